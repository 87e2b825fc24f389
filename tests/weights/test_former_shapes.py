"""A checkpoint whose model stored queries, keys and values side by side reaches the model that groups them by heads.

The arrays and the table of the former model are written by hand, from tensors with Hugging Face's names.
"""

import jax
import numpy as np
import pytest
from llamas import GROUPED, engine, logits, model
from safetensors.numpy import load_file, save_file

import jzero
from jzero.checkpoint import save
from jzero.cli import main

FORMER_ROWS = [
    {
        "name": f"model.layers.{{layer}}.{name}.weight", "leaf": f"stack/{leaf}/kernel", "columns": columns,
        "transposed": True,
    }
    for name, leaf, columns in (
        ("self_attn.q_proj", "attention/qkv", [0, 32]), ("self_attn.k_proj", "attention/qkv", [32, 48]),
        ("self_attn.v_proj", "attention/qkv", [48, 64]), ("mlp.gate_proj", "mlp/gate_up", [0, 48]),
        ("mlp.up_proj", "mlp/gate_up", [48, 96]),
    )
]  # fmt: skip
KERNELS = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
KERNELS = {f"self_attn.{name}": shape for name, shape in KERNELS.items()}
KERNELS |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}


def tensors():
    """Random tensors of a grouped Llama of 4 layers, in float32."""
    rng = np.random.default_rng(0)
    shapes = {f"model.layers.{i}.{name}": shape for i in range(4) for name, shape in KERNELS.items()}
    shapes |= {"model.embed_tokens": (64, 32), "lm_head": (64, 32), "model.norm": (32,)}
    shapes |= {f"model.layers.{i}.{n}_layernorm": (32,) for i in range(4) for n in ("input", "post_attention")}
    return {f"{n}.weight": rng.normal(0, 0.2, shape).astype(np.float32) for n, shape in shapes.items()}


def former(found):
    """The former model's parameters: kernels [in, out], several of them side by side."""

    def layers(*names):
        rows = ([found[f"model.layers.{i}.{name}.weight"].T for name in names] for i in range(4))
        return np.stack([np.concatenate(row, -1) for row in rows])

    rows = GROUPED.vocab_rows - 64  # padding
    embed, head = (np.pad(found[f"{name}.weight"], ((0, rows), (0, 0))) for name in ("model.embed_tokens", "lm_head"))
    attention, mlp = (f"self_attn.{x}_proj" for x in "qkv"), (f"mlp.{x}_proj" for x in ("gate", "up"))
    return {
        "ends": {"embed": embed, "head": {"kernel": head.T}, "norm": {"scale": found["model.norm.weight"]}},
        "stack": {
            "attention": {
                "qkv": {"kernel": layers(*attention)}, "out": {"kernel": layers("self_attn.o_proj")},
            },
            "attention_norm": {"scale": layers("input_layernorm")},
            "mlp": {"gate_up": {"kernel": layers(*mlp)}, "down": {"kernel": layers("mlp.down_proj")}},
            "mlp_norm": {"scale": layers("post_attention_layernorm")},
        },
    }  # fmt: skip


def former_table():
    table = model().weights_layout()
    names = {row["name"] for row in FORMER_ROWS}
    return table | {"tensors": [row for row in table["tensors"] if row["name"] not in names] + FORMER_ROWS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory of a former model's checkpoint, its tensors with Hugging Face's names)."""
    path, found = tmp_path_factory.mktemp("former"), tensors()
    params = jax.tree.map(jax.numpy.asarray, former(found))
    save({"params": params}, path, tag="last", notes={"weights": former_table()}).wait()
    return path, found


def test_it_is_an_error_that_shows_the_way(saved):
    with pytest.raises(jzero.ConfigError) as error:
        engine().load_checkpoint(saved[0], load_module_only=True)
    text = str(error.value)
    assert "params/stack/attention/qkv/kernel is (4, 32, 64), not (4, 32, 2, 4, 8)" in text
    assert "params/stack/mlp/gate_up/kernel is (4, 32, 96), not (4, 32, 2, 48)" in text
    assert (
        f"To load the parameters in their new shapes: jzero export {saved[0]} OUT, then engine.load_weights(OUT)"
        in text
    )
    assert "load_module_only" not in text


def test_export_and_load_weights_bring_its_parameters(tmp_path, saved):
    path, found = saved
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == found.keys()
    for name, x in found.items():
        np.testing.assert_array_equal(exported[name], x, err_msg=name)
    made, other = engine(stage=3, zero=2), engine()
    made.load_weights(tmp_path / "out")
    (tmp_path / "direct").mkdir()
    save_file(found, tmp_path / "direct" / "model.safetensors")
    other.load_weights(tmp_path / "direct")
    np.testing.assert_allclose(logits(model(), made.state.params), logits(model(), other.state.params), rtol=1e-6)
