"""Files to write: all keys that name one are checked at the start, and none follows a link or takes another's file."""

import contextlib
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.regression import CONFIG, Regression

import jzero
from jzero.checkpoint.directory import write_atomically
from jzero.cli import pid_file
from jzero.config.config import OUTPUTS
from jzero.config.fields import kind_of
from jzero.config.screen import FIELDS
from jzero.data import write_tokens
from jzero.distributed import heartbeat
from jzero.errors import PassingError
from jzero.files import create
from jzero.values import kinds

ROOT = Path(__file__).parents[2]

BATCH = {"x": np.ones((8, 3), np.float32), "y": np.zeros(8, np.float32)}
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


def test_every_text_that_names_a_file_is_known_and_on_the_security_page():
    """A new key with a text is a path, and in the table, or in this list."""
    texts = {key for key, field in FIELDS.items() if kind_of(field) in (kinds.TEXT, kinds.TEXT_OR_NULL)}
    no_path = {"optimizer.type", "scheduler.type"}
    no_path |= {key for key in texts if key.partition(".")[0] in SERVICES}
    assert {key for keys in OUTPUTS for key in keys} == texts - no_path
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (`.+?`) \| .+ \|$", text, re.MULTILINE)
    named = [key for row in rows for key in re.findall(r"`([\w.]+)`", row)]
    assert sorted(named) == sorted([*(key for keys in OUTPUTS for key in keys), *SERVICES, "compiler_options"])


@pytest.mark.parametrize("theirs", ["text", "link", "empty"])
def test_a_table_of_flops_replaces_only_its_own(tmp_path, theirs):
    mine, file = tmp_path / "mine", tmp_path / "there"
    mine.write_text("precious")
    make = {"text": lambda: file.write_text("precious"), "link": lambda: file.symlink_to(mine), "empty": file.touch}
    make[theirs]()
    words = r"flops_profiler.output_file = '.*there': is not a table that jzero"
    refuses(lambda: start("flops_profiler.output_file", file), words)
    assert mine.read_text() == "precious"
    assert (file.read_text(), file.is_symlink()) == ("" if theirs == "empty" else "precious", theirs == "link")


def test_a_file_that_appears_after_the_start_is_not_replaced(tmp_path, capfd):
    def run():
        for _ in range(2):  # the first one compiles
            engine.train_batch(BATCH)
        engine._observers.close()
        return file.read_text()

    file = tmp_path / "table"
    engine = start("flops_profiler.output_file", file)
    file.write_text("precious")
    assert run() == "precious"
    assert "is not a table that jzero wrote" in capfd.readouterr().out
    file.unlink()
    for _ in range(2):  # the second run replaces the first one's
        engine = start("flops_profiler.output_file", file)
        assert run().startswith("FLOPs of step 2: ")


def test_monitors_follow_no_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    for key, name, refused in (
        ("csv_monitor", "Train_Samples_lr.csv", pytest.warns(RuntimeWarning, match="csv_monitor: no more curves")),
        ("jsonl_monitor", "metrics.jsonl", pytest.raises(jzero.ConfigError, match="jsonl_monitor: ")),
    ):
        (tmp_path / name).symlink_to(tmp_path / "mine")
        with refused:
            engine = start(f"{key}.output_path", tmp_path)
            engine.train_batch(BATCH)
            engine._observers.close()
    assert (tmp_path / "mine").read_text() == "precious"


@contextlib.contextmanager
def not_as_root():
    """Have the rights of another user; root may write everywhere."""
    user = os.geteuid()
    os.seteuid(user or 65534)
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
PLACES = [(fault, key) for i, fault in enumerate(FAULTS) for key in KEYS[i % 3 :: 3]]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "closed").mkdir(mode=0)
    return tmp_path


@pytest.mark.parametrize(("fault", "key"), PLACES)
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
    off |= {section: {"output_path": "/dev/null/x"} for section in ("csv_monitor", "jsonl_monitor", "tensorboard")}
    jzero.initialize(model=Regression(), config=CONFIG | off | {"flops_profiler": {"output_file": "/dev/null"}})


def test_a_load_from_such_a_place_does_not_pass_either(folder):
    engine = jzero.initialize(model=Regression(), config=CONFIG)[0]
    for name in ("x" * 300, "loop", "file/new"):
        with pytest.raises(jzero.ConfigError) as error:
            engine.load_checkpoint(folder / name)
        assert not isinstance(error.value, PassingError)
        assert "Errno" not in str(error.value)


TOKENIZER = SimpleNamespace(vocab_size=128, end=0, encode=lambda text: list(text.encode()))
WRITERS = {  # the name of the temporary file, the final one's, the call that writes, what it writes
    "latest": ("latest.new", "latest", lambda path: write_atomically(path, "global_step3"), "global_step3"),
    "progress": ("latest.new", "latest", lambda path: heartbeat.write(str(path), "3 4"), "3 4"),
    "tokens": ("latest.unfinished", "latest.npy", lambda path: write_tokens(["ab"], path, TOKENIZER), [97, 98, 0]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_link_is_followed(writer, tmp_path):
    """Nor does a fifo block."""
    name, final, write, content = WRITERS[writer]
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    folder.mkdir()
    victim.write_text("precious")
    for target in (victim, tmp_path / "nothing", folder, None):
        (folder / name).symlink_to(target) if target else os.mkfifo(folder / name)
        write(written := folder / final)
        assert stat.S_ISREG(written.lstat().st_mode)
        assert (np.load(written).tolist() if written.suffix else written.read_text()) == content
        assert not (folder / name).is_symlink()
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared", "victim"]


def test_an_open_name_is_refused_rather_than_shared(tmp_path, monkeypatch):
    """Another user makes the link between the removal of the name and the opening."""
    (tmp_path / "victim").write_text("precious")
    monkeypatch.setattr(os, "unlink", lambda path: Path(path).symlink_to(tmp_path / "victim"))
    with pytest.raises(FileExistsError):
        create(tmp_path / "name")
    assert (tmp_path / "victim").read_text() == "precious"


def test_the_pid_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = tmp_path / f"{os.getpid()}.jzero"
    (tmp_path / "victim").write_text("precious")
    file.symlink_to(tmp_path / "victim")
    with pid_file():
        assert file.read_text() == f"{os.getpid()}\n"
        assert not file.is_symlink()
    assert not file.exists()
    assert (tmp_path / "victim").read_text() == "precious"
    file.mkdir()  # cannot be removed, as another user's file in /tmp cannot
    with pytest.raises(jzero.ConfigError, match=r"--save_pid: .*\.jzero: .*remove it"), pid_file():
        pass
    assert file.is_dir()
