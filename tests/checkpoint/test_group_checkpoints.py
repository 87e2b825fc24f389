"""Checkpoints between groups of devices that act as one: what any layout saves, another continues.

The oracle is optax on one device, three AdamW steps from the same weights.
"""

from functools import cache

import pytest
from helpers.group_layouts import LAYOUTS, make_engine, plain
from helpers.mixture_models import batches
from helpers.oracle import largest_error
from helpers.sampling import keep

NAMES = [*LAYOUTS]
PAIRS = [*zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True)]  # each layout saves once, and loads once


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function of a layout: (an engine that has done two steps, the directory of its checkpoint)."""

    @cache
    def train(name):
        directory, engine = tmp_path_factory.mktemp("run"), make_engine(name)
        for batch in batches()[:2]:
            engine.train_batch(batch)
        engine.save_checkpoint(directory)
        return engine, directory

    return train


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), keep(PAIRS, PAIRS[:2]))
def test_a_checkpoint_continues_on_another_layout(first, second, trained):
    (_, directory), (engine, _) = trained(first), trained(second)
    engine.load_checkpoint(directory)
    assert engine.global_steps == 2
    losses, params = plain()
    assert float(engine.train_batch(batches()[2])) == pytest.approx(losses[2], rel=1e-6)
    assert largest_error(engine.state.params, params) < 5e-6
