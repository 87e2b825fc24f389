"""A process reads its place from the environment."""

from pathlib import Path

from helpers.stored_cases import check_cases

from jzero.distributed.place import find_place, get_local_rank, get_rank, get_world_size, log_dist, slurm_hosts
from jzero.errors import ConfigError

RUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}


def test_place(pytestconfig):
    """By how the process was started; an environment that has half of a place is an error."""

    def outcome(case):
        try:
            return repr(find_place(case[1]))
        except ConfigError as error:
            return str(error)

    check_cases(Path(__file__).with_name("places.jsonl"), outcome, pytestconfig)
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
