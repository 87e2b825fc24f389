"""`engine.save_16bit_model` writes the same file as an export, at any stage and for any number of processes."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling import keep
from launcher.jobs import Command
from llamas import TIED, Net, engine, model, refused
from safetensors.numpy import load_file

from jzero import weights
from jzero.weights.save import _part, gather_params

LAYOUTS = [{"stage": 0, "zero": 4}, {"stage": 3, "zero": 2, "data": 2}, {"stage": 3, "pipe": 2, "zero": 4}]


@pytest.mark.parametrize("layout", keep(LAYOUTS, LAYOUTS[2:]), ids=str)
def test_it_is_the_export_in_bfloat16(tmp_path, layout):
    made = engine(**layout)
    made.save_checkpoint(tmp_path / "ckpt").wait()
    weights.export(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16")
    assert made.save_16bit_model(tmp_path / "new" / "saved") is True
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("new/saved", "out")]
    assert files[0].keys() == {"config.json", "model.safetensors"}
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def half():
    """The engine of a model without a table, in float16."""
    return engine(Net(), zero=2, more={"fp16": {"enabled": True}})


def test_names_dtypes_and_what_is_there_already(half, tmp_path):
    (tmp_path / "config.json").write_text("mine")
    (tmp_path / "a.safetensors").write_text("old")
    engine(model(TIED), zero=2).save_16bit_model(tmp_path, "a.safetensors")
    assert (tmp_path / "config.json").read_text() == "mine"
    assert load_file(tmp_path / "a.safetensors")["model.norm.weight"].dtype == jnp.bfloat16
    half.save_16bit_model(tmp_path, "half.safetensors")
    found = load_file(tmp_path / "half.safetensors")
    assert {x.dtype for x in found.values()} == {np.dtype("float16")}
    np.testing.assert_array_equal(found["stack.w"], half.state.params["stack"]["w"].astype("float16"))
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "config.json", "half.safetensors"}


def test_values_beyond_float16(half, tmp_path, monkeypatch):
    params = half.state.params
    w = params["stack"]["w"].at[1].set(1e5)
    large = dataclasses.replace(half.state, params=params | {"stack": params["stack"] | {"w": w}})
    monkeypatch.setattr(half, "state", large)
    words = "stack.w has values beyond the range of float16: jzero export --dtype bfloat16"
    refused(lambda: half.save_16bit_model(tmp_path), words)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_layer_at_a_time_is_gathered():
    """Also where the layers are divided among pipeline stages."""
    made, name = engine(stage=3, pipe=2, zero=2), "stack/mlp/gate_up/kernel"
    leaves = zip(*(jax.tree.leaves(tree) for tree in (made.step_fn.layouts, made.state.params)), strict=True)
    params = {layout.name: (layout, x) for layout, x in leaves}
    shapes = [x.shape for _, _, x in gather_params(params, made.mesh, np.dtype("float32"))]
    assert shapes.count((1, 32, 2, 48)) == 4
    layout, x = params[name]
    text = _part(layout, made.mesh, np.dtype("float32")).lower(x, jnp.int32(0)).compile().as_text()
    gathered = {tuple(map(int, m.split(","))) for m in re.findall(r"f32\[([\d,]+)\]\S* all-gather", text)}
    assert gathered == {(1, 32, 2, 48)}


def test_mistakes(half, tmp_path, monkeypatch):
    for name in ("pytorch_model.bin", "a/b.safetensors"):
        refused(
            lambda name=name: half.save_16bit_model(tmp_path, name), f"save_filename = '{name}': must be a name that"
        )
    (tmp_path / "file").write_text("x")
    refused(lambda: half.save_16bit_model(tmp_path / "file"), "cannot be written: File exists")

    def fallocate(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    refused(lambda: half.save_16bit_model(tmp_path), "model.safetensors cannot be written: No space left on device")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


PROGRAM = """
import pathlib
import shutil
import sys
sys.path.append({here!r})
import jax
import numpy as np
import jzero
jzero.init_distributed()
from llamas import GROUPED, TOKENS, model
from jzero import weights

config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "Adam", "params": {{"lr": 1e-3}}}},
          "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": 0}}}}
engine = jzero.initialize(model=model(), config=config)[0]
rank = jzero.get_rank()
engine.save_checkpoint("ckpt").wait()
engine.save_16bit_model("saved")
if rank == 0:
    weights.export("ckpt", "out", dtype="bfloat16")
    weights.export("ckpt", "fp32")

def tried(name, f):
    try:
        print(f"{{name}}: {{f()}}")
    except jzero.ConfigError as error:
        print(f"{{name}}: error: {{error}}")

jzero.distributed.host_collectives.gather_texts("exported", "")
sizes = []
windows = weights.safetensors.File.windows
def spy(self, name, box):
    for part, view in windows(self, name, box):
        sizes.append(view.nbytes)
        yield part, view
weights.safetensors.File.windows = spy
before = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), engine.state.params)
engine.load_weights("fp32")
after = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), engine.state.params)
assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
assert sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(after))
assert sum(sizes) * 2 == sum(x.nbytes for x in jax.tree.leaves(engine.state.params))
tried("there", lambda: engine.load_weights("fp32" if rank == 0 else "nowhere"))
shutil.copytree("fp32", f"copy{{rank}}")
file = weights.safetensors.File.open(pathlib.Path(f"copy{{rank}}", "model.safetensors"))
start, good = file.entries["model.norm.weight"].start, file.path.read_bytes()
for stage in (0, 3):
    made = jzero.make_train_step(model(), config | {{"zero_optimization": {{"stage": stage}}}})
    for damaged in (None, 0, 1):
        data = bytearray(good)
        for at in (start, start + 4 * GROUPED.d_model - 1):  # in both halves
            data[at] ^= damaged == rank
        file.path.write_bytes(data)
        tried(f"copy{{stage}}{{damaged}}", lambda: len(weights.load(file.path, made)))
tried("place", lambda: engine.save_16bit_model("/proc/nowhere"))
def full():
    if rank == 0:
        write, count = weights.safetensors.TensorWriter.write, []
        def failing(self, *part):
            if count.append(0) or len(count) > 3:
                raise OSError(28, "No space left on device")
            write(self, *part)
        weights.safetensors.TensorWriter.write = failing
    engine.save_16bit_model("room")
tried("room", full)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes(tmp_path):
    (tmp_path / "worker.py").write_text(PROGRAM.format(here=str(Path(__file__).parent)))
    job = Command("--platform", "cpu", "--num_gpus", 2, "worker.py", cwd=tmp_path)
    try:
        assert job.wait(120) == 0, job.errors
    finally:
        job.end()
    found = re.findall(r"^\[(\d)\] (\w+): (.*)$", job.output, re.M)
    said = [{name: text for number, name, text in found if number == rank} for rank in "01"]
    files = [[p.read_bytes() for p in sorted((tmp_path / name).iterdir())] for name in ("saved", "out")]
    assert files[0] == files[1] != []
    for one in said:
        assert one["there"].startswith("error: nowhere: no such directory; ")
        assert {one["copy0None"], one["copy3None"]} == {"2"}
        for damaged in ("copy00", "copy01", "copy30", "copy31"):
            assert re.match(r"error: copy\d/model.safetensors: damaged: values in model.saf", one[damaged])
        assert re.match(r"error: /proc/nowhere/model.safetensors cannot be written: ", one["place"])
        assert "room/model.safetensors cannot be written: No space left on device" in one["room"]
    assert [*(tmp_path / "room").iterdir()] == []
