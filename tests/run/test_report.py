"""The run report says what the run will do, in 100 columns of plain text; its page also what was measured."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from helpers.configs import TUTORIAL_ZERO3
from helpers.engines import Net, build, config, rows
from helpers.refusals import refuses
from helpers.report_sections import section
from helpers.steps import mesh

import jzero
from jzero.planner import GPUS
from jzero.planner.plan import observed
from jzero.planner.state_bytes import state_bytes
from models.llama import Llama, LlamaConfig
from models.mlp import MLP, cross_entropy

TINY = LlamaConfig(3, 64, 4, 2, 96, vocab_size=256)
ADAM = {"type": "Adam", "params": {"lr": 1e-3}}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": ADAM,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


def llama(**changes):
    return jzero.from_flax(lambda rngs: Llama(dataclasses.replace(TINY, **changes), rngs=rngs))


def mlp():
    return jzero.from_flax(MLP, cross_entropy)


def report_of(model, data=1, optimizer=None, **changes):
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(data=data), optimizer=optimizer)
    return step, jzero.report(step)


def table_of(text, title):
    """A table's rows as {first cell: the other cells}."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in section(text, title)[2:]]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize(
    ("model", "stage", "says"),
    [
        (mlp, 0, "parameters replicated, gradients all-reduced once a step"),
        (mlp, 1, "parameters gathered once a step, gradients reduce-scattered once a step"),
        (mlp, 3, "parameters gathered where they are used, gradients reduce-scattered every micro-batch"),
        (llama, 3, "parameters gathered layer by layer, gradients reduce-scattered every micro-batch"),
    ],
)
def test_stage_and_model_state(model, stage, says):
    step, text = report_of(model(), zero_optimization=CONFIG["zero_optimization"] | {"stage": stage})
    assert f"stage {stage}: {says}" in re.sub(r" +", " ", " ".join(section(text, "jzero run report")))
    number, unit = table_of(text, "Model state per device")["total inside the step"][0].split()
    total = float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit)
    assert total == pytest.approx(state_bytes(step).total, rel=0.01)


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
FULL = {"policy": "full"}
DEFAULTS = [
    r"under stage3_param_persistence_threshold 100: 3 leaves, 448 elements",
    r"Adam: adam_w_mode is true, as in DeepSpeed: this is AdamW",
    r"WarmupLR: as in DeepSpeed, the first two optimizer steps run at warmup_min_lr 1e-05",
    r"learning rate by step: 0=1e-05, 1=1e-05, 2=0\.000\d+, .*1000=0.001",
    r"layer stack: 3 layers, unrolled; activation checkpointing none",
    r"attention kernel xla \(attention='auto', bfloat16\)",
]


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (llama, {"scheduler": WARMUP}, DEFAULTS),
        (mlp, {"gradient_clipping": 0, "bf16": {"enabled": True, "check_grad_overflow": False}},
            [r"^  - gradient_clipping 0: off$", "check_grad_overflow false"]),
        (mlp, {"bf16": None, "fp16": {"enabled": True}}, [r"^  - loss scale dynamic, from 65536$"]),
        (mlp, {"bf16": None, "fp16": {"enabled": True, "loss_scale": 1}}, [r"^  - loss scale 1, static$"]),
        (lambda: llama(attention="cudnn"), {"gradient_allreduce_op": "SUM"},
            [r"^  - attention kernel cudnn \(attention='cudnn', bfloat16\)$",
             "gradient_allreduce_op sum: gradients are 8 times those of the mean over the replicas"]),
        (mlp, {"activation_checkpointing": {**FULL, "cpu_checkpointing": True}},
            ["- activation checkpointing full, kept in host memory$"]),
    ],
    ids=["defaults", "off", "fp16", "static scale", "cudnn", "remat on the host"],
)  # fmt: skip
def test_what_is_in_effect(model, changes, says):
    lines = section(report_of(model(), **changes)[1], "In effect")
    for words in says:
        assert any(re.search(words, line) for line in lines), (words, lines)
    assert any("is skipped" in line for line in lines) == ("gradient_clipping" not in changes)


def test_every_flax_wrapper_forwards_the_models_notes():
    def notes(self, dtype):
        return [f"computes in {dtype}"]

    plain, flat = (type("Noting", (layer,), {"report_notes": notes}) for layer in (nnx.Linear, linen.Dense))
    loss = lambda module, batch: jnp.mean(module(batch) ** 2)  # noqa: E731
    for model in (
        jzero.from_flax(lambda rngs: plain(8, 8, rngs=rngs), loss),
        jzero.from_flax(flat(8), loss, example_batch=jnp.zeros((4, 8))),
    ):
        assert "computes in bfloat16" in report_of(model)[1]


