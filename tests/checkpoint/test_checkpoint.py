"""A checkpoint is complete or absent; a read returns what was saved or raises an error that names the reason."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.checkpoints import ROWS, assert_same, mesh, nothing_left_over, plain, shardings, state  # noqa: F401
from helpers.sampling import keep
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.checkpoint import Checkpoint, async_save, checksums, directory, lock, restore, save, snapshot, wait
from jzero.ledger import schema

# ------------------------------------------------------------------------------------------- save and restore


def test_what_is_read_is_what_was_saved(tmp_path):
    saved = state()
    under_way = save(saved, tmp_path, "a", notes={"epoch": np.int64(3), "best": jnp.float32(0.5)})
    assert under_way.wait() == tmp_path / "a"
    assert repr(under_way) == f"Save('{tmp_path}/a', complete)"
    replicated = jax.tree.map(lambda x: NamedSharding(mesh(), PartitionSpec()), saved)
    for places in (shardings(saved), replicated):
        read = restore(tmp_path, places)
        assert_same(read, saved)
        assert shardings(read) == places
        assert jax.tree.map(lambda x: x.dtype, read) == jax.tree.map(lambda x: x.dtype, saved)
    found = Checkpoint.find(tmp_path)
    assert found.notes == {"epoch": 3, "best": 0.5}
    assert found.shapes["params/w"] == (ROWS, 16)
    assert "7 leaves" in repr(found)
    read = found.read({"params/w": replicated["params"]["w"]})  # one leaf alone
    assert_same(read, {"params/w": saved["params"]["w"]})


def test_a_save_keeps_what_was_there_when_it_was_called(tmp_path):
    saved = state()
    expected = plain(saved)
    save(saved, tmp_path, "a")
    jax.tree.map(lambda x: x.delete(), saved)  # as a train step that donates the buffers
    assert_same(restore(tmp_path, shardings(state())), expected)


def test_the_caller_goes_on_while_it_is_written(tmp_path, monkeypatch):
    going_on, commit = threading.Event(), async_save.commit

    def slow(*args):
        assert going_on.wait(30)
        commit(*args)

    monkeypatch.setattr(async_save, "commit", slow)
    under_way = save(state(), tmp_path, "a")
    assert not under_way.done
    assert "being written" in repr(under_way)
    assert directory.read_latest(tmp_path)[0] is None
    assert not (tmp_path / "a").exists()
    going_on.set()
    assert save(state(1), tmp_path, "b").wait()  # waits for the first
    assert under_way.done
    assert directory.read_latest(tmp_path)[0] == "b"


def test_a_tag_again_replaces_it(tmp_path):
    for seed in (0, 1):
        save(state(seed), tmp_path, "a").wait()
    assert_same(restore(tmp_path, shardings(state())), state(1))
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"a", "latest"}


def test_the_default_tag_and_latest(tmp_path):
    trained = jzero.make_train_step(
        type("M", (), {"init": lambda s, r: {"w": jnp.ones(8)}, "loss": lambda s, p, b, r: (p["w"] * b).mean()})(),
        {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    now, _ = trained(trained.init(jax.random.key(0)), np.ones((8, 8), np.float32))
    assert save(now, tmp_path).wait().name == "global_step1"
    save(now, tmp_path, "other", latest=False).wait()
    assert (tmp_path / "latest").read_text() == "global_step1"
    read = restore(tmp_path, trained.state_shardings, shapes=trained.state_shapes)
    assert_same(vars(read)["params"], vars(now)["params"])


def test_a_kill_between_two_renames(tmp_path):
    """It leaves the tag's previous checkpoint and the new one's draft."""
    for seed in (0, 1):
        save(state(seed), tmp_path, "a").wait()
    (tmp_path / "a").rename(tmp_path / "a.replaced")
    (tmp_path / "a.saving" / "state").mkdir(parents=True)
    assert_same(restore(tmp_path, shardings(state())), state(1))
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"a.replaced", "a.saving", "latest"}  # reading changes nothing
    save(state(2), tmp_path, "b", latest=False).wait()
    assert_same(restore(tmp_path, shardings(state())), state(1))
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"a", "b", "latest"}
    (tmp_path / "a.replaced").mkdir()  # a kill before the replaced one was deleted
    save(state(2), tmp_path, "b").wait()
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"a", "b", "latest"}


def test_what_is_kept_is_the_newest_and_the_latest(tmp_path):
    for step in (1, 2, 3):
        save(state(), tmp_path, f"global_step{step}", max_to_keep=1, latest=step < 3).wait()
        os.utime(tmp_path / f"global_step{step}" / "notes.json", (2e9 - step, 2e9 - step))  # another host's clock
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"global_step2", "global_step3", "latest"}


def test_what_is_kept_can_be_read(tmp_path):
    """A checkpoint that was damaged on the disk does not count: the whole one before it stays."""
    for step in (1, 2):
        save(state(), tmp_path, f"global_step{step}").wait()
    (tmp_path / "global_step2" / "notes.json").write_text("{}")
    save(state(), tmp_path, "global_step3", max_to_keep=2).wait()
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"global_step1", "global_step3", "latest"}


def test_a_link_is_never_removed(tmp_path):
    save(state(), tmp_path / "other", "global_step1").wait()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "global_step1").symlink_to(tmp_path / "other" / "global_step1")
    for step in (2, 3, 4):
        save(state(), tmp_path / "runs", f"global_step{step}", max_to_keep=1).wait()
    assert {p.name for p in (tmp_path / "runs").glob("[!.]*")} == {"global_step1", "global_step4", "latest"}
    assert_same(restore(tmp_path / "runs", shardings(state()), tag="global_step1"), state())


def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    """The last save counts as the newest even if the hosts' clocks disagree."""
    now = time.time()
    for step, late in ((100, 3600), (200, 0), (300, 60)):
        monkeypatch.setattr(time, "time", lambda late=late: now + late)
        save(state(), tmp_path, f"global_step{step}", max_to_keep=2).wait()
    assert [path.name for path, _ in directory.list_checkpoints(tmp_path)] == ["global_step300", "global_step200"]


