import signal

import pytest
from jobs import Command

# A shell's background job ignores Ctrl-C, and so would the commands that these tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start(tmp_path):
    """Start a job; whatever is left of it after the test is killed."""
    commands = []

    def start(*arguments, **keywords):
        commands.append(Command(*arguments, cwd=tmp_path, **keywords))
        return commands[-1]

    yield start
    for command in commands:
        command.end()
