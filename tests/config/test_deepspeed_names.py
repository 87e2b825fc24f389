"""All names of DeepSpeed's engine and PyTorch's: what can be read, what can be set, and what to write instead."""

import argparse
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import ACCUM, MICRO, REPLICAS, TRAIN, assert_same, build, engine, parts, rows, three_calls
from helpers.oracle import plain_loop
from helpers.plain_flax import dense
from helpers.refusals import refused, refuses
from helpers.sampling import keep
from helpers.steps import mesh, settings
from helpers.stored_cases import check_cases

import jzero
from jzero.run.deepspeed_names import READ
from jzero.step.setup import resolve
from jzero.step.train_step import TrainStep

# The public names of DeepSpeedEngine, PipelineEngine and DeepSpeedHybridEngine (0.19), a line each; arguments of
# those with which a training loop passes some.
LINES = (Path(__file__).parent / "deepspeed_engine.txt").read_text().splitlines()
ARGUMENTS = {name: arguments for name, *arguments in map(str.split, LINES)}
ATTRIBUTES = ["clip_grad_norm", "clip_grad_norm_", "dp_world_size", "mpu", "monitor", "timers", "checkpoint_engine"]
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
GROUPS = {**ADAM, "groups": [{"match": "^last/", "lr_scale": 0.5, "weight_decay": 0.3}]}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def squares(outputs, labels):
    return ((outputs - labels) ** 2).mean()


def config(stage=0, **more):
    return settings(16, stage, **{"optimizer": ADAM, **more})


def small(stage=0, criterion=squares, **more):
    return jzero.initialize(model=Net, criterion=criterion, config=config(stage, **more), mesh=mesh())[0]


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(16, 4)).astype("f4"), rng.normal(size=(16, 1)).astype("f4")


def plain(rates):
    """Train with optax: the parameters after one step at each rate, and their moving average."""
    start = nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(jax.random.key(0))), nnx.Param))
    rate = jnp.array(rates)
    adams = {
        "first": optax.adamw(lambda n: rate[n], weight_decay=0.1),
        "last": optax.adamw(lambda n: rate[n] / 2, weight_decay=0.3),
    }
    tx, average = optax.multi_transform(adams, {"first": "first", "last": "last"}), start

    def loss(params, batch):
        return squares(dense(params["last"], jnp.tanh(dense(params["first"], batch[0]))), batch[1])

    for steps in range(1, len(rates) + 1):  # plain_loop gives the last parameters alone
        params = plain_loop(loss, start, map(batch, range(steps)), tx).params
        average = jax.tree.map(lambda a, p: (a + p) / 2, average, params)
    return params, average


@pytest.mark.slow
@pytest.mark.parametrize("stage", keep([0, 3], [3]))
def test_set_lr_is_adamw_at_these_rates(stage):
    """The rates change within one run, and step 0 is the config's. The groups keep their ratios."""
    traced = []

    def counted(outputs, labels):
        traced.append(1)
        return squares(outputs, labels)

    e = small(stage, counted, optimizer=GROUPS, ema={"decay": 0.5})
    rates, traces = [0.01, 0.03, 0.0, 0.002], []
    for i, rate in enumerate(rates):
        if i:
            e.set_lr(rate)
        assert e.get_lr() == pytest.approx([rate / 2, rate])
        e.train_batch(batch(i))
        assert float(e.metrics["lr"]) == pytest.approx(rate)
        assert e.get_last_lr() == e.get_lr()
        traces.append(len(traced))
    found = e.state.params, e.step_fn.averaged(e.state).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, plain(rates))
    assert traces[0] < traces[1] == traces[2] == traces[3]  # a rate is an argument, not a constant of the program


@pytest.mark.slow
def test_a_checkpoint_keeps_the_rate_that_was_set(tmp_path):
    straight = small(3)
    straight.set_lr(0.03)
    straight.train_batch(batch(0))
    straight.save_checkpoint(tmp_path).wait()
    resumed = small(1)
    resumed.load_checkpoint(tmp_path)
    assert resumed.get_lr() == [pytest.approx(0.03)]
    straight.train_batch(batch(1))
    resumed.train_batch(batch(1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), straight.state.params, resumed.state.params)
    scheduled = small(1, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    scheduled.load_checkpoint(tmp_path)  # now the schedule decides
    assert scheduled.get_lr() != [pytest.approx(0.03)]
    small(0).save_checkpoint(tmp_path / "unset").wait()
    resumed.load_checkpoint(tmp_path / "unset")
    assert resumed.get_lr() == [pytest.approx(0.01)]


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        ({}, {"scheduler": {"type": "WarmupLR"}}, "a scheduler sets the rate of every step"),
        ({"optimizer": optax.sgd(0.1)}, {}, "the optimizer is your own"),
        ({}, {"optimizer": {"type": "AdamW", "params": {"lr": 0}}}, "the config's rate is 0"),
        ({}, {"optimizer": {"type": "madgrad", "params": {"lr": 0.1}}}, "madgrad has steps that are not proport"),
        ({}, {}, "must be a number, 0 or greater"),
    ],
)
def test_rates_that_cannot_be_set(arguments, more, words):
    model = jzero.from_flax(Net, criterion=squares)
    step = TrainStep(resolve(model, jzero.Config.load(config(**more)), mesh=mesh(), **arguments))
    for lr in (0.1,) if arguments or more else (-1, float("nan"), [0.1]):
        refused(lambda lr=lr: step.set_lr(lr), f"set_lr({lr!r}): ", words)


