"""The choice of hosts and devices: the hostfile, the filters, CUDA_VISIBLE_DEVICES."""

import re
import string
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.errors import ConfigError
from jzero.launcher.hostfile import devices_here, parse_filter, read_hostfile, select_hosts, visible_devices

# Labels with dots between them; `st.from_regex` takes most of the time of these tests.
labels = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=4)
names = st.lists(labels, min_size=1, max_size=3).map(lambda parts: "h" + ".".join(parts))
hostfiles = st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=6)


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "hosts").write_text(text)
        return tmp_path / "hosts"

    return write


def refused(call, *arguments, **keywords):
    with pytest.raises(ConfigError) as error:
        call(*arguments, **keywords)
    return error.value.problems


def devices(slots):
    return {host: list(range(n)) for host, n in slots.items()}


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("worker-1 slots=8\nworker-0 slots=2\n", {"worker-1": 8, "worker-0": 2}),
        ("# all\n\n  a slots=4  # the first\n\t\nb\tslots=1", {"a": 4, "b": 1}),
        ("a slots = 4\r\nb   slots=16\r\n", {"a": 4, "b": 16}),
        ("10.0.0.7 slots=1\nroot@gpu.example.com slots=08\n", {"10.0.0.7": 1, "root@gpu.example.com": 8}),
    ],
)
def test_reads(write, text, slots):
    read = read_hostfile(write(text))
    assert list(read.items()) == list(slots.items())


MALFORMED = ["a", "a 8", "a slots", "a slots=", "a slots=x", "a slots=-1", "a slots=2.5", "a slots=2 max=4", "slots=4",
             "a gpus=4", "a:4", "a slots=4 b slots=4"]  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED)
def test_malformed_line(write, line):
    path = write(f"# comment\nok slots=1\n{line}\n")
    (problem,) = refused(read_hostfile, path)
    assert problem == f"{path}, line 3: {line!r}: must be `HOST slots=N`, as in `worker-1 slots=8`"


def test_all_bad_lines_at_once(write):
    path = write("a slots=1\nb slots=0\n\na slots=2\nc 4\n-oProxyCommand=sh slots=1\na slots=1 # again\n")
    problems = refused(read_hostfile, path)
    assert [problem.partition(": ")[0] for problem in problems] == [f"{path}, line {n}" for n in (2, 4, 5, 6, 7)]
    reasons = ["0 slots", "a is already in line 1", "must be `HOST", "begin with -", "a is already in line 1"]
    assert [why in problem for problem, why in zip(problems, reasons, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    "name", ["a;reboot", "$(reboot)", "`id`", "a&b", "a|b", "a>b", "a'b", 'a"b', "a\\b", "a*", "~", "{a,b}"]
)
def test_a_name_that_a_shell_would_read(write, name):
    """As that of ssh's ProxyCommand, with %h."""
    (problem,) = refused(read_hostfile, write(f"{name} slots=1\n"))
    words = r"a host's name cannot contain '?\"?\S+; it may have letters, digits, \. _ - : % and \[ \]$"
    assert re.search(words, problem)
    (problem,) = refused(parse_filter, name, "--include")
    assert "a host's name cannot contain" in problem


@pytest.mark.parametrize("text", ["", "\n\n", "# a slots=4\n"])
def test_no_host(write, text):
    (problem,) = refused(read_hostfile, write(text))
    assert "contains no host" in problem


@given(hostfiles)
def test_reads_back(tmp_path_factory, slots):
    path = tmp_path_factory.getbasetemp() / "written"
    path.write_text("".join(f"{host} slots={n}\n" for host, n in slots.items()))
    assert list(read_hostfile(path).items()) == list(slots.items())


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("a", {"a": None}),
        ("b@a", {"b": None, "a": None}),
        ("a:0,2@b", {"a": [0, 2], "b": None}),
        (" a : 3, 1 @ b:0 ", {"a": [1, 3], "b": [0]}),
        ("worker-1.x:11", {"worker-1.x": [11]}),
        ("[::1]:0,1", {"[::1]": [0, 1]}),
        # What is named twice counts once, as in DeepSpeed; scripts that build their filters rely on it.
        ("a:1,1", {"a": [1]}),
        ("a:1,01,0", {"a": [0, 1]}),
        ("a:3@b@a:1,3", {"a": [1, 3], "b": None}),
        ("a@b:0@a", {"a": None, "b": [0]}),
    ],
)
def test_filter(text, chosen):
    assert parse_filter(text, "--include") == chosen


