"""Steps that are not finite: skipped, and found. The oracle is the fault: each test plants one, so it knows where."""

import re
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.drawn import random_params
from helpers.planted_faults import (
    ACCUM,
    GROUPS,
    LAYOUTS,
    MICRO,
    WIDTH,
    Net,
    batch_of,
    change,
    config,
    engine_of,
    found_by,
    new_params,
    put,
    replicas_of,
    rows,
    step_of,
    train,
)
from helpers.reference import LR, Layout, assert_bitwise, batches, leaves, model
from helpers.sampling import keep
from helpers.stack_models import BATCHES, SmallGPT, loss_fn
from helpers.steps import mesh

import jzero
from jzero import ledger
from jzero.loss_scale import NonFiniteError

TWO = MICRO * ACCUM * 2  # rows of a global batch on two replicas


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def says(engine, batches, *words):
    """Train on these batches until an error, which has these words; return its text."""
    with pytest.raises(NonFiniteError) as error:
        train(engine, *batches)
    assert [part for part in words if part not in str(error.value)] == [], str(error.value)
    return str(error.value)


def two_replicas(model=None, settings=None):
    params = None if model is LINEAR else new_params()
    return jzero.initialize(model=model or Net(), config=settings or config(1), mesh=mesh(2), params=params)[0]


def good_and_bad(row, seed=1):
    good, bad = rows(0, TWO), rows(seed, TWO)
    bad["x"][row] = np.nan
    return good, bad


@pytest.mark.parametrize("layout", keep(LAYOUTS, ["pipeline"]))
def test_a_layer_whose_weights_are_nan(layout):
    engine = engine_of(layout)
    change(engine, "w", lambda w: put(w, (2, 0, 0), np.nan))
    before = jax.device_get((engine.state.params, engine.state.opt_state))
    says(
        engine, [batch_of(layout), batch_of(layout, 1)], "step 1: the loss is nan",
        "first in the forward pass: layer 2 of 4", "parameter stack/w, layer 2, is not finite on ",
        "in micro-batch 0 of 3, on replicas 0, 1",
    )  # fmt: skip
    assert engine.global_steps == int(engine.state.step) == 0
    assert_bitwise(before, (engine.state.params, engine.state.opt_state))


@pytest.mark.parametrize("layout", keep(LAYOUTS, [GROUPS]))
def test_a_bad_sample_of_the_training_data_has_its_index(layout):
    data = rows(0, 10 * MICRO * ACCUM * replicas_of(layout))
    data["x"][77] = np.nan
    loader = jzero.data.DataLoader(data, step_of(layout))
    engine = jzero.Engine(loader.step, jax.random.key(0), loader, params=new_params())
    text = says(engine, [None] * 11, "the batch itself is not finite: x")
    assert re.search(r"row \d+ of the global batch, sample 77 of training_data", text)
    number = int(re.match(r"step (\d+)", text)[1])
    assert engine.global_steps == number - 1
    assert loader.position["samples"] == (number - 1) * engine.train_batch_size()


def test_one_micro_batch():
    """Micro-batches of a loader come one after the other: micro-batch 1 has the rows 8 to 15."""
    engine, size = engine_of(GROUPS), MICRO * replicas_of(GROUPS)
    parts = [rows(i, size) for i in range(3 * ACCUM)]
    parts[ACCUM + 1]["y"][:] = np.inf
    says(
        engine, [iter(parts[i : i + ACCUM]) for i in range(0, 3 * ACCUM, ACCUM)], "step 2: the loss is inf",
        "first in the forward pass: the loss (",  # all layers are finite; the labels are not
        "in micro-batch 1 of 3, on replicas 0, 1, 2, 3: rows 8, 9, 10, 11 (and maybe more) of",
        "the batch itself is not finite: y",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "same", "where"),
    keep([("stage 0", [0, 1, 2], "replica 3:"), (GROUPS, [1], "replicas 2, 3:")], [(GROUPS, [1], "replicas 2, 3:")]),
)
def test_one_replica_whose_copy_is_bad(layout, same, where):
    """`same`: the devices with the same part."""
    engine = engine_of(layout)
    w = engine.state.params["stack"]["w"]
    parts = [np.array(shard.data) for shard in w.addressable_shards]
    parts[3][1] = np.nan  # layer 1 on the last device
    copies = [jax.device_put(part, shard.device) for part, shard in zip(parts, w.addressable_shards, strict=True)]
    engine.state.params["stack"]["w"] = jax.make_array_from_single_device_arrays(w.shape, w.sharding, copies)
    bad = "parameter stack/w, layer 1, is not finite on device 3 (process 0); the same part is finite on "
    says(
        engine, [batch_of(layout), batch_of(layout, 1)], "first in the forward pass: layer 1 of 4", f"on {where}",
        bad + ", ".join(f"device {n} (process 0)" for n in same),
    )  # fmt: skip