def test_what_the_engine_its_optimizer_and_its_scheduler_tell():
    """Under fp16: a step that overflows is skipped, and takes no step of the schedule."""
    warmup = {"warmup_max_lr": 0.5, "warmup_num_steps": 10, "warmup_type": "linear"}
    more = {"scheduler": {"type": "WarmupLR", "params": warmup}, "fp16": {"enabled": True, "initial_scale_power": 4}}
    in_groups = {**ADAM, "groups": [{"match": "out", "lr_scale": 0.5, "weight_decay": 0.3}]}
    e, optimizer, loader, schedule = build(3, more={**more, "optimizer": in_groups})
    assert isinstance(optimizer, optax.GradientTransformation)
    assert_same(optimizer.init({"w": jnp.ones(2)})[0], e.step_fn.setup.optimizer.tx.init({"w": jnp.ones(2)})[0])
    assert (loader, e.metrics, e.device) == (None, {}, "cpu")
    assert (e.global_rank, e.local_rank, e.world_size) == (0, 0, 1)
    assert e.get_batch_info() == (TRAIN, MICRO, ACCUM)
    assert (e.train_batch_size(), e.train_micro_batch_size_per_gpu(), e.gradient_accumulation_steps()) == (24, 2, 3)
    assert (e.zero_optimization_stage(), e.loss_scale, e.get_global_grad_norm()) == (3, 16, None)
    assert not e.was_step_applied()
    assert schedule.get_last_lr() == schedule.get_lr() == [0, 0]
    for seed in range(4):
        e.train_batch(rows(seed))
    assert e.get_global_grad_norm() > 0
    assert e.was_step_applied()
    assert schedule.get_last_lr() == e.lr_scheduler.get_last_lr() == pytest.approx([0.05, 0.1])
    bad = rows(9)
    bad["x"][0, 0] = np.inf
    e.train_batch(bad)
    assert not e.was_step_applied()
    assert (e.skipped_steps, e.global_steps) == (1, 5)
    assert set(e.metrics) == {"loss", "grad_norm", "lr", "loss_scale", "skipped"}
    assert [float(schedule(n)) for n in (0, 5, 11)] == pytest.approx([0, 0.2, 0.5])
    assert schedule.last_batch_iteration == 4
    assert schedule.get_lr() == e.get_lr() == pytest.approx([0.075, 0.15])
    first, rest = groups = optimizer.param_groups
    assert first == {"params": ["ends/out"], "lr": pytest.approx(0.075), "weight_decay": 0.3}
    assert rest == {"params": ["stack/w"], "lr": pytest.approx(0.15)}
    assert e.optimizer.param_groups == groups
    refused(lambda: groups[0].__setitem__("lr", 0.1), "'lr'] = 0.1: param_groups are read-only; write engine.set_lr")
    refused(lambda: groups[0].__setitem__("weight_decay", 1), "weight_decay in the config's optimizer.groups")
    assert repr(e) == f"Engine({e.step_fn!r}, global step 5)"
    assert "ZeRO-3, fp16, mesh zero 4, batch 24 = 2 x 3 x 4" in repr(e)
    del e
    with pytest.raises(jzero.ConfigError, match="was deleted"):  # an optimizer does not keep the state in memory
        optimizer.param_groups  # noqa: B018


