"""DeepSpeed's and PyTorch's names on the engine: what can be read, what can be set, and what to write instead."""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.engines import REPLICAS, assert_same, build, engine, parts
from helpers.refusals import refused, refuses
from helpers.sampling import keep
from helpers.steps import mesh

import jzero
from jzero.step.setup import resolve
from jzero.step.train_step import TrainStep

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
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_batch_size": 16, "gradient_clipping": 0, "optimizer": ADAM, "zero_optimization": zero, **more}


def small(stage=0, criterion=squares, **more):
    return jzero.initialize(model=Net, criterion=criterion, config=config(stage, **more), mesh=mesh())[0]


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(16, 4)).astype("f4"), rng.normal(size=(16, 1)).astype("f4")


def plain(rates):
    """Train with optax: the parameters after one step at each rate, and their moving average."""
    params = nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(jax.random.key(0))), nnx.Param))
    rate = jnp.array(rates)
    adams = {
        "first": optax.adamw(lambda n: rate[n], weight_decay=0.1),
        "last": optax.adamw(lambda n: rate[n] / 2, weight_decay=0.3),
    }
    tx = optax.multi_transform(adams, {"first": "first", "last": "last"})
    average, state = params, tx.init(params)
    for i in range(len(rates)):
        x, y = batch(i)

        def loss(params, x=x, y=y):
            hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
            return squares(hidden @ params["last"]["kernel"] + params["last"]["bias"], y)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
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
    ("arguments", "more", "lr", "words"),
    [
        ({}, {"scheduler": {"type": "WarmupLR"}}, 0.1, "a scheduler sets the rate of every step"),
        ({"lr_scheduler": lambda n: 0.1}, {}, 0.1, "a scheduler sets the rate of every step"),
        ({"optimizer": optax.sgd(0.1)}, {}, 0.1, "the optimizer is your own"),
        ({}, {"optimizer": {"type": "AdamW", "params": {"lr": 0}}}, 0.1, "the config's rate is 0"),
        ({}, {"optimizer": {"type": "madgrad", "params": {"lr": 0.1}}}, 0.1, "madgrad has steps that are not proport"),
        ({}, {}, -1, "must be a number, 0 or greater"),
        ({}, {}, float("nan"), "must be a number, 0 or greater"),
        ({}, {}, [0.1], "must be a number, 0 or greater"),
    ],
)
def test_rates_that_cannot_be_set(arguments, more, lr, words):
    model = jzero.from_flax(Net, criterion=squares)
    step = TrainStep(resolve(model, jzero.Config.load(config(**more)), mesh=mesh(), **arguments))
    refused(lambda: step.set_lr(lr), f"set_lr({lr!r}): ", words)


def test_the_optimizer_and_the_scheduler():
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 10, "warmup_type": "linear"}}
    e, optimizer, _, schedule = jzero.initialize(
        model=Net, criterion=squares, config=config(optimizer=GROUPS, scheduler=scheduler), mesh=mesh()
    )
    assert isinstance(optimizer, optax.GradientTransformation)
    assert_same(optimizer.init({"w": jnp.ones(2)})[0], e.step_fn.setup.optimizer.tx.init({"w": jnp.ones(2)})[0])
    assert schedule.get_last_lr() == schedule.get_lr() == [0, 0]
    for i in range(4):
        e.train_batch(batch(i))
    assert [float(schedule(n)) for n in (0, 5, 11)] == pytest.approx([0, 0.2, 0.5])
    assert schedule.last_batch_iteration == 4
    assert schedule.get_lr() == e.get_lr() == pytest.approx([0.075, 0.15])
    assert schedule.get_last_lr() == e.lr_scheduler.get_last_lr() == pytest.approx([0.05, 0.1])
    first, rest = groups = optimizer.param_groups
    assert first == {"params": ["last/bias", "last/kernel"], "lr": pytest.approx(0.075), "weight_decay": 0.3}
    assert rest == {"params": ["first/bias", "first/kernel"], "lr": pytest.approx(0.15)}
    assert e.optimizer.param_groups == groups
    refused(lambda: groups[0].__setitem__("lr", 0.1), "'lr'] = 0.1: param_groups are read-only; write engine.set_lr")
    refused(lambda: groups[0].__setitem__("weight_decay", 1), "weight_decay in the config's optimizer.groups")
    del e
    with pytest.raises(jzero.ConfigError, match="was deleted"):  # an optimizer does not keep the state in memory
        optimizer.param_groups  # noqa: B018


def test_a_callers_optimizer_has_no_schedule_to_show():
    e, _, _, schedule = build(optimizer=optax.sgd(0.1))
    assert e.lr_scheduler is schedule is None
    assert np.isnan(e.optimizer.param_groups[0]["lr"])


@pytest.fixture(scope="module")
def with_loss():
    e = engine()
    return e, e(parts(0)[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e, loss: loss.backward(), "Loss.backward(): write engine.backward(loss)"),
        (lambda e, loss: loss.loss, "loss.loss: leave it out: engine"),
        (lambda e, loss: e.optimizer.step(), "Optimizer.step(): write engine.step()"),
        (lambda e, loss: e.optimizer.state_dict(), "write engine.save_checkpoint(directory)"),
        (lambda e, loss: e.lr_scheduler.step(), "LRScheduler.step(): leave it out: engine.step() advances"),
        (lambda e, loss: e.optimizer.param_groups[0].update(lr=1), "read-only; write engine.set_lr(...)"),
        (lambda e, loss: e.parameters(), "parameters(): read engine.state.params"),
        (lambda e, loss: e.module.parameters(), "Module.parameters(): read engine.state.params"),
        (lambda e, loss: e.module.state_dict(), "engine.save_16bit_model(directory)"),
        (lambda e, loss: e.to("cuda"), "to(): leave it out"),
        (lambda e, loss: e.half(), 'write "fp16": {"enabled": true}'),
        (lambda e, loss: e.state_dict(), "engine.save_checkpoint(directory)"),
        (lambda e, loss: e.loss_scale(), "engine.loss_scale(): write engine.loss_scale, without parentheses"),
        (lambda e, loss: jzero.from_flax(Net, criterion=squares).parameters(), "leave out model_parameters"),
        (lambda e, loss: jzero.from_flax(Net, lambda m, b: 0).to("cuda"), "NNXModel.to(): leave it out"),
        (lambda e, loss: jzero.PipelineModule([nnx.relu], loss_fn=squares).cuda(), "PipelineModule.cuda(): leave"),
        *(
            (lambda e, loss, name=name: jzero.PipelineModule([nnx.relu], loss_fn=squares, **{name: 1}), words)
            for name, words in {
                "topology": "topology=...): pass num_stages; the config's mesh section",
                "base_seed": "base_seed=...): leave it out: the config's seed decides",
                "layer": "layer=...): unknown",
            }.items()
        ),
    ],
)
def test_what_has_no_meaning_says_what_to_write(with_loss, call, words):
    text = refuses(lambda: call(*with_loss))
    assert words in text
    assert "\n" not in text


def test_a_loss_is_a_number_and_batches_belong_on_the_host(with_loss):
    e, loss = with_loss
    assert loss.item() == float(loss)
    assert e.device == "cpu"


@pytest.mark.parametrize(
    ("own", "first", "grouped"),
    [
        (None, True, False),
        ({"type": int}, True, True),
        ({"type": int, "default": -1}, False, True),
        ({"type": str, "default": "0"}, True, False),
        ({"type": str, "default": "0"}, False, False),
    ],
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
