"""The example programs learn, write their files, and report a user's mistake in one line."""

import argparse
import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.sampling import some
from helpers.stored_cases import check_cases

from experiments import clip, gpt, images, pretrain, quickstart, text, tokens
from experiments.tutorial import data_parallel, pipeline, zero1, zero2, zero3

PROGRAMS = [data_parallel, zero1, zero2, zero3, pipeline]
SMALL = {"d_model": 64, "num_heads": 2, "num_kv_heads": 1, "d_ff": 96}
LOSS = re.compile(r"^step +(\d+)   loss (\S+)", re.MULTILINE)


@pytest.mark.parametrize("program", some(PROGRAMS, [zero3, pipeline]), ids=lambda p: p.__name__.rsplit(".", 1)[1])
def test_tutorial_learns_the_digits(program, capsys):
    assert program.main() > 0.95
    if program is pipeline:
        printed = capsys.readouterr().out
        assert "stage 0: [LayerSpec(SimpleLayer, 784, 128, relu=True)] on devices [0, 1, 2, 3]" in printed
        assert "stage 1: [LayerSpec(SimpleLayer, 128, 10)] on devices [4, 5, 6, 7]" in printed
        assert "stage 0 | F0 | F1 ·  | F2 B0 | F3 B1 | ·  B2 | B3 |" in printed


@pytest.fixture
def library(tmp_path_factory, monkeypatch):
    """40 files of 5,000 bytes in the place of Python's own library, which takes long to list."""
    path = tmp_path_factory.mktemp("library")
    (path / "tests").mkdir()
    for i in range(40):
        (path / ("tests" * (i == 0)) / f"{i}.py").write_bytes(bytes([i]) * 5000)
    monkeypatch.setattr(text, "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": path}))


@pytest.fixture
def run_pretrain(monkeypatch, capsys):
    """`run_pretrain(options)` trains a small Llama and returns its output."""
    monkeypatch.setattr(pretrain, "CORPUS", 300_000)
    monkeypatch.setattr(pretrain, "HELD_OUT_BYTES", 1)  # one batch

    def run(options):
        shape = " ".join(f"--set {name}={value}" for name, value in SMALL.items())
        pretrain.main(f"{shape} --sequence 32 {options}".split())
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_pretrain_on_text_files(run_pretrain, tmp_path, capsys):
    """From text files to packed tokens to a model that learns, interrupted and resumed in another layout."""
    pytest.importorskip("tokenizers")
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(text.__doc__ * (1 + i % 3))
    tokens.main([str(tmp_path), "--bpe", "280", "--out", str(tmp_path)])
    said = r"tokens.npy: [\d,]+ tokens, vocabulary 280\n12 documents, \d\.\d\d bytes per token"
    assert re.search(said, capsys.readouterr().out)
    fp32 = "--override bf16.enabled=false --override gradient_accumulation_steps"
    options = f"--pack --data {tmp_path / 'tokens.npy'} {fp32}"
    once = run_pretrain(f"{options}=1 --steps 8 --eval-every 4")
    stages = "--override mesh.pipe=2 --override zero_optimization.stage=3"
    first = run_pretrain(f"{options}=2 --steps 5 --save {tmp_path} {stages}")
    rest = run_pretrain(f"{options}=1 --steps 8 --resume {tmp_path}")
    assert "vocab_size=320" in once
    assert once.count("held-out loss") == 2
    assert "pipe 2 x data 1 x zero 4" in first
    assert f"resumed from {tmp_path / 'global_step5'}" in rest
    expected, found = ({int(n): float(loss) for n, loss in LOSS.findall(out)} for out in (once, first + rest))
    assert expected.keys() == found.keys() == set(range(1, 9))
    assert found == pytest.approx(expected, abs=2e-4)
    assert expected[8] < expected[1] - 0.1


