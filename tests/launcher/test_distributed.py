"""A process reads its place from the environment and meets the other processes."""

import contextlib
import socket
import struct
import threading
import time

import pytest
from helpers.sampling import keep

from jzero.distributed.connections import authenticate
from jzero.distributed.joining import meet
from jzero.distributed.place import Place, find_place, get_local_rank, get_rank, get_world_size, log_dist, slurm_hosts
from jzero.errors import ConfigError

RUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "100000",
}  # fmt: skip
OMPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "a",
}  # fmt: skip
PLACES = {
    "alone": ({"HOME": "/", "MASTER_ADDR": "a"}, Place(0, 1, 0, 1, "")),
    "jzero": (RUN | {"LOCAL_SIZE": "4", "CROSS_RANK": "0"}, Place(3, 8, 1, 4, "a:1234")),
    "jzero under srun": (SLURM | RUN | {"LOCAL_SIZE": "4"}, Place(3, 8, 1, 4, "a:1234")),
    "torchrun": (RUN | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, Place(3, 8, 1, 2, "a:1235")),
    "by hand": ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, Place(1, 2, 0, 1, "a:29500")),
    "a batch script of Slurm": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Place()),
    "by hand, one": ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, 1, ":29500")),
    "six": (RUN | {"MASTER_ADDR": "fe80::1"}, Place(3, 8, 1, 1, "fe80::1:1234")),
    "srun": (SLURM, Place(5, 8, 1, 4, f"gpu07:{49152 + 100000 % 16384}")),
    "srun, port": (SLURM | {"MASTER_ADDR": "b", "MASTER_PORT": "99"}, Place(5, 8, 1, 4, "b:99")),
    "mpirun": (OMPI, Place(2, 4, 0, 2, "a:29500")),
    "mpirun in Slurm": (OMPI | {"MASTER_ADDR": "", "SLURM_STEP_NODELIST": "n[1,3]"}, Place(2, 4, 0, 2, "n1:29500")),
    "sbatch, no srun": ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, Place(0, 1, 0, 1, "")),
}


@pytest.mark.parametrize("started", PLACES)
def test_place(started):
    env, place = PLACES[started]
    assert find_place(env) == place


@pytest.mark.parametrize(
    ("tasks", "most"),
    [("8", 8), ("2(x3)", 2), ("4,2(x2)", 4), ("2(x12),3", 3), ("16(x128)", 16), ("12(x10),8(x99)", 12), ("", 1)],
)
def test_slurm_tasks_on_a_host(tasks, most):
    assert find_place(SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks}).local_size == most


