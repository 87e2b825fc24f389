"""Checkpoints between groups of devices that act as one: what any layout saves, every other continues.

The oracle is optax on one device, three AdamW steps from the same weights.
"""

from functools import cache
from itertools import product

import jax
import numpy as np
import pytest
from helpers.group_layouts import LAYOUTS, make_engine, plain
from helpers.mixture_models import batches
from helpers.sampling import keep

from jzero.tree import named

PAIRS = [pair for pair in product(LAYOUTS, LAYOUTS) if len(set(pair)) == 2]
RING = [*zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True)]


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
@pytest.mark.parametrize(("first", "second"), keep(PAIRS, RING[:1]))
def test_a_checkpoint_continues_on_another_layout(first, second, trained):
    (_, directory), (engine, _) = trained(first), trained(second)
    engine.load_checkpoint(directory)
    assert engine.global_steps == 2
    losses, params = plain()
    assert float(engine.train_batch(batches()[2])) == pytest.approx(losses[2], rel=1e-6)
    for name, x in named(jax.device_get(engine.state.params)).items():
        assert np.abs(x - params[name]).max() < 5e-6 * max(np.abs(params[name]).max(), 1e-2), name
