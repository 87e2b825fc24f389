"""Weights in MXFP4, as the downloads of GPT-OSS have them, against the formulas of the OCP's specification."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from hugging_face import CASES, step_of, torch, torch_model, transformers
from safetensors.numpy import load_file, save_file

import jzero
from jzero import weights
from models import config_from_hf

NAMES = ("gate_up_proj", "down_proj")


def oracle(blocks, scales):
    """E2M1: sign, two bits of exponent with bias 1, one of mantissa; E8M0: a power of two with bias 127."""
    elements = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(*scales.shape, 32).astype(int)
    sign, exponent, mantissa = (-1.0) ** (elements // 8), elements // 2 % 4, elements % 2
    normal, subnormal = 2.0 ** (exponent - 1) * (1 + mantissa / 2), mantissa / 2
    values = sign * np.where(exponent > 0, normal, subnormal) * 2.0 ** (scales[..., None].astype(float) - 127)
    return values.reshape(*scales.shape[:-1], -1)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The same model with matrices of MXFP4 in two files, and with those that transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, plain = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("plain")
    options = CASES["gpt_oss"].options | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    made, rng = transformers.GptOssForCausalLM(transformers.GptOssConfig(**options | {"layer_types": None})), np.random
    made.save_pretrained(packed)
    tensors, last, layers = load_file(packed / "model.safetensors"), {}, made.model.layers
    generator = rng.default_rng(0)
    for i, layer in enumerate(layers):
        for name in NAMES:
            key, there = f"model.layers.{i}.mlp.experts.{name}", getattr(layer.mlp.experts, name)
            experts, inputs, outputs = tensors.pop(key).shape
            blocks = generator.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
            scales = generator.integers(118, 125, (experts, outputs, inputs // 32), dtype=np.uint8)
            tensors[f"{key}_blocks"], last[f"{key}_scales"] = blocks, scales
            there.data = convert_moe_packed_tensors(*map(torch.tensor, (blocks, scales)), dtype=torch.float32)
            np.testing.assert_array_equal(there.data.numpy(), oracle(blocks, scales).swapaxes(1, 2))
    made.save_pretrained(plain)
    (packed / "model.safetensors").unlink()
    save_file(tensors, packed / "model-00001-of-00002.safetensors")
    save_file(last, packed / "model-00002-of-00002.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


LAYOUTS = {"one": {}, "zero3": {"stage": 3, "zero": 2}, "expert": {"expert": 2}, "tensor": {"tensor": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_packed_matrices_on_each_layout(layout, directories):
    packed, plain = directories
    assert config_from_hf(packed) == config_from_hf(plain)
    step = step_of(config_from_hf(packed), **LAYOUTS[layout])
    found, expected = (weights.load(path, step) for path in directories)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert abs(np.asarray(found["stack"]["mlp"]["gate_up"])).max() > 0.1


def test_an_export_has_no_packed_matrices(directories, tmp_path):
    packed, _ = directories
    step = step_of(config_from_hf(packed))
    weights.save(weights.load(packed, step), step, tmp_path, "model.safetensors", np.dtype(ml_dtypes.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = load_file(next(packed.glob("*00001-of*")))
    name = "model.layers.1.mlp.experts.down_proj"
    scales = load_file(next(packed.glob("*00002-of*")))[f"{name}_scales"]
    expected = oracle(found[f"{name}_blocks"], scales).swapaxes(1, 2)
    np.testing.assert_array_equal(back.state_dict()[name].float().numpy(), expected)


def test_blocks_and_scales_of_other_shapes(tmp_path):
    config = torch_model("gpt_oss").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{name}_blocks": np.zeros((2, 4, 1, 16), np.uint8), f"{name}_scales": np.zeros((2, 4, 2), np.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(jzero.ConfigError, match=r"down_proj has blocks \[2, 4, 1, 16\] and scales \[2, 4, 2\]; MXFP4"):
        weights.load(tmp_path, step_of(config_from_hf(config)))
