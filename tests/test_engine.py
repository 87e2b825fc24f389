"""The DeepSpeed-shaped engine: two ways to run a step, one set of numbers; counters, loaders, checkpoints, mistakes."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.engine.run_report import report
from jzero.model import stack_loss

FAST = {"xla_backend_optimization_level": 0}  # compiling is what these tests spend their time on
FEATURES, MICRO, ACCUM, REPLICAS = 8, 2, 3, 4
UNIT = MICRO * REPLICAS  # rows of a micro-batch of all replicas
TRAIN = UNIT * ACCUM


class Net:
    """Two layers in a stack, with noise from the key; (sum, count), so that every micro-batch weighs differently."""

    def init(self, rng):
        w, v = (0.3 * jax.random.normal(key, (2, FEATURES, FEATURES)) for key in jax.random.split(rng))
        return {"ends": {"out": v[0]}, "stack": {"w": w}}

    def prefix(self, ends, batch, rng):
        return batch["x"]

    def block(self, layer, x, rng):
        noise = 1.0 if rng is None else jax.random.uniform(rng, x.shape, x.dtype, 0.5, 1.5)
        return x + jnp.tanh(x @ layer["w"]) * noise

    def suffix(self, ends, x, batch, rng):
        error = ((x @ ends["out"] - batch["y"]) ** 2).mean(-1)
        return jnp.sum(error * batch["mask"]), batch["mask"].sum()

    def loss(self, params, batch, rng):
        return stack_loss(self, params, batch, rng)


def rows(seed, n=TRAIN):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    mask = (rng.random(n) < 0.6).astype(np.float32)
    mask[::UNIT] = 1
    return {"x": x, "y": np.roll(x, 1, axis=1), "mask": mask}


def parts(seed, n=ACCUM):
    return [rows(100 * seed + i, UNIT) for i in range(n)]


def config(stage=2, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUM,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "stack": {"unroll": False},
        "compiler_options": FAST,
        **more,
    }


def mesh(zero=REPLICAS, data=1):
    return jzero.make_mesh(zero=zero, data=data, devices=jax.devices()[: zero * data])


@lru_cache
def compiled(stage):
    """(step, its first state): compiled once, for the tests that need no config of their own."""
    step = jzero.make_train_step(Net(), config(stage), mesh=mesh())
    return step, step.init(jax.random.key(0))


def engine(stage=2):
    step, state = compiled(stage)
    made = jzero.Engine(step, jax.random.key(0))
    made.state = jax.tree.map(jnp.copy, state)
    return made


def build(stage=2, *, zero=REPLICAS, data=1, model=None, more=None, **arguments):
    return jzero.initialize(
        model=model or Net(), config=config(stage, **(more or {})), mesh=mesh(zero, data), **arguments
    )


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True):
        np.testing.assert_array_equal(x, y)


def three_calls(engine, micro_batches):
    losses = []
    for micro_batch in micro_batches:
        losses.append(engine(micro_batch))
        engine.backward(losses[-1])
        engine.step()
    return losses


# ------------------------------------------------------------------------------------------- the two loops


@pytest.mark.parametrize("stage", range(4))
def test_three_calls_are_train_batch_bit_for_bit(stage):
    one, three = engine(stage), engine(stage)
    for seed in range(3):
        loss = one.train_batch(iter(parts(seed)))
        losses = three_calls(three, parts(seed))
        counts = [p["mask"].sum() for p in parts(seed)]
        np.testing.assert_allclose(np.average([float(x) for x in losses], weights=counts), loss, rtol=1e-6)
        assert one.get_global_grad_norm() == three.get_global_grad_norm()
    assert_same((one.state.params, one.state.opt_state), (three.state.params, three.state.opt_state))
    for name in ("global_steps", "global_samples", "micro_steps"):
        assert getattr(one, name) == getattr(three, name), name
    assert (three.global_steps, three.global_samples, three.micro_steps) == (3, 3 * TRAIN, 3 * ACCUM)


def test_a_batch_is_its_micro_batches():
    """A global batch lies replica by replica: replica r's micro-batch i is rows r * accum + i of the micro-batches."""
    whole, split = engine(), engine()
    batch = rows(0)
    by_replica = jax.tree.map(lambda x: x.reshape(REPLICAS, ACCUM, MICRO, *x.shape[1:]), batch)
    micro = [jax.tree.map(lambda x, i=i: x[:, i].reshape(UNIT, *x.shape[3:]), by_replica) for i in range(ACCUM)]
    assert whole.train_batch(batch) == split.train_batch(iter(micro))
    assert_same(whole.state.params, split.state.params)


