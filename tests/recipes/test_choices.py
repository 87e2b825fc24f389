"""`jzero finetune` chooses what no option says, and refuses options that cannot be."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.fine_tuning import RECIPE, SAMPLES, SHAPE, TEXTS
from helpers.refusals import refuses
from helpers.stored_cases import check_cases

from jzero.config import Config
from jzero.config.sizes import MICRO
from jzero.optimizers.lr_schedules import make_lr_schedule
from jzero.precision import settle_precision
from jzero.recipes import choices, fitting
from jzero.recipes.choices import Options
from jzero.recipes.examples import Examples, read_examples
from jzero.recipes.finetune import finetune
from jzero.recipes.fitting import Fit, choose_fit
from jzero.recipes.starting_point import StartingPoint, starting_point
from models import config_from_hf
from models.byte_tokenizer import byte_tokenizer

pytest.importorskip("transformers")


def test_options_that_cannot_be(directory, data, tmp_path, pytestconfig):
    chat = data("chat")

    def outcome(options):
        said = refuses(lambda: finetune(str(directory), chat, out=tmp_path / "out", **options))
        assert not (tmp_path / "out").exists()
        return said.replace(str(tmp_path), "HERE")

    check_cases(Path(__file__).with_name("options.jsonl"), outcome, pytestconfig)


def test_few_samples_have_a_row_each(directory):
    """Packed are they if that leaves a batch and a row held out, or if it is asked."""
    start, packs = starting_point(str(directory), None), "--pack: several samples a row; "
    for count, given, packed, words in (
        (60, {}, False, "--no_pack: one sample a row; packed, they fill only 7 rows; "),
        (60, {"pack": True}, True, packs),
        (60, {"batch": 4}, True, packs),
        (200, {}, True, packs),
        (200, {"pack": False}, False, "--no_pack: one sample a row; "),
    ):
        chats = [SAMPLES["chat"]("a", "b" * (1 if i else 200)) for i in range(count)[::-1]]
        data, _, why = choices.encode_rows(start, Examples("chat", chats, "x"), Options(**given))
        assert (data.packs, why, packed or len(data)) == (packed, words, packed or count)


@pytest.mark.parametrize(("kind", "rate"), [("chat", 2e-4), ("preferences", 2e-5)])
def test_a_recipe_decides_what_no_option_does(kind, rate, directory, data, tmp_path):
    start, examples = starting_point(str(directory), None), read_examples(data(kind))
    given = {"batch": 16, "steps": 5, "config": {"zero_optimization": {"stage": 2}}}
    found = choices.choose(start, examples, Options(out=tmp_path, recipe=RECIPE.name, **given))
    method, _, _, batch, steps, *_, stage = found.lines[1:]
    assert method == "--method lora (recipe): adapters of --rank 16 at all matrices"
    assert batch.startswith("--batch 16 rows a step; --micro_batch 2 (recipe), --recompute matmuls (recipe): ")
    assert steps == f"--lr {rate:g}{' (recipe)' * (kind == 'chat')}; --steps 5"
    assert stage == "ZeRO stage 2 on 8 devices, with the sections of --recipe (--config)"
    assert found.config["stack"] == {"unroll": False}
    assert found.config["optimizer"]["params"] == {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.0}
    assert (found.config["train_batch_size"], found.config[MICRO]) == (16, 2)
    assert found.config["scheduler"] == choices.warmup_cosine(rate, 5)  # of this run, not of the recipe's
    assert found.config["bf16"] == {"enabled": "auto"}
    other = choices.merged_sections(found.config, {"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.99]}}})
    assert other["optimizer"] == {"type": "Lion", "params": {"betas": [0.9, 0.99], "lr": rate}}  # the rate stays


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("family", "more", "modules"),
    [("phi3", {}, ("o_proj", "down_proj")), ("glm4", {"head_dim": 8}, (*QKVO, "down_proj")), ("mixtral", {}, QKVO)],
)
def test_adapters_are_at_the_matrices_of_the_family(family, more, modules, tmp_path):
    shape = config_from_hf({"model_type": family, **SHAPE, **more})
    start = StartingPoint(family, shape, byte_tokenizer(), tmp_path)
    found = choices.choose(start, TEXTS, Options(out=tmp_path))
    assert found.shape.lora.target_modules == modules
    assert f"--method lora: adapters of --rank 16 at {', '.join(modules)}" in found.lines
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(found.model.init, jax.random.key(0)))
    assert {path[-2].key for path, _ in leaves if path[-1].key == "lora_a"} == set(modules)


T4 = SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
H100 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")


@pytest.mark.parametrize(
    ("given", "on_a_t4", "on_an_h100"),
    [
        ({}, "fp16", "bf16"),
        ({"fp16": {"enabled": True}}, "fp16", "fp16"), ({"bf16": {"enabled": True}}, "bf16", "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"check_grad_overflow": False}}, "fp16", "fp16"),
        ({"fp16": {"enabled": "auto"}}, "fp16", "bf16"), ({"fp16": {"initial_scale_power": 12}}, "fp16", "bf16"),
        ({"bf16": {"check_grad_overflow": False}}, "fp16", "bf16"),
        ({"fp16": {"enabled": False}}, "fp32", "bf16"), ({"bf16": {"enabled": False}}, "fp16", "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32", "fp32"),
    ],
)  # fmt: skip
def test_the_half_precision_is_the_devices(given, on_a_t4, on_an_h100):
    """A T4, Colab's GPU, multiplies fast in fp16 alone. A --config decides by an `enabled` of its own."""
    made = choices.merged_sections(choices.base_config(16, 1e-4, Options(), "lora", 1), given)
    for device, expected in ((T4, on_a_t4), (H100, on_an_h100)):
        assert settle_precision(Config.load(made), {"w": np.zeros(2, np.float32)}, device)[0].precision == expected