@pytest.mark.parametrize("options", [[], ["--bpe", "260"]])
def test_tokens_of_jsonl(options, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"né {i}\n"}) + "\n" for i in range(3)))
    (tmp_path / "b.txt").write_text("b")
    tokens.main([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt"), "--out", str(tmp_path), *options])
    assert f"vocabulary {options[1] if options else 257}\n4 documents, " in capsys.readouterr().out
    assert json.loads((tmp_path / "tokens.npy.json").read_text())["documents"] == 4
    assert (tmp_path / "tokenizer.json").exists() == bool(options)


@pytest.mark.slow
def test_quickstart_leaves_its_files(tmp_path, capsys):
    out = tmp_path / "run"
    override = '{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 200}}'
    quickstart.main(["--steps", "12", "--layers", "1", "--sequence", "32", "--out", str(out), "--config", override])
    printed = capsys.readouterr().out
    assert "held-out loss" in printed
    assert quickstart.PROMPT in printed
    assert {path.name for path in out.iterdir()} == {"checkpoint", "config.json", "metrics.csv", "loss.png"}
    config = json.loads((out / "config.json").read_text())
    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 200
    with (out / "metrics.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoint" / "latest").read_text() == "global_step12"


@pytest.mark.usefixtures("library")
def test_a_mistake_is_one_line(pytestconfig, capsys, tmp_path, monkeypatch):
    """Before anything is trained or written."""

    def outcome(case):
        program = {"pretrain": pretrain, "quickstart": quickstart, "tokens": tokens}[case[0]]
        with pytest.raises(SystemExit, match="2"):
            program.main(case[1].split())
        said = capsys.readouterr().err.splitlines()
        if program is not tokens:
            assert [line for line in said if not line.startswith("usage: ")] == said[-1:]
            assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]
        # Without what other versions of Python and later models change.
        return re.sub(r"(choose from |LlamaConfig\(|text has ).*", r"\1...", said[-1])

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("text")
    check_cases(Path(__file__).with_name("command_mistakes.jsonl"), outcome, pytestconfig)


@pytest.mark.usefixtures("library")
def test_the_corpus_its_windows_and_its_bigrams():
    """It splits by file and repeats; a window labels every byte with the next; bigrams are smoothed."""
    (train, held_out), again = text.standard_library(100_000), text.standard_library(100_000)
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(held_out, again[1])
    assert len(train) > len(held_out) > 0
    whole = np.bincount(train, minlength=40), np.bincount(held_out, minlength=40)
    assert sorted(sum(whole)) == [0] * 20 + [5000] * 20  # each file in one of them
    assert {*whole[0], *whole[1]} == {0, 5000}  # whole files
    assert sum(whole)[0] == 0  # of tests
    rows = text.windows(np.arange(10, dtype=np.uint8), 4)
    assert rows["inputs"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    train = np.frombuffer(b"ababab", np.uint8)  # a is followed by b three times, b by a twice
    loss = text.bigram_loss(train, np.array([[ord("a"), ord("b")]]), np.array([[ord("b"), ord("a")]]))
    assert loss == pytest.approx(-(np.log(4 / 259) + np.log(3 / 258)) / 2)


@pytest.mark.slow
def test_gpt(tmp_path, capsys):
    """On a text file; a byte at random costs log 256 = 5.5 nats."""
    shape = f"--layers 1 --width 64 --sequence 32 --steps 60 --text {argparse.__file__} --out {tmp_path}"
    losses, held_out, bigram = gpt.main([*shape.split(), "--prompt", "def "])
    assert len(losses) == 60
    assert losses[0] > 5
    assert held_out < 3.3
    assert 2 < bigram < 3
    sample = (tmp_path / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert len(sample.encode()) >= 32
    assert f"a sample:\n\n{sample}" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "steps", "first", "last", "least", "said"),
    [
        # One digit in ten is right by chance; the running statistics must be those of the training for more.
        (images, 46, 0, 1, 0.8, "held-out accuracy {:.1%}"),
        # One caption in 256 is right by chance.
        (clip, 80, 4, 3.8, 0.02, "captions found {:.1%}"),
    ],
)
def test_an_example_learns(program, steps, first, last, least, said, tmp_path, capsys):
    losses, found = program.main(["--steps", str(steps), "--out", str(tmp_path)])
    if program is images:
        assert len(found) == 2
        found = found[-1]
    assert len(losses) == steps
    assert losses[0] > first
    assert losses[-1] < last
    assert found > least
    assert said.format(found) in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