@pytest.mark.parametrize("stage", range(4))
def test_no_sync_is_legal_at_every_stage(stage):
    inside, plain = engine(stage), engine(stage)
    *first, last = parts(0)
    with inside.no_sync():
        for micro_batch in first:
            inside.backward(inside(micro_batch))
        with pytest.raises(jzero.ConfigError, match=r"step\(\) inside no_sync"):
            inside.step()
        with pytest.raises(jzero.ConfigError, match=r"no_sync\(\) inside no_sync"), inside.no_sync():
            pass
    inside.backward(inside(last))
    inside.step()
    three_calls(plain, parts(0))
    assert inside.global_steps == 1
    assert_same(inside.state.params, plain.state.params)


def test_the_boundary_is_counted():
    e = engine()
    seen, before, steps = [], [], []
    for micro_batch in parts(0) + parts(1):
        before.append(e.is_gradient_accumulation_boundary())
        e.backward(e(micro_batch))
        seen.append(e.is_gradient_accumulation_boundary())
        e.step()
        steps.append(e.global_steps)
    assert seen == before == [False, False, True] * 2
    assert steps == [0, 0, 1, 1, 1, 2]


def test_the_boundary_by_hand():
    """The mean is over what came: two micro-batches, then one, then the counted three."""
    e, (a, b, c) = engine(), parts(0)
    e.set_gradient_accumulation_boundary(False)
    three_calls(e, [a, b])
    assert (e.global_steps, e.is_gradient_accumulation_boundary()) == (0, False)
    e.set_gradient_accumulation_boundary(True)
    loss = e(c)
    e.backward(loss)
    e.step()
    assert (e.global_steps, e.micro_steps) == (1, 3)
    e.set_gradient_accumulation_boundary(None)
    counted = engine()
    three_calls(counted, [a, b, c])
    assert_same(e.state.params, counted.state.params)
    three_calls(e, parts(1))
    assert e.global_steps == 2


def test_unmanaged_accumulation_steps_on_every_call():
    unmanaged, *_ = build(more={"managed_gradient_accumulation": False})
    single, *_ = build(more={"gradient_accumulation_steps": 1})
    three_calls(unmanaged, parts(0, 2))
    for micro_batch in parts(0, 2):
        single.train_batch(micro_batch)
    assert unmanaged.global_steps == single.global_steps == 2
    assert unmanaged.is_gradient_accumulation_boundary()
    assert_same(unmanaged.state.params, single.state.params)
    with unmanaged.no_sync():
        for micro_batch in parts(1):
            unmanaged.backward(unmanaged(micro_batch))
    unmanaged.step()
    assert (unmanaged.global_steps, unmanaged.micro_steps) == (3, 5)


def test_the_loss_of_a_micro_batch():
    early, late = engine(), engine()
    for micro_batch in parts(0):
        loss, other = early(micro_batch), late(micro_batch)
        assert repr(loss) == "Loss(not computed yet)"
        value = float(loss)  # before the step: a forward pass of its own
        assert early.backward(loss) is loss
        late.backward(other)
        early.step()
        late.step()
        if other is not None and late.global_steps:
            np.testing.assert_allclose(value, float(other), rtol=1e-6)
    assert f"{loss:.3f}" == f"{value:.3f}"
    assert repr(loss) == f"Loss({value})"
    assert loss.item() == value == np.asarray(loss) == float(jnp.asarray(loss) + 0)
    assert np.asarray(loss, np.float64).dtype == np.float64
    assert_same(early.state.params, late.state.params)


def test_all_losses_are_there_after_the_step():
    early, late = engine(), engine()
    values = [float(early.step_fn.micro_loss(early.state, p, i)) for i, p in enumerate(parts(0))]
    losses = three_calls(late, parts(0))
    np.testing.assert_allclose([float(x) for x in losses], values, rtol=1e-6)
    assert len(set(values)) == ACCUM


# ------------------------------------------------------------------------------------------- evaluation


