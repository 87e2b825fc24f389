"""Any partition of a leaf into boxes gives its tensors, for any table and any window size."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.sampling import keep
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import Net, engine
from safetensors.numpy import load_file, save_file

import jzero
from jzero.weights import safetensors
from jzero.weights.export import shards
from jzero.weights.name_map import ShapeDtype, assign, leaves_of, tensors
from jzero.weights.safetensors import File, TensorWriter, checksum_of

HEADS = {"leaf": "stack/heads", "transposed": [1, 2, 3, 0]}
TABLE = {
    "config": {},
    "tensors": [
        {"name": "q.{layer}", "leaf": "stack/qk", "columns": [0, 4], "transposed": True},
        {"name": "k.{layer}", "leaf": "stack/qk", "columns": [4, 7], "transposed": False},
        {"name": "norm.{layer}", "leaf": "stack/norm"},
        {"name": "query.{layer}", "leaf": "stack/query", "transposed": [1, 2, 0], "reshape": [6, 4]},
        {"name": "out.{layer}", "leaf": "stack/out", "transposed": [2, 0, 1], "reshape": [4, 6]},
        {"name": "hq.{layer}", "slices": [[2, 0, 2]], "reshape": [12, 4], **HEADS},
        {"name": "hk.{layer}", "slices": [[2, 2, 3]], "reshape": [6, 4], **HEADS},
        {"name": "hv.{layer}", "slices": [[2, 3, 4]], "reshape": [6, 4], **HEADS},
        {"name": "scale", "leaf": "scale"},
        {"name": "conv", "leaf": "conv", "transposed": True, "reshape": [5, 3, 2, 2]},
        {"name": "embed", "leaf": "embed", "rows": [0, 5]},
        {"name": None, "leaf": "embed", "rows": [5, 8]},
        {"name": "head", "leaf": "head", "columns": [0, 5], "transposed": True},
        {"name": None, "leaf": "head", "columns": [5, 6]},
    ],
}
VALUES = {
    "stack.qk": np.arange(3 * 5 * 7, dtype="f4").reshape(3, 5, 7),
    "stack.norm": np.arange(6, dtype="f4").reshape(3, 2),
    "stack.query": np.arange(3 * 24, dtype="f4").reshape(3, 4, 2, 3),  # [layer, D, H, K]
    "stack.out": np.arange(3 * 24, dtype="f4").reshape(3, 2, 3, 4),  # [layer, H, K, D]
    "stack.heads": np.arange(3 * 96, dtype="f4").reshape(3, 4, 2, 4, 3),  # [layer, D, K, two queries, key, value, C]
    "scale": np.float32(3).reshape(()),
    "conv": np.arange(12 * 5, dtype="f4").reshape(12, 5),
    "embed": np.arange(8 * 3, dtype="f4").reshape(8, 3),
    "head": np.arange(3 * 6, dtype="f4").reshape(3, 6),
}
PADDING = {"embed": np.s_[5:], "head": np.s_[:, 5:]}
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
    found = {"scale": VALUES["scale"], "conv": np.zeros((5, 3, 2, 2), "f4")}
    for c, i, j, d in np.ndindex(3, 2, 2, 5):
        found["conv"][d, c, i, j] = VALUES["conv"][4 * c + 2 * i + j, d]
    found |= {"embed": VALUES["embed"][:5], "head": VALUES["head"][:, :5].T}
    for i in range(3):
        found |= {f"q.{i}": qk[i, :, :4].T, f"k.{i}": qk[i, :, 4:], f"norm.{i}": norm[i]}
        found[f"query.{i}"] = VALUES["stack.query"][i].reshape(4, 6).T  # torch's [H * K, D] and [D, H * K]
        found[f"out.{i}"] = VALUES["stack.out"][i].reshape(6, 4).T
        heads = VALUES["stack.heads"][i]
        found[f"hq.{i}"] = np.concatenate([heads[:, h // 2, h % 2].T for h in range(4)])  # torch's [H * C, D]
        found |= {f"h{x}.{i}": np.concatenate([heads[:, k, j].T for k in (0, 1)]) for x, j in (("k", 2), ("v", 3))}
    return found


def checksum_of_all(x):
    """The checksum of a whole tensor, however it was written."""
    x = np.atleast_1d(x)
    return checksum_of(x, (0,) * x.ndim, x.shape)


def test_the_numbers_of_layers():
    row = {"name": "norm.{layer}", "leaf": "stack/norm", "layers": [4, 2]}
    found = tensors({"stack.norm": LEAVES["stack.norm"]}, {"tensors": [row]})
    assert [(x.name, x.layer) for x in found] == [("norm.4", 0), ("norm.6", 1), ("norm.8", 2)]


@pytest.mark.parametrize("table", keep([TABLE, None], [TABLE]), ids=["table", "own"])
@settings(max_examples=20)
@given(data=st.data(), window=st.integers(1, 200))
def test_boxes_into_files_and_back(tmp_path_factory, table, data, window):
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    before, File.window = File.window, window
    try:
        some = tensors(LEAVES, table)
        writer = TensorWriter({path: some})
        for name, values in VALUES.items():
            for box in data.draw(boxes(values.shape)):
                writer.write(name, box, values[box])
        with pytest.raises(jzero.ConfigError, match="its header does not match its checksum"):
            File.open(path)
        writer.close()
        found = load_file(path)
        assert found.keys() == expected(table).keys()
        for name, values in expected(table).items():
            np.testing.assert_array_equal(found[name], values)
        file = File.open(path)
        for name, entry in file.entries.items():
            assert entry.checksum == checksum_of_all(found[name])
        for tensor in some:
            file.reshape(tensor.name, tensor.view)
        for name, values in VALUES.items():
            if table and name in PADDING:
                values = values.copy()
                values[PADDING[name]] = np.nan  # no file has it
            for box in data.draw(boxes(values.shape)):
                read = np.full_like(values[box], np.nan)
                for tensor in some:
                    if tensor.leaf == name and (both := tensor.overlap(box)):
                        for part, view in file.windows(tensor.name, both[0]):
                            assert view.nbytes <= max(window, 4)
                            assign(tensor.oriented(read[both[1]])[part], view)
                np.testing.assert_array_equal(read, values[box])
        for name, entry in file.entries.items():
            assert file.sums[name] % 2**64 == entry.checksum
    finally:
        File.window = before


def test_layers_come_together():
    names = [t.name for t in tensors(LEAVES, TABLE)]
    layer = ("q", "k", "norm", "query", "out", "hq", "hk", "hv")
    assert names == [*(f"{name}.{i}" for i in range(3) for name in layer), "scale", "conv", "embed", "head"]


Q = {"name": "q.{layer}", "leaf": "stack/qk"}
PART = "omit, or name twice, a part of stack.qk"
WRONG = [
    ({**Q, "leaf": "stack/wq"}, "q.{layer} names the leaf stack.wq, but the leaves are stack.qk, stack.norm"),
    ({**Q, "columns": [4, 8]}, "columns [4, 8], outside stack.qk (3, 5, 7)"),
    ({**Q, "columns": [0, 3]}, PART),
    ({**Q, "columns": [3, 7]}, PART),
    ({**Q, "columns": [0, 4], "rows": [0, 3]}, "omit, or name twice, a part"),
    ({**Q, "name": "q"}, PART),
    ({**Q, "name": "k.{layer}", "columns": [0, 4]}, "two tensors have the name k.0, k.1, k.2"),
    ({**Q, "leaf": "stack/norm", "transposed": True}, "needs more dimensions than stack.norm"),
    ({**Q, "rows": [0, 6]}, "has rows [0, 6], outside stack.qk (3, 5, 7)"),
    ({**Q, "slices": [[2, 0, 4]]}, "slices [[2, 0, 4]], outside stack.qk"),
    ({**Q, "slices": [[1, 0, 8]]}, "slices [[1, 0, 8]], outside stack.qk"),
    ({**Q, "columns": [0, 4], "slices": [[1, 0, 4]]}, "q.{layer} has two ranges of dimension 1 of stack.qk"),
    ({**Q, "leaf": "stack/query", "transposed": True}, "true is for a matrix; otherwise list"),
    ({**Q, "leaf": "stack/query", "transposed": [0, 1]}, "has transposed [0, 1], but stack.query"),
    ({**Q, "columns": [0, 4], "reshape": [5, 7]}, "has reshape [5, 7], which (5, 4) cannot take"),
    ({**Q, "name": None, "columns": [9, 10]}, "padding of stack.qk has columns [9, 10], outside"),
    ({**Q, "name": "q", "transpose": True}, "q has unknown keys ['transpose']; allowed: ['columns', 'layers', 'leaf'"),
]


@pytest.mark.parametrize(("row", "words"), WRONG)
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


class Coinciding(Net):
    """One tensor has the name of a leaf."""

    def weights_layout(self):
        rows = [{"name": "ends.out", "leaf": "ends/out", "transposed": True}, {"name": "s", "leaf": "ends/scale"}]
        return {"config": {}, "aliases": {"^old_": ""}, "tensors": [*rows, {"name": "w.{layer}", "leaf": "stack/w"}]}


def test_a_coinciding_name_leaves_the_table_in_use(tmp_path):
    saved = engine(Coinciding(), 3, zero=2)
    saved.save_16bit_model(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"ends.out", "s", "w.0", "w.1"}
    loaded = engine(Coinciding(), seed=1)
    for prefix in ("", "old_"):
        save_file({prefix + name: x for name, x in found.items()}, tmp_path / "model.safetensors")
        loaded.state = loaded.step_fn.init(jax.random.key(1))
        loaded.load_weights(tmp_path)
        np.testing.assert_array_equal(loaded.state.params["ends"]["out"], found["ends.out"].T)
        np.testing.assert_array_equal(loaded.state.params["stack"]["w"][1], found["w.1"])
    save_file(found | {"old_s": found["s"]}, tmp_path / "model.safetensors")
    with pytest.raises(jzero.ConfigError, match="some tensors are in two of"):
        loaded.load_weights(tmp_path)


def test_parts_of_one_tensor(tmp_path):
    """They lie in one tensor of one file, one after the other, and every damaged byte of it is found."""
    leaves = {"q": ShapeDtype((4, 6), np.dtype("f4")), "k": ShapeDtype((4, 2), np.dtype("f4"))}
    rows = [{"name": f"qk[{i}]", "leaf": leaf, "transposed": True} for i, leaf in enumerate("qk")]
    some = tensors(leaves, {"tensors": rows})
    assert [*shards(some, 8)] == ["model.safetensors"]
    values = {name: np.random.default_rng(0).normal(size=x.shape).astype("f4") for name, x in leaves.items()}
    file = tmp_path / "model.safetensors"
    writer = TensorWriter({file: some})
    for name, x in values.items():
        writer.write(name, tuple(slice(0, n) for n in x.shape), x)
    writer.close()
    assert load_file(file).keys() == {"qk"}
    np.testing.assert_array_equal(load_file(file)["qk"], np.concatenate([values["q"].T, values["k"].T]))

    def total():
        read = File.open(file)
        expected = read.entries["qk"].checksum
        assert expected == checksum_of_all(np.concatenate([values["q"].T, values["k"].T]))
        read.divide("qk", some)
        for tensor in some:
            read.reshape(tensor.name, tensor.view)
            parts = [part.copy() for _, part in read.windows(tensor.name, tuple(slice(0, n) for n in tensor.view))]
            np.testing.assert_array_equal(parts[0], values[tensor.leaf].T)
        return read.sums["qk"] % 2**64 - expected

    assert total() == 0
    content = bytearray(file.read_bytes())
    content[-3:] = bytes(x ^ 1 for x in content[-3:])
    file.write_bytes(content)
    with pytest.raises(AssertionError):
        total()
