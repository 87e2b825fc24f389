"""Files of `torch.save` that are damaged, cut short or written to do harm: refused in one line, and nothing runs."""

import os
import pickle
import shutil
import struct
import tracemalloc
import zipfile
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from make_checkpoints import STEPS
from stored_runs import make_engine

import jzero
from jzero.deepspeed.torch_files import TorchTensor, load_torch
from jzero.deepspeed.zero_shards import read_deepspeed

TAG = f"global_step{STEPS}"
CASES = "mlp-0-fp32", "mlp-1-fp32", "mlp-2-fp16", "mlp-3-fp32", "pipe-1-fp32"


def refused(read, path):
    """Return the message of the error with which a path is refused; memory goes with its size, not with its numbers."""
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*.pt")))
    most = 64 * size + 2**20  # a byte of a pickle makes an object of 48 bytes at most
    for _ in range(2):  # threads of earlier tests allocate too, but not in both
        tracemalloc.start()
        try:
            with pytest.raises(jzero.ConfigError) as error:
                read(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak < most:
            break
    assert peak < most
    assert "\n" not in str(error.value)
    return str(error.value)


def archive(path, pickled, storages=(), compress=zipfile.ZIP_STORED, byteorder="little"):
    """Write a file as torch.save does, around any pickle."""
    with zipfile.ZipFile(path, "w", compress) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", byteorder)
        for i, storage in enumerate(storages):
            file.writestr(f"archive/data/{i}", storage)
        file.writestr("archive/version", "3\n")
    return path


class Call:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def text(some):
    return b"X" + struct.pack("<I", len(some)) + some.encode()


def tensor(offset=0, shape=(2,), strides=(1,), numel=2, key="0", kind="FloatStorage"):
    ints = lambda some: b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", n) for n in some) + b"t"  # noqa: E731
    kinds = f"ctorch\n{kind}\n".encode()
    storage = b"(" + text("storage") + kinds + text(key) + text("cpu") + ints([numel])[1:-1] + b"tQ"
    rest = ints([offset])[1:-1] + ints(shape) + ints(strides) + b"\x89}t"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"R."


def set_again(count):
    """The pickle of instances that all take the same attributes."""
    attributes = pickle.dumps({i: None for i in range(count)}, 2)[2:-1] + b"r\x00\x01\x00\x000"
    made = b"cdeepspeed.x\ny\n)\x81j\x00\x01\x00\x00b"
    return b"\x80\x02" + attributes + b"](" + made * count + b"e."


NESTED = b")q\x01" + b"h\x01\x86q\x01" * 20  # its text has 4 MB
STORAGE = b"\x80\x02(X\x01\x00\x00\x00sctorch\nFloatStorage\n"
FLOATS = np.arange(2, dtype=np.float32).tobytes()
HOSTILE = {
    "os.system": (pickle.dumps(Call(os.system, "touch /tmp/harm")), "uses posix.system"),
    "inst": (b"(S'touch /tmp/harm'\nios\nsystem\n.", "is not a file of torch.save"),
    "a call of text": (b"\x80\x02X\x02\x00\x00\x00os)R.", "calls something that is no function"),
    "a function's attribute": (b"\x80\x02ctorch\nSize\n}b.", "sets attributes of something"),
    "an import of a submodule": (b"\x80\x02ctorch._utils\n__builtins__\n.", "uses torch._utils.__builtins__"),
    "a memo of 2**32": (b"\x80\x02Nr\xff\xff\xff\xff.", None),
    "bytes of 2**62": (b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".", "is not a file of torch.save"),
    "a number of 2**31 bytes": (b"\x80\x02\x8b" + struct.pack("<I", 2**31 - 1) + b".", "is not a file of torch.save"),
    "nested keys": (b"\x80\x02}N" + b"\x85" * 200_000 + b"Ns.", "a key of type tuple"),
    "keys of one hash": (pickle.dumps(dict.fromkeys(range(0, 2000 * (2**61 - 1), 2**61 - 1)), 2), "more than 64 bits"),
    "a frozenset": (pickle.dumps(frozenset({1}), 4), "is not a file of torch.save"),
    "a persistent id": (b"\x80\x02X\x01\x00\x00\x00aQ.", "is not a file of torch.save"),
    "a tensor at an offset": (tensor(offset=2**40), "larger than its storage"),
    "a negative shape": (tensor(shape=(-2,)), "not made of whole numbers"),
    "an expanded tensor": (tensor(shape=(2**40,), strides=(0,)), "not contiguous"),
    "a storage that is cut": (tensor(numel=2**40), "is truncated"),
    "no such storage": (tensor(key="../../etc/passwd"), "is not a file of torch.save"),
    "a storage's nested name": (STORAGE + NESTED + b"NK\x01tQ.", "a name that is no text"),
    "a storage's nested size": (STORAGE + b"X\x01\x00\x00\x000N" + NESTED + b"tQ.", "a size that is no whole number"),
    "a set of a tuple": (b"\x80\x02c__builtin__\nset\n)\x85R.", "a set of something that is no list"),
    "a shape that is a list": (b"\x80\x02ctorch\nSize\n]\x85R.", "no tuple of at most 32"),
    "attributes set again": (set_again(1000), "sets more attributes than it contains"),
    "nothing": (b"", "is not a file of torch.save"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(tmp_path, name):
    pickled, message = HOSTILE[name]
    path = archive(tmp_path / "x.pt", pickled, [FLOATS])
    if message is None:
        assert load_torch(path) is None  # a large number of a memo costs one entry of a dict
        return
    assert message in refused(load_torch, path)
    assert not Path("/tmp/harm").exists()


def test_a_good_pickle_is_read(tmp_path):
    """The same pickle without the harm: so the refusals above are not of the test's own archive."""
    read = load_torch(archive(tmp_path / "x.pt", tensor(), [FLOATS]))
    assert isinstance(read, TorchTensor)
    assert read.read().tolist() == [0, 1]
    sets = pickle.dumps({"sparse_tensor_module_names": set(), "names": {"a"}}, 2)  # DeepSpeed before 0.19
    assert load_torch(archive(tmp_path / "x.pt", sets)) == {"sparse_tensor_module_names": [], "names": ["a"]}


def test_archives_that_are_no_torch_files(tmp_path):
    good = pickle.dumps({"a": 1}, 2)
    compressed = archive(tmp_path / "a", good + b" " * 9999, compress=zipfile.ZIP_DEFLATED)
    assert "is compressed" in refused(load_torch, compressed)
    assert "big-endian" in refused(load_torch, archive(tmp_path / "b", good, byteorder="big"))
    (tmp_path / "c").write_bytes(good)
    assert "before PyTorch 1.6" in refused(load_torch, tmp_path / "c")
    assert "Is a directory" in refused(load_torch, tmp_path)
    assert "No such file" in refused(load_torch, tmp_path / "none")


def test_a_file_that_is_cut_or_changed_is_refused_or_the_same(runs_of_deepspeed, tmp_path):
    """Files that are cut anywhere, or with bytes of the pickle or the archive's directory changed."""
    random, refusals, number = np.random.default_rng(0), 0, 80
    for n in range(number):
        copy = shutil.copytree(runs_of_deepspeed / CASES[n % len(CASES)] / "ckpt" / TAG, tmp_path / str(n))
        files = [file for file in sorted(copy.rglob("*.pt")) if is_read(file)]
        file = files[random.integers(len(files))]
        good = file.read_bytes()
        data = bytearray(good)
        if n % 2:
            data = data[: random.integers(len(data))]
        else:
            begin, end = span_of_pickle(file)
            for at in random.integers(begin, end, 1 + n % 3):
                data[at] ^= 1 << random.integers(8)
        if data != good:
            file.write_bytes(data)
            assert str(copy) in refused(read_deepspeed, copy)
            refusals += 1
        shutil.rmtree(copy)
    assert refusals > number * 2 / 3


def is_read(file):
    """With ZeRO, the masters are read and not a pipeline's layers; at stage 3, other ranks' models have frozen ones."""
    return "layer_" not in file.name and not (
        "zero_pp" in file.name and "_0_mp" not in file.name and "model" in file.name
    )


def span_of_pickle(file):
    with zipfile.ZipFile(file) as found:
        entry = next(one for one in found.infolist() if one.filename.endswith("data.pkl"))
    data, head = file.read_bytes(), entry.header_offset
    names, extra = struct.unpack("<HH", data[head + 26 : head + 30])
    return head + 30 + names + extra, head + 30 + names + extra + entry.file_size


@pytest.mark.parametrize("case", CASES[1:])
def test_a_file_that_is_lost(runs_of_deepspeed, tmp_path, case):
    for file in sorted((runs_of_deepspeed / case / "ckpt" / TAG).rglob("*.pt")):
        if "layer_" in file.name or (file.name.startswith("zero_pp_rank_0") and "model" in file.name):
            continue
        copy = shutil.copytree(file.parent, tmp_path / file.name)
        (copy / file.name).unlink()
        if case == "mlp-3-fp32" and "model" in file.name:
            assert read_deepspeed(copy).steps == STEPS  # the other ranks' model states have frozen parameters alone
            continue
        message = refused(read_deepspeed, copy)
        assert "lacks" in message or "ranks wrote it" in message or "has no file" in message or "complete" in message


COUNTERS = {"global_steps": 1, "global_samples": 1, "skipped_steps": 0}
TWO = tensor()[2:-1]


def states(path, **values):
    """Write a dict as a file of torch.save: bytes are pickles of a tensor, whose storage has two numbers."""
    part = lambda x: x if isinstance(x, bytes) else pickle.dumps(x, 2)[2:-1]  # noqa: E731
    pickled = b"".join(text(key) + part(x) for key, x in values.items())
    return archive(path, b"\x80\x02}(" + pickled + b"u.", [FLOATS])


TUPLES = reduce(lambda inner, _: (inner, inner), range(20), ())  # whose text doubles with each
ZERO = {"base_optimizer_state": {"state": {}, "param_groups": []}, "single_partition_of_fp32_groups": [[]]}
SGD, ONE = ({"state": {}, "param_groups": [{"params": numbers}]} for numbers in ([0, 1], [0]))
PART, ENDLESS = ZERO | {"partition_count": 1}, SGD | {"state": {0: {"step": float("inf")}}}
IN_ONE = b"}X\x01\x00\x00\x00a" + TWO + b"s"  # {"a": a tensor}
APART = b"}(X\x01\x00\x00\x00a%sX\x01\x00\x00\x00b%su" % (
    tensor(shape=(1,))[2:-1], tensor(offset=1, shape=(1,))[2:-1]
)  # fmt: skip
MODEL, ZERO_FILE = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
# The rest of the model states, the optimizer states of a rank (None: without ZeRO), and what the error contains.
DAMAGED = {
    "nested counts": ({"param_shapes": []}, ZERO | {"partition_count": TUPLES}, "partition_count is no whole"),
    "a shape of text": ({"param_shapes": [{"w": ("a", 10**9)}]}, PART, "the shape of w is no"),
    "a negative shape": ({"param_shapes": [{"w": (-1, -2)}]}, PART, "the shape of w is no"),
    "a frozen shape": ({"param_shapes": [], "frozen_param_shapes": {"w": [2]}}, PART, "the shape of w is no"),
    "more parameters than weights": ({"module": IN_ONE, "optimizer": SGD}, None, "StopIteration"),
    "fewer parameters than weights": ({"module": APART, "optimizer": ONE}, None, "not all parameters"),
    "counters of text": ({"module": {}, "optimizer": None, "global_steps": "a"}, None, "must be whole numbers"),
    "a step without end": ({"module": IN_ONE, "optimizer": ENDLESS}, None, "OverflowError"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_states_of_other_kinds_are_refused(tmp_path, name):
    archive(tmp_path / MODEL, pickle.dumps([1], 2))
    assert "is not a complete checkpoint" in refused(read_deepspeed, tmp_path)
    rest, optimizer, message = DAMAGED[name]
    states(tmp_path / MODEL, **COUNTERS | {"module": {}} | rest)
    if optimizer is not None:
        states(tmp_path / ZERO_FILE, optimizer_state_dict=optimizer)
    assert message in refused(read_deepspeed, tmp_path)


@pytest.mark.parametrize("lost", ["zero_pp_rank_30000000_mp_rank_00", "zero_pp_rank_0_mp_rank_30000000"])
def test_large_numbers_in_names(runs_of_deepspeed, tmp_path, lost):
    """The memory of the refusal goes with the files."""
    copy = shutil.copytree(runs_of_deepspeed / "mlp-1-fp32" / "ckpt" / TAG, tmp_path / "copy")
    (copy / f"{lost}_optim_states.pt").touch()
    assert "more" in refused(read_deepspeed, copy)


def test_lists_without_end(runs_of_deepspeed, tmp_path):
    """A list in a list in a list, deeper than Python's stack, is no client_state."""
    deep = b"]" * 3000 + b"a" * 2999
    states(tmp_path / MODEL, **COUNTERS, module=IN_ONE, optimizer=None, mine=deep)
    engine = make_engine(runs_of_deepspeed / "mlp-1-fp32", "mlp")
    with pytest.raises(jzero.ConfigError, match="is damaged: its counters: maximum recursion depth"):
        engine.load_checkpoint(tmp_path)
