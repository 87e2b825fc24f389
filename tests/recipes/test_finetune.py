"""`jzero finetune` lowers the loss on every kind of sample, and writes what `transformers` and peft load."""

import json
import os
import signal
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.refusals import refuses

from jzero import cli
from jzero.config import Config
from jzero.config.sizes import MICRO
from jzero.errors import ConfigError
from jzero.launcher import options
from jzero.optimizers.lr_schedules import make_lr_schedule
from jzero.precision import settle_precision
from jzero.recipes import choices, fitting
from jzero.recipes.choices import Options
from jzero.recipes.examples import Examples, read_examples
from jzero.recipes.finetune import TuningRun, finetune
from jzero.recipes.fitting import Fit, choose_fit
from jzero.recipes.recipe_table import find_recipe
from jzero.recipes.starting_point import StartingPoint, starting_point
from jzero.run.engine import Engine
from models import config_from_hf
from models.byte_tokenizer import byte_tokenizer
from models.named import add_adapters
from models.preferences import PreferenceDecoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COLORS = {"snow": "white", "grass": "green", "coal": "black", "the sky": "blue", "a lemon": "yellow", "blood": "red"}
RECIPE = find_recipe("llama3-8b-lora-8xh100")
ASKED = [(f"Color of {thing}? ({i})", f"{thing} is {color}.") for thing, color in COLORS.items() for i in range(8)]
SAMPLES = {
    "text": lambda question, answer: {"text": f"{question} {answer}"},
    "completions": lambda question, answer: {"prompt": question, "completion": answer},
    "chat": lambda question, answer: {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    },
    "preferences": lambda question, answer: {"prompt": question, "chosen": f"{answer} Friend!", "rejected": answer},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory of `transformers` with a small Llama of random weights."""
    path, tokenizer = tmp_path_factory.mktemp("llama"), byte_tokenizer()
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path):
    def write(kind):
        path = tmp_path / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(SAMPLES[kind](*asked)) + "\n" for asked in ASKED))
        return path

    return write


def torch_loss(model, kind):
    """The loss of whole samples as `transformers` computes it."""
    tokenizer, losses = byte_tokenizer(), []
    for asked in ASKED[::6]:
        sample = SAMPLES[kind](*asked)
        if kind == "chat":
            text = tokenizer.apply_chat_template(sample["messages"], tokenize=False)
        else:
            text = "".join(sample.values())
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            losses.append(float(model(tokens, labels=tokens).loss))
    return np.mean(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    [("text", "full"), ("completions", "full"), ("chat", "lora"), ("preferences", "lora"), ("chat", "qlora")],
)
def test_loss_falls_and_the_model_loads(kind, method, directory, data, tmp_path, capsys):
    out = tmp_path / "out"
    options = {"out": out, "method": method, "steps": 24, "evaluations": 3, "lr": 3e-3 if method == "full" else 1e-2}
    options |= {"config": {"mesh": {"tensor": 2}}} if method == "qlora" else {}
    tuned = finetune(str(directory), data(kind), **options)
    assert len(tuned.losses) == 24
    assert tuned.held_out[tuned.best] == min(tuned.held_out.values()) < tuned.held_out[0] - 0.05
    if kind == "preferences":
        assert tuned.losses[0] == pytest.approx(np.log(2), abs=1e-4)  # the model is its own reference
    printed = capsys.readouterr().out
    assert f"--method {method}" in printed
    assert all(repr(prompt) in printed for prompt, _ in tuned.samples)
    assert len(tuned.samples) == 3
    load = transformers.AutoModelForCausalLM.from_pretrained
    before, after = load(directory, dtype=torch.float32), load(out / "model", dtype=torch.float32)
    if kind != "preferences":
        assert torch_loss(after, kind) < torch_loss(before, kind) - 0.05
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    prompt = torch.tensor([tokenizer(ASKED[0][0])["input_ids"]])
    assert after.generate(prompt, max_new_tokens=4, min_new_tokens=4).shape[1] == prompt.shape[1] + 4
    assert {path.name for path in (out / "checkpoints").iterdir()} >= {"best", "last", "latest"}
    if method != "full":
        peft = pytest.importorskip("peft")
        adapted = peft.PeftModel.from_pretrained(before, out / "adapters")
        np.testing.assert_allclose(adapted(prompt).logits.detach(), after(prompt).logits.detach(), atol=3e-2)


@pytest.mark.slow
def test_the_samples_of_a_gpt2_have_its_positions(data, tmp_path):
    tokenizer = byte_tokenizer()
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 48, "eos_token_id": tokenizer.eos_token_id}
    shape = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes)
    transformers.GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tuned = finetune(str(tmp_path), data("text"), out=tmp_path / "out", method="full", steps=2, length=48)
    assert [len(text) <= 24 for _, text in tuned.samples] == [True] * 3  # a token is a byte
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model.config.n_positions == 48


@pytest.mark.slow
def test_a_preset_stops_early_and_goes_back_to_its_best(data, tmp_path, capsys):
    """A rate far too high, so that the first evaluation stays the best."""
    out = tmp_path / "out"
    options = {"out": out, "steps": 12, "evaluations": 6, "patience": 2, "lr": 30.0, "method": "full"}
    tuned = finetune("llama:tiny", data("text"), **options)
    assert "stopped: no better held-out loss in --patience 2" in capsys.readouterr().out
    assert len(tuned.losses) < 12
    assert tuned.best < len(tuned.losses)
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    assert torch_loss(model, "text") == pytest.approx(tuned.held_out[tuned.best], abs=0.3)


def test_a_model_that_does_not_fit_names_the_method_that_does(directory, data, tmp_path, monkeypatch):
    """The step of all weights needs 9 MiB, that of adapters 2 MiB."""

    def choose_fit(make, config, rows, length, most):
        step, batch = make({**config, "train_micro_batch_size_per_gpu": 1})
        need = (9 if step.config.trainable_parameters is None else 2) * 2**20
        assert batch["inputs"].shape == (8, length)
        return Fit(1, "full", need) if need <= most else need

    monkeypatch.setattr(choices, "choose_fit", choose_fit)
    arguments = {"out": tmp_path / "out", "batch": 8, "method": "full", "memory": "4 MiB"}
    said = r"full does not fit: 9\.00 MiB of 4\.00 MiB per device; --method lora fits, peak 2\.00 MiB per device; "
    refuses(lambda: finetune(str(directory), data("text"), **arguments), said + "--method qlora fits")
    said = r"does not fit: 9\.00 MiB of 1\.00 MiB per device; shorter rows"
    refuses(lambda: finetune(str(directory), data("text"), **arguments | {"memory": "1 MiB"}), said)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "qlor"}, "--method qlor: must be one of full, lora, qlora"),
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"held_out": 1.0}, "--held_out 1.0: must be a share"),
        ({"batch": 3}, "--batch 3: must be a multiple of the 8 devices"),
        ({"batch": 800}, "smaller than the"),
        ({"micro_batch": 5, "batch": 16}, "--micro_batch 5: must divide the 2 rows"),
        ({"config": {"optimizr": {}}}, "optimizer"),
        ({"config": {"train_batch_size": 8}}, "--config has train_batch_size: give it as --batch"),
        ({"beta": float("nan")}, "--beta nan: must be positive"),
        ({"memory": 40}, "did you mean 40GB?"),
        ({"lenght": 3}, "resume; did you mean 'length'?"),
        ({"length": 4096, "pack": True}, "1 row of 4,096 tokens, too few for a step on 8 devices and"),
        ({"length": 4096, "batch": 8, "pack": True}, "smaller than the 1 row of chat.jsonl"),
        ({"recipe": "llama3-8b-lora-2xh100"}, "no such recipe; did you mean 'llama3-8b-lora-"),
        ({"recipe": "llama3-8b-pretrain-8xh100"}, "pretrains; name one of lora or qlora, or give --method"),
        ({"config": RECIPE.config}, "--config has trainable_parameters: give it as --method; a whole recipe as"),
        ({"method": "qlora", "quantize": "fp4"}, "--quantize fp4: must be one of nf4, int8"),
        ({"method": "full", "rank": 8}, "--rank 8: is for --method lora and qlora, and not used here"),
        ({"quantize": "int8", "beta": 0.2}, "--beta 0.2: is for preferences (chosen, rejected), and not used here"),
    ],
)
def test_options_that_cannot_be(options, words, directory, data, tmp_path):
    with pytest.raises(ConfigError) as error:
        finetune(str(directory), data("chat"), out=tmp_path / "out", **options)
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_length_beyond_the_models_positions_is_said(directory, tmp_path):
    start = starting_point(str(directory), None)
    for length, words in ((1024, "as asked, beyond the model's max_position_embeddings 512"), (512, "as asked")):
        assert choices.encode_rows(start, TEXTS, Options(out=tmp_path, length=length))[1] == words


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


def test_mistakes_in_the_command_are_one_line(directory, data, tmp_path, capsys):
    for path in ("full/file", "run/model/config.json"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    chat = data("chat")
    for words, said in (
        (["none/none", chat], "none/none: no such directory, and not in the cache"),
        (["qwen3-9b", chat], "model 'qwen3-9b' is unknown: must be a directory with config.json, a hub id"),
        (["qwen3-8b", chat, "--method", "qlora"], "--method qlora: qwen3-8b has no weights to quantise"),
        ([directory, tmp_path / "none.jsonl"], "none.jsonl: no such file or directory"),
        ([directory, chat, "--out", tmp_path / "full"], "exists and is not an empty directory"),
        ([tmp_path / "full", chat], "full/config.json: no such file or directory\n"),
        ([tmp_path / "run", chat], f"no such file or directory; {tmp_path / 'run' / 'model'} has one"),
        ([chat, "llama:tiny"], f"swapped? jzero finetune llama:tiny {chat}"),
    ):
        assert cli.main(["finetune", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


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


SHAPE = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": None}  # fmt: skip
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


TEXTS = Examples("text", [{"text": "hello, world. " * 400}], "x")


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


def test_models_that_cannot_be_tuned(tmp_path):
    neox = config_from_hf({"model_type": "gpt_neox", **SHAPE, "max_position_embeddings": 64})
    refuses(lambda: add_adapters("neox", neox, 16, None), "neox: files of gpt_neox have no matrices .* --method full")
    refuses(lambda: add_adapters("vit", object(), 16, None), "vit: takes no adapters")
    mixtral = config_from_hf({"model_type": "mixtral", **SHAPE})
    refuses(lambda: PreferenceDecoder(mixtral, rngs=nnx.Rngs(0)), "tunes no mixture of experts")
    byte_tokenizer().save_pretrained(tmp_path)
    bert = {"model_type": "bert", **SHAPE, "max_position_embeddings": 64, "type_vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    refuses(lambda: starting_point(str(tmp_path), None), "is a bert: jzero finetune tunes decoders; see")


def test_a_rate_stays_when_the_config_has_another_optimizer():
    own = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    made = choices.merged_sections(own, {"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.99]}}})
    assert made["optimizer"] == {"type": "Lion", "params": {"betas": [0.9, 0.99], "lr": 0.5}}


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
    """The warm-up is a line through 0 before the first step; the cosine ends after the last."""
    section = choices.warmup_cosine(2e-4, steps)
    schedule = make_lr_schedule(section["type"], section["params"], 2e-4)
    rates, warmup = np.array([schedule.lr(n) for n in range(steps)]), max(1, steps // 30)
    np.testing.assert_allclose(rates[:warmup], [2e-4 * (n + 1) / (warmup + 1) for n in range(warmup)], rtol=1e-6)
    cosine = (1 + np.cos(np.pi * np.arange(steps - warmup) / max(1, steps - warmup))) / 2
    np.testing.assert_allclose(rates[warmup:], 2e-4 * cosine, rtol=1e-5, atol=1e-10)  # 2e-4 in float32
    assert (rates > 0).all()


def test_losses_that_are_not_finite(monkeypatch, tmp_path):
    """The first stops the run; a later one is never the best."""

    def engine(*losses):
        made = Mock(**{"eval_batch.side_effect": losses, "global_steps": 0, "train_batch_size.return_value": 1})

        def step(batches):
            made.global_steps += 1
            return 1.0

        made.train_batch = step
        return made

    monkeypatch.setattr("jzero.recipes.finetune.DataLoader", MagicMock())
    rows, shape = TEXTS.rows(byte_tokenizer(), 32, 258, True), config_from_hf({"model_type": "llama", **SHAPE})
    made = choices.Choices({}, None, shape, rows, np.arange(1), np.arange(2), 3, [])
    arguments = made, np.zeros((len(rows), 2)), Options(out=tmp_path, evaluations=3)
    refuses(lambda: TuningRun(engine(np.nan), *arguments).train(), "held-out loss is nan before the first step")
    trained = engine(2.0, np.nan, 1.0, -np.inf)
    TuningRun(trained, *arguments).train()
    assert [call.args[1] for call in trained.save_checkpoint.call_args_list] == ["best", "last", "best", "last"]


def test_an_interrupted_run_goes_on(directory, data, tmp_path, monkeypatch):
    """Ctrl-C ends it after the step that runs; then the losses are those of a run that was not interrupted."""
    options = {"method": "lora", "lr": 1e-2, "batch": 8, "length": 64, "evaluations": 2, "steps": 6}
    path, train_batch = data("completions"), Engine.train_batch

    def interrupted(engine, batches):
        loss = train_batch(engine, batches)
        if engine.global_steps == 3:  # which is evaluated before the save
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    whole = finetune(directory, path, out=tmp_path / "whole", **options)
    options["out"] = tmp_path / "out"
    monkeypatch.setattr(Engine, "train_batch", interrupted)
    with pytest.raises(KeyboardInterrupt, match="--resume continues after step 3"):
        finetune(directory, path, **options)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    refuses(lambda: finetune(directory, path, **options), "name a new one, or add --resume to continue its run")
    again = finetune(directory, path, resume=True, **options)
    assert (again.losses, again.held_out, again.samples) == (whole.losses, whole.held_out, whole.samples)
    refuses(lambda: finetune(directory, path, resume=True, **options | {"lr": 1.0}), "has --lr 0.01: give the same")
    recipe = options | {"recipe": RECIPE.name, "micro_batch": 1}
    refuses(lambda: finetune(directory, path, resume=True, **recipe), "has no --recipe: give the same")
    path.write_text(path.read_text().replace("green", "lilac"))
    refuses(lambda: finetune(directory, path, resume=True, **options), "out has rows of DATA ")


def test_the_command_has_every_option():
    parsed = options.parse_other("finetune", ["m", "d", "--steps", "3", "--no_pack", "--lr", "1e-3"])
    assert vars(parsed) == {"model": "m", "data": "d", "steps": 3, "pack": False, "lr": 1e-3}
    names = {settings.get("dest", flags[0].lstrip("-")) for flags, settings in options.FINETUNE}
    assert names == set(Options.__dataclass_fields__)


def test_models_by_name(directory):
    assert starting_point(str(directory), None).directory == directory
    start = starting_point("qwen3-0.6b", None)
    assert (start.shape.d_model, start.shape.vocab_size, start.directory) == (1024, 258, None)
    assert starting_point("llama:tiny", None).shape.num_layers == 4
    assert starting_point("moe:mixtral-8x7b", None).shape.mixture.num_experts == 8
    assert starting_point("gpt2:xl", None).shape.max_positions == 1024
    refuses(lambda: starting_point("tiny", None), r"model 'tiny' is unknown: .*; did you mean 'llama:tiny'\?")
    assert starting_point("qwen3-0.6b", str(directory)).tokenizer.chat_template == byte_tokenizer().chat_template


EACH = {"none": 100, "matmuls": 40, "full": 10}  # bytes of a row, besides 100 of state


@pytest.fixture
def compiled(monkeypatch):
    """(the steps that were compiled, the function that makes one); memory is linear in the micro-batch."""
    tried = []

    def make(config):
        tried.append((config[MICRO], config["activation_checkpointing"]["policy"]))
        peak = 100 + tried[-1][0] * EACH[tried[-1][1]]
        return SimpleNamespace(lower=lambda batch: SimpleNamespace(compile=lambda: peak)), None

    monkeypatch.setattr(fitting, "memory", lambda peak, step: SimpleNamespace(peak=peak))
    return tried, make


@pytest.mark.parametrize(
    ("most", "length", "expected"),
    [
        (10_000, 512, Fit(16, "none", 1700)),  # all rows at once
        (1000, 512, Fit(8, "none", 900)),  # 8 x 512 tokens are enough
        (1000, 64, Fit(16, "matmuls", 740)),  # small rows: recompute for a larger micro-batch
        (300, 64, Fit(16, "full", 260)),
        (190, 64, Fit(8, "full", 180)),
        (110, 64, Fit(1, "full", 110)),
        (109, 64, 110),  # nothing fits; this much would be needed
    ],
)
def test_the_fastest_that_fits(most, length, expected, compiled):
    tried, make = compiled
    assert choose_fit(make, {}, rows=16, length=length, most=most) == expected
    assert len(tried) == len(set(tried)) <= 9


def test_what_is_given_is_kept(compiled):
    _, make = compiled
    kept = {"activation_checkpointing": {"policy": "full"}}
    assert choose_fit(make, kept, 16, 64, 10_000) == Fit(16, "full", 260)
    assert choose_fit(make, {MICRO: 2}, 16, 64, 250) == Fit(2, "matmuls", 180)