@pytest.fixture(scope="module")
def whole():
    return engine()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e, loss: loss.backward(), "Loss.backward(): write engine.backward(loss)"),
        (lambda e, loss: loss.loss, "loss.loss: leave it out: engine"),
        (lambda e, loss: e.optimizer.step(), "Optimizer.step(): write engine.step()"),
        (lambda e, loss: e.lr_scheduler.step(), "LRScheduler.step(): leave it out: engine.step() advances"),
        (lambda e, loss: e.optimizer.param_groups[0].update(lr=1), "read-only; write engine.set_lr(...)"),
        (lambda e, loss: e.module.parameters(), "Module.parameters(): read engine.state.params"),
        (lambda e, loss: e.loss_scale(), "engine.loss_scale(): write engine.loss_scale, without parentheses"),
        (lambda e, loss: jzero.from_flax(Net, criterion=squares).parameters(), "leave out model_parameters"),
        (lambda e, loss: jzero.PipelineModule([nnx.relu], loss_fn=squares).cuda(), "PipelineModule.cuda(): leave"),
        (lambda e, loss: jzero.PipelineModule([nnx.relu], loss_fn=squares, topology=1), "topology=...): pass num_st"),
        (lambda e, loss: jzero.PipelineModule([nnx.relu], loss_fn=squares, layer=1), "layer=...): unknown"),
        (lambda e, loss: jzero.initialize(None, Net), "initialize: 2 arguments without a name: write "),
        (lambda e, loss: jzero.initialize(config={}), "initialize: model is missing"),
        (lambda e, loss: jzero.init_distributed(dist_backend="nccl"), "(dist_backend=...): leave it out: JAX"),
        (lambda e, loss: jzero.init_distributed(timeout="nccl"), "(dist_backend=...): leave it out: JAX"),
        (lambda e, loss: jzero.init_distributed(timeout=-1), "timeout = -1: must be a positive number of seconds"),
        (lambda e, loss: jzero.init_distributed(init_method=1), "init_distributed(init_method=...): "),
        (lambda e, loss: jzero.init_distributed(backend="nccl"), "unknown argument"),
    ],
)
def test_what_has_no_meaning_says_what_to_write(whole, call, words):
    text = refuses(lambda: call(whole, whole(parts(0)[0])))
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("own", "first", "grouped"),
    [(None, True, False), ({"type": int, "default": -1}, False, True), ({"type": str, "default": "0"}, True, False)],
)
def test_the_launchers_local_rank(own, first, grouped):
    """A script needs no option --local_rank; one of its own decides on type and default, wherever it is added."""
    parser = argparse.ArgumentParser()
    holder = parser.add_argument_group("mine") if grouped else parser

    def add_own():
        if own is not None:
            holder.add_argument("--local_rank", **own)

    for add in (add_own, lambda: jzero.add_config_arguments(parser))[:: 1 if first else -1]:
        add()
    own = own or {"type": int}
    for words in (["--local_rank=3"], ["--local_rank", "3"]):
        assert parser.parse_args(words).local_rank == own["type"](3)
    assert parser.parse_args([]).local_rank == own.get("default")


def test_config_arguments(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config()))
    parser = argparse.ArgumentParser()
    assert jzero.add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    assert args.deepspeed is True
    e, *_ = jzero.initialize(args=args, model=Net, criterion=squares, mesh=mesh())
    assert e.train_batch_size() == 16
    assert e.step_fn.replicas == REPLICAS
    both = r"--deepspeed_config = .* and config = \{\} are both given"
    refuses(lambda: jzero.initialize(args=args, config={}, model=Net), both)
    for args in (parser.parse_args([]), None, argparse.Namespace()):
        words = r"config: none given; pass config=.*--deepspeed_config FILE"
        refuses(lambda args=args: jzero.initialize(args=args, model=Net), words)


def test_every_name_of_deepspeeds_engine(whole):
    """It is there and takes DeepSpeed's arguments; or it is an AttributeError that says what to write."""
    for name in (*ARGUMENTS, *ATTRIBUTES):
        if not hasattr(whole, name):
            with pytest.raises(AttributeError) as error:
                getattr(whole, name)
            assert isinstance(error.value, jzero.ConfigError)
            assert re.fullmatch(rf"engine.{name}: .*\b(leave it out|write|read|pass)\b.*", str(error.value))
        elif arguments := ARGUMENTS.get(name):
            parameters = inspect.signature(getattr(whole, name)).parameters
            required = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            for argument in set(arguments) - parameters.keys():
                with pytest.raises(jzero.ConfigError, match=r": .*\b(leave it out|write|read|pass)\b"):
                    getattr(whole, name)(*map(id, required), **{argument: object()})
    with pytest.raises(AttributeError, match="no attribute 'nonsense'") as error:
        whole.nonsense  # noqa: B018
    assert not isinstance(error.value, jzero.ConfigError)


def test_what_reads_the_config(whole, pytestconfig):
    """What the engine's methods return of a config: of the empty one all, of others what is not the same."""

    def read(given):
        holder = SimpleNamespace(config=jzero.Config.load(given))
        return {name: repr(function(holder)) for name, function in READ.items()}

    def outcome(given):
        return dict(sorted(read(given).items() - (plain.items() if given else set())))

    plain = read({})
    check_cases(Path(__file__).with_name("reads.jsonl"), outcome, pytestconfig)
    assert (whole.zero_optimization_partition_gradients(), whole.zero_optimization_partition_weights()) == (True, False)


def test_a_batch_by_its_names():
    """Hugging Face's line, `engine(**batch)`, and `zero_grad`, which has nothing to do."""
    named, other = engine(), engine()
    named.zero_grad()
    for part in parts(0):
        loss = named(**part)
        assert not hasattr(loss, "loss")
        named.backward(loss)
        named.step()
        if named.global_steps:
            named.optimizer.zero_grad()
    three_calls(other, parts(0))
    assert_same(named.state.params, other.state.params)
    part = parts(1)[0]
    for call in (named, lambda: named(part["x"], part["y"]), lambda: named(part, mask=part["mask"])):
        refuses(call, r"a micro-batch is one argument: engine\(batch\) or engine\(\*\*batch")
    for given in ({}, {"batch": part, "data_iter": []}):
        refuses(lambda given=given: named.eval_batch(**given), "eval_batch: pass one of batch and data_iter")
    named.backward(named(part))
    refuses(named.optimizer.zero_grad, r"zero_grad: 1 micro-batches wait for step\(\)")
