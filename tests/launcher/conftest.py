import os
import signal

import pytest
from hosts import Hosts
from jobs import WORKER, Command
from planning import Here

# A background job of a shell ignores Ctrl-C, and the commands that these tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start(tmp_path):
    """Start a job, with a program as its worker.py; kill what is left of it after the test."""
    commands = []

    def start(*arguments, program=None, **keywords):
        if program:
            (tmp_path / "worker.py").write_text(program)
        commands.append(Command(*arguments, cwd=tmp_path, **keywords))
        return commands[-1]

    yield start
    for command in commands:
        command.end()


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path.name


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    return Here(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = Hosts(tmp_path_factory.mktemp("hosts"), int(os.environ.get("PYTEST_XDIST_WORKER", "gw99")[2:]))
    yield made
    made.remove()


@pytest.fixture
def launch(start, hosts, worker, tmp_path):
    """Start a job on both hosts, two processes each."""

    def launch(*arguments, on="a", slots=2, **keywords):
        (tmp_path / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in hosts.names.values()))
        common = ("--hostfile", "hostfile", "--platform", "cpu", "--launcher_args", hosts.options)
        return start(*common, *arguments, prefix=hosts.on(on), **keywords)

    return launch
