"""A checkpoint is complete or absent; a read returns what was saved or raises an error that names the reason."""

import json
import os
import threading
import time
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.checkpoints import assert_read, assert_same, names, nothing_left_over, plain, shardings, state  # noqa: F401
from helpers.refusals import refuses
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.checkpoint import Checkpoint, async_save, checksums, directory, lock, restore, save
from jzero.ledger import schema

Numbered = namedtuple("Numbered", "step")  # a train state has this attribute


def steps(path, *numbers, **more):
    """Save a small tree under the tags of these steps."""
    for n in numbers:
        save({"x": jnp.ones(3)}, path, f"global_step{n}", **more).wait()


def test_what_is_read_is_what_was_saved(tmp_path):
    saved = state()
    under_way = save(saved, tmp_path, "a", notes={"epoch": np.int64(3), "best": jnp.float32(0.5)})
    assert under_way.wait() == tmp_path / "a"
    replicated = jax.tree.map(lambda x: NamedSharding(saved["zeros"].sharding.mesh, PartitionSpec()), saved)
    for places in (shardings(saved), replicated):
        read = restore(tmp_path, places)
        assert_same(read, saved)
        assert shardings(read) == places
        assert jax.tree.map(lambda x: x.dtype, read) == jax.tree.map(lambda x: x.dtype, saved)
    found = Checkpoint.find(tmp_path)
    assert found.notes == {"epoch": 3, "best": 0.5}
    assert found.shapes["params/w"] == saved["params"]["w"].shape
    assert "7 leaves" in repr(found)
    read = found.read({"params/w": replicated["params"]["w"]})  # one leaf alone
    assert_same(read, {"params/w": saved["params"]["w"]})
    save(saved, tmp_path, 0.25, latest=False).wait()
    assert_read(tmp_path, saved, tag=0.25)
    assert names(tmp_path) == {"a", "0.25", "latest"}
    assert (tmp_path / "latest").read_text() == "a"
    assert save(Numbered(jnp.int32(3)), tmp_path / "default").wait().name == "global_step3"


def test_the_caller_goes_on_while_it_is_written(tmp_path, monkeypatch):
    going_on, commit, saved = threading.Event(), async_save.commit, state()

    def slow(*args):
        assert going_on.wait(30)
        commit(*args)

    monkeypatch.setattr(async_save, "commit", slow)
    expected, under_way = plain(saved), save(saved, tmp_path, "a")
    jax.tree.map(lambda x: x.delete(), saved)  # as a train step that donates the buffers
    assert not under_way.done
    assert directory.read_latest(tmp_path)[0] is None
    assert not (tmp_path / "a").exists()
    going_on.set()
    assert save(state(1), tmp_path, "b").wait()  # waits for the first
    assert under_way.done
    assert directory.read_latest(tmp_path)[0] == "b"
    assert_same(restore(tmp_path, shardings(state()), tag="a"), expected)


def test_a_kill_between_two_renames(tmp_path):
    """It leaves the tag's previous checkpoint and the new one's draft."""
    for seed in (0, 1):
        save(state(seed), tmp_path, "a").wait()  # the second replaces the first
    (tmp_path / "a").rename(tmp_path / "a.replaced")
    (tmp_path / "a.saving" / "state").mkdir(parents=True)
    assert_read(tmp_path, state(1))
    assert names(tmp_path) == {"a.replaced", "a.saving", "latest"}  # reading changes nothing
    save(state(2), tmp_path, "b", latest=False).wait()
    assert_read(tmp_path, state(1))
    assert names(tmp_path) == {"a", "b", "latest"}
    (tmp_path / "a.replaced").mkdir()  # a kill before the replaced one was deleted
    save(state(2), tmp_path, "b").wait()
    assert names(tmp_path) == {"a", "b", "latest"}


def test_max_to_keep(tmp_path):
    steps(tmp_path, 1, 2, 10, 3, max_to_keep=2)  # resumes from an older step
    save({"x": jnp.ones(3)}, tmp_path, "best", max_to_keep=2).wait()
    # a later step belongs to another run and stays
    assert names(tmp_path) == {"global_step10", "global_step2", "global_step3", "best", "latest"}
    steps(tmp_path, 11, max_to_keep=2)
    assert names(tmp_path) == {"global_step3", "global_step11", "best", "latest"}
    steps(tmp_path, 12, max_to_keep=1, latest=False)  # that which latest names stays
    assert names(tmp_path) == {"global_step11", "global_step12", "best", "latest"}


def test_what_is_kept_can_be_read(tmp_path):
    """A checkpoint that was damaged on the disk does not count: the whole one before it stays."""
    steps(tmp_path, 1, 2)
    (tmp_path / "global_step2" / "notes.json").write_text("{}")
    steps(tmp_path, 3, max_to_keep=2)
    assert names(tmp_path) == {"global_step1", "global_step3", "latest"}


