"""Any partition of a leaf into boxes gives its tensors, for any table and any window size."""

import itertools
from functools import cache
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.refusals import says
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import Net, engine, same
from safetensors.numpy import load_file, save_file

import jzero
from jzero import weights
from jzero.weights import safetensors
from jzero.weights.export import shards
from jzero.weights.name_map import ShapeDtype, assign, tensors
from jzero.weights.safetensors import File, TensorWriter, checksum_of

HEADS = {"leaf": "stack/heads", "transposed": [1, 2, 3, 0]}
TABLE = {
    "config": {},
    "tensors": [
        {"name": "q.{layer}", "leaf": "stack/qk", "columns": [0, 4], "transposed": True},
        {"name": "k.{layer}", "leaf": "stack/qk", "columns": [4, 7], "transposed": False},
        {"name": "norm.{layer}", "leaf": "stack/norm"},
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
    cuts = [sorted({0, n, *draw(st.lists(st.integers(1, n), max_size=2))}) for n in shape]
    return [tuple(slice(*edge) for edge in box) for box in itertools.product(*(itertools.pairwise(c) for c in cuts))]


@cache
def expected():
    qk, norm = VALUES["stack.qk"], VALUES["stack.norm"]
    found = {"scale": VALUES["scale"], "conv": np.zeros((5, 3, 2, 2), "f4")}
    for c, i, j, d in np.ndindex(3, 2, 2, 5):
        found["conv"][d, c, i, j] = VALUES["conv"][4 * c + 2 * i + j, d]
    found |= {"embed": VALUES["embed"][:5], "head": VALUES["head"][:, :5].T}
    for i in range(3):
        found |= {f"q.{i}": qk[i, :, :4].T, f"k.{i}": qk[i, :, 4:], f"norm.{i}": norm[i]}
        heads = VALUES["stack.heads"][i]
        found[f"hq.{i}"] = np.concatenate([heads[:, h // 2, h % 2].T for h in range(4)])  # torch's [H * C, D]
        found |= {f"h{x}.{i}": np.concatenate([heads[:, k, j].T for k in (0, 1)]) for x, j in (("k", 2), ("v", 3))}
    return found


@settings(max_examples=12)
@given(data=st.data(), window=st.integers(1, 200))
def test_boxes_into_files_and_back(tmp_path_factory, data, window):
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    with mock.patch.object(File, "window", window):
        some = tensors(LEAVES, TABLE)
        assert [tensor.name for tensor in some] == [*expected()][4:] + [*expected()][:4]  # layer by layer
        writer = TensorWriter({path: some})
        for name, values in VALUES.items():
            for box in data.draw(boxes(values.shape)):
                writer.write(name, box, values[box])
        says(lambda: File.open(path), "its header does not match its checksum")
        writer.close()
        found = load_file(path)
        assert found.keys() == expected().keys()
        for name, values in expected().items():
            np.testing.assert_array_equal(found[name], values)
        file = File.open(path)
        for name, entry in file.entries.items():
            whole = np.atleast_1d(found[name])
            assert entry.checksum == checksum_of(whole, (0,) * whole.ndim, whole.shape)
        for tensor in some:
            file.reshape(tensor.name, tensor.view)
        for name, values in VALUES.items():
            if name in PADDING:
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


Q = {"name": "q.{layer}", "leaf": "stack/qk"}
PART = "omit, or name twice, a part of stack.qk"
WRONG = [
    ({**Q, "leaf": "stack/wq"}, "q.{layer} names the leaf stack.wq, but the leaves are stack.qk, stack.norm"),
    ({**Q, "columns": [4, 8]}, "columns [4, 8], outside stack.qk (3, 5, 7)"),
    ({**Q, "columns": [0, 3]}, PART),
    ({**Q, "name": "q"}, PART),
    ({**Q, "name": "k.{layer}", "columns": [0, 4]}, "two tensors have the name k.0, k.1, k.2"),
    ({**Q, "leaf": "stack/norm", "transposed": True}, "needs more dimensions than stack.norm"),
    ({**Q, "slices": [[2, 0, 4]]}, "slices [[2, 0, 4]], outside stack.qk"),  # no such dimension
    ({**Q, "columns": [0, 4], "slices": [[1, 0, 4]]}, "q.{layer} has two ranges of dimension 1 of stack.qk"),
    ({**Q, "leaf": "stack/heads", "transposed": True}, "true is for a matrix; otherwise list"),
    ({**Q, "leaf": "stack/heads", "transposed": [0, 1]}, "has transposed [0, 1], but stack.heads"),
    ({**Q, "columns": [0, 4], "reshape": [5, 7]}, "has reshape [5, 7], which (5, 4) cannot take"),
    ({**Q, "name": None, "columns": [9, 10]}, "padding of stack.qk has columns [9, 10], outside"),
    ({**Q, "name": "q", "transpose": True}, "q has unknown keys ['transpose']; allowed: ['columns', 'layers', 'leaf'"),
]


@pytest.mark.parametrize(("row", "words"), WRONG)
def test_a_table_that_does_not_fit(row, words):
    says(lambda: tensors(LEAVES, {**TABLE, "tensors": [row, *TABLE["tensors"][1:]]}), words)


@pytest.mark.parametrize("dtype", ["BF16", "BOOL", "F32", "I64", "U8"])
def test_every_dtype_is_read_as_it_was_written(tmp_path, dtype):
    kind, box = safetensors.DTYPES[dtype], (slice(0, 2), slice(0, 3))
    values = np.arange(6).reshape(2, 3).astype(kind)
    array = {"a": ShapeDtype((2, 3), kind), "empty": ShapeDtype((0, 4), kind), "odd": ShapeDtype((3,), np.dtype("u1"))}
    writer = TensorWriter({tmp_path / "a": tensors(array, None)})
    writer.write("a", box, values)
    writer.write("empty", (slice(0, 0), slice(0, 4)), np.zeros((0, 4), kind))
    found = load_file(tmp_path / "a")
    assert (found["a"].dtype, found["empty"].shape) == (kind, (0, 4))
    np.testing.assert_array_equal(found["a"], values)
    save_file({"a": values}, tmp_path / "b")
    (_, view), = File.open(tmp_path / "b").windows("a", box)  # fmt: skip
    np.testing.assert_array_equal(view, values)


def test_a_dtype_that_files_do_not_support(tmp_path):
    some = tensors({"x": ShapeDtype((2,), np.dtype(ml_dtypes.int4))}, None)
    says(lambda: TensorWriter({tmp_path / "c": some}), "x has dtype int4, which safetensors files do not support")


class Coinciding(Net):
    def weights_layout(self):
        rows = [{"name": "ends.out", "leaf": "ends/out", "transposed": True}, {"name": "s", "leaf": "ends/scale"}]
        return {"config": {}, "aliases": {"^old_": ""}, "tensors": [*rows, {"name": "w.{layer}", "leaf": "stack/w"}]}


COINCIDING = Coinciding()


def test_a_coinciding_name_leaves_the_table_in_use(tmp_path):
    saved = engine(COINCIDING, 3, zero=2)
    saved.save_16bit_model(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"ends.out", "s", "w.0", "w.1"}
    loaded = engine(COINCIDING, seed=1)
    for prefix in ("", "old_"):
        save_file({prefix + name: x for name, x in found.items()}, tmp_path / "model.safetensors")
        loaded.state = loaded.step_fn.init(jax.random.key(1))
        loaded.load_weights(tmp_path)
        np.testing.assert_array_equal(loaded.state.params["ends"]["out"], found["ends.out"].T)
        np.testing.assert_array_equal(loaded.state.params["stack"]["w"][1], found["w.1"])
    save_file(found | {"old_s": found["s"]}, tmp_path / "model.safetensors")
    says(lambda: loaded.load_weights(tmp_path), "some tensors are in two of")


def test_a_checkpoint_whose_model_kept_other_shapes_reaches_the_new_one(tmp_path):
    """Its error names the way: an export by the table that the checkpoint has."""
    made, former, out = engine(COINCIDING), tmp_path / "former", tmp_path / "out"
    new, table = made.state.params, COINCIDING.weights_layout()
    table["tensors"][2]["reshape"] = [8, 8]
    old = {"ends": new["ends"], "stack": {"w": new["stack"]["w"].reshape(2, 64)}}
    jzero.checkpoint.save({"params": old}, former, tag="last", notes={"weights": table}).wait()
    way = f"To load the parameters in their new shapes: jzero export {former} OUT, then engine.load_weights(OUT)"
    other = engine(COINCIDING, 3, seed=1, zero=2)
    says(lambda: other.load_checkpoint(former, load_module_only=True), "w is (2, 64), not (2, 8, 8)", way)
    weights.export(former, out)
    assert same(weights.load(out, other.step_fn), new)


def test_parts_of_one_tensor(tmp_path):
    """They lie in one tensor of one file, one after the other, and every damaged byte of it is found."""
    leaves = {"q": ShapeDtype((4, 6), np.dtype("f4")), "k": ShapeDtype((4, 2), np.dtype("f4"))}
    rows = [{"name": f"qk[{i}]", "leaf": leaf, "transposed": True} for i, leaf in enumerate("qk")]
    some, file = tensors(leaves, {"tensors": rows}), tmp_path / "model.safetensors"
    assert [*shards(some, 8)] == ["model.safetensors"]
    values = {name: np.random.default_rng(0).normal(size=x.shape).astype("f4") for name, x in leaves.items()}
    whole = np.concatenate([values["q"].T, values["k"].T])
    writer = TensorWriter({file: some})
    for name, x in values.items():
        writer.write(name, tuple(slice(0, n) for n in x.shape), x)
    writer.close()
    assert load_file(file).keys() == {"qk"}
    np.testing.assert_array_equal(load_file(file)["qk"], whole)

    def read():
        """The parts, and how far their checksum is from the file's."""
        opened = File.open(file)
        expected = opened.entries["qk"].checksum
        assert expected == checksum_of(whole, (0, 0), whole.shape)
        opened.divide("qk", some)
        parts = {}
        for tensor in some:
            opened.reshape(tensor.name, tensor.view)
            windows = opened.windows(tensor.name, tuple(slice(0, n) for n in tensor.view))
            (parts[tensor.leaf],) = [part.copy() for _, part in windows]
        return parts, opened.sums["qk"] % 2**64 - expected

    parts, difference = read()
    assert difference == 0
    assert all((parts[name] == values[name].T).all() for name in leaves)
    content = bytearray(file.read_bytes())
    content[-3:] = bytes(x ^ 1 for x in content[-3:])
    file.write_bytes(content)
    assert read()[1] != 0
