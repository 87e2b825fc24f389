"""A process reads its place from the environment; after SIGTERM it agrees with the others on the last step."""

import signal
import threading
import time
from pathlib import Path

import jax
import pytest
from helpers.stored_cases import check_cases

from jzero.distributed import preemption
from jzero.distributed.place import find_place, get_local_rank, get_rank, get_world_size, log_dist, slurm_hosts
from jzero.errors import ConfigError

RUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "100000",
}  # fmt: skip


def test_place(pytestconfig):
    """By how the process was started; an environment that has half of a place is an error."""

    def outcome(case):
        try:
            return repr(find_place(case[1]))
        except ConfigError as error:
            return str(error)

    check_cases(Path(__file__).with_name("places.jsonl"), outcome, pytestconfig)


def test_slurm():
    """The most tasks on a host, and one of the dynamic ports, whatever the job's number."""
    for tasks, most in (("8", 8), ("4,2(x2)", 4), ("2(x12),3", 3), ("12(x10),8(x99)", 12), ("", 1)):
        assert find_place(SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks}).local_size == most
    for job in ("16383", "16384", "4294967295"):
        _, _, port = find_place(SLURM | {"SLURM_JOB_ID": job}).coordinator.rpartition(":")
        assert 49152 <= int(port) < 65536
    for nodelist, first in {
        "b,a": "b",
        "gpu[07-09,12],login1": "gpu07",
        "login1,gpu[07-09]": "login1",
        "gpu[3,1]": "gpu3",
        "rack[2-4]n[10-19]-ib,x": "rack2n10-ib",
        "a-b.c.example[1-2].org": "a-b.c.example1.org",
    }.items():
        assert slurm_hosts(nodelist)[0] == first
    assert slurm_hosts("") == []


def test_who_am_i(monkeypatch, capsys):
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    assert (get_rank(), get_world_size(), get_local_rank()) == (3, 8, 1)
    log_dist("on rank 0")
    log_dist("on rank 1", [1])
    log_dist("here", [2, 3])
    log_dist("everywhere", [-1])
    assert capsys.readouterr().out == "[rank 3] here\n[rank 3] everywhere\n"
    monkeypatch.setenv("RANK", "0")
    log_dist("on rank 0")
    assert capsys.readouterr().out == "on rank 0\n"


class Service:
    """A coordination service: keys that are written once, and a read that waits."""

    def __init__(self):
        self.keys, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.keys and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.keys[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key):
        if key not in self.keys:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.keys[key]

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.keys, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.keys[key]


class Killed(BaseException):
    pass


@pytest.fixture
def service(monkeypatch):
    """Make this process rank 0 of 3 that has begun step 5 and received SIGTERM."""
    one = Service()

    def leave(code):
        raise Killed(code)

    monkeypatch.setattr(preemption._compat, "coordination_service", lambda: one)
    monkeypatch.setattr(preemption.os, "_exit", leave)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for name, value in {"_begun": 5, "_last": None, "_signalled": threading.Event()}.items():
        monkeypatch.setattr(preemption, name, value)
    monkeypatch.setattr(preemption, "_ending", threading.Event())
    preemption._signalled.set()
    return one


def publish(service, rank, begun, monkeypatch):
    """Let another rank's script end after it has begun `begun` steps."""
    with monkeypatch.context() as there:
        there.setattr(jax, "process_index", lambda: rank)
        there.setattr(preemption, "_begun", begun)
        preemption._end(threading.Thread())


def test_the_last_step_is_the_highest(service, monkeypatch):
    """Two ranks' scripts have ended: nobody waits for them, and a later number of theirs does not count."""
    monkeypatch.setattr(threading.Thread, "join", lambda *_: None)
    publish(service, 1, 6, monkeypatch)
    publish(service, 2, 5, monkeypatch)
    publish(service, 2, 9, monkeypatch)
    began = time.monotonic()
    preemption._agree_on_the_last()
    assert time.monotonic() - began < 5
    assert preemption._last == 6
    assert [preemption.reached(), preemption.reached()] == [False, True]
    assert "jzero/stop" in service.keys


def test_a_rank_that_does_not_answer(service, monkeypatch, capsys):
    monkeypatch.setenv("JZERO_GRACE", "3")
    service.key_value_set("jzero/begun/1", "5")
    with pytest.raises(Killed, match=str(128 + signal.SIGTERM)):
        preemption._agree_on_the_last()
    assert capsys.readouterr().err == (
        "jzero: SIGTERM: stopping without a checkpoint: process 2 did not answer within 1 s\n"
    )
    assert preemption._last is None