@pytest.mark.parametrize("job", ["1", "16383", "16384", "4294967295"])
def test_slurm_port_is_a_port(job):
    """It is one of the dynamic ports, whatever the job's number."""
    _, _, port = find_place(SLURM | {"SLURM_JOB_ID": job}).coordinator.rpartition(":")
    assert 49152 <= int(port) < 65536


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ["WORLD_SIZE = 2 and RANK is not set"]),
        ({"RANK": "1", "MASTER_ADDR": "a"}, ["RANK = 1 and WORLD_SIZE is not set"]),
        ({"SLURM_PROCID": "1"}, ["SLURM_PROCID = 1 and SLURM_STEP_NUM_TASKS is not set"]),
        (RUN | {"WORLD_SIZE": ""}, ["WORLD_SIZE = ''"]),
        (RUN | {"RANK": "-1"}, ["RANK = '-1'"]),
        (RUN | {"LOCAL_RANK": "x"}, ["LOCAL_RANK = 'x'"]),
        (RUN | {"MASTER_PORT": "tcp://1.2.3.4:5"}, ["MASTER_PORT = 'tcp://1.2.3.4:5'"]),
        (RUN | {"RANK": "8"}, ["rank = 8 of 8 processes: ranks are 0 to 7"]),
        (RUN | {"MASTER_ADDR": "a..b"}, ["MASTER_ADDR = 'a..b': a host's name must have 1 to 63 characters"]),
        (RUN | {"MASTER_ADDR": ""}, ["process 3 of 8: MASTER_ADDR is not set; set it to process 0's host"]),
        ({"OMPI_COMM_WORLD_RANK": "0", "MASTER_ADDR": "a"}, ["OMPI_COMM_WORLD_SIZE = None"]),
        (OMPI | {"MASTER_ADDR": ""}, ["process 2 of 4: MASTER_ADDR is not set"]),
    ],
)
def test_half_of_a_place(env, parts):
    with pytest.raises(ConfigError) as error:
        find_place(env)
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("b,a", "b"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("login1,gpu[07-09]", "login1"),
        ("gpu[3,1]", "gpu3"),
        ("gpu[3]", "gpu3"),
        ("rack[2-4]n[10-19]-ib,x", "rack2n10-ib"),
        ("a-b.c.example[1-2].org", "a-b.c.example1.org"),
        ("", ""),
    ],
)
def test_slurm_hosts(nodelist, host):
    assert slurm_hosts(nodelist)[:1] == [host][: bool(host)]


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


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def met(port, calls):
    """Make all calls (rank, size, timeout, job) at the same time; return their errors ("": none) and their seconds."""
    said = [None] * len(calls)

    def one(index, call):
        start = time.monotonic()
        try:
            meet(f"127.0.0.1:{port}", *call)
            said[index] = "", time.monotonic() - start
        except ConfigError as error:
            said[index] = str(error), time.monotonic() - start

    threads = [threading.Thread(target=one, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert None not in said
    return [text for text, _ in said], [seconds for _, seconds in said]


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("job", ["", "5f", "with spaces in it"])
def test_all_come(port, size, job):
    said, _ = met(port, [(rank, size, 10, job) for rank in reversed(range(size))])
    assert said == [""] * size


@pytest.mark.parametrize("missing", keep([[2], [1, 3]], [[1, 3]]))
def test_everyone_hears_who_is_missing(port, missing):
    said, seconds = met(port, [(rank, 5, 3, "") for rank in range(5) if rank not in missing])
    ranks = ", ".join(map(str, missing))
    assert len(set(said)) == 1
    assert said[0].startswith(f"rank {ranks} of 5 did not come to 127.0.0.1:{port} within 3 s: see its output")
    assert max(seconds) < 15


def test_nobody_listens(port):
    (said,), (seconds,) = met(port, [(1, 2, 0.3, "")])
    what = f"timed out after 0.3 s waiting for process 0 at 127.0.0.1:{port}: Connection refused"
    assert said.startswith(f"process 1 of 2 {what}")
    assert "check MASTER_ADDR and MASTER_PORT" in said
    assert 0.3 <= seconds < 20


@pytest.mark.parametrize("other", [(2, 3, 60, "other"), pytest.param((2, 4, 60, "job"), marks=pytest.mark.slow)])
def test_another_jobs_process_is_turned_away(port, other):
    """It is refused at once, and does not count as present."""
    said, seconds = met(port, [(0, 3, 4, "job"), (1, 3, 4, "job"), other])
    assert said[0] == said[1]
    assert said[0].startswith("rank 2 of 3 did not come")
    assert f"process 0 at 127.0.0.1:{port} belongs to another job" in said[2]
    assert seconds[2] < 30


def test_port_is_busy(port):
    with socket.create_server(("", port)):
        (said,), (seconds,) = met(port, [(0, 2, 10, "")])
    assert said.startswith(f"process 0 cannot listen on port {port}: Address already in use")
    assert "pass another --master_port" in said
    assert seconds < 5


def test_port_is_free_afterwards(port):
    for _ in range(3):
        said, _ = met(port, [(0, 2, 10, ""), (1, 2, 10, "")])
        assert said == ["", ""]
    socket.create_server(("", port)).close()


def test_a_rank_whose_connection_was_reset_may_come_again(port):
    said = []
    first = threading.Thread(target=lambda: said.append(met(port, [(0, 3, 20, "job")])), daemon=True)
    first.start()
    for _ in range(100):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port))
            break
        time.sleep(0.05)
    authenticate(connection, "job 1 3", "")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a close is a reset then
    time.sleep(0.3)
    connection.close()
    time.sleep(0.3)
    assert met(port, [(rank, 3, 10, "job") for rank in (1, 2)])[0] == ["", ""]
    first.join(20)
    assert said[0][0] == [""]