def test_unreadable_directories(tmp_path, monkeypatch):
    """lost+found is skipped; a checkpoint that another user's umask hides is reported."""
    stat, hidden = Path.stat, {"lost+found"}

    def denied(self, **how):
        if hidden & set(self.parent.parts):
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **how)

    save(state(), tmp_path, "global_step1").wait()
    for name in ("lost+found", "global_step2"):
        (tmp_path / name / "state").mkdir(parents=True)
    monkeypatch.setattr(Path, "stat", denied)
    save(state(), tmp_path, "global_step3", max_to_keep=1).wait()
    assert [path.name for path, _ in directory.list_checkpoints(tmp_path)] == ["global_step3"]
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"global_step3", "latest", "lost+found"}
    hidden.add("global_step3")
    (_, problem) = directory.list_checkpoints(tmp_path)[0]
    assert str(problem) == f"checkpoint {tmp_path}/global_step3: Permission denied"


@pytest.mark.parametrize("end", keep(["", "raise ValueError", "import sys; sys.exit(3)"], ["raise ValueError"]))
def test_a_program_ends_when_its_save_is_complete(tmp_path, end):
    script = tmp_path / "script.py"
    saving = f"jzero.checkpoint.save({{'x': jnp.ones(1 << 22)}}, {str(tmp_path)!r}, 'a')"
    script.write_text(f"import jax.numpy as jnp, jzero\n{saving}\n{end}")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    if (3, 12) <= sys.version_info < (3, 12, 2) and done.returncode:
        assert "call jzero.checkpoint.wait() at the script's end" in done.stderr
        return
    assert done.returncode == {"": 0, "raise ValueError": 1}.get(end, 3), done.stderr
    assert Checkpoint.find(tmp_path).shapes == {"x": (1 << 22,)}


