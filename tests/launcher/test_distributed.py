"""A process reads its place from the environment."""

from pathlib import Path

from helpers.stored_cases import check_cases

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
