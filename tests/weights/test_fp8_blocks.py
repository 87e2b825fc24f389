"""Weights in fp8 with a scale for each block of 128 x 128, as DeepSeek-V3's downloads have them, against NumPy."""

import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from hugging_face import CASES, step_of, torch, transformers
from safetensors.numpy import load_file, save_file

import jzero
from jzero import weights
from jzero.weights.fp8_blocks import unpacked_fp8
from jzero.weights.safetensors import File
from models import config_from_hf

SIZES = {"hidden_size": 160, "intermediate_size": 144, "moe_intermediate_size": 136, "q_lora_rank": 130}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_bf16(elements, scales):
    """Multiply block by block."""
    values = elements.astype(np.float32)
    for i, j in np.ndindex(scales.shape):
        values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[i, j]
    return values.astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The same model with matrices in fp8 and scales in another file, and with their products in bfloat16."""
    packed, plain = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**CASES["deepseek_v3"].options | SIZES)
    transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
    tensors, scales = load_file(plain / "model.safetensors"), {}
    generator, config = np.random.default_rng(0), json.loads((plain / "config.json").read_text())
    expected = dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = (tensors[name].astype("f4") * 300).astype(ml_dtypes.float8_e4m3fn)
        blocks = [-(-n // 128) for n in tensors[name].shape]
        scales[f"{name}_scale_inv"] = generator.uniform(1e-3, 5e-3, blocks).astype("f4")
        expected[name] = in_bf16(tensors[name], scales[f"{name}_scale_inv"])
    save_file(expected, plain / "model.safetensors")
    save_file(tensors, packed / "model-00001-of-00002.safetensors")
    save_file(scales, packed / "model-00002-of-00002.safetensors")
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return packed, plain


@pytest.mark.parametrize("layout", [{}, {"stage": 3, "zero": 2}, {"expert": 2}, {"tensor": 2}], ids=str)
def test_parts_of_matrices_in_fp8_on_each_layout(layout, directories):
    packed, plain = directories
    assert config_from_hf(packed) == config_from_hf(plain)
    step = step_of(config_from_hf(packed), **layout)
    found, expected = (weights.load(path, step) for path in directories)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert abs(np.asarray(found["stack"]["attention"]["q_up"]["kernel"])).max() > 0.05


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda x: np.dtype(x).name)
def test_windows_of_a_large_matrix(dtype, tmp_path):
    """Qwen3's scales are bfloat16. Decoding 16 Mi elements takes less than their bytes, and 8 times as much before."""
    generator = np.random.default_rng(0)
    elements = generator.integers(0, 0x7F, (4096, 4096), np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = generator.uniform(1e-3, 5e-3, (32, 32)).astype(dtype)
    save_file({"w": elements, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    *_, file = unpacked_fp8([File.open(tmp_path / "model.safetensors")])
    found, box = np.empty(elements.shape, ml_dtypes.bfloat16), (slice(0, 4096), slice(0, 4096))
    tracemalloc.start()
    for at, values in file.windows("w", box):
        found[at] = values
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found, in_bf16(elements, scales.astype("f4")))
    assert peak < elements.nbytes


def test_scales_of_other_blocks(directories, tmp_path):
    packed, _ = directories
    config = json.loads((packed / "config.json").read_text())
    with pytest.raises(jzero.ConfigError, match=r"quantization_config = .*64.*: models/decoder.py does not have it"):
        config_from_hf({**config, "quantization_config": {**FP8, "weight_block_size": [64, 64]}})
    with pytest.raises(jzero.ConfigError, match=r"quantization_config = .*int8.*: models/decoder.py does not have it"):
        config_from_hf({**config, "quantization_config": {**FP8, "quant_method": "int8"}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = {name: np.zeros((160, 40), ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": np.zeros((3, 1), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(jzero.ConfigError, match=r"o_proj.weight is float8_e4m3fn\[160, 40\] with scales float32\[3, "):
        weights.load(tmp_path, step_of(config_from_hf(packed)))
