"""A run of DeepSpeed goes on in jzero; names, the command `jzero import`, and what does not fit.

`make_checkpoints.py` has trained 20 steps with DeepSpeed 0.19.8 on two or four CPU processes, saved, and gone on for 20
steps; `checkpoints.tar.xz` has the checkpoints and the losses. So these tests run without DeepSpeed. CI makes some of
the checkpoints anew where DeepSpeed installs.
"""

import dataclasses
import json
import shutil
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.stored_cases import check_cases
from make_checkpoints import CASES, ROWS, STEPS
from stored_runs import about, batch, config_of, make_engine, make_model, make_step

import jzero
from jzero.cli import main
from jzero.deepspeed import find_deepspeed
from jzero.deepspeed.import_run import BATCH, deepspeed_batch
from jzero.deepspeed.torch_files import TorchTensor
from jzero.deepspeed.zero_shards import DeepSpeedState, _add_module, _add_others, _place_in_groups, read_deepspeed
from jzero.run.import_deepspeed import compare_names

# case of make_checkpoints.py, its directory, our stage, devices and pipeline stages; every stage of DeepSpeed's, both
# kinds of directory, every optimizer and kind of model, frozen parameters (in a universal checkpoint each rank has a
# part), and groups in bf16, whose masters are in files of their own
RUNS = [
    ("mlp-1-bf16", "universal", 3, 2, 1), ("mlp-1-sgd", "ckpt", 0, 1, 1), ("mlp-2-adagrad", "ckpt", 1, 1, 1),
    ("mlp-0-lamb", "ckpt", 0, 1, 1), ("mlp-3-lion", "ckpt", 1, 1, 1), ("mlp-0-muon", "ckpt", 0, 1, 1),
    ("mlp-0-bf16-fused", "ckpt", 3, 2, 1), ("mlp-0-bf16-groups", "ckpt", 0, 1, 1), ("pipe-1-fp32", "ckpt", 1, 2, 2),
    ("llama-3-bf16", "ckpt", 0, 1, 1), ("mlp-3-frozen", "universal", 1, 1, 1),
]  # fmt: skip
FP16 = [("mlp-0-fp16", "ckpt", 1, 1, 1), ("mlp-3-fp16", "ckpt", 1, 1, 1)]
# The other stages, precisions, models and kinds of checkpoint. CI makes some of them again.
MORE = [
    (case, folder, i % 4, (1, 2, 8)[i % 3], 2 if kind != "mlp" and i % 3 else 1)
    for i, (case, folder) in enumerate(product(sorted(CASES.keys() - {"mlp-0-frozen"}), ("ckpt", "universal")))
    for kind, *_, universal in [CASES[case]]
    if (folder == "ckpt" or universal) and (case, folder) not in {run[:2] for run in (*RUNS, *FP16)}
]


@pytest.mark.parametrize(("case", "folder", "stage", "devices", "pipe"), keep([*RUNS, *FP16, *MORE], [*RUNS, *FP16]))
def test_the_next_losses_are_deepspeeds(runs_of_deepspeed, case, folder, stage, devices, pipe):
    """The loss scale of fp16 grows at its 19th and 38th step. With ZeRO, DeepSpeed divides by the new scale there."""
    directory, (kind, _, precision, *_) = runs_of_deepspeed / case, case.split("-")
    if not (directory / folder).exists():
        pytest.skip("not among the cases that were made")
    engine = make_engine(directory, kind, stage, devices, pipe)
    path, client = engine.load_checkpoint(directory / folder)
    assert path.endswith("global_step20")
    assert client == {"epoch": 3, "note": "twenty"}
    assert (engine.global_steps, engine.global_samples) == (20, 160)
    if precision == "fp16":
        assert float(engine.state.loss_scale.scale) == 2.0**9
    steps = 18 if precision == "fp16" else STEPS
    goes_on(engine, directory, steps, kind, rtol=2e-2 if precision in ("bf16", "fp16") else 1e-5)
    if precision == "fp16":
        for n in range(steps, STEPS):
            engine.train_batch(batch(kind, STEPS + n))
        assert float(engine.state.loss_scale.scale) == about(directory)["scale"] == 2.0**10
    ours, theirs = engine.get_lr(), about(directory)["lr"]
    some = slice(1 if case.endswith(("groups", "muon")) else None)  # jzero's config says the groups in another way
    np.testing.assert_allclose(ours[some], theirs[some], rtol=1e-6)


