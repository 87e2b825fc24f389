"""Downloads in MXFP4 (GPT-OSS) and in fp8 with scales for blocks of 128 x 128 (DeepSeek-V3) are those in bfloat16."""

import json
import re
from functools import cache

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.refusals import refuses
from hugging_face import CASES, step_of, torch, transformers, written
from safetensors.numpy import load_file, save_file

from jzero import weights
from jzero.weights.fp8_blocks import unpacked_fp8
from jzero.weights.safetensors import File
from models import config_from_hf

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
MATRICES = {"deepseek_v3": "_proj", "gpt_oss": "experts[.](gate_up|down)_proj$"}
SIZES = {
    "deepseek_v3": {"hidden_size": 160, "intermediate_size": 144, "moe_intermediate_size": 136, "q_lora_rank": 130},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "layer_types": None},
}


def of_blocks(elements, scales):
    values = elements.astype(np.float32)
    for i, j in np.ndindex(scales.shape):
        values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[i, j]
    return values.astype(ml_dtypes.bfloat16)


def of_mxfp4(blocks, scales):
    """The OCP's E2M1: sign, two bits of exponent with bias 1, one of mantissa; E8M0: a power of two with bias 127."""
    elements = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(*scales.shape, 32).astype(int)
    sign, exponent, mantissa = (-1.0) ** (elements // 8), elements // 2 % 4, elements % 2
    normal, subnormal = 2.0 ** (exponent - 1) * (1 + mantissa / 2), mantissa / 2
    values = sign * np.where(exponent > 0, normal, subnormal) * 2.0 ** (scales[..., None].astype(float) - 127)
    return values.reshape(*scales.shape[:-1], -1).swapaxes(1, 2).astype(ml_dtypes.bfloat16)


def in_mxfp4(name, x, random):
    """Random elements and scales of a tensor, by name, and the matrix that they are."""
    experts, inputs, outputs = x.shape
    elements = random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
    scales = random.integers(118, 125, elements.shape[:3], dtype=np.uint8)
    return {f"{name}_blocks": elements}, {f"{name}_scales": scales}, of_mxfp4(elements, scales)


def in_fp8(name, x, random):
    elements = (x.astype("f4") * 300).astype(ml_dtypes.float8_e4m3fn)
    kind = {"o_proj": "f2", "q_a_proj": ml_dtypes.bfloat16}.get(name.split(".")[-2], "f4")  # Qwen's are bfloat16
    scales = random.uniform(1e-3, 5e-3, [-(-n // 128) for n in x.shape]).astype(kind)
    return {name: elements}, {f"{name}_scale_inv": scales}, of_blocks(elements, scales.astype("f4"))


KINDS = {"fp8": ("deepseek_v3", in_fp8, FP8), "mxfp4": ("gpt_oss", in_mxfp4, MXFP4)}


def make(kind, directory):
    """Write a model with few bits, its scales in another file, and the same in bfloat16; return both directories."""
    name, pack, quantization = KINDS[kind]
    few, plain, case, random = directory / "few", directory / "plain", CASES[name], np.random.default_rng(0)
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.options | SIZES[name])
    getattr(transformers, case.architecture)(config).to(torch.bfloat16).save_pretrained(plain)
    few.mkdir()
    tensors, all_scales = load_file(plain / "model.safetensors"), {}
    expected = dict(tensors)
    for key in [key for key in tensors if re.search(MATRICES[name], key)]:
        elements, scales, matrix = pack(key, tensors.pop(key), random)
        tensors |= elements
        all_scales |= scales
        expected[key] = np.ascontiguousarray(matrix)
    save_file(expected, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, few / "model-00001-of-00002.safetensors")
    save_file(all_scales, few / "model-00002-of-00002.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (few / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return few, plain


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return cache(lambda kind: make(kind, tmp_path_factory.mktemp(kind)))


@pytest.mark.parametrize(
    ("kind", "layout"), [("fp8", {"stage": 3, "zero": 2}), ("fp8", {"tensor": 2}), ("mxfp4", {"tensor": 2})]
)
def test_parts_of_matrices_on_each_layout(kind, layout, downloads):
    few, plain = downloads(kind)
    assert config_from_hf(few) == config_from_hf(plain)
    step = step_of(config_from_hf(few), **layout)
    assert "quantization_config" not in written(config_from_hf(few))  # an export has what is loaded
    found, expected = (weights.load(path, step) for path in (few, plain))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    matrix = found["stack"]["mlp"]["gate_up"] if kind == "mxfp4" else found["stack"]["attention"]["q_up"]["kernel"]
    assert abs(np.asarray(matrix)).max() > 0.05


def test_a_large_matrix_is_decoded_in_small_windows(tmp_path):
    """Decoding takes 14 bytes of memory for each element."""
    large = {"w": np.zeros((4096, 4096), ml_dtypes.float8_e4m3fn), "w_scale_inv": np.ones((32, 32), np.float32)}
    save_file(large, tmp_path / "model.safetensors")
    *_, file = unpacked_fp8([File.open(tmp_path / "model.safetensors")])
    sizes = [x.size for _, x in file.windows("w", (slice(0, 4096), slice(0, 4096)))]
    assert (sum(sizes), max(sizes)) == (2**24, 2**20)


O_PROJ, DOWN = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.experts.down_proj"
SHAPES = [
    ("fp8", {O_PROJ: np.zeros((160, 40), ml_dtypes.float8_e4m3fn), f"{O_PROJ}_scale_inv": np.zeros((3, 1), np.float32)},
     r"o_proj.weight is float8_e4m3fn\[160, 40\] with scales float32\[3, "),
    ("mxfp4", {f"{DOWN}_blocks": np.zeros((2, 4, 1, 16), np.uint8), f"{DOWN}_scales": np.zeros((2, 4, 2), np.uint8)},
     r"down_proj has blocks \[2, 4, 1, 16\] and scales \[2, 4, 2\]; MXFP4"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensors", "words"), SHAPES, ids=["fp8", "mxfp4"])
def test_scales_of_another_shape(kind, tensors, words, tmp_path, downloads):
    few, _ = downloads(kind)
    save_file(tensors, tmp_path / "model.safetensors")
    refuses(lambda: weights.load(tmp_path, step_of(config_from_hf(few))), words)