@pytest.mark.parametrize("steps", [1, 90])
def test_no_step_is_taken_at_rate_zero(steps):
    """The warm-up is a line through 0 before the first step; the schedule's end comes after the last."""
    section = choices.warmup_cosine(2e-4, steps)
    schedule = make_lr_schedule(section["type"], section["params"], 2e-4)
    rates, warmup = np.array([schedule.lr(n) for n in range(steps)]), max(1, steps // 30)
    np.testing.assert_allclose(rates[:warmup], [2e-4 * (n + 1) / (warmup + 1) for n in range(warmup)], rtol=1e-6)
    cosine = (1 + np.cos(np.pi * np.arange(steps - warmup) / max(1, steps - warmup))) / 2
    np.testing.assert_allclose(rates[warmup:], 2e-4 * cosine, rtol=1e-5, atol=1e-10)  # 2e-4 in float32
    assert (rates > 0).all()


EACH = {"none": 100, "matmuls": 40, "full": 10}  # bytes of a row, besides 100 of state


@pytest.mark.parametrize(
    ("given", "most", "length", "expected"),
    [
        ({}, 10_000, 512, Fit(16, "none", 1700)),  # all rows at once
        ({}, 1000, 512, Fit(8, "none", 900)),  # 8 x 512 tokens are enough
        ({}, 1000, 64, Fit(16, "matmuls", 740)),  # small rows: recompute for a larger micro-batch
        ({}, 300, 64, Fit(16, "full", 260)),
        ({}, 190, 64, Fit(8, "full", 180)),
        ({}, 110, 64, Fit(1, "full", 110)),
        ({}, 109, 64, 110),  # nothing fits; this much would be needed
        ({"activation_checkpointing": {"policy": "full"}}, 10_000, 64, Fit(16, "full", 260)),  # what is given is kept
        ({MICRO: 2}, 250, 64, Fit(2, "matmuls", 180)),
    ],
)
def test_the_fastest_that_fits(given, most, length, expected, monkeypatch):
    """Memory is linear in the micro-batch; no step is compiled twice."""
    tried = []

    def make(config):
        tried.append((config[MICRO], config["activation_checkpointing"]["policy"]))
        peak = 100 + tried[-1][0] * EACH[tried[-1][1]]
        return SimpleNamespace(lower=lambda batch: SimpleNamespace(compile=lambda: peak)), None

    monkeypatch.setattr(fitting, "memory", lambda peak, step: SimpleNamespace(peak=peak))
    assert choose_fit(make, given, rows=16, length=length, most=most) == expected
    assert len(tried) == len(set(tried)) <= 9