@pytest.mark.parametrize("text", ["", "@", "a@", "@a", "a:", "a:x", "a:0-3", "a:0,", "a:,0", "a:-1", "a:0:1", "a b"])
def test_malformed_filter(text):
    (problem,) = refused(parse_filter, text, "--exclude")
    assert problem.startswith(f"--exclude = {text!r}: ")
    assert "must be HOST or HOST:ID,ID, parts joined by @" in problem


@pytest.mark.parametrize("text", ["a@a:0", "a:0@a", "b@a:1@a:2@a"])
def test_a_host_that_is_named_both_whole_and_in_part(text):
    """DeepSpeed silently takes the part; the user may mean either."""
    (problem,) = refused(parse_filter, text, "--exclude")
    assert problem == f"--exclude = {text!r}: a is named both whole and with devices; keep one of them"


HOSTS = {"b": [0, 1, 2, 3], "a": [0, 1], "c": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"include": "a", "exclude": "b"}, ["--include a and --exclude b"]),
        ({"include": "a", "num_nodes": 1}, ["--include a and --num_nodes 1"]),
        ({"exclude": "a", "num_gpus": 2}, ["--exclude a and --num_gpus 2"]),
        ({"num_nodes": 0}, ["--num_nodes = 0: must be at least 1"]),
        ({"num_gpus": 0}, ["--num_gpus = 0: must be at least 1"]),
        ({"num_gpus": -2}, ["--num_gpus = -2: must be at least 1"]),
        ({"num_nodes": 4}, ["--num_nodes = 4: there are 3 hosts: b, a, c"]),
        ({"num_gpus": 3}, ["--num_gpus = 3: a has 2: 0, 1; ask for fewer"]),
        ({"include": "d"}, ["no host 'd'; the hosts are b, a, c"]),
        ({"exclude": "a:2"}, ["a has no device 2; it has 0, 1"]),
        ({"exclude": "a@b@c"}, ["leaves no device of b, a, c"]),
    ],
)
def test_refused(options, parts):
    (problem,) = refused(select_hosts, HOSTS, **options)
    assert [part for part in parts if part not in problem] == [], problem


def test_all_at_once():
    problems = refused(select_hosts, HOSTS, include="d@a:0,2,3@e:1@b:4")
    assert [problem.partition(": ")[2] for problem in problems] == [
        "no host 'd'; the hosts are b, a, c",
        "no host 'e'; the hosts are b, a, c",
        "a has no device 2; it has 0, 1",
        "a has no device 3; it has 0, 1",
        "b has no device 4; it has 0, 1, 2, 3",
    ]
    assert len(refused(select_hosts, HOSTS, num_gpus=5)) == 3


@given(hostfiles, st.data())
def test_include_and_exclude_are_complements(slots, data):
    hosts = devices(slots)
    every = [(host, id) for host, ids in hosts.items() for id in ids]
    some = data.draw(st.sets(st.sampled_from(every), min_size=1))
    text = "@".join(
        f"{host}:{','.join(str(id) for h, id in some if h == host)}"
        for host in data.draw(st.permutations(sorted({host for host, _ in some})))
    )
    kept = select_hosts(hosts, include=text)
    assert _flat(kept) == [pair for pair in every if pair in some]  # in the hostfile's order
    if len(some) == len(every):
        refused(select_hosts, hosts, exclude=text)
    else:
        assert _flat(select_hosts(hosts, exclude=text)) == [pair for pair in every if pair not in some]


def _flat(hosts):
    return [(host, id) for host, ids in hosts.items() for id in ids]


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


@given(hostfiles, st.data())
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_filters_choose_as_deepspeed_does(option, slots, data):
    hosts = devices(slots)
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


@given(hostfiles, st.data())
def test_counts(slots, data):
    nodes = data.draw(st.integers(1, len(slots)))
    gpus = data.draw(st.integers(1, min(list(slots.values())[:nodes])))
    chosen = select_hosts(devices(slots), num_nodes=nodes, num_gpus=gpus)
    assert list(chosen.items()) == [(host, list(range(gpus))) for host in list(slots)[:nodes]]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0", [0]),
        ("3,1", [3, 1]),
        (" 2 , 0,", [2, 0]),
        ("GPU-8a1f,MIG-3c,5", ["GPU-8a1f", "MIG-3c", 5]),
        ("1,-1,2", [1]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_visible(text, ids):
    assert visible_devices({"CUDA_VISIBLE_DEVICES": text}) == ids
    assert devices_here({"CUDA_VISIBLE_DEVICES": text}) == ids
    assert visible_devices({}) is None
