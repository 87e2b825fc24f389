"""The run report says what the run will do, in 100 columns of plain text; its page also what was measured."""

import dataclasses
import re

import jax
import optax
import pytest
from golden import snapshots
from helpers.configs import TUTORIAL_ZERO3
from helpers.engines import LINE, Net, build, config, rows
from helpers.named_models import model_of
from helpers.refusals import refuses
from helpers.report_sections import section
from helpers.steps import mesh

import jzero
from jzero.planner import GPUS
from jzero.planner.plan import observed
from jzero.planner.state_bytes import state_bytes
from models.llama import LlamaConfig
from models.mlp import MLP, cross_entropy

TINY = LlamaConfig(3, 64, 4, 2, 96, vocab_size=256)
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


def mlp():
    return jzero.from_flax(MLP, cross_entropy)


def report_of(model, own=None, **changes):
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(), optimizer=own)
    return step, jzero.report(step)


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **more}}


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
FULL = {"policy": "full"}
TUTORIAL = {"zero_optimization": TUTORIAL_ZERO3["zero_optimization"]}
AUTO = {
    "bf16": {"enabled": "auto"}, "fp16": {"loss_scale": "auto"}, "steps_per_print": "auto",
    "autotuning": {"enabled": "auto"}, "activation_checkpointing": "auto",
    "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}},
}  # fmt: skip
REPORTS = {
    "stage 0": (mlp, zero(0)),
    "stage 1": (mlp, zero(1)),
    "stage 3, a schedule": (lambda: model_of(TINY), {"scheduler": WARMUP}),
    "off": (mlp, {"gradient_clipping": 0, "bf16": {"enabled": True, "check_grad_overflow": False}}),
    "fp16": (mlp, {"bf16": None, "fp16": {"enabled": True}}),
    "static scale": (mlp, {"bf16": None, "fp16": {"enabled": True, "loss_scale": 1}}),
    "cudnn, sums": (lambda: model_of(dataclasses.replace(TINY, attention="cudnn")), {"gradient_allreduce_op": "SUM"}),
    "remat on the host": (mlp, {"activation_checkpointing": {**FULL, "cpu_checkpointing": True}}),
    "keys of one reason": (mlp, zero(2, overlap_comm=True, reduce_bucket_size=5e8, allgather_bucket_size="auto")),
    "fallbacks": (mlp, {"activation_checkpointing": FULL, **zero(1)}),
    "frozen": (mlp, {"frozen_parameters": ["fc1"], **zero(3, stage3_param_persistence_threshold=0)}),
    "auto": (mlp, AUTO),
    "DeepSpeed's own keys": (mlp, {"activation_checkpointing": FULL, **TUTORIAL}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_stored_report(name, pytestconfig):
    """It fits a chat: plain ASCII, at most 100 columns, no trailing blanks."""
    model, changes = REPORTS[name]
    step, text = report_of(model(), own=optax.sgd(0.1) if name == "fallbacks" else None, **changes)
    lines = text.splitlines()
    stored = {**snapshots.read("reports.json"), name: lines}
    assert stored.keys() <= REPORTS.keys()
    snapshots.check("reports.json", stored, pytestconfig.getoption("--update-golden"))
    (total,) = (line for line in section(text, "Model state per device") if "total inside the step" in line)
    number, unit = re.split(r"\s{2,}", total.strip())[1].split()
    assert float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit) == pytest.approx(state_bytes(step).total, rel=0.01)
    assert text.isascii()
    assert max(map(len, lines)) <= 100
    assert not re.search(r"[ \t]$", text, re.M)


@pytest.fixture
def cpus(monkeypatch):
    """Describe this machine's devices as GPUs of some kind."""
    kind = dataclasses.replace(GPUS["h200"], description=jax.devices()[0].device_kind)
    monkeypatch.setitem(GPUS, "h200", kind)


@pytest.fixture(scope="module")
def ran():
    """An engine after its first step, which no other test runs."""
    made = build(3, model=LINE)[0]
    made.train_batch(rows(0))
    return made


@pytest.mark.slow
def test_the_page_shows_what_was_measured(cpus, ran, tmp_path):
    pytest.importorskip("matplotlib")
    for _ in range(2):
        float(ran.train_batch(rows(0)))
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