@pytest.mark.parametrize("layout", keep(LAYOUTS, [GROUPS]))
def test_a_backward_pass_that_fails_after_a_finite_forward_pass(layout):
    engine, bad, good = engine_of(layout), batch_of(layout), batch_of(layout, 1)
    for batch in (bad, good):
        batch["x"][:, -1] = 1.0
    bad["x"][9, -1] = 0.0  # the derivative of a root at 0
    text = found_by(engine, bad, good, ("root", lambda root: put(0 * root, 0, 1.0)))
    assert "the forward pass is finite; first in the backward pass: layer 0 of 4" in text
    assert "step 2: the gradient is not finite" in text
    assert ": row 9 of the global batch" in text


def test_a_fault_that_does_not_repeat():
    engine = engine_of(GROUPS)
    engine.train_batch(batch_of(GROUPS))
    watch = engine._checks._finite
    watch._frozen = jax.device_put(np.True_, watch._frozen.sharding)  # as if a device had failed once
    says(engine, [batch_of(GROUPS, 1), batch_of(GROUPS, 2)], "repeated, the step is finite")
    engine.train_batch(batch_of(GROUPS, 1))
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)


@pytest.mark.slow
def test_nothing_is_saved_between_a_bad_step_and_the_next(tmp_path):
    """The ledger has what was found; the bad step was taken back."""
    engine = two_replicas(settings=config(1, checkpoint={"dir": str(tmp_path / "run")}))
    good, bad = good_and_bad(5)
    train(engine, good, bad)
    with pytest.raises(NonFiniteError, match="step 2: the loss is nan") as error:
        engine.save_checkpoint()
    engine.save_checkpoint().wait()
    engine.load_checkpoint()
    assert engine.global_steps == 1
    train(engine, good)
    assert engine.global_steps == 2
    run = ledger.read(tmp_path / "run")
    (notice,) = run.of("notice")
    assert (notice["step"], notice["what"]) == (2, "not finite")
    assert notice["text"].splitlines() == str(error.value).splitlines()[:-1]
    assert list(run.steps) == [1, 2]
    assert np.isfinite(run.steps[2].metrics["loss"])


LINEAR = SimpleNamespace(
    init=lambda rng: {"w": np.ones((WIDTH, WIDTH), np.float32)},
    loss=lambda params, batch, rng: ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(),
)


def test_a_model_without_layers():
    engine, bad = two_replicas(LINEAR, config(2)), rows(0, TWO)
    bad["x"][7] = np.inf
    where = "in micro-batch 0 of 3, on replica 1: row 7 of the global batch"
    says(engine, [bad, bad], "first in the forward pass: the loss", where)


class Suffixed(Net):
    def suffix(self, ends, x, batch, rng):
        root = jnp.sqrt(jnp.maximum(batch["y"][:, 0] * ends["out"][0, 0], 0))
        return super().suffix(ends, x, batch, rng) + root.sum()


@pytest.mark.slow
def test_a_gradient_that_fails_in_the_suffix():
    engine, bad = two_replicas(Suffixed(), config(3)), rows(0, TWO)
    bad["y"][:, 0] = np.sign(float(engine.state.params["ends"]["out"][0, 0]))
    bad["y"][3, 0] = 0.0
    place = "the suffix (what is after the layers); gradients that are not finite: ends/out"
    where = "in micro-batch 1 of 3, on replica 0: row 3 of the global batch"
    says(engine, [bad, bad], f"first in the backward pass: {place}", where)


@pytest.mark.slow
def test_a_module_with_dropout_in_a_pipeline(tmp_path):
    make = lambda: jzero.from_flax(lambda rngs: SmallGPT(rngs, 0.2), loss_fn, stack="blocks")  # noqa: E731
    more = {"bf16": {"enabled": True}, "pipeline": {"schedule": "zero_bubble"}, "gradient_accumulation_steps": 2}
    settings = {**config(1, **more), "train_micro_batch_size_per_gpu": 4}
    engine = jzero.initialize(model=make(), config=settings, mesh=mesh(2, pipe=2))[0]
    up = engine.state.params["stack"]["up"]
    up["kernel"] = jax.device_put(put(np.array(up["kernel"]), (1, 3, 5), np.inf), up["kernel"].sharding)
    bad = "parameter stack/up/kernel, layer 1, is not finite on device"
    says(engine, BATCHES, "first in the forward pass: layer 1 of 2", bad)
    assert jzero.replay(tmp_path / "saved" / "step1", make()).place == "layer 1 of 2"


