"""PyTorch's tensors as batches: wherever a batch goes in, as the NumPy arrays of the same values."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import LINE, TRAIN, UNIT, assert_same, build, config, parts, rows, three_calls
from helpers.refusals import refuses
from helpers.steps import mesh

import jzero
from jzero.step.batch import host_arrays

torch = pytest.importorskip("torch")


def tensors(batch):
    return jax.tree.map(torch.from_numpy, batch)


def test_the_loops_take_tensors():
    step = jzero.make_train_step(LINE, config(), mesh=mesh())
    ours, theirs = (jzero.Engine(step, jax.random.key(0)) for _ in range(2))
    assert ours.train_batch(rows(0)) == theirs.train_batch(tensors(rows(0)))
    assert ours.train_batch(iter(parts(1))) == theirs.train_batch(map(tensors, parts(1)))
    losses = three_calls(ours, parts(2)), three_calls(theirs, map(tensors, parts(2)))
    assert [float(x) for x in losses[0]] == [float(x) for x in losses[1]]
    assert ours.eval_batch(rows(3)) == theirs.eval_batch(tensors(rows(3)))
    assert ours.eval()(parts(3)[0]) == theirs.eval()(tensors(parts(3)[0]))
    assert ours.eval_batch(iter(parts(4))) == theirs.eval_batch(map(tensors, parts(4)))
    ours.train()
    theirs.train()
    data = rows(5, TRAIN)
    loader = torch.utils.data.DataLoader(torch.utils.data.StackDataset(**tensors(data)), batch_size=UNIT)
    cut = [{name: x[i : i + UNIT] for name, x in data.items()} for i in range(0, TRAIN, UNIT)]
    assert ours.train_batch(iter(cut)) == theirs.train_batch(iter(jzero.RepeatingLoader(loader)))
    assert_same((ours.state.params, ours.state.opt_state), (theirs.state.params, theirs.state.opt_state))
    refuses(lambda: build(model=LINE, training_data=loader), r"training_data is a torch DataLoader.*loader.dataset")


def test_training_data_of_tensors():
    data = rows(6, 2 * TRAIN)
    loaders = [
        build(model=LINE, training_data=kind, more={"seed": 3})[2]
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
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    np.testing.assert_array_equal(host_arrays(torch.ones(3, dtype=torch.float8_e4m3fn)).astype(np.float32), 1)


def test_a_tensor_that_is_not_on_the_host():
    batch = {**rows(8), "x": torch.empty(TRAIN, 8, device="meta")}  # a device that every torch has
    e = build(model=LINE)[0]
    for call in (e.train_batch, e, e.eval_batch):
        refuses(lambda call=call: call(batch), r"leaf 'x' is a torch tensor on meta: .*\.to\(engine.device\)")
