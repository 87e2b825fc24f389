"""Names, the command `jzero import`, and what does not fit."""

import json
import shutil

import jax
import numpy as np
import pytest
from helpers.sampling import keep
from make_checkpoints import STEPS
from stored_runs import BOUND, about, batch, config_of, continued, make_engine, make_model

import jzero
from jzero.cli import main
from jzero.deepspeed import find_deepspeed
from jzero.deepspeed.import_run import BATCH, deepspeed_batch
from jzero.deepspeed.torch_files import TorchTensor
from jzero.deepspeed.zero_shards import DeepSpeedState, _add_module, _add_others, _place_in_groups, read_deepspeed
from jzero.mesh import make_mesh
from jzero.run.import_deepspeed import compare_names
from jzero.step.train_step import make_train_step

HERE = "my_mlp:make_model"


@pytest.fixture
def here(monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])


def test_the_command_writes_a_checkpoint(runs_of_deepspeed, tmp_path, capsys, here):
    directory = runs_of_deepspeed / "mlp-3-fp32"
    assert main(["import", str(directory / "ckpt"), str(tmp_path), "--model", HERE]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path}/global_step20\n")
    engine = make_engine(directory, "mlp", 2, 8)
    assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 3, "note": "twenty"}
    assert engine.global_samples == 160
    np.testing.assert_allclose(continued(engine, "mlp"), about(directory)["after"], rtol=BOUND["fp32"])


def test_names_of_both_sides(runs_of_deepspeed, tmp_path, capsys, here):
    """A file that the printed proposal makes turns our names into DeepSpeed's."""
    arguments = ["import", str(runs_of_deepspeed / "pipe-1-fp32" / "ckpt"), "--names", "--model", HERE]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"{runs_of_deepspeed / 'pipe-1-fp32' / 'ckpt' / 'global_step20'}\n")  # not broken
    assert "fc1.kernel" in printed
    assert "missing; perhaps 0.weight" in printed
    proposal = tmp_path / "rename.json"
    proposal.write_text(printed[printed.index("\n{") :])
    assert {**json.loads(proposal.read_text())}["^fc3[.]weight$"] == "4.weight"
    assert main([*arguments, "--rename", str(proposal)]) == 0


