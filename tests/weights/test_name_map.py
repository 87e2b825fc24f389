"""Any partition of a leaf into boxes gives its tensors, for any table and any window size."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import jzero
from jzero.weights import safetensors
from jzero.weights.name_map import ShapeDtype, assign, leaves_of, tensors
from jzero.weights.safetensors import File
from jzero.weights.tensor_writer import TensorWriter

TABLE = {
    "config": {},
    "tensors": [
        {"name": "q.{layer}", "leaf": "stack/qk", "columns": [0, 4], "transposed": True},
        {"name": "k.{layer}", "leaf": "stack/qk", "columns": [4, 7], "transposed": False},
        {"name": "norm.{layer}", "leaf": "stack/norm"},
        {"name": "scale", "leaf": "scale"},
    ],
}
VALUES = {
    "stack.qk": np.arange(3 * 5 * 7, dtype="f4").reshape(3, 5, 7),
    "stack.norm": np.arange(6, dtype="f4").reshape(3, 2),
    "scale": np.float32(3).reshape(()),
}
LEAVES = {name: ShapeDtype(x.shape, x.dtype) for name, x in VALUES.items()}


@st.composite
def boxes(draw, shape):
    """A grid of boxes that partitions an array."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(1, n), max_size=2))}) for n in shape]
    return [tuple(slice(*edge) for edge in box) for box in itertools.product(*(itertools.pairwise(c) for c in cuts))]


def expected(table):
    qk, norm = VALUES["stack.qk"], VALUES["stack.norm"]
    if table is None:
        return VALUES
    found = {"scale": VALUES["scale"]}
    for i in range(3):
        found |= {f"q.{i}": qk[i, :, :4].T, f"k.{i}": qk[i, :, 4:], f"norm.{i}": norm[i]}
    return found


@pytest.mark.parametrize("table", [TABLE, None], ids=["table", "own"])
@given(data=st.data(), window=st.integers(1, 200))
def test_boxes_into_files_and_back(tmp_path_factory, table, data, window):
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    before, safetensors.WINDOW = safetensors.WINDOW, window
    try:
        some = tensors(LEAVES, table)
        writer = TensorWriter({path: some})
        for name, values in VALUES.items():
            for box in data.draw(boxes(values.shape)):
                writer.write(name, box, values[box])
        found = load_file(path)
        assert found.keys() == expected(table).keys()
        for name, values in expected(table).items():
            np.testing.assert_array_equal(found[name], values)
        file = File.open(path)
        for name, values in VALUES.items():
            for box in data.draw(boxes(values.shape)):
                read = np.full_like(values[box], np.nan)
                for tensor in some:
                    if tensor.leaf == name and (both := tensor.overlap(box)):
                        for part, view in file.windows(tensor.name, both[0]):
                            assert view.nbytes <= max(window, 4)
                            assign(tensor.oriented(read[both[1]])[part], view)
                np.testing.assert_array_equal(read, values[box])
    finally:
        safetensors.WINDOW = before


def test_layers_come_together():
    names = [t.name for t in tensors(LEAVES, TABLE)]
    assert names == ["q.0", "k.0", "norm.0", "q.1", "k.1", "norm.1", "q.2", "k.2", "norm.2", "scale"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"name": "q.{layer}", "leaf": "stack/wq"},
            "q.{layer} names the leaf stack.wq, but the leaves are stack.qk, stack.norm",
        ),
        ({"name": "q.{layer}", "leaf": "stack/qk", "columns": [4, 8]}, "columns [4, 8], outside stack.qk (3, 5, 7)"),
        ({"name": "q.{layer}", "leaf": "stack/qk", "columns": [0, 3]}, "omit, or name twice, a part of stack.qk"),
        ({"name": "q.{layer}", "leaf": "stack/qk", "columns": [3, 7]}, "omit, or name twice, a part of stack.qk"),
        ({"name": "k.{layer}", "leaf": "stack/qk", "columns": [0, 4]}, "two tensors have the name k.0, k.1, k.2"),
        ({"name": "q.{layer}", "leaf": "stack/norm", "transposed": True}, "needs more dimensions than stack.norm"),
        (
            {"name": "q", "leaf": "stack/qk", "transpose": True},
            "q has unknown keys ['transpose']; allowed: ['columns', 'leaf'",
        ),
    ],
)
def test_a_table_that_does_not_fit(row, words):
    with pytest.raises(jzero.ConfigError) as error:
        tensors(LEAVES, {**TABLE, "tensors": [row, *TABLE["tensors"][1:]]})
    assert words in str(error.value)


@pytest.mark.parametrize("dtype", sorted(safetensors.DTYPES))
def test_every_dtype_is_read_as_it_was_written(tmp_path, dtype):
    kind = safetensors.DTYPES[dtype]
    values = np.arange(6).reshape(2, 3).astype(kind)
    array = {"a": ShapeDtype((2, 3), kind), "empty": ShapeDtype((0, 4), kind), "odd": ShapeDtype((3,), np.dtype("u1"))}
    writer = TensorWriter({tmp_path / "a": tensors(array, None)})
    writer.write("a", (slice(0, 2), slice(0, 3)), values)
    writer.write("empty", (slice(0, 0), slice(0, 4)), np.zeros((0, 4), kind))
    if not dtype.startswith("F8"):  # the safetensors library does not support these for NumPy
        found = load_file(tmp_path / "a")
        assert (found["a"].dtype, found["empty"].shape) == (kind, (0, 4))
        np.testing.assert_array_equal(found["a"], values)
        save_file({"a": values}, tmp_path / "b")
        (_, view), = File.open(tmp_path / "b").windows("a", (slice(0, 2), slice(0, 3)))  # fmt: skip
        np.testing.assert_array_equal(view, values)
    with pytest.raises(jzero.ConfigError, match="x has dtype int4, which safetensors files do not support"):
        TensorWriter({tmp_path / "c": tensors({"x": ShapeDtype((2,), np.dtype(ml_dtypes.int4))}, None)})


def test_names():
    assert [*leaves_of({"a": [VALUES["scale"]]}), *leaves_of(VALUES["scale"])] == ["a.0", "params"]
