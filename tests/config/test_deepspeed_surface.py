"""All of DeepSpeed's engine, `initialize` and `init_distributed`: each name works, or says what to write."""

import argparse
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.engines import Net, assert_same, config, engine, parts, three_calls
from helpers.refusals import refuses

import jzero
from jzero.run.deepspeed_names import READ

# The public names of DeepSpeedEngine, PipelineEngine and DeepSpeedHybridEngine (0.19), a line each; arguments of
# those with which a training loop passes some.
LINES = (Path(__file__).parent / "deepspeed_engine.txt").read_text().splitlines()
ARGUMENTS = {name: arguments for name, *arguments in map(str.split, LINES)}
ATTRIBUTES = ["clip_grad_norm", "clip_grad_norm_", "dp_world_size", "mpu", "monitor", "timers", "checkpoint_engine"]


@pytest.fixture(scope="module")
def whole():
    return engine()


@pytest.mark.parametrize("name", [*ARGUMENTS, *ATTRIBUTES])
def test_every_name_of_deepspeeds_engine(whole, name):
    """It is there and takes DeepSpeed's arguments; or it is an AttributeError that says what to write."""
    if not hasattr(whole, name):
        with pytest.raises(AttributeError) as error:
            getattr(whole, name)
        assert isinstance(error.value, jzero.ConfigError)
        assert re.fullmatch(rf"engine.{name}: .*\b(leave it out|write|read|pass)\b.*", str(error.value))
        return
    arguments = ARGUMENTS.get(name)
    parameters = inspect.signature(getattr(whole, name)).parameters if arguments else {}
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    for argument in arguments or ():
        if argument not in parameters:
            with pytest.raises(jzero.ConfigError, match=r": .*\b(leave it out|write|read|pass)\b"):
                getattr(whole, name)(*map(id, required), **{argument: object()})


def test_a_name_that_deepspeed_does_not_have(whole):
    with pytest.raises(AttributeError, match="no attribute 'nonsense'") as error:
        whole.nonsense  # noqa: B018
    assert not isinstance(error.value, jzero.ConfigError)


def read(**given):
    """Return what the engine's methods return of a config."""
    holder = SimpleNamespace(config=jzero.Config.load(given))
    return {name: function(holder) for name, function in READ.items()}


def test_what_reads_the_config(whole):
    found = read(
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0}, bf16={"enabled": True},
        optimizer={"type": "AdamW", "params": {"lr": 0.01}}, gradient_clipping=0.5, flops_profiler={"profile_step": 7},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    )  # fmt: skip
    expected = {
        "bfloat16_enabled": True, "fp16_enabled": False, "amp_enabled": False, "dynamic_loss_scale": True,
        "initial_dynamic_scale": 2**16, "zero_optimization": True, "zero_optimization_partition_gradients": True,
        "zero_optimization_partition_weights": True, "zero_param_persistence_threshold": 0, "zero_cpu_offload": False,
        "gradient_clipping": 0.5, "steps_per_print": None, "flops_profiler_profile_step": 7, "autotp_size": 0,
        "optimizer_name": "AdamW", "optimizer_params": {"lr": 0.01}, "managed_gradient_accumulation": True,
        "scheduler_name": "WarmupLR", "scheduler_params": {"warmup_num_steps": 3},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    replaced = {
        "amp_enabled": {"amp": {"enabled": True}},
        "torch_autocast_enabled": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        **{name: {name: True} for name in ("dump_state", "graph_harvesting")},
        "sparse_gradients_enabled": {"sparse_gradients": True},
    }
    for name, given in replaced.items():
        found = read(**given)
        assert [other for other in replaced if found[other]] == [name]


def test_a_batch_by_its_names():
    """Hugging Face's line, `engine(**batch)`, and `zero_grad`, which has nothing to do."""
    named, plain_loop = engine(), engine()
    named.zero_grad()
    for part in parts(0):
        loss = named(**part)
        assert not hasattr(loss, "loss")
        named.backward(loss)
        named.step()
        if named.global_steps:
            named.optimizer.zero_grad()
    three_calls(plain_loop, parts(0))
    assert_same(named.state.params, plain_loop.state.params)
    part = parts(1)[0]
    one, both = r"a micro-batch is one argument: engine\(batch\) or engine\(\*\*batch", {"batch": part, "data_iter": []}
    for call, words in (
        (lambda: named(), one),
        (lambda: named(part["x"], part["y"]), one),
        (lambda: named(part, mask=part["mask"]), one),
        (lambda: named.eval_batch(), "eval_batch: pass one of batch and data_iter"),
        (lambda: named.eval_batch(**both), "eval_batch: pass one of batch and data_iter"),
    ):
        refuses(call, words)
    named.backward(named(part))
    refuses(named.optimizer.zero_grad, r"zero_grad: 1 micro-batches wait for step\(\)")


def test_initialize_without_names():
    words = r"initialize: 2 arguments without a name: write .*model=\.\.\., config="
    refuses(lambda: jzero.initialize(argparse.Namespace(), Net()), words)
    refuses(lambda: jzero.initialize(config=config()), r"initialize: model is missing")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dist_backend": "nccl"}, "init_distributed(dist_backend=...): leave it out: JAX"),
        ({"timeout": "nccl"}, "init_distributed(dist_backend=...): leave it out: JAX"),
        ({"timeout": -1}, "init_distributed: timeout = -1: must be a positive number of seconds"),
        ({"backend": "nccl"}, "unknown argument"),
        *(
            ({name: 1}, f"init_distributed({name}=...): ")
            for name in ("auto_mpi_discovery", "distributed_port", "verbose", "init_method", "dist_init_required")
        ),
    ],
)
def test_arguments_of_deepspeeds_init_distributed(given, words):
    text = refuses(lambda: jzero.init_distributed(**given))
    assert words in text
    assert ("unknown" in words) == ("unknown" in text)
