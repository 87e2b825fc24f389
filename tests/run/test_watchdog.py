"""The watchdog: its limit, its words, NCCL's RAS service behind a stand-in, and jobs that no launcher watches."""

import socket
import threading
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.sampling import some
from launcher.jobs import Command

import jzero
from jzero.distributed import heartbeat, watchdog
from jzero.distributed.host_collectives import Guard
from jzero.step.call import Call


def nccl_says(answer, wait=0.0, **keywords):
    """What the watchdog reads from a RAS service that answers once, and what it asked."""
    received = []

    def serve():
        connection, _ = server.accept()
        with connection:
            received.append(connection.makefile().readline())
            connection.sendall(answer)
            time.sleep(wait)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        found = watchdog.nccl_status({"NCCL_RAS_ADDR": f"127.0.0.1:{server.getsockname()[1]}"}, **keywords)
        thread.join(10)
    assert received == ["VERBOSE STATUS\n"]
    return found


def test_what_nccl_knows():
    found = nccl_says(b"NCCL version 2.27.3\nCommunicators... \n  1 rank behind\n")
    assert found.splitlines()[1:] == ["NCCL version 2.27.3", "Communicators... ", "  1 rank behind"]
    assert nccl_says(b"half", wait=0.4, timeout=0.2).endswith(":\nhalf")
    assert len(nccl_says(b"x" * 10 * watchdog.NCCL_MOST)) < watchdog.NCCL_MOST + 100
    assert nccl_says(b"").endswith("did not answer: it closed the connection")
    assert watchdog.nccl_status({"NCCL_RAS_ADDR": "127.0.0.1:1"}).endswith("did not answer: Connection refused")
    assert "did not answer" in watchdog.nccl_status({"NCCL_RAS_ADDR": "nonsense"})
    assert "is off" in watchdog.nccl_status({"NCCL_RAS_ENABLE": "0"})


def test_words(monkeypatch):
    monkeypatch.setattr(watchdog, "nccl_status", lambda: "NCCL's view")
    assert watchdog.words({0: (3, 4), 1: (3, 3)}, 2, 60) == [
        "no step has finished for 60 s; steps finished of those begun: rank 0 3 of 4, rank 1 3 of 3",
        "look at rank 1 first: the others wait for it (its stack is above)",
    ]
    assert watchdog.words({0: (3, 4)}, 3, 60)[1] == "rank 1, 2 did not answer: look there first"
    assert watchdog.words({0: (3, 4), 1: (2, 4)}, 2, 60)[1:] == [
        "all 2 ranks have begun step 4, so they wait in the devices",
        "NCCL's view",
    ]
    monkeypatch.setenv("JZERO_HANG_TIMEOUT", "soon")
    refuses(lambda: watchdog.watch_for_hangs(600, 1800), "JZERO_HANG_TIMEOUT = 'soon': must be seconds")


def test_what_counts(monkeypatch):
    """Only train steps that have run before give the limit and are held to it; a step that raises does not count."""
    for name, value in {"_waiting": deque(), "_begun": 0, "_open": None, "_times": deque()}.items():
        monkeypatch.setattr(heartbeat, name, value)
    with pytest.raises(ValueError, match="out of memory"), heartbeat.work(steady=True):
        raise ValueError("out of memory")
    assert (heartbeat.pending(), heartbeat.step_counts()[1]) == ((0.0, False), 0)
    with heartbeat.work():
        time.sleep(0.01)
        assert heartbeat.pending()[0] > 0
        assert not heartbeat.pending()[1]
    with heartbeat.work(steady=True) as finished_when:
        finished_when(jnp.ones(1))
    assert [work.steady for _, work in heartbeat._waiting] == [False, True]
    assert heartbeat.step_counts()[1] == 2


def test_the_first_run_of_a_program_is_not_steady(monkeypatch):
    """Nor is one of another shape. What a run waits for is one array, also where the results are a dict."""
    monkeypatch.setattr(heartbeat, "_waiting", deque())
    guard = Guard(jzero.make_mesh(devices=jax.devices()[:1]), jzero.Config(train_batch_size=1), {})
    guard.shared = True
    call = Call("a step", jax.jit(lambda state, batch, extra: {"outputs": [state]}), guard, steady=True)
    results = [call(jnp.ones(1), {"x": np.zeros((rows, 3))}, None) for rows in (2, 2, 4)]
    assert [work.steady for _, work in heartbeat._waiting] == [False, True, False]
    for (waits_for, _), result in zip(heartbeat._waiting, results, strict=True):
        assert waits_for is result["outputs"][0]  # one array: a dict is never ready


PROGRAM = """
import faulthandler, os, sys, time
import jax, numpy as np
import jzero
from jzero.distributed import watchdog
from helpers.regression import CONFIG, Regression

what, rank = sys.argv[1], jzero.get_rank()
watchdog.TIMES = 1
config = CONFIG | {"watchdog": {"floor": 4, "ceiling": 20 if what == "loader" else 60}}
rows = {"x": np.ones((8, 3), "float32"), "y": np.ones(8, "float32")}
engine, *_ = jzero.initialize(model=Regression(), config=config, training_data=rows)
for step in range(60):
    if step == 50 and rank == 1:
        print("hangs", flush=True)
    if step == 50 and rank == 1 and what in ("data", "loader"):
        time.sleep(1000)
    if step == 50 and rank == 1 and what == "stopped":
        os.kill(os.getpid(), 19)
    float(engine.train_batch() if what == "loader" else engine.train_batch(rows))
if what == "ends":
    time.sleep(8)  # no step runs, so none is late
"""


@pytest.mark.processes
@pytest.mark.parametrize("what", some(["data", "loader", "stopped", "ends"], ["data", "ends"]))
def test_a_job_without_the_launcher(tmp_path, what):
    """As srun, mpirun and torchrun start it: the processes end by themselves, and say where to look."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (tmp_path / "worker.py").write_text(PROGRAM)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    ranks = [Command(what, cwd=tmp_path, env=env | {"RANK": rank}, main=("worker.py",)) for rank in "01"]
    try:
        if what != "ends":
            ranks[1].until("hangs")
        began = time.monotonic()
        codes = [process.wait(120) for process in (ranks[:1] if what == "stopped" else ranks)]
        took = time.monotonic() - began
    finally:
        for process in ranks:
            process.end()
    errors = [process.errors for process in ranks]
    assert codes[0] == (0 if what == "ends" else 124), errors
    if what == "ends":
        return
    limit = 20 if what == "loader" else 4  # a wait for another process's data may take the ceiling
    assert took < limit + 10 + 15  # the end of both, and a busy machine
    where = "rank 1 did not answer: look there first" if what == "stopped" else "look at rank 1 first"
    steps = "steps finished of those begun: rank 0 50 of 51"
    for words in (f"jzero: no step has finished for {limit} s", steps, where, 'worker.py"'):  # last its stack
        assert words in errors[0]
    if what != "stopped":
        assert codes[1] != 0
        assert 'worker.py"' in errors[1]


def test_a_work_inside_of_another_is_a_part_of_it(monkeypatch):
    """A search for what is not finite runs programs; each would count as a finished step."""
    monkeypatch.setattr(heartbeat, "_waiting", deque())
    finished, begun = heartbeat.step_counts()
    with heartbeat.work():
        with heartbeat.work(steady=True):
            assert heartbeat.step_counts() == (finished, begun + 1)
        assert not heartbeat._waiting
    assert [work.steady for _, work in heartbeat._waiting] == [False]
    assert heartbeat.step_counts() == (finished, begun + 1)