@pytest.mark.slow
def test_fp16_stops_only_where_no_lower_scale_helps():
    scaled = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    engine, (good, bad) = two_replicas(settings=config(1, fp16=scaled)), good_and_bad(4)
    train(engine, *[good] * 16)  # overflows, while the scale comes down
    assert 3 < engine.skipped_steps < 16
    skipped, scale = engine.skipped_steps, engine.loss_scale
    says(engine, [bad, good], "row 4 of the global batch")
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (16, skipped, scale)


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 100, "warmup_type": "linear"}}
SCALED = {"enabled": True, "initial_scale_power": 3, "hysteresis": 2}


def mlp():
    return random_params(model("mlp"))


def spoiled(batch):
    images, labels = batch
    images = images.copy()
    images[-1, 0] = np.nan  # one pixel of one row of the last replica
    return images, labels


@pytest.mark.parametrize(("precision", "stage"), keep(product(["fp32", "bf16", "fp16"], [0, 3]), [("fp16", 3)]))
def test_a_step_that_is_not_finite_changes_nothing(precision, stage):
    layout = Layout(stage, 4, 2, precision=precision)
    config = layout.config(scheduler=WARMUP, **({"fp16": SCALED} if precision == "fp16" else {}))
    step, data = jzero.make_train_step(model("mlp"), config, mesh=layout.mesh), batches("mlp")
    state, seen = step.init(jax.random.key(0), mlp()), []
    for i in range(6):
        bad, before = i in (2, 3), jax.device_get((state.params, state.opt_state))
        state, metrics = step(state, spoiled(data[i]) if bad else data[i])
        if bad:
            assert_bitwise(before, (state.params, state.opt_state))
            assert not np.isfinite(metrics["loss"])
        seen.append([float(metrics[name]) for name in ("skipped", "lr", "loss_scale")])
    skipped, rates, scales = map(list, zip(*seen, strict=True))
    assert skipped == [0, 0, 1, 1, 0, 0]
    assert int(state.loss_scale.skipped) == 2
    assert rates[2] == rates[3] == rates[4] < rates[5]  # the schedule counts the steps that were applied
    # The first overflow is tolerated (hysteresis 2), the second halves.
    assert scales == ([8, 8, 8, 8, 4, 4] if precision == "fp16" else [1] * 6)
    assert all(np.isfinite(x).all() for x in leaves(state.params))


def test_without_the_overflow_check_bf16_takes_what_comes():
    config = Layout(0, 1, 1).config(bf16={"enabled": True, "check_grad_overflow": False})
    step = jzero.make_train_step(model("mlp"), config, mesh=Layout(0, 1, 1).mesh)
    state, metrics = step(step.init(jax.random.key(0), mlp()), spoiled(batches("mlp")[0]))
    assert not metrics["skipped"]
    assert not np.isfinite(state.params["fc2"]["kernel"]).all()


def test_a_run_of_bad_steps(capsys):
    """A warning names its first step; after 20 of them the run ends with the leaves' names, and the engine is whole."""
    layout = Layout(0, 1, 1)
    engine, *_ = jzero.initialize(model=model("mlp"), config=layout.config(), mesh=layout.mesh, params=mlp())
    good, bad = batches("mlp")[0], spoiled(batches("mlp")[0])
    train(engine, good, bad, bad, good, bad, good)
    warning = r"^jzero: step (\d+): the loss is nan, the step changed nothing; set \"non_finite\""
    assert re.findall(warning, capsys.readouterr().out, re.M) == ["2", "5"]
    assert (engine.skipped_steps, engine.global_steps) == (3, 6)
    before = jax.device_get(engine.state.params)
    # fc1/bias is not among them: ReLU's gradient at NaN is 0.
    with pytest.raises(NonFiniteError, match=r"20 optimizer steps .*: fc1/kernel, fc2/bias, fc2/kernel\."):
        train(engine, *[bad] * 40)
    assert engine.skipped_steps == engine.global_steps - 3 >= 20
    assert_bitwise(engine.state.params, before)