def test_evaluation():
    e, batch = engine(), rows(0)
    before = jax.device_get(e.state.params)
    loss = float(e.eval_batch(batch))
    total, count = jax.jit(Net().loss)(jax.tree.map(jnp.asarray, before), batch, None)
    np.testing.assert_allclose(loss, total / count, rtol=1e-6)
    np.testing.assert_allclose(e.eval_batch(jax.tree.map(lambda x: x[:UNIT], batch)), e.eval()(parts_of(batch)[0]))
    np.testing.assert_allclose(e.eval_batch(iter(parts_of(batch))), loss, rtol=1e-6)
    assert not isinstance(e(parts_of(batch)[0]), type(e.train()(parts_of(batch)[0])))  # an array, and a promise
    assert_same(e.state.params, before)
    assert (e.global_steps, e.micro_steps) == (0, 0)
    with pytest.raises(jzero.ConfigError, match=r"leaf 'mask' has shape \(9,\).*a multiple of 8"):
        e.eval_batch(rows(0, 9))


def parts_of(batch):
    return [jax.tree.map(lambda x, i=i: x[i * UNIT : (i + 1) * UNIT], batch) for i in range(ACCUM)]


# ------------------------------------------------------------------------------------------- what users ask


def test_getters():
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 10, "warmup_type": "linear"}}
    e, tx, loader, schedule = build(
        3, more={"scheduler": scheduler, "fp16": {"enabled": True, "initial_scale_power": 4}}
    )
    assert isinstance(e, jzero.Engine)
    assert isinstance(tx, optax.GradientTransformation)
    assert loader is None
    assert float(schedule(5)) == pytest.approx(0.2)
    assert e.get_batch_info() == (TRAIN, MICRO, ACCUM)
    assert (e.train_batch_size(), e.train_micro_batch_size_per_gpu(), e.gradient_accumulation_steps()) == (24, 2, 3)
    assert e.zero_optimization_stage() == 3
    assert e.get_global_grad_norm() is None
    assert not e.was_step_applied()
    assert e.loss_scale == 16
    rates = []
    for seed in range(4):
        rates += e.get_lr()
        e.train_batch(rows(seed))
    assert rates == pytest.approx([0, 0, 0.05, 0.1])
    assert e.get_global_grad_norm() > 0
    assert e.was_step_applied()
    bad = rows(9)
    bad["x"][0, 0] = np.inf
    e.train_batch(bad)
    assert not e.was_step_applied()
    assert (e.skipped_steps, e.global_steps) == (1, 5)
    assert e.get_lr() == pytest.approx([0.15])
    assert repr(e) == f"Engine({e.step_fn!r}, global step 5)"
    assert "ZeRO-3, fp16, mesh zero 4, batch 24 = 2 x 3 x 4" in repr(e)
    assert "step=5, parameters=192 in 2 leaves" in repr(e.state)


def test_the_report_is_printed_once(capsys):
    e, *_ = build()
    assert capsys.readouterr().out == jzero.report(e.step_fn) + "\n"
    e.train_batch(rows(0))
    assert capsys.readouterr().out == ""


def test_steps_per_print(capsys):
    e, *_ = build(more={"steps_per_print": 2})
    capsys.readouterr()
    for seed in range(5):
        loss = e.train_batch(rows(seed))
        if seed == 1:
            second = (
                f"step 2: loss {float(loss):.4f}, lr 1.000e-02, grad norm {e.get_global_grad_norm():.3f}, skipped 0, "
            )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(second)
    assert lines[0].endswith(" samples/s")
    assert lines[1].startswith("step 4: loss ")


def test_the_report_follows_set_train_batch_size():
    pipe = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "mesh": {"pipe": 2},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}  # fmt: skip
    e = jzero.initialize(model=Net(), config=pipe)[0]
    assert "for 4 micro-batches" in report(e.step_fn)
    e.set_train_batch_size(32)
    assert "for 8 micro-batches" in report(e.step_fn)


def test_set_train_batch_size():
    e, *_ = build()
    e.set_train_batch_size(2 * UNIT)
    assert e.get_batch_info() == (2 * UNIT, MICRO, 2)
    e.train_batch(rows(0, 2 * UNIT))
    three_calls(e, parts(0, 2))
    assert e.global_steps == 2
    assert e.global_samples == 4 * UNIT
    for size in (0, UNIT + 1):
        with pytest.raises(jzero.ConfigError, match=rf"train_batch_size = {size}: must be a multiple of {UNIT} "):
            e.set_train_batch_size(size)


# ------------------------------------------------------------------------------------------- data


def numbered(n):
    samples = rows(0, n)
    samples["y"][:, 0] = np.arange(n)
    return samples


def numbers(micro_batches):
    return np.concatenate([np.asarray(b["y"][:, 0]) for b in micro_batches]).astype(int).tolist()


