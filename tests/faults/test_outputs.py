"""The keys that name files to write: all are known, checked at the start, and none takes another's file."""

import contextlib
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero.config.config import OUTPUTS
from jzero.config.fields import kind_of
from jzero.config.screen import FIELDS
from jzero.errors import PassingError
from jzero.files import read_file
from jzero.values import kinds

ROOT = Path(__file__).parents[2]
NOBODY = 65534


class Regression:
    def init(self, rng):
        return {"w": jnp.zeros((3,))}

    def loss(self, params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)


BATCH = {"x": np.ones((8, 3), np.float32)}
CONFIG = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
FILES = ("csv_monitor", "jsonl_monitor", "tensorboard")
SERVICES = ("wandb", "comet")


def sections(key, path):
    """Return the config that writes to the path."""
    section, _, name = key.partition(".")
    on = {
        "checkpoint": {}, "non_finite": {"action": "stop"}, "flops_profiler": {"enabled": True},
        "profiler": {"steps": [1, 1]},
    }.get(section, {"enabled": True, "job_name": ""})  # fmt: skip
    return {section: {**on, name: str(path)}}


def start(key, path):
    if key == "resume":
        return jzero.initialize(model=Regression(), config=CONFIG, resume=path)[0]
    return jzero.initialize(model=Regression(), config=CONFIG | sections(key, path))[0]


# ------------------------------------------------------------------ what a config can reach


def test_every_text_that_names_a_file_is_known():
    """A new key with a text is a path, and in the table, or in this list."""
    texts = {key for key, field in FIELDS.items() if kind_of(field) in (kinds.TEXT, kinds.TEXT_OR_NULL)}
    no_path = {"optimizer.type", "scheduler.type"}
    no_path |= {key for key in texts if key.partition(".")[0] in SERVICES}
    assert {key for keys in OUTPUTS for key in keys} == texts - no_path


def test_the_security_page_names_them():
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (`.+?`) \| .+ \|$", text, re.MULTILINE)
    named = [key for row in rows for key in re.findall(r"`([\w.]+)`", row)]
    assert sorted(named) == sorted([*(key for keys in OUTPUTS for key in keys), *SERVICES, "compiler_options"])


@pytest.mark.parametrize("theirs", ["text", "link", "empty", "directory"])
def test_a_table_of_flops_replaces_only_its_own(tmp_path, theirs):
    mine, file = tmp_path / "mine", tmp_path / "there"
    mine.write_text("precious")
    {
        "text": lambda: file.write_text("precious"), "link": lambda: file.symlink_to(mine),
        "empty": file.touch, "directory": file.mkdir,
    }[theirs]()  # fmt: skip
    with pytest.raises(jzero.ConfigError, match=r"flops_profiler.output_file = '.*there': is not a table that jzero"):
        start("flops_profiler.output_file", file)
    assert mine.read_text() == "precious"
    assert theirs != "text" or file.read_text() == "precious"
    assert theirs != "link" or file.is_symlink()


def test_a_file_that_appears_after_the_start_is_not_replaced(tmp_path, capfd):
    file = tmp_path / "table"
    engine = start("flops_profiler.output_file", file)
    file.write_text("precious")
    for _ in range(2):  # the first one compiles
        engine.train_batch(BATCH)
    engine._observers.close()
    assert file.read_text() == "precious"
    assert "is not a table that jzero wrote" in capfd.readouterr().out
    file.unlink()
    for _ in range(2):  # the second run replaces the first one's
        engine = start("flops_profiler.output_file", file)
        for _ in range(2):
            engine.train_batch(BATCH)
        assert file.read_text().startswith("FLOPs of step 2: ")


@pytest.mark.parametrize(
    ("key", "name", "refused"),
    [
        ("csv_monitor", "Train_Samples_lr.csv", pytest.warns(RuntimeWarning, match="csv_monitor: no more curves")),
        ("jsonl_monitor", "metrics.jsonl", pytest.raises(jzero.ConfigError, match="jsonl_monitor: ")),
    ],
)
def test_monitors_follow_no_link(tmp_path, key, name, refused):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / name).symlink_to(tmp_path / "mine")
    with refused:
        engine = start(f"{key}.output_path", tmp_path)
        engine.train_batch(BATCH)
        engine._observers.close()
    assert (tmp_path / "mine").read_text() == "precious"


# ------------------------------------------------------------------ places that cannot be written


@contextlib.contextmanager
def not_as_root():
    """Have the rights of another user; root may write everywhere."""
    user = os.geteuid()
    os.seteuid(user or NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


FAULTS = {  # id: (path below a folder with such things, words of the error)
    "a name too long": ("new/" + "x" * 300, "File name too long"),
    "a path too long": ("/".join(["x" * 200] * 30), "File name too long"),
    "no room below": ("/" + "/".join(["x" * 126] * 32), "File name too long"),
    "a dangling link": ("dangling", "which does not exist"),
    "below a dangling link": ("dangling/new", "which does not exist"),
    "a loop": ("loop", "Too many levels of symbolic links"),
    "below a file": ("file/new", "file is not a writable directory"),
    "forbidden": ("closed/new/new", "Permission denied"),
    "not writable": ("/jzero/new", "/ is not a writable directory"),
}
KEYS = ["resume", *(keys[0] for keys in OUTPUTS)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "closed").mkdir(mode=0)
    return tmp_path


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_place_that_cannot_be_written(folder, fault, key):
    place, words = FAULTS[fault]
    before, place = sorted(folder.rglob("*")), folder / place
    place = place / "file" if key == "flops_profiler.output_file" else place
    rights = not_as_root() if fault in ("forbidden", "not writable") else contextlib.nullcontext()
    with pytest.raises(jzero.ConfigError) as error, rights:
        start(key, place)
    assert not isinstance(error.value, PassingError), "jzero --max_restarts would start it again"
    (line,) = str(error.value).splitlines()
    assert line.startswith((f"{key} = '", f"{key}, "))
    assert words in line
    assert "Errno" not in line
    assert sorted(folder.rglob("*")) == before


def test_what_is_not_used_is_not_checked(tmp_path):
    off = {"non_finite": {"output_path": "/dev/null/x"}, "profiler": {"output_path": "/dev/null/x"}}
    off |= {section: {"output_path": "/dev/null/x"} for section in FILES}
    jzero.initialize(model=Regression(), config=CONFIG | off | {"flops_profiler": {"output_file": "/dev/null"}})


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "loop", "file/new"])
def test_a_load_from_such_a_place_does_not_pass_either(folder, name):
    engine = jzero.initialize(model=Regression(), config=CONFIG)[0]
    with pytest.raises(jzero.ConfigError) as error:
        engine.load_checkpoint(folder / name)
    assert not isinstance(error.value, PassingError)
    assert "Errno" not in str(error.value)


def test_reading_a_directory_leaves_no_descriptor_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