def goes_on(engine, directory, steps=STEPS, kind="mlp", rtol=1e-5):
    """The next losses are those of DeepSpeed's own continuation."""
    losses = [float(engine.train_batch(batch(kind, STEPS + n))) for n in range(steps)]
    np.testing.assert_allclose(losses, about(directory)["after"][:steps], rtol=rtol)


@pytest.fixture
def command(monkeypatch):
    """Run `jzero import` for the model of the stored checkpoints; return its exit code."""
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    return lambda *arguments: main(["import", *map(str, arguments), "--model", "stored_runs:make_model"])


def engine_of(directory, devices, training_data=None, **batch_sizes):
    """An engine of DeepSpeed's config with other batch sizes."""
    config = {key: x for key, x in config_of(directory, 1).items() if key not in BATCH} | batch_sizes
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    return jzero.initialize(model=make_model(), config=config, mesh=mesh, training_data=training_data)[0]


def step_of(kind):
    return make_step(kind, '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}', 1, 1)


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_names_of_both_sides(runs_of_deepspeed, tmp_path, capsys, command):
    """A file that the printed proposal makes turns our names into DeepSpeed's; so does a function."""
    directory = runs_of_deepspeed / "pipe-1-fp32" / "ckpt"
    assert command(directory, "--names") == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"{directory / 'global_step20'}\n")  # not broken
    assert "fc1.kernel" in printed
    assert "missing; perhaps 0.weight" in printed
    proposal = tmp_path / "rename.json"
    proposal.write_text(printed[printed.index("\n{") :])
    names = json.loads(proposal.read_text())
    assert names["^fc3[.]weight$"] == "4.weight"
    assert command(directory, "--names", "--rename", proposal) == 0
    number, found, engine = {"fc1": "0", "fc2": "2", "fc3": "4"}, [], make_engine(directory.parent, "mlp")
    for rename in (names, lambda name: number[name[:3]] + name[3:]):
        nothing = jax.tree.map(lambda x: 0 * x, engine.state.params)
        engine.state = dataclasses.replace(engine.state, params=nothing)
        engine.load_checkpoint(directory, rename=rename)
        found.append(jax.device_get(engine.state.params))
    assert equal(*found)
    assert np.any(found[0]["fc3"]["bias"])