def test_max_to_keep(tmp_path):
    for step in (1, 2, 10, 3):  # resumes from an older step
        save(state(), tmp_path, f"global_step{step}", max_to_keep=2).wait()
    save(state(), tmp_path, "best", max_to_keep=2).wait()
    left = {p.name for p in tmp_path.glob("[!.]*")}
    assert left == {
        "global_step10",
        "global_step2",
        "global_step3",
        "best",
        "latest",
    }  # a later step belongs to another run and stays
    save(state(), tmp_path, "global_step11", max_to_keep=2).wait()
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"global_step3", "global_step11", "best", "latest"}


def test_copies_are_spread_over_the_axes_of_replicas():
    grid = jzero.make_mesh(data=2, zero=4)

    def spread(spec, shape):
        x = jax.device_put(jnp.ones(shape), NamedSharding(grid, PartitionSpec(*spec)))
        parts = list(snapshot.copy_sharding(x).spec)
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    assert spread((), (8, 3)) == PartitionSpec(("data", "zero"))
    assert spread((), (3, 16)) == PartitionSpec(None, ("data", "zero"))
    assert spread(("zero",), (8, 3)) == PartitionSpec(("zero", "data"))
    assert spread((None, "zero"), (3, 8)) == PartitionSpec(None, ("zero", "data"))
    assert spread((("data", "zero"),), (8,)) == PartitionSpec(("data", "zero"))
    assert spread((), (3, 5)) == PartitionSpec()
    assert spread((), ()) == PartitionSpec()


# ------------------------------------------------------------------------------------------- checksums


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), data=st.data())
def test_a_checksum_sees_every_change(seed, data):
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int32", "int8", "bool"]))
    x = np.random.default_rng(seed).integers(0, 2, (4, 6)).astype(dtype)
    bits = x.view(np.uint8).copy()
    place = data.draw(st.integers(0, bits.size - 1))
    flipped = bits.copy()
    flipped.reshape(-1)[place] ^= 1 if dtype == "bool" else 1 << data.draw(st.integers(0, 7))
    one, other = (int(checksums.checksums({"x": jnp.asarray(b.view(x.dtype))})[0]) for b in (bits, flipped))
    assert one != other


def test_a_checksum_sees_the_order_and_not_the_layout():
    x = jax.random.normal(jax.random.key(0), (16, 8))
    specs = [PartitionSpec(), PartitionSpec("zero"), PartitionSpec(None, "zero")]
    sums = {int(checksums.checksums({"x": jax.device_put(x, NamedSharding(mesh(), spec))})[0]) for spec in specs}
    assert len(sums) == 1
    others = [x[::-1], x[:, ::-1], x.T.reshape(16, 8), x.at[0].set(x[1]).at[1].set(x[0]), -x]
    assert len(sums | {int(checksums.checksums({"x": other})[0]) for other in others}) == 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float64"])
def test_a_checksum_in_parts_by_numpy(dtype, monkeypatch):
    x = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(jnp.dtype(dtype))
    monkeypatch.setattr(checksums, "BLOCK", 7)
    parts = [(x[i : i + 4, :, j : j + 3], (i, 0, j)) for i in (0, 4) for j in (0, 3)]
    total = sum(checksums.part_of_checksum(part, start, x.shape) for part, start in parts) % 2**32
    with jax.enable_x64(True):
        assert total == int(checksums.checksums({"x": jnp.asarray(x)})[0])


# ------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory with two checkpoints."""
    path = tmp_path_factory.mktemp("two")
    for seed, tag in enumerate(("good", "bad")):
        save(state(seed), path, tag).wait()
    return path


def files(path):
    return sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())


