"""Parameter groups in training: against optax, in layouts, over a resume, in the report."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.oracle import mean_of, plain_loop, train
from helpers.reference import BATCH, VOCAB, Decoder, assert_bitwise, batches
from helpers.report_sections import section
from helpers.sampling import keep

import jzero
from jzero.planner.state_bytes import state_bytes
from jzero.tree import named

WIDTH, LAYERS, STEPS = 16, 2, 10
RATE, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.95), 1e-6
GROUPS = [
    {"match": "^stack/w$", "lr_scale": 0.25, "weight_decay": 0.3, "betas": [0.8, 0.99]},
    {"match": "stack/", "lr_scale": 2.0},  # not w, which the first has
    {"match": "head", "betas": [0.5, 0.9]},
]
# What the groups and no_weight_decay give each parameter: rate, decay, betas. By hand.
EXPECTED = {
    "stack/w": (0.25, 0.3, (0.8, 0.99)),
    "stack/b": (2.0, 0.0, BETAS),
    "ends/head": (1.0, DECAY, (0.5, 0.9)),
    "ends/embed": (1.0, 0.0, BETAS),
    "ends/norm": (1.0, 0.0, BETAS),
}
FROZEN = "ends/fixed"


class Net(Decoder):
    """With a norm, and a parameter to freeze."""

    def init(self, rng):
        params = super().init(rng)
        params["ends"] |= {"norm": jnp.ones(WIDTH), "fixed": jax.random.normal(rng, WIDTH)}
        return params

    def suffix(self, ends, x, batch, rng):
        return super().suffix(ends, ends["norm"] * x + ends["fixed"], batch, rng)


@lru_cache
def start():
    return jax.device_get(jax.jit(Net().init)(jax.random.key(0)))


def rate(step):
    return RATE * (1 - step / 40)  # optax.linear_schedule(0.01, 0, 40)


@lru_cache
def with_optax():
    """optax.multi_transform with one adamw per parameter."""
    made = {
        name: optax.adamw(lambda n, s=scale: s * rate(n), *betas, eps=EPS, weight_decay=decay)
        for name, (scale, decay, betas) in EXPECTED.items()
    }
    labels = jax.tree_util.tree_map_with_path(lambda path, _: "/".join(key.key for key in path), start())
    tx = optax.multi_transform({**made, FROZEN: optax.set_to_zero()}, labels)
    return plain_loop(mean_of(Net()), start(), batches("decoder"), tx)


def config(stage, groups=GROUPS, word="norms_biases_embeddings", **more):
    params = {"lr": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPS}
    schedule = {"init_value": RATE, "end_value": 0, "transition_steps": 40}
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": params, "groups": groups, "no_weight_decay": word},
        "scheduler": {"type": "linear_schedule", "params": schedule},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "frozen_parameters": [f"^{FROZEN}$"],
        **more,
    }


def make(stage, pipe=1, **more):
    return jzero.make_train_step(Net(), config(stage, **more), mesh=jzero.make_mesh(pipe=pipe, zero=8 // pipe))


@pytest.mark.parametrize(("stage", "pipe"), keep([(0, 1), (3, 1), (1, 2)], [(1, 2)]))
def test_training_is_that_of_optax(stage, pipe):
    step = make(stage, pipe)
    seen, state = train(step, start(), batches("decoder"))
    np.testing.assert_allclose(seen[:, 0], with_optax().losses, rtol=1e-6)
    np.testing.assert_array_equal(jax.device_get(state.params["ends"]["fixed"]), start()["ends"]["fixed"])
    expected = named(with_optax().params)
    for name, x in named(jax.device_get(state.params)).items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
    _, metrics = step(state, batches("decoder")[0])
    assert float(metrics["lr"]) == pytest.approx(rate(STEPS))  # the base rate


def test_the_state_is_that_without_groups():
    """The same leaves, sharding and bytes: what the planner counts, and what a checkpoint names."""
    step, plain = make(3), make(3, groups=[], word=None)
    assert jax.tree.structure(step.state_shapes) == jax.tree.structure(plain.state_shapes)
    assert step.state_specs == plain.state_specs
    assert state_bytes(step) == state_bytes(plain)
    moments = optax.tree.get(step.state_specs.opt_state, "mu")
    assert moments["stack"]["w"] == step.state_specs.params["stack"]["w"] != jax.sharding.PartitionSpec()


@pytest.mark.slow
def test_a_resumed_run_and_one_with_other_groups(tmp_path):
    def engine(**more):
        return jzero.initialize(model=Net(), config=config(3, **more), rng=jax.random.key(0))[0]

    def run(made, data):
        for batch in data:
            made.train_batch(batch)
        return made

    straight = run(engine(), batches("decoder")[:2])
    scales = [EXPECTED[name][0] for name in ("stack/w", "stack/b", "ends/head", "ends/embed")]  # the last: of the rest
    assert straight.get_lr() == pytest.approx([scale * rate(2) for scale in scales])
    straight.save_checkpoint(tmp_path).wait()
    run(straight, batches("decoder")[2:4])
    resumed = engine()
    resumed.load_checkpoint(tmp_path)
    assert_bitwise(run(resumed, batches("decoder")[2:4]).state, straight.state)
    assert resumed.get_lr() == straight.get_lr()
    other = engine(groups=GROUPS[:1])
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == pytest.approx([0.25 * rate(2), rate(2)])
    run(other, batches("decoder")[2:4])
    changed = named(jax.device_get(other.state.params))
    for name, x in named(jax.device_get(straight.state.params)).items():
        assert np.array_equal(x, changed[name]) == (name == FROZEN)


def test_a_skipped_step_changes_nothing():
    step = make(3, fp16={"enabled": True, "initial_scale_power": 40})  # so large that the gradients overflow
    state = step.init(jax.random.key(0), start())
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, batches("decoder")[0])
    assert metrics["skipped"]
    assert_bitwise((state.params, state.opt_state), before)
    assert float(metrics["lr"]) == pytest.approx(rate(0))


def test_the_report_lists_the_leaves():
    lines = section(jzero.report(make(3)), "Parameter groups")
    w, b, table = LAYERS * WIDTH * WIDTH, LAYERS * WIDTH, VOCAB * WIDTH
    assert lines == [
        f'  - "^stack/w$" (lr_scale 0.25, weight_decay 0.3, betas [0.8, 0.99]): 1 leaf, {w} elements: stack/w',
        f'  - "stack/" (lr_scale 2): 1 leaf, {b} elements: stack/b',
        f'  - "head" (betas [0.5, 0.9]): 1 leaf, {table:,} elements: ends/head',
        f"  - all others: 2 leaves, {table + WIDTH:,} elements: ends/embed, ends/norm",
        f"  - no_weight_decay norms_biases_embeddings: 3 leaves, {b + table + WIDTH:,} elements: stack/b, ends/embed, "
        "ends/norm",
    ]
    assert section(jzero.report(make(3, groups=[], word=None)), "Parameter groups") == []