def test_replaced_keys():
    """Keys of one reason share a line."""
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "allgather_bucket_size": "auto"}
    first, second = section(report_of(mlp(), zero_optimization=zero)[1], "Replaced keys")
    assert first.startswith("  - zero_optimization.overlap_comm = true: XLA's latency-hiding")
    keys = 'zero_optimization.reduce_bucket_size = 5e+08, zero_optimization.allgather_bucket_size = "auto"'
    assert second.startswith(f"  - {keys}: XLA's collective combiner")


def test_fallbacks():
    _, text = report_of(mlp(), activation_checkpointing=FULL, zero_optimization={"stage": 1}, optimizer=optax.sgd(0.1))
    lines = section(text, "Fallbacks")
    assert "  - replicated, no dimension of (10,) is a multiple of 8: fc2/bias" in lines
    assert any("no layer stack" in line for line in lines)
    assert "  - optimizer section (Adam) not used: an optimizer was passed in" in lines
    assert "adam_w_mode" not in text


def test_frozen_leaves_are_marked():
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    table = table_of(report_of(mlp(), frozen_parameters=["fc1"], zero_optimization=zero)[1], "Layout")
    assert table["fc1/*"] == ["2", "100,480", "P('zero')", "frozen"]
    assert table["fc2/bias"] == ["1", "10", "P()", "replicated"]
    assert table["trained"] == ["2", "1,290", "1.27%"]


def test_fits_a_chat():
    """Plain ASCII, at most 100 columns, no trailing blanks: also with a config full of DeepSpeed's own keys."""
    zero = TUTORIAL_ZERO3["zero_optimization"]
    step, text = report_of(mlp(), zero_optimization=zero, activation_checkpointing=FULL)
    assert len(step.config.replaced) > 5
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert not re.search(r"[ \t]$", text, re.M)


def test_auto_is_said():
    _, text = report_of(
        mlp(), bf16={"enabled": "auto"}, fp16={"loss_scale": "auto"}, steps_per_print="auto",
        optimizer=None, scheduler=None, autotuning={"enabled": "auto"}, activation_checkpointing="auto",
        zero_optimization={"stage": "auto", "offload_optimizer": {"device": "auto"}},
    )  # fmt: skip
    assert (
        '"auto", so the default: steps_per_print = null, activation_checkpointing = null, bf16.enabled = false, '
        'zero_optimization.stage = 0, zero_optimization.offload_optimizer.device = "none", fp16.loss_scale = 0, '
        "autotuning.enabled (off)"
    ) in " ".join(text.split())
    assert '"auto"' not in report_of(mlp(), zero_optimization={"overlap_comm": "auto"})[1].partition("Replaced")[0]


@pytest.fixture
def cpus(monkeypatch):
    """Describe this machine's devices as GPUs of some kind."""
    kind = dataclasses.replace(GPUS["h200"], description=jax.devices()[0].device_kind)
    monkeypatch.setitem(GPUS, "h200", kind)


@pytest.fixture(scope="module")
def ran():
    """An engine after its first step, which no other test runs."""
    made = build(3)[0]
    made.train_batch(rows(0))
    return made


@pytest.mark.slow
def test_an_engine_knows_its_time_and_the_page_shows_it(cpus, ran, tmp_path):
    pytest.importorskip("matplotlib")
    walls = []
    for _ in range(12):
        start = time.perf_counter()
        float(ran.train_batch(rows(0)))
        walls.append(time.perf_counter() - start)
    assert min(walls) / 2 < ran.seconds_per_step() < 2 * max(walls)
    assert jzero.report(ran, html=tmp_path / "run.html").startswith("jzero run report")
    page = (tmp_path / "run.html").read_text()
    assert "Planned and measured" in page
    assert "on them" in page
    assert not re.search(r"(src|href)=\"http", page)


def test_measured_beside_planned(cpus, ran):
    """The program is the one that ran: XLA's own figures."""
    plan = observed(ran.step_fn, 0.5)
    stats = ran.step_fn.lower(rows(0)).compile().memory_analysis()
    assert plan.memory.xla.temps == stats.temp_size_in_bytes
    assert (plan.measured.step_s, plan.gpus) == (0.5, 4)
    assert plan.collectives


def test_no_page_without_a_step_or_a_gpu(ran, tmp_path):
    unused = jzero.make_train_step(Net(), config(), mesh=mesh())
    for step, words in ((unused, "did not run yet"), (ran.step_fn, "not a GPU that")):
        refuses(lambda step=step: jzero.report(step, html=tmp_path / "run.html"), words)
    assert not (tmp_path / "run.html").exists()
