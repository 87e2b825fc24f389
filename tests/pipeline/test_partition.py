"""Cutting layers into parts: properties, and "parameters" against every other way to cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jzero
from jzero.pipeline.layer_spec import partition_layers

METHODS = ["uniform", "parameters", "best", "type:a", "type:^A"]
NAMES = st.sampled_from(["Embed", "Block", "Attention", "relu"])
LAYERS = st.lists(st.tuples(NAMES, st.integers(0, 20)), min_size=1, max_size=9)


def heaviest(weights, boundaries):
    return max(sum(weights[a:b]) for a, b in pairwise(boundaries))


def lightest_possible(weights, parts):
    n = len(weights)
    return min(heaviest(weights, [0, *cut, n]) for cut in combinations(range(1, n), parts - 1))


@given(LAYERS, st.data(), st.sampled_from(METHODS))
def test_every_layer_once_in_order_and_no_cut_better_balanced(layers, data, method):
    names, sizes = zip(*[("Attention", 1), *layers], strict=True)
    parts = data.draw(st.integers(1, len(names)))
    boundaries = partition_layers(method, names, sizes, parts)
    assert len(boundaries) == parts + 1
    assert (boundaries[0], boundaries[-1]) == (0, len(names))
    assert all(a < b for a, b in pairwise(boundaries))
    attention = [int(name == "Attention") for name in names]
    weights = {"parameters": sizes, "best": sizes, "type:^A": attention}.get(method)
    if weights:
        assert heaviest(weights, boundaries) == lightest_possible(weights, parts)


def test_parts_by_hand():
    names = ["Embed", "Linear", "relu", "Linear", "relu", "Linear"]
    sizes = [100, 10, 0, 10, 0, 10]
    assert partition_layers("parameters", names, sizes, 2) == [0, 1, 6]
    assert partition_layers("UNIFORM", names, sizes, 4) == [0, 2, 4, 5, 6]
    assert partition_layers("type:linear", names, sizes, 3) == [0, 3, 5, 6]  # an activation stays with what it follows
    assert partition_layers("type:lin|emb", names, sizes, 2) == [0, 3, 6]
    assert partition_layers("type:^LINEAR$", names, sizes, 3) == partition_layers("type:linear", names, sizes, 3)


@pytest.mark.parametrize(
    ("method", "parts", "words"),
    [
        ("profile", 2, "partition_method 'profile' is unknown.*'parameters'.*'best'.*'uniform'.*'type:regex'"),
        ("type:conv", 2, "'type:conv' matches no layer: the class names are Embed, Block$"),
        ("type:(", 2, "is not a regex: "),
        ("uniform", 4, r"4 parts \(num_stages x chunks\) exceed the layers: there are 3 layers, ask for 1 to 3"),
        ("parameters", 0, r"0 parts .* are too few: there are 3 layers, ask for 1 to 3"),
    ],
)
def test_parts_that_cannot_be(method, parts, words):
    with pytest.raises(jzero.ConfigError, match=words):
        partition_layers(method, ["Embed", "Block", "Block"], [1, 2, 2], parts)
