"""Data and positions that do not fit, and kinds of data."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.loaders import Rows, Sizes, data, numbers
from helpers.refusals import refuses

import jzero
from jzero.data import DataLoader


def first_batch(source, **more):
    return next(iter(DataLoader(source, Sizes(2, 1, 1), **more)))


def test_positions_that_do_not_fit():
    for position, words in (
        (None, "position = None: must be"),
        ({"epoch": 0, "samples": 1, "rank": 2}, "must be"),
        ({"epoch": 0.0, "samples": 4}, "whole numbers from 0"),
        ({"epoch": 0, "samples": 4, "begun": 6}, "begun must be at most samples"),
        ({"epoch": 0, "samples": 100}, "training_data has 20 samples per epoch, so the position belongs to other data"),
    ):
        for kind in ("arrays", "function"):
            loader = DataLoader(data(kind, 20), Sizes(4, 1, 1))
            refuses(lambda position=position, loader=loader: next(iter(loader.seek(position) or loader)), words)


def test_bad_data():
    wrong = Rows(8)
    wrong.rows = lambda indices: np.zeros(7)
    for bad, words in (
        ([], "training_data contains no samples"),
        (lambda: iter(()), "training_data contains no samples"),
        ({"x": np.zeros(4), "y": np.zeros(3)}, r"have \[3, 4\] samples"),
        ({"train": [1, 2]}, r"training_data\['train'\]\[0\] is int; expected an array"),
        (np.float32(1), "training_data is float32: must be a pytree"),
        (np.array(1), "is ndarray; expected an array with a leading sample dimension"),
        (7, "training_data is int: must be a pytree"),
        ("train.jsonl", r"'train.jsonl': to read a file of tokens, .*; jzero.data.write_tokens makes a file of tokens"),
        (np.array(["a", "b"]), "training_data has dtype <U1; expected numbers"),
        ([np.zeros(2), np.zeros(3)] * 2, r"2 shapes, such as \(2,\) and \(3,\).*Packed"),
        (SimpleNamespace(rows=lambda indices: np.zeros(7), __len__=None), "training_data is SimpleNamespace"),
        (wrong, r"returned a leaf of shape \(7,\) for 2 indices"),
        ([[1, 2], [3]], "samples have 2 shapes"),
        ([[[1], [2, 3]]] * 2, "samples have lists of uneven length"),
    ):
        refuses(lambda bad=bad: first_batch(bad), words)


@pytest.mark.parametrize("kind", ["arrays", "function"])
def test_too_few_samples(kind):
    with pytest.raises(jzero.ConfigError, match="7 samples do not fill one global batch of 8"):
        next(iter(DataLoader(data(kind, 7), Sizes(2, 2, 2), drop_last=True)))
    assert numbers(DataLoader(data(kind, 3), Sizes(2, 2, 2), shuffle=False)) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_batch_may_repeat_one_sample():
    """As a benchmark does; a batch that no memory holds is an error before it is allocated."""
    assert numbers(DataLoader(data("arrays", 1), Sizes(4096, 1, 1))) == [0] * 4096
    with pytest.raises(jzero.ConfigError, match=r"1 samples, which one batch would repeat .*; use at most 1048576"):
        DataLoader(data("arrays", 1), Sizes(2**21, 1, 1))


def test_hugging_face_columns():
    datasets = pytest.importorskip("datasets")
    make = datasets.Dataset.from_dict
    mixed, ragged = make({"x": [1, 2], "text": ["a", "b"]}), make({"ragged": [[1], [1, 2]]})
    words = r"\['text'\] has dtype <U1; expected numbers; select columns .*select_columns.*write_tokens"
    refuses(lambda: first_batch(mixed), words)
    refuses(lambda: first_batch(ragged), r"training_data\['ragged'\] has dtype object; expected numbers")
    words = r"\['train'\] is Dataset; expected an array .*pass one split"
    refuses(lambda: first_batch(datasets.DatasetDict({"train": mixed})), words)
    chosen = mixed.with_format("torch" if importlib.util.find_spec("torch") else "numpy", columns=["x"])
    assert np.asarray(first_batch(chosen, shuffle=False)["x"]).tolist() == [1, 2]
    whole = make({"x": [1, 2], "y": [3, 4]}).with_format(columns=["x"], output_all_columns=True)
    assert first_batch(whole).keys() == {"x", "y"}
    doubled = mixed.with_transform(lambda batch: {"x": [np.float32(2 * x) for x in batch["x"]]})
    assert np.asarray(first_batch(doubled, shuffle=False)["x"]).tolist() == [2, 4]
    loader = DataLoader(make({"x": range(20)}).to_iterable_dataset().shuffle(seed=1, buffer_size=20), Sizes(2, 1, 1))
    first, second = ([int(x) for batch in loader for x in batch["x"]] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_lists_of_numbers_are_arrays():
    lists = [{"x": i, "y": [float(i), -i], "image": [[i, 1], [2, True]]} for i in range(4)]
    for source in (lists, lambda: iter(lists)):
        (batch,) = DataLoader(source, Sizes(4, 1, 1), shuffle=False)
        assert numbers([batch]) == [0, 1, 2, 3]
        assert np.asarray(batch["image"]).tolist() == [[[i, 1], [2, 1]] for i in range(4)]