def test_a_model_of_images(runs_of_deepspeed, tmp_path, capsys):
    """The command asks for no batch, which only a plan makes of tokens."""
    config = {"model_type": "vit", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
              "intermediate_size": 64, "image_size": 16, "patch_size": 4, "num_channels": 3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    directory = runs_of_deepspeed / "mlp-1-fp32" / "ckpt"
    assert main(["import", str(directory), "--names", "--model", str(tmp_path)]) == 1
    assert "fc1.weight" in capsys.readouterr().out


def test_jzero_has_the_models():
    """As docs/from-deepspeed.md writes it, with `import jzero` alone; other tests have imported them already."""
    assert callable(jzero.__getattr__("models").from_hf)


def test_a_proposal_keeps_a_layers_tensors_together(runs_of_deepspeed):
    """The two biases of 7 have one shape; each is in a layer with another weight, so its shape alone is no proposal."""
    stored = read_deepspeed(runs_of_deepspeed / "mlp-1-fp32" / "ckpt" / "global_step20")
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    step = make_train_step(make_model("mlp"), config, mesh=make_mesh(devices=jax.devices()[:1]))
    text = compare_names(stored, step, {"^fc1": "x.fc2", "^fc2": "y.fc1"})[0]  # names that look like the other's
    proposed = json.loads(text[text.index("\n{") :])
    assert proposed["^x[.]fc2[.]bias$"] == "fc1.bias"
    assert proposed["^y[.]fc1[.]bias$"] == "fc2.bias"
    assert "perhaps fc1.bias, one of 2 with this shape" in text


def test_training_data_begin_at_their_start(runs_of_deepspeed, capfd):
    """DeepSpeed stores no position in the data."""
    directory = runs_of_deepspeed / "mlp-1-fp32"
    data = tuple(np.concatenate(parts) for parts in zip(*(batch("mlp", STEPS + n) for n in range(4)), strict=True))
    config = config_of(directory, 1) | {"seed": 1}
    engine = jzero.initialize(model=make_model("mlp"), config=config, training_data=data)[0]
    engine.load_checkpoint(directory / "ckpt")
    assert "has no position in training_data, which begins at its start" in capfd.readouterr().err
    assert engine.training_dataloader.position == {"epoch": 0, "samples": 0}
    assert np.isfinite(float(engine.train_batch()))


def test_the_global_batch_goes_on(runs_of_deepspeed):
    """A config of DeepSpeed with a micro-batch alone means another global batch on fewer devices."""
    directory = runs_of_deepspeed / "mlp-2-fp32"  # of four processes with two rows each
    config = {key: x for key, x in config_of(directory, 1).items() if key not in BATCH}
    config |= {"train_micro_batch_size_per_gpu": 2}
    mesh = make_mesh(devices=jax.devices()[:2])
    engine = jzero.initialize(model=make_model("mlp"), config=config, mesh=mesh)[0]
    assert engine.train_batch_size() == 4
    engine.load_checkpoint(directory / "ckpt")
    assert engine.train_batch_size() == 8
    np.testing.assert_allclose(continued(engine, "mlp"), about(directory)["after"], rtol=BOUND["fp32"])


AUTO = [(BATCH, 2, (8, 2, 2)), (BATCH[1:2], 4, (8, 2, 1)), (BATCH, 8, (8, 1, 1))]


@pytest.mark.parametrize(("keys", "devices", "sizes"), keep(AUTO, AUTO[:1]))
def test_a_batch_of_auto_becomes_deepspeeds(runs_of_deepspeed, keys, devices, sizes):
    """The default micro-batch of the Trainer, 8, is larger than the run's, and does not fit on two devices."""
    directory = runs_of_deepspeed / "mlp-2-fp32"  # of four processes with two rows each
    config = {key: x for key, x in config_of(directory, 1).items() if key not in BATCH} | dict.fromkeys(keys, "auto")
    mesh = make_mesh(devices=jax.devices()[:devices])
    engine = jzero.initialize(model=make_model("mlp"), config=config, mesh=mesh)[0]
    assert engine.get_batch_info() == (8 * devices, 8, 1)
    engine.load_checkpoint(directory / "ckpt")
    assert engine.get_batch_info() == sizes
    assert engine.step_fn.setup.batch_sizes[:3] == sizes
    np.testing.assert_allclose(continued(engine, "mlp", 5), about(directory)["after"][:5], rtol=BOUND["fp32"])


COUNTED = {"global_steps": 20, "global_samples": 160}


@pytest.mark.parametrize(
    ("model", "config", "sizes"),
    [
        ({"dp_world_size": 4}, {"train_batch_size": 8}, (8, 2, 4)),
        ({"dp_world_size": 4}, {"train_micro_batch_size_per_gpu": 2}, (8, 2, 4)),
        # DeepSpeed counts the devices of a sequence in dp_world_size, unless the config has data_parallel_size.
        ({"dp_world_size": 4}, {"train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 2}, (8, 4, 2)),
        ({"dp_world_size": 4}, {"train_batch_size": 8, "sequence_parallel_size": 2}, (8, 4, 2)),
        (
            {"dp_world_size": 2},
            {"train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 2, "data_parallel_size": 2},
            (8, 4, 2),
        ),
        ({"dp_world_size": 4}, {"train_micro_batch_size_per_gpu": 4}, None),  # an mpu's sequence: 8 samples a step
        ({"dp_world_size": 3}, {"train_batch_size": 8, "sequence_parallel_size": 2}, None),
        ({"dp_world_size": 4}, {"train_batch_size": 8, "sequence_parallel_size": None}, None),
        ({"dp_world_size": 4}, {"train_batch_size": 8, "sequence_parallel_size": 0}, None),
        ({"dp_world_size": None}, {"train_batch_size": 8}, None),
        ({}, {"train_batch_size": 8}, None),
        ({"dp_world_size": 3}, {"train_batch_size": 8}, None),
        ({"dp_world_size": 4}, {"train_batch_size": "auto"}, None),
        ({"dp_world_size": 4}, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, None),
        ({"dp_world_size": 4}, {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}, None),
        ({"dp_world_size": 4}, {"gradient_accumulation_steps": 2}, None),
    ],
)
def test_the_batch_that_the_files_say(model, config, sizes):
    """The product of config.py's equation, or nothing."""
    given = [config.get(key) for key in BATCH]
    expected = dict(zip(("train", "micro", "replicas", "given"), (*sizes, given), strict=True)) if sizes else {}
    assert deepspeed_batch(COUNTED | model, config) == expected


@pytest.mark.parametrize("text", ["{x", "[1]", '{"a": 1}', None])
def test_a_rename_of_another_form(runs_of_deepspeed, tmp_path, here, capsys, text):
    file = tmp_path / "rename.json"
    if text is not None:
        file.write_text(text)
    directory = runs_of_deepspeed / "mlp-1-fp32" / "ckpt"
    assert main(["import", str(directory), "--names", "--model", HERE, "--rename", str(file)]) != 0
    assert f'--rename {file}: must be a file of JSON, {{"regular expression"' in capsys.readouterr().err


def test_the_config_of_many_devices(runs_of_deepspeed, tmp_path, here):
    """The run's own file divides the batch over its 2 processes; the import has one device."""
    directory, file = runs_of_deepspeed / "mlp-1-fp32", tmp_path / "ds_config.json"
    config = config_of(directory, 1) | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    for more in ({"train_batch_size": 8, "mesh": {"data": 2}}, {}):
        file.write_text(json.dumps({key: x for key, x in config.items() if key != "train_batch_size"} | more))
        arguments = [str(directory / "ckpt"), str(tmp_path / f"out{len(more)}"), "--config", str(file)]
        assert main(["import", *arguments, "--model", HERE]) == 0
        notes = json.loads((tmp_path / f"out{len(more)}" / "global_step20" / "notes.json").read_text())["notes"][
            "notes"
        ]
        assert notes["batch"]["given"] == [8, None, None]  # the division is this machine's


def test_names_that_a_table_ignores(runs_of_deepspeed):
    """What the import accepts, the comparison does not call different: a buffer, a name that the table ignores."""
    stored = read_deepspeed(runs_of_deepspeed / "llama-2-fp32" / "ckpt" / "global_step20")
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    step = make_train_step(make_model("llama"), config, mesh=make_mesh(devices=jax.devices()[:1]))
    numbers = [TorchTensor(stored.path, np.dtype("f4"), (2,), 0)]
    stored.add("fp32", "model.layers.0.self_attn.rotary_emb.inv_freq", (2,), numbers)  # of an older transformers
    assert not compare_names(stored, step, None)[1]
    stored.add("fp32", "model.mine", (2,), numbers)
    assert "in DeepSpeed alone" in compare_names(stored, step, None)[0]


def test_other_names(runs_of_deepspeed):
    """A pattern or a function; the model is the same, under other names in a pipeline's files."""
    directory = runs_of_deepspeed / "pipe-1-fp32"
    number = {"fc1": "0", "fc2": "2", "fc3": "4"}
    found = []
    for rename in ({"^fc1": "0", "^fc2": "2", "^fc3": "4"}, lambda name: number[name[:3]] + name[3:]):
        engine = make_engine(directory, "mlp")
        engine.load_checkpoint(directory / "ckpt", rename=rename)
        found.append(jax.tree.map(np.asarray, engine.state.params))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *found)))


def test_another_model_is_refused(runs_of_deepspeed):
    engine = make_engine(runs_of_deepspeed / "mlp-1-fp32", "mlp")
    with pytest.raises(jzero.ConfigError, match=r"another model: missing fc1\.bias .*--names"):
        engine.load_checkpoint(runs_of_deepspeed / "pipe-1-fp32" / "ckpt")
    with pytest.raises(jzero.ConfigError, match="is no checkpoint of DeepSpeed"):
        engine.load_checkpoint(runs_of_deepspeed, tag="none", rename={"a": "b"})
    assert engine.global_steps == 0


def test_another_optimizer(runs_of_deepspeed):
    """SGD's momentum is not Adam's moment; without the optimizer's state the masters and the schedule go on."""
    directory = runs_of_deepspeed / "mlp-1-sgd"
    engine = make_engine(runs_of_deepspeed / "mlp-1-fp32", "mlp")
    with pytest.raises(jzero.ConfigError, match=r"belongs to another model or optimizer: .*mu"):
        engine.load_checkpoint(directory / "ckpt")
    engine.train_batch((np.zeros((8, 5), "f4"), np.zeros((8, 3), "f4")))
    engine.load_checkpoint(directory / "ckpt", load_optimizer_states=False)
    np.testing.assert_allclose(continued(engine, "mlp", 1), about(directory)["after"][:1], rtol=BOUND["fp32"])


def test_the_directory_of_a_tag(runs_of_deepspeed, tmp_path):
    """The checkpoint itself, its tag, and the weights alone; a tag of jzero may be "zero", as a universal folder."""
    (tmp_path / "jzero" / "zero").mkdir(parents=True)
    assert find_deepspeed(tmp_path / "jzero") is None
    directory = runs_of_deepspeed / "mlp-2-fp32"
    shutil.copytree(directory / "ckpt" / "global_step20", tmp_path / "mine")
    engine = make_engine(directory, "mlp")
    for arguments in ((tmp_path / "mine",), (tmp_path, "mine")):
        assert engine.load_checkpoint(*arguments, load_module_only=True)[0].endswith("mine")
    assert engine.global_steps == 0
    assert abs(continued(engine, "mlp", 1)[0] / about(directory)["after"][0] - 1) < BOUND["fp32"]


@pytest.mark.parametrize("files", keep(["bin", "shards", "safe"], ["shards", "safe"]))
def test_weights_alone(runs_of_deepspeed, tmp_path, capfd, here, files):
    """The files of zero_to_fp32.py have no optimizer state: the run begins at step 0 and prints a line about it."""
    directory = runs_of_deepspeed / "mlp-2-fp32"
    engine = make_engine(directory, "mlp", 2, 2)
    engine.train_batch(batch("mlp", 0))
    before = engine.state.opt_state
    path, client = engine.load_checkpoint(directory / f"weights-{files}")
    assert "counters stay as they are in this engine" in capfd.readouterr().out
    assert (path, client) == (str(directory / f"weights-{files}"), {})
    assert engine.global_steps == 1
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, engine.state.opt_state)))
    whole = make_engine(directory, "mlp")
    whole.load_checkpoint(directory / "ckpt")
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, whole.state.params, engine.state.params)))

    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of(directory, 0)))
    out = str(tmp_path / "out")
    assert main(["import", path, out, "--model", HERE, "--config", str(config)]) == 0
    assert "has weights alone" in capfd.readouterr().out
    whole.load_checkpoint(out)
    assert whole.global_steps == 0
    assert abs(continued(whole, "mlp", 1)[0] / about(directory)["after"][0] - 1) < BOUND["fp32"]