def test_a_model_of_images(runs_of_deepspeed, tmp_path, capsys):
    """The command asks for no batch, which only a plan makes of tokens."""
    config = {"model_type": "vit", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
              "intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_channels": 3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    directory = runs_of_deepspeed / "mlp-1-fp32" / "ckpt"
    assert main(["import", str(directory), "--names", "--model", str(tmp_path)]) == 1
    assert "fc1.weight" in capsys.readouterr().out


def test_a_proposal_keeps_a_layers_tensors_together(runs_of_deepspeed):
    """The two biases of 7 have one shape; each is in a layer with another weight, so its shape alone is no proposal."""
    stored = read_deepspeed(runs_of_deepspeed / "mlp-1-fp32" / "ckpt" / "global_step20")
    names = {"^fc1": "x.fc2", "^fc2": "y.fc1"}  # that look like the other's
    text = compare_names(stored, step_of("mlp"), names)[0]
    proposed = json.loads(text[text.index("\n{") :])
    assert proposed["^x[.]fc2[.]bias$"] == "fc1.bias"
    assert proposed["^y[.]fc1[.]bias$"] == "fc2.bias"
    assert "perhaps fc1.bias, one of 2 with this shape" in text


def test_names_that_a_table_ignores(runs_of_deepspeed):
    """What the import accepts, the comparison does not call different: a buffer, a name that the table ignores."""
    stored, step = read_deepspeed(runs_of_deepspeed / "llama-2-fp32" / "ckpt" / "global_step20"), step_of("llama")
    numbers = [TorchTensor(stored.path, np.dtype("f4"), (2,), 0)]
    stored.add("fp32", "model.layers.0.self_attn.rotary_emb.inv_freq", (2,), numbers)  # of an older transformers
    assert not compare_names(stored, step, None)[1]
    stored.add("fp32", "model.mine", (2,), numbers)
    assert "in DeepSpeed alone" in compare_names(stored, step, None)[0]


def test_training_data_begin_at_their_start(runs_of_deepspeed, capfd):
    """DeepSpeed stores no position in the data."""
    directory = runs_of_deepspeed / "mlp-1-fp32"
    data = tuple(np.concatenate(parts) for parts in zip(*(batch("mlp", STEPS + n) for n in range(4)), strict=True))
    engine = engine_of(directory, 1, data, train_batch_size=ROWS, seed=1)
    engine.load_checkpoint(directory / "ckpt")
    assert "has no position in training_data, which begins at its start" in capfd.readouterr().err
    assert engine.training_dataloader.position == {"epoch": 0, "samples": 0}


def test_the_global_batch_goes_on(runs_of_deepspeed):
    """A config of DeepSpeed with a micro-batch alone means another global batch on fewer devices."""
    directory = runs_of_deepspeed / "mlp-2-fp32"  # of four processes with two rows each
    engine = engine_of(directory, 2, train_micro_batch_size_per_gpu=2)
    assert engine.train_batch_size() == 4
    engine.load_checkpoint(directory / "ckpt")
    assert engine.train_batch_size() == 8


AUTO = [(BATCH, 2, (8, 2, 2)), (BATCH[1:2], 4, (8, 2, 1))]


@pytest.mark.parametrize(("keys", "devices", "sizes"), keep(AUTO, AUTO[:1]))
def test_a_batch_of_auto_becomes_deepspeeds(runs_of_deepspeed, keys, devices, sizes):
    """The default micro-batch of the Trainer, 8, is larger than the run's, and does not fit on two devices."""
    directory = runs_of_deepspeed / "mlp-2-fp32"  # of four processes with two rows each
    engine = engine_of(directory, devices, **dict.fromkeys(keys, "auto"))
    assert engine.get_batch_info() == (8 * devices, 8, 1)
    engine.load_checkpoint(directory / "ckpt")
    assert engine.get_batch_info() == engine.step_fn.setup.batch_sizes[:3] == sizes
    goes_on(engine, directory, 5)


def test_the_batch_that_the_files_say(pytestconfig):
    """The product of config.py's equation, or nothing.

    DeepSpeed counts the devices of a sequence in dp_world_size, unless the config has data_parallel_size; with those
    that an mpu makes it has 8 samples a step.
    """

    def outcome(case):
        counters = {"global_steps": 20, "global_samples": 160, "dp_world_size": case["dp_world_size"]}
        return deepspeed_batch(counters, case["config"])

    check_cases(Path(__file__).with_name("stored_batches.jsonl"), outcome, pytestconfig)


def test_a_rename_of_another_form(runs_of_deepspeed, tmp_path, command, capsys):
    directory, file = runs_of_deepspeed / "mlp-1-fp32" / "ckpt", tmp_path / "rename.json"
    for text in (None, "{x", "[1]", '{"a": 1}'):
        if text is not None:
            file.write_text(text)
        assert command(directory, "--names", "--rename", file) != 0
        assert f'--rename {file}: must be a file of JSON, {{"regular expression"' in capsys.readouterr().err


def test_the_command_and_the_config_of_many_devices(runs_of_deepspeed, tmp_path, capsys, command):
    """The run's own file divides the batch over its 2 processes; the import has one device. The checkpoint goes on."""
    directory, file, out = runs_of_deepspeed / "mlp-1-fp32", tmp_path / "ds_config.json", tmp_path / "out"
    config = config_of(directory, 1) | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    del config["train_batch_size"]
    file.write_text(json.dumps(config | {"mesh": {"data": 2}}))
    assert command(directory / "ckpt", out, "--config", file) == 0
    notes = json.loads((out / "global_step20" / "notes.json").read_text())["notes"]["notes"]
    assert notes["batch"]["given"] == [8, None, None]  # the division is this machine's
    assert capsys.readouterr().out.endswith(f"{out}/global_step20\n")
    engine = make_engine(directory, "mlp")
    assert engine.load_checkpoint(out)[1] == {"epoch": 3, "note": "twenty"}
    assert engine.global_samples == 160
    goes_on(engine, directory)


def test_another_model_and_another_optimizer(runs_of_deepspeed):
    """Another model's names are refused.

    SGD's momentum is not Adam's moment; without the optimizer's state the masters and the schedule go on.
    """
    directory = runs_of_deepspeed / "mlp-1-sgd"
    engine = make_engine(runs_of_deepspeed / "mlp-1-fp32", "mlp")
    words = r"another model: missing fc1\.bias .*--names"
    refuses(lambda: engine.load_checkpoint(runs_of_deepspeed / "pipe-1-fp32" / "ckpt"), words)
    words = "is no checkpoint of DeepSpeed"
    refuses(lambda: engine.load_checkpoint(runs_of_deepspeed, tag="none", rename={"a": "b"}), words)
    refuses(lambda: engine.load_checkpoint(directory / "ckpt"), r"belongs to another model or optimizer: .*mu")
    assert engine.global_steps == 0
    engine.train_batch((np.zeros((8, 5), "f4"), np.zeros((8, 3), "f4")))
    engine.load_checkpoint(directory / "ckpt", load_optimizer_states=False)
    goes_on(engine, directory, 1)


def test_weights_alone(runs_of_deepspeed, tmp_path, capfd, command):
    """The files of zero_to_fp32.py have no optimizer state: the run begins at step 0 and prints a line about it."""
    directory, config = runs_of_deepspeed / "mlp-2-fp32", tmp_path / "config.json"
    engine, whole = (make_engine(directory, "mlp") for _ in range(2))
    whole.load_checkpoint(directory / "ckpt")
    for steps, files in enumerate(("bin", "shards", "safe"), 1):
        engine.train_batch(batch("mlp", 0))
        before, path = engine.state.opt_state, str(directory / f"weights-{files}")
        assert engine.load_checkpoint(path) == (path, {})
        assert "counters stay as they are in this engine" in capfd.readouterr().out
        assert engine.global_steps == steps
        assert equal(before, engine.state.opt_state)
        assert equal(whole.state.params, engine.state.params)

    config.write_text(json.dumps(config_of(directory, 0)))
    assert command(path, tmp_path / "out", "--config", config) == 0
    assert "has weights alone" in capfd.readouterr().out
    whole.load_checkpoint(tmp_path / "out")
    assert whole.global_steps == 0
    goes_on(whole, directory, 1)


def test_files_of_weights_that_are_no_weights(runs_of_deepspeed, tmp_path):
    """One of three is lost; a pickle of something else; and beside a checkpoint they do not count."""
    source = runs_of_deepspeed / "mlp-2-fp32"
    some = shutil.copytree(source / "weights-shards", tmp_path / "some")
    (some / "pytorch_model-00002-of-00003.bin").unlink()
    refuses(lambda: read_deepspeed(some), "has 2 files of weights, and their names say 3")
    shutil.copy(source / "ckpt" / "global_step20" / "mp_rank_00_model_states.pt", tmp_path / "pytorch_model.bin")
    refuses(lambda: read_deepspeed(tmp_path), "is no file of weights by name")
    both = shutil.copytree(source / "ckpt", tmp_path / "both")
    shutil.copy(source / "weights-bin" / "pytorch_model.bin", both)
    assert find_deepspeed(both) == both / "global_step20"
    assert find_deepspeed(both / "pytorch_model.bin") == both / "pytorch_model.bin"
    assert find_deepspeed(both / "global_step20") == find_deepspeed(both, "global_step20") == both / "global_step20"
    (both / "latest").unlink()
    assert find_deepspeed(both) == both
    (tmp_path / "jzero" / "zero").mkdir(parents=True)  # a tag of jzero may have the name of a universal folder
    assert find_deepspeed(tmp_path / "jzero") is None


def test_buffers_keep_the_order_of_the_files(tmp_path):
    """Of a set, the order of text is another in every process."""
    names = [f"buffer{i}" for i in range(9)]
    module = {name: TorchTensor(tmp_path, np.dtype("f4"), (2,), 8 * i) for i, name in enumerate(names)}
    for add in (_add_module, lambda state, module: _add_others(state, {"module": module, "buffer_names": names}, [])):
        state = DeepSpeedState(tmp_path, {}, buffers=set(names))
        add(state, module)
        assert [*state.tensors["fp32"].entries] == names


def test_groups_whose_moments_fit_in_two_ways():
    """Files without ZeRO number the moments group by group; the shapes have to say which parameter each is of."""
    assert _place_in_groups([(7,), (3,), (7,)], [[(7,)], [(3,), (7,)]]) == [0, 1, 1]
    assert _place_in_groups([(7,), (7,)], [[(7,)], [(3,)]]) == []
    assert _place_in_groups([(7,), (7,)], [[(7,)], [(7,)]]) == []


def test_an_optimizer_without_the_frozen_parameters(runs_of_deepspeed):
    """Its numbers leave them out; the files of one process without ZeRO do not say which they are."""
    path = runs_of_deepspeed / "mlp-0-frozen" / "ckpt" / "global_step20"
    refuses(lambda: read_deepspeed(path), r"not all parameters.*save it once with ZeRO stage 1")