def test_training_data():
    """An epoch is whole global batches: of 5 micro-batches of samples and 2 of accumulation, 6."""
    e, _, loader, _ = build(training_data=numbered(5 * UNIT), more={"gradient_accumulation_steps": 2})
    assert len(loader) == 6
    assert e.training_dataloader is loader
    for _ in range(6):  # two epochs
        e.train_batch()
    assert e.global_samples == 12 * UNIT
    assert loader.position == {"epoch": 2, "samples": 0}
    epochs = [numbers(loader) for _ in range(2)]
    assert all(sorted(epoch[: 5 * UNIT]) == list(range(5 * UNIT)) for epoch in epochs)
    assert all(epoch[5 * UNIT :] == epoch[:UNIT] for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_position_is_the_engines():
    """Two runs over the same data: the second one goes on where the first was, in other global batches."""
    samples = numbered(7 * UNIT)
    straight, _, loader, _ = build(training_data=samples)
    assert loader.position == {"epoch": 0, "samples": 0}
    losses = [float(straight.train_batch())]
    saved = loader.position
    assert saved == {"epoch": 0, "samples": TRAIN}
    straight.set_train_batch_size(2 * UNIT)
    losses += [float(straight.train_batch()) for _ in range(4)]
    assert loader.position == {"epoch": 1, "samples": 4 * UNIT}  # 3 + 2 x 2 micro-batches, then the next epoch
    more = {"gradient_accumulation_steps": 2}
    again, _, loader, _ = build(training_data=samples, more=more)
    first = again.train_batch()
    again.training_dataloader.seek({"epoch": 0, "samples": 0})
    fresh, _, other, _ = build(training_data=samples, more=more)
    assert float(first) == float(fresh.train_batch())
    again.state, fresh.state = (jax.tree.map(jnp.copy, fresh.state) for _ in range(2))
    for loader in (again.training_dataloader, other):
        loader.seek(saved)
    assert [float(again.train_batch()) for _ in range(4)] == [float(fresh.train_batch()) for _ in range(4)]
    assert other.position == straight.training_dataloader.position
    assert len(set(losses)) == 5


def test_what_the_loader_gives_is_not_copied():
    e, _, loader, _ = build(training_data=rows(0))
    micro_batch = next(iter(loader))
    placed = e.step_fn.place_micro_batch(micro_batch)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(micro_batch), strict=True))


def test_training_data_as_samples():
    whole, one = rows(0, UNIT + 1), {"gradient_accumulation_steps": 1}
    samples = [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(UNIT + 1)]
    _, _, loader, _ = build(training_data=samples, more=one)
    assert [b["x"].shape for b in loader] == [(UNIT, FEATURES)] * 2  # the last one filled up
    _, _, loader, _ = build(training_data=samples, more={"dataloader_drop_last": True, **one})
    assert len(loader) == len(list(loader)) == 1


def test_training_data_that_ends():
    """An iterator of samples, which no epoch follows; a user's own iterator of micro-batches stays possible."""
    whole = rows(0, TRAIN + 1)
    e, *_ = build(training_data=(jax.tree.map(lambda x, i=i: x[i], whole) for i in range(TRAIN + 1)))
    e.train_batch(iter(parts(0)))
    e.train_batch()
    e.train_batch()
    with pytest.raises(jzero.ConfigError, match=r"ended after 0 of 3 micro-batches.*give a function that makes one"):
        e.train_batch()
    assert e.global_steps == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (rows(0, UNIT - 1), "7 samples do not fill one global batch of 24"),
        ({**rows(0), "y": np.zeros((3, 2))}, "have .3, 24. samples"),
        (rows(0, 0), "training_data contains no samples"),
        ([], "training_data contains no samples"),
    ],
)
def test_bad_training_data(data, words):
    with pytest.raises(jzero.ConfigError, match=words):
        build(training_data=data, more={"dataloader_drop_last": True})


def test_repeating_loader():
    loader = jzero.RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    e = engine()
    e.train_batch(jzero.RepeatingLoader(parts(0, 2)))
    assert e.micro_steps == ACCUM