def test_weights_of_jzero_are_for_load_weights(runs_of_deepspeed, tmp_path):
    engine = make_engine(runs_of_deepspeed / "mlp-2-fp32", "mlp")
    engine.save_16bit_model(tmp_path)
    with pytest.raises(jzero.ConfigError, match=r"missing fc1\.weight.*read with engine\.load_weights\(DIRECTORY\)"):
        engine.load_checkpoint(tmp_path)
    engine.load_weights(tmp_path)


def test_buffers_keep_the_order_of_the_files(tmp_path):
    """Of a set, the order of text is another in every process."""
    names = [f"buffer{i}" for i in range(9)]
    module = {name: TorchTensor(tmp_path, np.dtype("f4"), (2,), 8 * i) for i, name in enumerate(names)}
    for add in (_add_module, lambda state, module: _add_others(state, {"module": module, "buffer_names": names}, [])):
        state = DeepSpeedState(tmp_path, {}, buffers=set(names))
        add(state, module)
        assert [*state.tensors["fp32"].entries] == names


def test_files_of_weights_that_are_no_weights(runs_of_deepspeed, tmp_path):
    """One of three is lost; a pickle of something else; and beside a checkpoint they do not count."""
    source = runs_of_deepspeed / "mlp-2-fp32"
    some = shutil.copytree(source / "weights-shards", tmp_path / "some")
    (some / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(jzero.ConfigError, match="has 2 files of weights, and their names say 3"):
        read_deepspeed(some)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(source / "ckpt" / "global_step20" / "mp_rank_00_model_states.pt", other / "pytorch_model.bin")
    with pytest.raises(jzero.ConfigError, match="is no file of weights by name"):
        read_deepspeed(other)
    both = shutil.copytree(source / "ckpt", tmp_path / "both")
    shutil.copy(source / "weights-bin" / "pytorch_model.bin", both)
    assert find_deepspeed(both) == both / "global_step20"
    assert find_deepspeed(both / "pytorch_model.bin") == both / "pytorch_model.bin"
    (both / "latest").unlink()
    assert find_deepspeed(both) == both


def test_groups_whose_moments_fit_in_two_ways(runs_of_deepspeed):
    """Files without ZeRO number the moments group by group; the shapes have to say which parameter each is of."""
    path = runs_of_deepspeed / "mlp-0-groups" / "ckpt" / "global_step20"
    moment = read_deepspeed(path).tensors["exp_avg"]
    assert {name: entry.shape for name, entry in moment.entries.items()}["fc2.weight"] == (7, 7)
    assert _place_in_groups([(7,), (3,), (7,)], [[(7,)], [(3,), (7,)]]) == [0, 1, 1]
    assert _place_in_groups([(7,), (7,)], [[(7,)], [(3,)]]) == []
    assert _place_in_groups([(7,), (7,)], [[(7,)], [(7,)]]) == []


def test_an_optimizer_without_the_frozen_parameters(runs_of_deepspeed):
    """Its numbers leave them out; the files of one process without ZeRO do not say which they are."""
    with pytest.raises(jzero.ConfigError, match=r"not all parameters.*save it once with ZeRO stage 1"):
        read_deepspeed(runs_of_deepspeed / "mlp-0-frozen" / "ckpt" / "global_step20")
