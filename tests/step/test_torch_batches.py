"""PyTorch's tensors as batches: wherever a batch goes in, as the NumPy arrays of the same values."""

import collections
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import TRAIN, UNIT, assert_same, build, engine, parts, rows, three_calls
from helpers.refusals import refuses
from helpers.sampling import keep

import jzero
from jzero.step.batch import host_arrays

torch = pytest.importorskip("torch")


def tensors(batch):
    return jax.tree.map(torch.from_numpy, batch)


@pytest.mark.parametrize("stage", keep([0, 3], [3]))
def test_the_loops_take_tensors(stage):
    """train_batch with a batch and with an iterator, the three calls, evaluation in both forms."""
    ours, theirs = engine(stage), engine(stage)
    assert ours.train_batch(rows(0)) == theirs.train_batch(tensors(rows(0)))
    assert ours.train_batch(iter(parts(1))) == theirs.train_batch(map(tensors, parts(1)))
    assert [float(x) for x in three_calls(ours, parts(2))] == [
        float(x) for x in three_calls(theirs, map(tensors, parts(2)))
    ]
    assert ours.eval_batch(rows(3)) == theirs.eval_batch(tensors(rows(3)))
    assert ours.eval()(parts(3)[0]) == theirs.eval()(tensors(parts(3)[0]))
    assert ours.eval_batch(iter(parts(4))) == theirs.eval_batch(map(tensors, parts(4)))
    assert_same((ours.state.params, ours.state.opt_state), (theirs.state.params, theirs.state.opt_state))


def test_a_data_loader_of_torch():
    data = rows(5, 2 * TRAIN)
    table = torch.utils.data.StackDataset(**tensors(data))
    ours, theirs = engine(), engine()
    loader = torch.utils.data.DataLoader(table, batch_size=UNIT)
    micro_batches = [{name: x[i : i + UNIT] for name, x in data.items()} for i in range(0, 2 * TRAIN, UNIT)]
    three_calls(ours, micro_batches[:3])
    three_calls(theirs, list(loader)[:3])
    assert ours.train_batch(iter(micro_batches)) == theirs.train_batch(iter(jzero.RepeatingLoader(loader)))
    assert_same((ours.state.params, ours.state.opt_state), (theirs.state.params, theirs.state.opt_state))
    refuses(lambda: build(training_data=loader), r"training_data is a torch DataLoader.*loader.dataset")


def test_training_data_of_tensors():
    """A pytree of tensors, and a map-style dataset whose samples are tensors."""
    data = rows(6, 2 * TRAIN)
    loaders = [
        build(training_data=kind, more={"seed": 3})[2]
        for kind in (data, tensors(data), torch.utils.data.StackDataset(**tensors(data)))
    ]
    for ours, *others in zip(*loaders, strict=True):
        for other in others:
            assert_same(ours, other)


def test_dtypes_and_nesting():
    Pair = collections.namedtuple("Pair", "a b")
    grown = torch.ones(2, 3, requires_grad=True) * 2
    batch = [
        Pair(torch.arange(4), grown),
        {"half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "f16": torch.ones(2, dtype=torch.float16)},
        (torch.tensor([True, False]), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T),
        collections.UserDict(input_ids=torch.arange(2, dtype=torch.int32)),  # as transformers.BatchEncoding
        np.float64(3),
    ]
    found = host_arrays(batch)
    expected = [
        Pair(np.arange(4), np.full((2, 3), 2, np.float32)),
        {"half": np.asarray([1.5, -2.0], jnp.bfloat16), "f16": np.ones(2, np.float16)},
        (np.array([True, False]), np.arange(6).reshape(2, 3).T.astype(jnp.bfloat16)),
        {"input_ids": np.arange(2, dtype=np.int32)},
        np.float64(3),
    ]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_same(found, expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
    np.testing.assert_array_equal(host_arrays(torch.ones(3, dtype=torch.float8_e4m3fn)).astype(np.float32), 1)


def test_half_precision_reaches_the_step():
    e = engine()
    x = {**rows(7), "y": torch.from_numpy(rows(7)["y"]).bfloat16()}
    rounded = {**rows(7), "y": np.asarray(rows(7)["y"], jnp.bfloat16)}
    assert e.eval_batch(x) == e.eval_batch(rounded)


def test_a_tensor_that_is_not_on_the_host():
    batch = {**rows(8), "x": torch.empty(TRAIN, 8, device="meta")}  # a device that every torch has
    e = engine()
    for call in (e.train_batch, e, e.eval_batch):
        with pytest.raises(jzero.ConfigError, match=r"leaf 'x' is a torch tensor on meta: .*\.to\(engine.device\)"):
            call(batch)


def test_extra_takes_tensors():
    from jzero.step.batch import place_extra

    mesh = jzero.make_mesh()
    placed = place_extra({"t": torch.arange(3.0)}, mesh)["t"]
    np.testing.assert_array_equal(placed, np.arange(3.0))
    assert placed.sharding.is_fully_replicated


@pytest.mark.slow
def test_torch_is_never_imported():
    program = (
        "import sys, numpy as np, jzero\n"
        "from jzero.step.batch import host_arrays\n"
        "from jzero.data.sources import as_source\n"
        "import jzero.run.initialize\n"
        "host_arrays({'x': np.ones(3)}); as_source({'x': np.ones(3)})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