# ------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("stage", "zero", "data"), [(0, 1, 1), (1, 2, 1), (3, 8, 1), (3, 4, 2)])
def test_any_checkpoint_loads_on_any_layout(tmp_path, stage, zero, data):
    saved = engine(2)
    for seed in range(2):
        saved.train_batch(rows(seed))
    assert saved.save_checkpoint(tmp_path, client_state={"epoch": 7}).wait() == tmp_path / "global_step2"
    assert (tmp_path / "latest").read_text() == "global_step2"
    batch = {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": 1, "train_batch_size": TRAIN}
    loaded, *_ = build(stage, zero=zero, data=data, more=batch, rng=jax.random.key(5))
    path, client_state = loaded.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step2")
    assert client_state == {"epoch": 7}
    assert_same((loaded.state.params, loaded.state.opt_state), (saved.state.params, saved.state.opt_state))
    assert_same(*(jax.random.key_data(e.state.rng) for e in (loaded, saved)))
    assert jax.tree.map(lambda x: x.sharding, loaded.state) == loaded.step_fn.state_shardings
    assert (loaded.global_steps, loaded.global_samples, loaded.micro_steps) == (2, 2 * TRAIN, 2 * ACCUM)
    np.testing.assert_allclose(loaded.eval_batch(rows(2)), saved.eval_batch(rows(2)), rtol=1e-6)
    loaded.train_batch(rows(2))
    assert int(loaded.state.step) == 3


def test_a_loaded_run_goes_on_as_the_straight_one(tmp_path):
    straight = engine(3)
    straight.train_batch(rows(0))
    straight.save_checkpoint(tmp_path, tag="here")
    loaded = engine(3)
    loaded.load_checkpoint(tmp_path, tag="here")
    for seed in (1, 2):
        assert straight.train_batch(rows(seed)) == loaded.train_batch(rows(seed))
    assert_same(straight.state.params, loaded.state.params)


def test_checkpoint_mistakes(tmp_path):
    e = engine()
    with pytest.raises(jzero.ConfigError, match="has no default checkpoint"):
        e.load_checkpoint(tmp_path)
    with pytest.raises(jzero.ConfigError, match="does not exist"):
        e.load_checkpoint(tmp_path, tag="no")
    with pytest.raises(jzero.ConfigError, match="client_state is not JSON"):
        e.save_checkpoint(tmp_path, client_state={"x": object()})
    e.backward(e(parts(0)[0]))
    for call in (lambda: e.save_checkpoint(tmp_path), lambda: e.load_checkpoint(tmp_path)):
        with pytest.raises(jzero.ConfigError, match="1 micro-batches wait for step"):
            call()


# ------------------------------------------------------------------------------------------- a client's optimizer


def sgd_steps(rates):
    """The parameters after SGD at these rates, through the config's optimizer."""
    e, *_ = build(0, optimizer=lambda lr: optax.sgd(lr), lr_scheduler=lambda count: jnp.asarray(rates)[count])
    for seed in range(len(rates)):
        e.train_batch(rows(seed))
    return e.state.params


def test_client_optimizers():
    expected = sgd_steps([0.1, 0.1])
    e, tx, _, schedule = build(3, optimizer=(own := optax.sgd(0.1)))
    assert tx is own
    assert schedule is None
    assert np.isnan(e.get_lr()[0])
    injected, _, _, none = build(3, optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    assert none is None
    assert injected.get_lr() == pytest.approx([0.1])
    for seed in range(2):
        e.train_batch(rows(seed))
        injected.train_batch(rows(seed))
    for params in (e.state.params, injected.state.params):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)


def test_an_optimizer_of_the_schedule_and_a_scheduler():
    e, _, _, schedule = build(3, optimizer=lambda lr: optax.sgd(lr), lr_scheduler=lambda count: 0.1 * (count + 1))
    assert [float(schedule(n)) for n in (0, 4)] == pytest.approx([0.1, 0.5])
    rates = []
    for seed in range(2):
        rates += e.get_lr()
        e.train_batch(rows(seed))
    assert rates == pytest.approx([0.1, 0.2])
    expected = sgd_steps([0.1, 0.2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), e.state.params, expected)


def test_a_scheduler_for_the_configs_optimizer():
    e, *_ = build(lr_scheduler=optax.linear_schedule(0.0, 1.0, 10))
    before = jax.device_get(e.state.params)
    e.train_batch(rows(0))
    assert_same(e.state.params, before)  # the rate is 0
    assert e.get_lr() == pytest.approx([0.1])


# ------------------------------------------------------------------------------------------- mistakes


def test_wrong_batch_sizes_name_the_leaf_the_shape_and_the_equation():
    e = engine()
    equation = r"train_batch_size 24 = micro-batch 2 x accumulation 3 x 4 replicas"
    with pytest.raises(jzero.ConfigError, match=rf"leaf 'mask' has shape \(23,\).* must be 24 \({equation}\)"):
        e.train_batch(rows(0, 23))
    with pytest.raises(jzero.ConfigError, match=rf"leaf 'mask' has shape \(24,\).* must be 8 \({equation}\)"):
        e(rows(0))
    with pytest.raises(jzero.ConfigError, match=r"leaf 'x' has shape \(3, 8\)"):
        e.train_batch(iter([{**p, "x": p["x"][:3]} for p in parts(0)]))
    with pytest.raises(jzero.ConfigError, match=r"leaf 'mask' has shape \(\)"):
        e.train_batch({**rows(0), "mask": np.float32(1)})
    with pytest.raises(jzero.ConfigError, match="contains no arrays"):
        e.train_batch({})
    assert e.global_steps == 0
    e.train_batch(rows(0))  # nothing was donated


def test_calls_out_of_order():
    e = engine()
    with pytest.raises(jzero.ConfigError, match=r"no batch: pass one, or pass training_data"):
        e.train_batch()
    with pytest.raises(jzero.ConfigError, match=r"ended after 2 of 3 micro-batches.*RepeatingLoader"):
        e.train_batch(iter(parts(0, 2)))
    with pytest.raises(jzero.ConfigError, match=r"step\(\) without a backward\(\)"):
        e.step()
    first, second = e(parts(0)[0]), e(parts(0)[1])
    for foreign in (first, 2 * float(second), jnp.float32(1)):
        with pytest.raises(jzero.ConfigError, match=r"is not the loss that the last engine\(micro_batch\) returned"):
            e.backward(foreign)
    e.backward(second)
    with pytest.raises(jzero.ConfigError, match="is not the loss"):
        e.backward(second)  # twice
    for call in (lambda: e.train_batch(rows(0)), lambda: e.set_train_batch_size(UNIT)):
        with pytest.raises(jzero.ConfigError, match=r"1 micro-batches wait for step\(\)"):
            call()


def test_a_loss_that_no_step_took_says_so():
    """Its parameters are gone with the step that came after it."""
    e = engine()
    loss = e(parts(0)[0])
    e.train_batch(rows(0))
    with pytest.raises(jzero.ConfigError, match="read it before"):
        float(loss)


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        ({"resume": True}, {}, "resume = True: must be a directory"),
        ({"resume": "auto"}, {}, 'resume = "auto": where? Put checkpoint.dir into the config'),
        ({"optimizer": optax.sgd(0.1)}, {"scheduler": {"type": "WarmupLR"}}, "scheduler: the optimizer passed in has"),
        ({"optimizer": optax.sgd(0.1), "lr_scheduler": lambda n: 0.1}, {}, "scheduler: the optimizer passed in has"),
        ({"lr_scheduler": 0.1}, {}, "lr_scheduler: 0.1 is not a function"),
        ({"optimizer": "adam"}, {}, "neither an optax.GradientTransformation nor a function"),
        ({}, {"optimizer": None}, "optimizer: none given"),
        ({}, {"train_batch_size": 25}, "train_batch_size = 25: must equal"),
        ({}, {"frozen_parameters": [".*"]}, "every parameter is frozen"),
        ({}, {"frozen_parameters": ["nowhere"]}, "match no parameter; the names are ends/out, stack/w"),
        ({"model": object()}, {}, "wrap a Flax module with jzero.from_flax"),
        ({"model_parameters": []}, {}, "initialize(model_parameters=...): leave it out: the model makes its own"),
        ({"args": None}, {}, "initialize(args=...): pass config=args.deepspeed_config"),
        ({"modle": None}, {}, "initialize(modle=...): unknown argument"),
    ],
)
def test_what_initialize_refuses(arguments, more, words):
    with pytest.raises(jzero.ConfigError) as error:
        build(more=more, **arguments)
    assert words in str(error.value)


def test_a_foreign_mesh():
    foreign = jax.make_mesh((4,), ("batch",), devices=jax.devices()[:4])
    with pytest.raises(jzero.ConfigError, match=r"mesh axes are \('batch',\).*make_mesh"):
        jzero.initialize(model=Net(), config=config(), mesh=foreign)


def test_what_the_engine_shows():
    e = engine()
    assert (e.global_rank, e.local_rank, e.world_size) == (0, 0, 1)
    assert e.metrics == {}
    e.train_batch(iter(parts(0)))
    assert set(e.metrics) == {"loss", "grad_norm", "lr", "loss_scale", "skipped"}
    with pytest.raises(jzero.ConfigError, match="from_flax"):
        e.module()
