"""The run report says what the run will do, in 100 columns of plain text; its page also what was measured."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from helpers.engines import Net, build, config, rows
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


def test_head():
    _, text = report_of(llama(), data=2)
    head = " ".join(section(text, "jzero run report"))
    for words in (
        "LlamaConfig(num_layers=3, d_model=64",
        "8 x cpu = pipe 1 x data 2 x zero 4",
        "64 = 4 per device x 2 accumulation x 8 replicas (train_batch_size = 64: inferred)",
        "bf16: masters float32, gradients reduced in bfloat16 and accumulated in float32",
    ):
        assert words in head


@pytest.mark.parametrize(
    ("model", "stage", "says"),
    [
        (llama, 0, "stage 0: parameters replicated, gradients all-reduced once a step"),
        (llama, 1, "stage 1: parameters gathered once a step, gradients reduce-scattered once a step"),
        (llama, 2, "stage 2: parameters gathered once a step, gradients reduce-scattered every micro-batch"),
        (llama, 3, "stage 3: parameters gathered layer by layer, gradients reduce-scattered every micro-batch"),
        (mlp, 3, "stage 3: parameters gathered where they are used, gradients reduce-scattered every micro-batch"),
    ],
)
def test_stage_and_model_state(model, stage, says):
    step, text = report_of(model(), zero_optimization=CONFIG["zero_optimization"] | {"stage": stage})
    assert says in re.sub(r" +", " ", " ".join(section(text, "jzero run report")))
    found, table = state_bytes(step), table_of(text, "Model state per device")
    formula = re.fullmatch(r"ZeRO formula, every leaf partitioned: (.*)", table["total inside the step"][1])
    for printed, n_bytes in (
        (table["masters, float32"][0], found.masters),
        (table["optimizer state"][0], found.optimizer),
        (table["total between steps"][0], found.persistent),
        (table["parameters, bfloat16"][0], found.parameters),
        (table["gradients, float32"][0], found.gradients),
        (table["total inside the step"][0], found.total),
        (formula[1], found.formula),
    ):
        number, unit = printed.split()
        assert float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit) == pytest.approx(n_bytes, rel=0.01)


def test_fp32_parameters_are_the_masters():
    table = table_of(report_of(mlp(), bf16=None, zero_optimization={"stage": 0})[1], "Model state per device")
    assert table["parameters, float32"] == ["0 B", "equal to the masters"]


def test_layout_groups_leaves():
    _, text = report_of(llama())
    assert table_of(text, "Layout") == {
        "ends/embed": ["1", "16,384", "P('zero')"],
        "ends/head/kernel": ["1", "16,384", "P('zero')"],
        "ends/norm/scale": ["1", "64", "P()", "replicated"],
        "stack/attention/*": ["2", f"{3 * (64 * 128 + 64 * 64):,}", "P(None, 'zero')"],
        "stack/attention_norm/scale": ["1", "192", "P()", "replicated"],
        "stack/mlp/*": ["2", f"{3 * 3 * 64 * 96:,}", "P(None, 'zero')"],
        "stack/mlp_norm/scale": ["1", "192", "P()", "replicated"],
        "total": ["9", f"{TINY.num_parameters:,}"],
    }
    assert any("under stage3_param_persistence_threshold 100: 3 leaves, 448 elements" in line
               for line in section(text, "In effect"))  # fmt: skip


class Deep(linen.Module):
    """Twenty layers that are no layer stack."""

    @linen.compact
    def __call__(self, x):
        for i in range(20):
            x = linen.Dense(16, name=f"layers_{i}")(x)
        return x


def test_layout_of_many_layers_is_short():
    example = {"x": jnp.zeros((32, 16))}
    model = jzero.from_flax(Deep(), lambda m, batch: jnp.mean(m(batch["x"]) ** 2), example_batch=example)
    _, text = report_of(model)
    assert table_of(text, "Layout") == {
        "layers_*/kernel": ["20", "5,120", "P('zero')"],
        "layers_*/bias": ["20", "320", "P()", "replicated"],
        "total": ["40", "5,440"],
    }


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
FULL = {"policy": "full"}
DEFAULTS = [
    r"gradient_clipping 1: by global norm",
    r"a step whose gradient is not finite is skipped",
    r"optimizer Adam: lr 0.001",
    r"Adam: adam_w_mode is true, as in DeepSpeed: this is AdamW",
    r"WarmupLR: as in DeepSpeed, the first two optimizer steps run at warmup_min_lr 1e-05",
    r"learning rate by step: 0=1e-05, 1=1e-05, 2=0\.000\d+, .*1000=0.001",
    r"layer stack: 3 layers, unrolled; activation checkpointing none",
    r"attention kernel xla \(attention='auto', bfloat16\)",
]


@pytest.mark.parametrize(
    ("model", "changes", "says", "never"),
    [
        (llama, {"scheduler": WARMUP}, DEFAULTS, "Fallbacks"),
        (mlp, {"gradient_clipping": 0, "bf16": {"enabled": True, "check_grad_overflow": False}},
            [r"^  - gradient_clipping 0: off$", "check_grad_overflow false"], "skipped|activation checkpointing"),
        (mlp, {"bf16": None, "fp16": {"enabled": True}}, [r"^  - loss scale dynamic, from 65536$"], "static"),
        (mlp, {"bf16": None, "fp16": {"enabled": True, "loss_scale": 1}}, [r"^  - loss scale 1, static$"], "dynamic"),
        (lambda: llama(attention="cudnn"), {},
            [r"^  - attention kernel cudnn \(attention='cudnn', bfloat16\)$"], "kernel xla"),
        (mlp, {"gradient_allreduce_op": "SUM"},
            ["gradient_allreduce_op sum: gradients are 8 times those of the mean over the replicas"], "checkpointing"),
        (mlp, {"activation_checkpointing": FULL}, ["- activation checkpointing full$"], "host memory"),
        (mlp, {"activation_checkpointing": {**FULL, "cpu_checkpointing": True}},
            ["- activation checkpointing full, kept in host memory$"], "checkpointing none"),
    ],
    ids=["defaults", "off", "fp16", "static scale", "cudnn", "sum", "remat", "remat on the host"],
)  # fmt: skip
def test_what_is_in_effect(model, changes, says, never):
    lines = section(report_of(model(), **changes)[1], "In effect")
    for words in says:
        assert any(re.search(words, line) for line in lines), (words, lines)
    assert not any(re.search(never, line) for line in lines)


def test_every_flax_wrapper_forwards_the_models_notes():
    class Plain(nnx.Linear):
        def report_notes(self, dtype):
            return [f"plain in {dtype}"]

    class Flat(linen.Dense):
        def report_notes(self, dtype):
            return [f"flat in {dtype}"]

    def loss(module, batch):
        return jnp.mean(module(batch) ** 2)

    plain = jzero.from_flax(lambda rngs: Plain(8, 8, rngs=rngs), loss)
    assert "plain in bfloat16" in report_of(plain)[1]
    assert "flat in bfloat16" in report_of(jzero.from_flax(Flat(8), loss, example_batch=jnp.zeros((4, 8))))[1]


def test_replaced_keys():
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "allgather_bucket_size": "auto"}
    lines = section(report_of(mlp(), zero_optimization=zero)[1], "Replaced keys")
    assert len(lines) == 2, "keys of one reason share a line"
    assert any(line.startswith("  - zero_optimization.overlap_comm = true: XLA's latency-hiding") for line in lines)
    keys = 'zero_optimization.reduce_bucket_size = 5e+08, zero_optimization.allgather_bucket_size = "auto"'
    assert any(line.startswith(f"  - {keys}: XLA's collective combiner") for line in lines)
    assert section(report_of(mlp())[1], "Replaced keys") == []


def test_fallbacks():
    _, text = report_of(mlp(), activation_checkpointing=FULL, zero_optimization={"stage": 1})
    lines = section(text, "Fallbacks")
    assert "  - replicated, no dimension of (10,) is a multiple of 8: fc2/bias" in lines
    assert any("no layer stack" in line for line in lines)
    assert section(report_of(llama())[1], "Fallbacks") == []
    _, text = report_of(llama(), optimizer=optax.sgd(0.1))
    assert "  - optimizer section (Adam) not used: an optimizer was passed in" in section(text, "Fallbacks")
    assert "adam_w_mode" not in text


@pytest.mark.parametrize(("stage", "spec"), [(1, "P()"), (3, "P('zero')")])
def test_frozen_leaves_are_marked(stage, spec):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    table = table_of(report_of(mlp(), frozen_parameters=["fc1"], zero_optimization=zero)[1], "Layout")
    assert table["fc1/*"] == ["2", "100,480", spec, "frozen"]
    assert table["fc2/bias"] == ["1", "10", "P()", "replicated"]
    assert table["trained"] == ["2", "1,290", "1.27%"]


def test_fits_a_chat():
    """Plain ASCII, at most 100 columns, no trailing blanks: also with a config full of DeepSpeed's own keys."""
    zero_section = {
        **{key: True for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients")},
        **{key: 5e8 for key in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")},
        **{key: 10**9 for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size")},
    }
    others = {"zero_allow_untested_optimizer": True}
    for model in (llama(), mlp()):
        zero = {"stage": 3, **zero_section}
        step, text = report_of(model, zero_optimization=zero, activation_checkpointing=FULL, **others)
        assert len(step.config.replaced) == len(zero_section) + len(others)
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


def test_a_schedule_is_printed_with_its_values():
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000, "warmup_max_lr": None}}
    shown = (
        "WarmupDecayLR(total_num_steps=2000, warmup_min_lr=0.0, warmup_num_steps=1000, warmup_type='log', "
        "last_batch_iteration=-1, warmup_max_lr=0.001)"
    )
    for given, words in ((scheduler, shown), (None, "constant(lr=0.001)")):
        assert repr(report_of(mlp(), scheduler=given)[0].setup.optimizer.schedule) == words


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
    text = jzero.report(ran, html=tmp_path / "run.html")
    assert text.startswith("jzero run report")
    page = (tmp_path / "run.html").read_text()
    assert "Planned and measured" in page
    assert "on them" in page
    assert not re.search(r"(src|href)=\"http", page)


def test_measured_beside_planned(cpus, ran):
    """The program is the one that ran: XLA's own figures."""
    plan = observed(ran.step_fn, 0.5)
    stats = ran.step_fn.lower(rows(0)).compile().memory_analysis()
    assert plan.memory.xla.temps == stats.temp_size_in_bytes
    assert plan.measured.step_s == 0.5
    assert plan.gpus == 4
    assert plan.collectives


def test_no_page_without_a_step_or_a_gpu(ran, tmp_path):
    unused = jzero.make_train_step(Net(), config(), mesh=mesh())
    for step, words in ((unused, "did not run yet"), (ran.step_fn, "not a GPU that")):
        with pytest.raises(jzero.ConfigError, match=words):
            jzero.report(step, html=tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()