def damage_of(how, file):
    whole = file.read_bytes()
    if how == "deleted":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(whole[: len(whole) // 2])
    else:
        spots = np.linspace(0, len(whole) - 1, 12).astype(int)
        flipped = bytearray(whole)
        flipped[spots[how % len(spots)]] ^= 1 << (how % 8)
        file.write_bytes(bytes(flipped))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # one error, no further tracebacks
@pytest.mark.parametrize("how", keep(["deleted", "truncated", *range(12)], ["deleted", "truncated", 0]))
def test_damage_is_found_and_the_checkpoint_before_it_is_read(tmp_path, two, how):
    """For every file in turn: reading raises an error that names the checkpoint, or returns what was saved."""
    expected, harmless, said = state(1), [], []
    for file in files(two / "bad"):
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        here = shutil.copytree(two, tmp_path / "here")
        damage_of(how, here / "bad" / file)
        try:
            read = restore(here, shardings(expected))
        except jzero.CheckpointError as error:
            said.append(str(error))
        else:
            assert_same(read, expected)
            harmless.append(str(file))
        assert_same(restore(here, shardings(expected), tag="good"), state(0))
    assert all(str(tmp_path / "here" / "bad") in text for text in said)
    assert "notes.json" not in harmless
    if how in ("deleted", "truncated"):  # a flipped bit may be in unused bytes
        assert not [name for name in harmless if name.startswith(("state/d/", "state/manifest"))]


def test_a_leaf_that_is_not_what_was_saved_is_named(tmp_path):
    save(state(), tmp_path, "a").wait()
    notes = tmp_path / "a" / "notes.json"
    said = json.loads(notes.read_text())["notes"]
    said["leaves"]["params/w"][2] ^= 1
    notes.write_text(directory._seal(said))
    with pytest.raises(jzero.CheckpointError, match=r"a is damaged: wrong checksum of params/w"):
        restore(tmp_path, shardings(state()))


def test_changed_notes_are_noticed(tmp_path):
    save(state(), tmp_path, "a", notes={"samples": 1000}).wait()
    notes = tmp_path / "a" / "notes.json"
    notes.write_text(notes.read_text().replace("1000", "2000"))
    with pytest.raises(jzero.CheckpointError, match=r"a is damaged: notes\.json does not match its checksum"):
        restore(tmp_path, shardings(state()))


# ------------------------------------------------------------------------------------------- mistakes


OWN = [
    "latest",
    "latest.new",
    schema.FILE,
    lock.LOCK,
    f"{lock.LOCK}.0123456789abcdef",
]  # files in the directory


@pytest.mark.parametrize(
    "tag", ["a/b", "", "..", " ", "a ", " a", *OWN, "a.saving", "a.replaced", b"a", "a\0", "a\nb", "a" * 247]
)
def test_invalid_tags(tmp_path, tag):
    for call in (lambda: save(state(), tmp_path, tag), lambda: restore(tmp_path, shardings(state()), tag=tag or "a/")):
        with pytest.raises(jzero.ConfigError, match="tag = "):
            call()


def test_a_number_is_a_tag(tmp_path):
    for tag in (7, 0.25):
        save(state(), tmp_path, tag).wait()
        assert_same(restore(tmp_path, shardings(state()), tag=tag), state())
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"7", "0.25", "latest"}


def test_other_mistakes(tmp_path):
    places = shardings(state())
    with pytest.raises(jzero.ConfigError, match=r"client_state is not JSON: <object object at .*> has type object"):
        save(state(), tmp_path, "a", notes={"x": object()})
    with pytest.raises(
        jzero.ConfigError,
        match=r"has no default checkpoint \(it has no file 'latest'\): pass the directory",
    ):
        restore(tmp_path, places)
    save(state(), tmp_path, "a", latest=False).wait()
    with pytest.raises(jzero.ConfigError, match=r"no file 'latest'\): choose a tag: a"):
        restore(tmp_path, places)
    with pytest.raises(jzero.ConfigError, match="b does not exist"):
        restore(tmp_path, places, tag="b")
    with pytest.raises(jzero.ConfigError, match="the checkpoint directory is None"):
        restore(None, places)
    more = places | {"more": places["step"]}
    del more["zeros"]
    with pytest.raises(jzero.ConfigError, match="another model or optimizer: missing more, extra zeros"):
        restore(tmp_path, more, tag="a")
    other = jax.eval_shape(lambda: state() | {"step": jnp.zeros(3)})
    with pytest.raises(jzero.ConfigError, match=r"step is \(\), not \(3,\)"):
        restore(tmp_path, places, tag="a", shapes=other)
    wait()
