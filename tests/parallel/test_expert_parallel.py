"""Expert parallelism: one device's losses, norms and parameters, by a decoder whose experts compute every token."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import mixture_models, tensor_models
from helpers.mixture_models import CONFIG, OwnModel, batches, config_of, divided_by_both, initial, make_step
from helpers.mixtures import plain_mixtures
from helpers.oracle import largest_error, train
from helpers.sampling import keep, some

import jzero
from jzero.planner.state_bytes import leaf_bytes, state_bytes
from jzero.tree import named
from models.moe import MixtureConfig

CASES = [  # and the capacity factor
    ({"expert": 1}, None),
    ({"expert": 2, "stage": 3, "unroll": False}, 1.0),
    ({"expert": 2, "zero": 2, "stage": 2, "accum": 2}, None),
    ({"expert": 4, "context": 2, "stage": 2, "unroll": False, "remat": "matmuls"}, None),
    ({"pipe": 2, "expert": 2, "zero": 2, "stage": 3, "accum": 2}, 1.0),
    ({"pipe": 2, "expert": 2, "tensor": 2, "stage": 2, "accum": 4, "schedule": "zero_bubble"}, None),
    ({"expert": 2, "context": 2, "tensor": 2, "stage": 3, "unroll": False}, 1.0),
]


@pytest.mark.parametrize(("layout", "factor"), keep(CASES, CASES[1:2]), ids=str)
def test_one_device_computes_the_same(layout, factor):
    config = config_of(layout, factor)
    step = make_step(config, **layout)
    seen, state = train(step, initial(config), batches())
    _, metrics = step(step.init(jax.random.key(0), initial(config)), batches()[0])
    assert (metrics["drop_rate"] > 0) == (factor is not None)
    assert metrics["balance_loss"] > 1.9
    total = metrics["cross_entropy"] + config.mixture.balance * metrics["balance_loss"]
    assert total == pytest.approx(metrics["loss"])
    known = mixture_models.reference(config)
    assert np.abs(seen / known.seen - 1).max() < 1e-6
    assert largest_error(state.params, known.params) < 2e-6


DEEPSEEK = MixtureConfig(4, 2, 16, score="sigmoid", scale=2.5, groups=(2, 1, 2), shared=24, balance=0.0, bias_rate=0.01)


BIASED = [{"expert": 2, "zero": 2, "stage": 3}, {"pipe": 2, "expert": 2, "stage": 2}]


@pytest.mark.parametrize("layout", some(BIASED, BIASED[:1]), ids=str)
def test_a_bias_and_a_shared_expert(layout):
    """All replicas move the bias by the counts of the whole batch, as one device does."""
    config = dataclasses.replace(CONFIG, mixture=DEEPSEEK)
    _, state = train(make_step(config, **layout), initial(config), batches())

    def mean(params, batch):
        (loss, _), new = mixture_models.model(config).loss(params, batch, jax.random.key(0))
        return loss.sum / loss.count, new

    params = initial(config)
    with plain_mixtures():
        for batch in batches():
            gradient, new = jax.jit(jax.grad(mean, has_aux=True))(params, batch)
            trained = jax.tree.map(lambda w, g: w - mixture_models.LR * g, params, gradient)
            params = jax.tree.map(lambda x, w: w if x is None else x, new, trained, is_leaf=lambda x: x is None)
    assert (named(params)["stack/mlp/bias"] != 0).any()
    assert largest_error(state.params, jax.device_get(params)) < 2e-6


@pytest.mark.slow
def test_evaluation_predictions_and_text_of_one_device():
    """Every device along `expert` evaluates rows of its own, and results come in the order of the batch."""
    config, batch, prompts, found = config_of({"zero": 2}, None), batches()[0], batches()[0]["inputs"][:8], []
    for layout in ({"expert": 2, "zero": 2, "stage": 3}, {"expert": 1}):
        step = make_step(config, **layout)
        state = step.init(jax.random.key(0), initial(config))
        found.append((step.predict(state, batch), step.evaluate(state, batch), step.generate(state, prompts, 6)))
    (ours, loss, text), (others, known, expected) = found
    np.testing.assert_allclose(ours, others, rtol=1e-5, atol=1e-6)
    assert float(loss[0]) == pytest.approx(float(known[0]), rel=1e-6)
    np.testing.assert_array_equal(text, expected)
    assert text.shape == (8, prompts.shape[1] + 6)


def test_rows_count_along_expert_and_zero_partitions_over_it():
    """Experts lie along `expert`, and ZeRO partitions them over `zero`; other parameters it partitions over both."""
    step = make_step(CONFIG, expert=2, zero=2, accum=2, stage=3)
    assert (step.batch_sizes[:3], step.replicas) == ((16, 2, 2), 4)
    specs = named(step.state_specs.params)
    assert specs["stack/mlp/gate_up"] == jax.sharding.PartitionSpec(None, ("expert", "zero"))
    assert specs["stack/attention/out/kernel"] == jax.sharding.PartitionSpec(None, ("zero", "expert"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_state(stage):
    """Masters and fp32 gradients, 4 bytes each, and weights that stage 1 and 2 gather; experts are always divided."""
    step = make_step(CONFIG, expert=2, zero=2, stage=stage)
    found = leaf_bytes(step)
    for layout in jax.tree.leaves(step.layouts):
        size = 4 * int(np.prod(layout.shape))
        own = 2 if layout.name in ("stack/mlp/gate_up", "stack/mlp/down") else 1
        state, gradients = (4 if stage >= s else own for s in (1, 2))
        weights = size / own if stage in (1, 2) else 0
        assert tuple(found.pop(layout.name)) == (size / state, 0, weights, size / gradients, 0), layout.name
    whole = state_bytes(step)
    assert whole.formula == pytest.approx(whole.total, abs=16)  # the optimizer's counters


@pytest.mark.slow
@pytest.mark.parametrize("stack", [None, "blocks"])
def test_a_module_of_a_users_own(stack):
    subject, losses = jzero.from_flax(OwnModel, mixture_models.own_loss, stack=stack), []
    for expert in (1, 2):
        step = tensor_models.make_step(subject, expert=expert)
        divided = {name.rpartition("/")[2] for name, spec in named(step.state_specs.params).items() if "expert" in spec}
        assert divided == ({"up", "down"} if expert == 2 else set())
        losses.append(train(step, None, batches())[0][-1, 0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_experts_that_a_table_divides_by_both_axes():
    step = divided_by_both(mixture_models.BothTables)
    specs = named(step.state_specs.params)
    assert ("tensor" in specs["embed/embedding"], "tensor" in specs["blocks/0/up"]) == (True, False)
    text = " ".join(jzero.report(step).split())
    assert "mesh.tensor = 2 x mesh.expert = 4 does not divide the 4 of blocks/0/down, blocks/1/down [4, 8, 16]:" in text
    assert "8 would fit" in text