def test_a_link_is_never_removed(tmp_path):
    runs, other = tmp_path / "runs", tmp_path / "other" / "global_step1"
    steps(other.parent, 1)
    runs.mkdir()
    (runs / "global_step1").symlink_to(other)
    steps(runs, 2, 3, 4, max_to_keep=1)
    assert names(runs) == {"global_step1", "global_step4", "latest"}
    assert Checkpoint.find(runs, "global_step1").shapes == {"x": (3,)}


def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    """The last save counts as the newest even if the hosts' clocks disagree."""
    now = time.time()
    for step, late in ((100, 3600), (200, 0), (300, 60)):
        monkeypatch.setattr(time, "time", lambda late=late: now + late)
        steps(tmp_path, step, max_to_keep=2)
        os.utime(tmp_path / f"global_step{step}" / "notes.json", (2e9 - step, 2e9 - step))
    assert [path.name for path, _ in directory.list_checkpoints(tmp_path)] == ["global_step300", "global_step200"]


def test_unreadable_directories(tmp_path, monkeypatch):
    """lost+found is skipped; a checkpoint that another user's umask hides is reported."""
    stat, hidden = Path.stat, {"lost+found"}

    def denied(self, **how):
        if hidden & set(self.parent.parts):
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **how)

    steps(tmp_path, 1)
    for name in ("lost+found", "global_step2"):
        (tmp_path / name / "state").mkdir(parents=True)
    monkeypatch.setattr(Path, "stat", denied)
    steps(tmp_path, 3, max_to_keep=1)
    assert [path.name for path, _ in directory.list_checkpoints(tmp_path)] == ["global_step3"]
    assert names(tmp_path) == {"global_step3", "latest", "lost+found"}
    hidden.add("global_step3")
    (_, problem) = directory.list_checkpoints(tmp_path)[0]
    assert str(problem) == f"checkpoint {tmp_path}/global_step3: Permission denied"


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "float64"])
def test_a_checksum_in_parts_by_numpy_sees_the_order(dtype, monkeypatch):
    x = np.trunc(np.random.default_rng(0).normal(size=(6, 6, 4))).astype(jnp.dtype(dtype))  # two thirds are zeros
    monkeypatch.setattr(checksums, "BLOCK", 7)
    parts = [(x[i : i + 4, :, j : j + 3], (i, 0, j)) for i in (0, 4) for j in (0, 3)]
    total = sum(checksums.part_of_checksum(part, start, x.shape) for part, start in parts) % 2**32
    with jax.enable_x64(True):
        same, *others = (
            int(checksums.checksums({"x": jnp.asarray(y)})[0])
            for y in (x, x[::-1], x[:, ::-1], x.swapaxes(0, 1), x[[1, 0, *range(2, 6)]])
        )
    assert same == total
    assert total not in others


def test_changed_notes_and_leaves_are_noticed(tmp_path):
    save(state(), tmp_path, "a", notes={"samples": 1000}).wait()
    notes = tmp_path / "a" / "notes.json"
    text = notes.read_text()
    said = json.loads(text)["notes"]
    said["leaves"]["params/w"][2] ^= 1
    for changed, words in {
        directory._seal(said): "wrong checksum of params/w",
        text.replace("1000", "2000"): r"notes\.json does not match its checksum",
    }.items():
        notes.write_text(changed)
        with pytest.raises(jzero.CheckpointError, match=f"a is damaged: {words}"):
            Checkpoint.find(tmp_path).read({"params/w": shardings(state())["params"]["w"]})


OWN = ["latest", "latest.new", schema.FILE, lock.LOCK, f"{lock.LOCK}.0123456789abcdef"]  # files in the directory


@pytest.mark.parametrize(
    "tag", ["a/b", "", "..", " ", "a ", " a", *OWN, "a.saving", "a.replaced", b"a", "a\0", "a\nb", "a" * 247]
)
def test_invalid_tags(tmp_path, tag):
    places = {"x": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    refuses(lambda: save({"x": jnp.ones(3)}, tmp_path, tag), "tag = ")
    refuses(lambda: restore(tmp_path, places, tag=tag or "a/"), "tag = ")


def test_other_mistakes(tmp_path):
    places = shardings(state())
    more = {name: x for name, x in places.items() if name != "zeros"} | {"more": places["step"]}
    other = jax.eval_shape(lambda: state() | {"step": jnp.zeros(3)})
    none, empty = r"has no default checkpoint \(it has no file 'latest'\): ", tmp_path / "empty"
    empty.mkdir()
    save(state(), tmp_path, "a", latest=False).wait()
    for place, words, how in (
        (empty, f"{none}pass the directory", {}),
        (tmp_path, f"{none}choose a tag: a", {}),
        (tmp_path, "b does not exist", {"tag": "b"}),
        (None, "the checkpoint directory is None", {}),
        (tmp_path, "another model or optimizer: missing more, extra zeros", {"tag": "a", "shardings": more}),
        (tmp_path, r"step is \(\), not \(3,\)", {"tag": "a", "shapes": other}),
    ):
        refuses(lambda place=place, how=how: restore(place, **{"shardings": places, **how}), words)
