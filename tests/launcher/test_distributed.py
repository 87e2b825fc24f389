"""A process reads its place from the environment."""

import re

import pytest

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


def test_half_of_a_place():
    for env, part in (
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE = 2 and RANK is not set"),
        ({"RANK": "1", "MASTER_ADDR": "a"}, "RANK = 1 and WORLD_SIZE is not set"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID = 1 and SLURM_STEP_NUM_TASKS is not set"),
        (RUN | {"WORLD_SIZE": ""}, "WORLD_SIZE = ''"),
        (RUN | {"MASTER_PORT": "tcp://1.2.3.4:5"}, "MASTER_PORT = 'tcp://1.2.3.4:5'"),
        (RUN | {"RANK": "8"}, "rank = 8 of 8 processes: ranks are 0 to 7"),
        (RUN | {"MASTER_ADDR": "a..b"}, "MASTER_ADDR = 'a..b': a host's name must have 1 to 63 characters"),
        (RUN | {"MASTER_ADDR": ""}, "process 3 of 8: MASTER_ADDR is not set; set it to process 0's host"),
        ({"OMPI_COMM_WORLD_RANK": "0", "MASTER_ADDR": "a"}, "OMPI_COMM_WORLD_SIZE = None"),
    ):
        with pytest.raises(ConfigError, match=re.escape(part)):
            find_place(env)


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
