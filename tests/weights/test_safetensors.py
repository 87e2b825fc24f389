"""Headers and indexes of safetensors: jzero refuses in one line what the package refuses; what both read is equal."""

import copy
import json
import os
import random
import re

import jax
import numpy as np
import pytest
from helpers.refusals import refuses
from llamas import One, step
from safetensors import SafetensorError, deserialize

import jzero
from jzero import weights
from jzero.weights.safetensors import DTYPES, MOST, File, checksum_of

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
I16 = {"dtype": "I16", "shape": [2, 1], "data_offsets": [8, 12]}
U8 = {"dtype": "U8", "shape": [], "data_offsets": [12, 13]}
GOOD = {"__metadata__": {"format": "pt"}, "a": F32, "b": I16, "c": U8}
DATA = bytes(range(1, 14))


def packed(head, data=DATA):
    text = head if isinstance(head, bytes) else head.encode() if isinstance(head, str) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def theirs(blob):
    """name -> (dtype, shape, bytes) as the package reads them; None if it refuses the file."""
    try:
        return {name: (x["dtype"], tuple(x["shape"]), bytes(x["data"])) for name, x in deserialize(blob)}
    except SafetensorError:
        return None


def ours(path, blob):
    path.write_bytes(blob)
    try:
        file = File.open(path)
    except jzero.ConfigError as error:
        return str(error)
    names, found = {dtype: name for name, dtype in DTYPES.items()}, {}
    for name, (dtype, shape, *_) in file.entries.items():
        values = np.empty(shape, dtype)
        for part, view in file.windows(name, tuple(slice(0, n) for n in shape)):
            values[part] = view
        found[name] = names[dtype], shape, values.tobytes()
    return found


def agree(path, blob):
    """Compare the two readers on one file; return (package, jzero)."""
    them, us = theirs(blob), ours(path, blob)
    if isinstance(us, str):
        assert us.startswith(f"{path} is not a complete safetensors file: "), us
        assert len(us) < len(str(path)) + 300, us
        assert us.isprintable(), us
    else:
        assert us == them, blob
    return them, us


def of_a(data=DATA[:8], **changes):
    return packed({"a": F32 | changes}, data)


FAULTS = [
    (packed(GOOD | {"a": F32 | {"data_offsets": [-8, 0]}}), "contains '-8': must be an integer from 0"),
    (packed({"a": F32, "b": F32}, DATA[:8]), "begins at byte 0, where 8 bytes are described before it"),
    (of_a(DATA[:12], data_offsets=[4, 12]), "a begins at byte 4, where 0 bytes"),
    (packed('{"a": %s, "a": %s}' % ((json.dumps(F32),) * 2), DATA[:8]), "has 'a' twice"),
    (packed(json.dumps(GOOD).replace("[2]", "[2.0]")), "contains '2.0': must be an integer"),
    (packed('{"a": NaN}'), "contains 'NaN'"),
    (of_a(shape=[True, 2]), "a has shape [True, 2]: must be a list of integers"),
    (of_a(data_offsets=[0]), "a has data_offsets [0]: must be two integers"),
    (packed("[]"), "its header is not a JSON object"),
    (of_a(b"", shape=[2**63, 4, 0], data_offsets=[0, 0]), "more than 2**64 bytes"),
    (of_a(shape=[3]), "a has 8 bytes, which does not match F32 [3]"),
    (of_a(dtype="F" * 10**6), "a has the unsupported dtype 'FFFF"),
    (packed({"a": 3}, b""), "a must have data_offsets, dtype, shape; it has 3"),
    (packed({"a\nb": F32}, DATA[:8]), r"has the name 'a\nb': must be printable"),
    (packed("[" * 10**5 + "]" * 10**5), "nested too deeply"),
    (packed('{"__metadata__": {"x": "\\ud800"}}', b""), "surrogates not allowed"),
    (packed({"__metadata__": {"x": 1}}, b""), "__metadata__ = {'x': 1}: must map names to strings"),
    (packed(GOOD, DATA + b"x"), "the rest belongs to no tensor"),
    (packed(GOOD, DATA[:-1]), "it is truncated"),
    ((10**18).to_bytes(8, "little") + b"{}", "its header is longer than the file"),
]


