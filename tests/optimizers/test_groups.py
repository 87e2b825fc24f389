"""Parameter groups in training: against torch and optax, in every kind of layout, over a resume, in the report."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.reference import assert_bitwise
from helpers.report_sections import section
from helpers.sampling import keep

import jzero
from jzero.planner.state_bytes import state_bytes

BATCH, WIDTH, HEADS, VOCAB, LAYERS, STEPS = 16, 16, 4, 24, 2, 20
RATE, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.95), 1e-6
GROUPS = [
    {"match": "^stack/w$", "lr_scale": 0.25, "weight_decay": 0.3, "betas": [0.8, 0.99]},
    {"match": "stack/", "lr_scale": 2.0},  # not w, which the first has
    {"match": "head", "betas": [0.5, 0.9]},
]
# What the groups and no_weight_decay give each parameter: rate, decay, betas. By hand.
EXPECTED = {
    "stack/w": (0.25, 0.3, (0.8, 0.99)),
    "stack/gain": (2.0, 0.0, BETAS),
    "stack/bias": (2.0, 0.0, BETAS),
    "ends/head": (1.0, DECAY, (0.5, 0.9)),
    "ends/embed": (1.0, 0.0, BETAS),
    "ends/norm": (1.0, 0.0, BETAS),
}
FROZEN = "ends/fixed"


class Net:
    """A layer stack in plain JAX, with a norm, a bias of two dimensions and a parameter to freeze."""

    def init(self, rng):
        keys = jax.random.split(rng, 5)
        normal = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        ends = {"embed": normal(keys[0], VOCAB, WIDTH), "norm": jnp.ones(WIDTH), "head": normal(keys[1], WIDTH, VOCAB)}
        stack = {
            "w": normal(keys[2], LAYERS, WIDTH, WIDTH),
            "gain": jnp.ones((LAYERS, WIDTH)),
            "bias": normal(keys[3], LAYERS, HEADS, WIDTH // HEADS),
        }
        return {"ends": {**ends, "fixed": normal(keys[4], VOCAB)}, "stack": stack}

    def prefix(self, ends, batch, rng):
        return ends["embed"][batch["inputs"]]

    def block(self, layer, x, rng):
        return x + jnp.tanh(layer["gain"] * x @ layer["w"] + layer["bias"].reshape(-1))

    def suffix(self, ends, x, batch, rng):
        return ((ends["norm"] * x @ ends["head"] + ends["fixed"] - batch["labels"]) ** 2).mean()

    def loss(self, params, batch, rng):
        x = self.prefix(params["ends"], batch, rng)
        for i in range(LAYERS):
            x = self.block(jax.tree.map(lambda w, i=i: w[i], params["stack"]), x, rng)
        return self.suffix(params["ends"], x, batch, rng)


@lru_cache
def batches():
    rng = np.random.default_rng(0)
    inputs, labels = rng.integers(0, VOCAB, (STEPS, BATCH)).astype(np.int32), rng.normal(size=(STEPS, BATCH, VOCAB))
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels.astype(np.float32), strict=True)]


def by_name(params):
    return {f"{part}/{name}": np.asarray(x) for part, leaves in params.items() for name, x in leaves.items()}


@lru_cache
def start():
    return jax.device_get(jax.jit(Net().init)(jax.random.key(0)))


value_and_grad = jax.jit(jax.value_and_grad(lambda params, batch: Net().loss(params, batch, None)))


def rate(step):
    return RATE * (1 - step / 40)  # optax.linear_schedule(0.01, 0, 40)


@lru_cache
def with_torch():
    """torch.optim.AdamW with param_groups, on the gradients of the plain loss: (losses, parameters, rates)."""
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(x.copy()) for name, x in by_name(start()).items()}
    groups = [
        {"params": [tensors[name]], "lr": RATE * scale, "weight_decay": decay, "betas": betas}
        for name, (scale, decay, betas) in EXPECTED.items()
    ]
    optimizer = torch.optim.AdamW(groups, eps=EPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
    losses, rates = [], []
    for batch in batches():
        params = {"ends": {}, "stack": {}}
        for name, x in tensors.items():
            params[name.partition("/")[0]][name.partition("/")[2]] = x.numpy()
        loss, gradient = value_and_grad(params, batch)
        for name, x in by_name(gradient).items():
            tensors[name].grad = torch.tensor(x.copy())
        losses.append(float(loss))
        rates.append({name: group["lr"] for name, group in zip(EXPECTED, optimizer.param_groups, strict=True)})
        optimizer.step()
        schedule.step()
    return np.array(losses), {name: x.numpy() for name, x in tensors.items()}, rates


@lru_cache
def with_optax():
    """optax.multi_transform with one adamw per parameter: (losses, parameters)."""
    made = {
        name: optax.adamw(lambda n, s=scale: s * rate(n), *betas, eps=EPS, weight_decay=decay)
        for name, (scale, decay, betas) in EXPECTED.items()
    }
    label = lambda path, _: "/".join(key.key for key in path)  # noqa: E731
    params = start()
    labels = jax.tree_util.tree_map_with_path(label, params)
    tx = optax.multi_transform({**made, FROZEN: optax.set_to_zero()}, labels)
    state, losses = tx.init(params), []
    update = jax.jit(tx.update)
    for batch in batches():
        loss, gradient = value_and_grad(params, batch)
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return np.array(losses), by_name(params)


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
    step = jzero.make_train_step(Net(), config(stage, **more), mesh=jzero.make_mesh(pipe=pipe, zero=8 // pipe))
    return step, step.init(jax.random.key(0), start())


def assert_params(ours, theirs):
    for name, x in by_name(jax.device_get(ours)).items():
        np.testing.assert_allclose(x, theirs[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("stage", "pipe"), keep([(0, 1), (3, 1), (1, 2)], [(1, 2)]))
def test_training_is_that_of_torch_and_optax(stage, pipe):
    step, state = make(stage, pipe)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        assert not metrics["skipped"]
    assert float(metrics["lr"]) == pytest.approx(rate(STEPS - 1))  # the base rate
    np.testing.assert_array_equal(jax.device_get(state.params["ends"]["fixed"]), start()["ends"]["fixed"])
    for reference in (with_optax, with_torch):  # the last one is skipped where there is no torch
        theirs, params, *_ = reference()
        np.testing.assert_allclose(losses, theirs, rtol=1e-6)
        assert_params(state.params, params)


def test_the_state_is_that_without_groups():
    """The same leaves, sharding and bytes: what the planner counts, and what a checkpoint names."""
    (step, _), (plain, _) = make(3), make(3, groups=[], word=None)
    assert jax.tree.structure(step.state_shapes) == jax.tree.structure(plain.state_shapes)
    assert step.state_specs == plain.state_specs
    assert state_bytes(step) == state_bytes(plain)
    moments = optax.tree.get(step.state_specs.opt_state, "mu")
    assert moments["stack"]["w"] == step.state_specs.params["stack"]["w"] != jax.sharding.PartitionSpec()


@pytest.mark.slow
def test_a_resumed_run_and_one_with_other_groups(tmp_path):
    def engine(**more):
        made, *_ = jzero.initialize(model=Net(), config=config(3, **more), rng=jax.random.key(0))
        return made

    def run(made, data):
        for batch in data:
            made.train_batch(batch)
        return made

    straight = run(engine(), batches()[:2])
    names = ["stack/w", "stack/gain", "ends/head", "ends/embed"]  # of each group, and of the rest
    assert straight.get_lr() == pytest.approx([with_torch()[2][2][name] for name in names])
    straight.save_checkpoint(tmp_path).wait()
    run(straight, batches()[2:4])
    resumed = engine()
    resumed.load_checkpoint(tmp_path)
    assert_bitwise(run(resumed, batches()[2:4]).state, straight.state)
    assert resumed.get_lr() == straight.get_lr()
    other = engine(groups=GROUPS[:1])
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == pytest.approx([0.25 * rate(2), rate(2)])
    run(other, batches()[2:4])
    changed = by_name(jax.device_get(other.state.params))
    for name, x in by_name(jax.device_get(straight.state.params)).items():
        assert np.array_equal(x, changed[name]) == (name == FROZEN)


def test_a_skipped_step_changes_nothing():
    bad = {**batches()[0], "labels": np.full_like(batches()[0]["labels"], np.inf)}
    step, state = make(3, fp16={"enabled": True, "initial_scale_power": 4})
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    assert_bitwise((state.params, state.opt_state), before)
    state, metrics = step(state, batches()[0])
    assert not metrics["skipped"]
    assert float(metrics["lr"]) == pytest.approx(rate(0))


def test_the_report_lists_the_leaves():
    lines = section(jzero.report(make(3)[0]), "Parameter groups")
    w, vector, table = LAYERS * WIDTH * WIDTH, LAYERS * WIDTH, VOCAB * WIDTH
    assert lines == [
        f'  - "^stack/w$" (lr_scale 0.25, weight_decay 0.3, betas [0.8, 0.99]): 1 leaf, {w} elements: stack/w',
        f'  - "stack/" (lr_scale 2): 2 leaves, {2 * vector} elements: stack/bias, stack/gain',
        f'  - "head" (betas [0.5, 0.9]): 1 leaf, {table} elements: ends/head',
        f"  - all others: 2 leaves, {table + WIDTH} elements: ends/embed, ends/norm",
        f"  - no_weight_decay norms_biases_embeddings: 4 leaves, {2 * vector + table + WIDTH} elements: stack/bias, "
        "stack/gain, ends/embed, ends/norm",
    ]
    assert section(jzero.report(make(3, groups=[], word=None)[0]), "Parameter groups") == []


def test_the_callers_optimizer_has_one_rate():
    made, *_ = jzero.initialize(model=Net(), config=config(0), optimizer=lambda lr: optax.sgd(lr))
    assert made.get_lr() == pytest.approx([RATE])
    assert section(jzero.report(made.step_fn), "Parameter groups") == []
