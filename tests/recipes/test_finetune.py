"""`jzero finetune` lowers the loss on every kind of sample, and writes what `transformers` and peft load."""

import json
import os
import signal
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from flax import nnx
from helpers.fine_tuning import ASKED, RECIPE, SAMPLES, SHAPE, TEXTS
from helpers.refusals import refuses

from jzero import cli
from jzero.launcher import options
from jzero.recipes import choices
from jzero.recipes.choices import Options
from jzero.recipes.finetune import TuningRun, finetune
from jzero.recipes.fitting import Fit
from jzero.recipes.starting_point import starting_point
from jzero.run.engine import Engine
from models import config_from_hf
from models.byte_tokenizer import byte_tokenizer
from models.decoder_config import ViTConfig
from models.named import add_adapters
from models.preferences import PreferenceDecoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


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


def test_models_that_cannot_be_tuned(tmp_path):
    neox = config_from_hf({"model_type": "gpt_neox", **SHAPE, "max_position_embeddings": 64})
    refuses(lambda: add_adapters("neox", neox, 16, None), "neox: files of gpt_neox have no matrices .* --method full")
    refuses(lambda: add_adapters("vit", ViTConfig(2, 32, 4, 48), 16, None), "vit: files of vit have no matrices")
    mixtral = config_from_hf({"model_type": "mixtral", **SHAPE})
    refuses(lambda: PreferenceDecoder(mixtral, rngs=nnx.Rngs(0)), "tunes no mixture of experts")
    byte_tokenizer().save_pretrained(tmp_path)
    bert = {"model_type": "bert", **SHAPE, "max_position_embeddings": 64, "type_vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    refuses(lambda: starting_point(str(tmp_path), None), "is a bert: jzero finetune tunes decoders; see")


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
    refuses(lambda: starting_point("tiny", None), r"model 'tiny' is unknown: .*; did you mean 'llama:tiny'\?")
    assert starting_point("qwen3-0.6b", str(directory)).tokenizer.chat_template == byte_tokenizer().chat_template