@pytest.mark.parametrize(("blob", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_each_fault_of_a_header(tmp_path, blob, words):
    them, us = agree(tmp_path / "x.safetensors", blob)
    assert words in str(us)
    assert them is None or "twice" in words or "name" in words  # which the package reads


def test_a_header_of_more_than_100_mb_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((MOST + 1).to_bytes(8, "little"))
    os.truncate(path, MOST + 100)  # sparse
    refuses(lambda: File.open(path), "its header has 100000001 bytes; at most 100000000 are allowed")


BITS = ["", '"', "{", "}", "[", "]", ",", "0", "-", "1e1", "\\", "\\ud800", " ", "\0", "é"]
ODD = [-1, 0, 1, 7, 8, 12, 13, 2**31, 2**63, 2**64, 1.5, 2.0, 1e300, True, None, "F64", "", [], [2], {}, "x" * 50]


def mutated(chance):
    """A file with up to four faults: in its values, in the header's text, in its bytes."""
    head = json.loads(json.dumps(GOOD))
    for _ in range(chance.choice([0, 0, 1, 2])):
        entry = head[chance.choice("abc")]
        key, value = chance.choice(sorted(entry)), copy.copy(chance.choice(ODD))
        if isinstance(entry[key], list) and entry[key] and chance.random() < 0.7:
            entry[key][chance.randrange(len(entry[key]))] = value
        else:
            entry[key] = value
    text = json.dumps(head)
    if chance.random() < 0.1:
        text = text.replace(chance.choice(['"b"', '"dtype"', '"shape"']), chance.choice(['"a"', '"shape"']))
    if chance.random() < 0.25:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice(BITS) + text[at + chance.randrange(3) :]
    blob = bytearray(packed(text, DATA[: chance.choice([13, 13, 13, 12, 8])]))
    if chance.random() < 0.25:
        blob[chance.randrange(len(blob))] = chance.randrange(256)
    return bytes(blob[: chance.choice([len(blob)] * 5 + [chance.randrange(len(blob))])])


@pytest.mark.parametrize("number", [600, pytest.param(6_000, marks=pytest.mark.slow)])
def test_mutated_headers(tmp_path, number):
    chance, both, stricter = random.Random(number), 0, []
    them, us = agree(tmp_path / "x.safetensors", packed(GOOD | {"__metadata__": None}))  # MLX writes null
    assert us == them == theirs(packed(GOOD))
    for _ in range(number):
        them, us = agree(tmp_path / "x.safetensors", mutated(chance))
        both += isinstance(us, dict)
        stricter += [us] if them is not None and isinstance(us, str) else []
    assert both > number / 50
    # jzero alone refuses doubled names, fields that the format does not have, and an entry that is not an object.
    assert [us for us in stricter if "twice" not in us and "must have data_offsets" not in us] == []


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int64"])
def test_a_checksum_is_the_same_for_every_division(dtype):
    """The oracle adds word by word, in Python's integers."""
    x = np.random.default_rng(0).integers(0, 2**63, (3, 4, 5)).astype(jax.numpy.dtype(dtype))
    words = x.view(np.uint32 if x.itemsize > 2 else f"u{x.itemsize}").reshape(-1).tolist()
    expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    for a, b in ((0, 0), (1, 2), (2, 3), (3, 4)):
        rows, columns = (slice(0, a), slice(a, 3)), (slice(0, b), slice(b, 5))
        parts = [(x[r, :, c], (r.start, 0, c.start)) for r in rows for c in columns]
        assert sum(checksum_of(part, start, x.shape) for part, start in parts) % 2**64 == expected
    for i, j in ((0, 1), (0, 59), (7, 58)):  # the highest bit of two elements
        other = x.copy().view(f"u{x.itemsize}").reshape(-1)
        other[[i, j]] ^= other.dtype.type(1 << (8 * x.itemsize - 1) if dtype != "bool" else 1)
        assert checksum_of(other.view(x.dtype).reshape(x.shape), (0, 0, 0), x.shape) != expected


BAD_NAME = "is not the name of a file in its directory"
ELSEWHERE = {
    **dict.fromkeys(("../x.safetensors", "", "a/x.safetensors", "x\0", "x" * 10**6), BAD_NAME),
    "absent.safetensors": "absent.safetensors: No such file",
    "directory": "it is not a regular file",
    3: "TypeError",
}


@pytest.mark.parametrize("name", [*ELSEWHERE, None], ids=lambda name: str(name)[:20])
def test_an_index_that_points_elsewhere(tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes(packed(GOOD))
    (tmp_path / "copy" / "directory").mkdir(parents=True)
    text = json.dumps({"weight_map": {"a": name}}) if name is not None else '{"weight_map":' * 10**5
    (tmp_path / "copy" / "model.safetensors.index.json").write_text(text)
    words = ELSEWHERE.get(name, "is not an index of safetensors files: RecursionError")
    message = refuses(lambda: weights.load(tmp_path / "copy", step(One())), re.escape(words))
    assert len(message.splitlines()) == 1
    assert len(message) < 500
