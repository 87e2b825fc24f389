"""The choice of hosts and devices, by the hostfile, the filters and CUDA_VISIBLE_DEVICES; and a process's place."""

import string
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.stored_cases import check_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.distributed.place import find_place, get_local_rank, get_rank, get_world_size, log_dist, slurm_hosts
from jzero.errors import ConfigError
from jzero.launcher.hostfile import parse_filter, read_hostfile, select_hosts

# Labels with dots between them; `st.from_regex` takes most of the time of these tests.
labels = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=4)
names = st.lists(labels, min_size=1, max_size=3).map(lambda parts: "h" + ".".join(parts))
hostfiles = st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=6)


def refused(call, *arguments, **keywords):
    with pytest.raises(ConfigError) as error:
        call(*arguments, **keywords)
    return error.value.problems


HOSTS = {"b": [0, 1, 2, 3], "a": [0, 1], "c": [0, 1, 2, 3]}


def test_all_bad_lines_at_once(tmp_path, pytestconfig):
    """And mistakes in filters and options. ssh's ProxyCommand has a shell expand the name of a host.

    DeepSpeed silently takes the part of a host that is also named whole; the user may mean either.
    """
    path = tmp_path / "hosts"

    def outcome(case):
        if isinstance(case, str):
            path.write_text(case)
            problems = refused(read_hostfile, path)
        elif "filter" in case:
            problems = refused(parse_filter, case["filter"], "--exclude")
        else:
            problems = refused(select_hosts, HOSTS, **case)
        return [problem.replace(str(path), "HOSTS") for problem in problems]

    check_cases(Path(__file__).with_name("hostfile_mistakes.jsonl"), outcome, pytestconfig)


def deepspeed_filter(host_info, include_str="", exclude_str=""):
    """Port of parse_resource_filter and parse_node_config_list of DeepSpeed 0.19.8, deepspeed/launcher/runner.py."""
    node_configs = defaultdict(list)
    for node_config in (include_str or exclude_str).split("@"):
        hostname, _, slots = node_config.partition(":")
        node_configs[hostname] += [int(x) for x in slots.split(",")] if slots else []
    filtered_hosts = {} if include_str else {host: list(slots) for host, slots in host_info.items()}
    for hostname, slots in {k: sorted(set(v)) for k, v in node_configs.items()}.items():
        if include_str:
            filtered_hosts[hostname] = slots or host_info[hostname]
        elif slots:
            for slot in slots:
                filtered_hosts[hostname].remove(slot)
        else:
            filtered_hosts[hostname] = []
    return {host: filtered_hosts[host] for host in host_info if filtered_hosts.get(host)}


@settings(max_examples=25)
@given(hostfiles, st.data())
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_filters_choose_as_deepspeed_does(option, slots, data):
    hosts = {host: list(range(n)) for host, n in slots.items()}
    whole = data.draw(st.dictionaries(st.sampled_from(sorted(hosts)), st.booleans(), min_size=1))
    parts = []
    for _ in range(data.draw(st.integers(1, 6))):
        host = data.draw(st.sampled_from(sorted(whole)))
        ids = data.draw(st.lists(st.sampled_from(hosts[host]), min_size=1, max_size=4))
        parts.append(host if whole[host] else f"{host}:{','.join(map(str, ids))}")
    expected = deepspeed_filter(hosts, **{f"{option}_str": "@".join(parts)})
    if expected:
        assert list(select_hosts(hosts, **{option: "@".join(parts)}).items()) == list(expected.items())
    else:
        refused(select_hosts, hosts, **{option: "@".join(parts)})


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
    run = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    for name, value in run.items():
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
