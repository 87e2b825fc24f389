"""Running fuzzers, and the mutations that they share."""

import os
import random
import time

import jax

import jzero
from jzero.errors import CheckpointError

FUZZERS = {}  # name -> (function, cases in the default run, cases under -m slow)


def fuzzer(few, many):
    """Register `function(random, folder)`, which makes one case and runs it."""

    def register(function):
        FUZZERS[function.__name__] = (function, few, int(os.environ.get("FUZZ", many)))
        return function

    return register


def run(name, cases, folder):
    jax.random.key(0)  # starts JAX
    refused = 0
    for number in range(cases):
        started, error = time.thread_time(), None
        try:
            FUZZERS[name][0](random.Random(number), folder)
        except (jzero.ConfigError, CheckpointError) as answer:
            error = answer
        except Exception as fault:
            raise AssertionError(f"case {number} of {name}: {fault!r}") from fault
        took = time.thread_time() - started
        assert took < 1, f"case {number} of {name} took {took:.1f} s"
        if error:
            refused += 1
            assert is_short(error), f"case {number} of {name}: {error}"
    print(f"{name}: {cases} cases, {refused} refused")
    assert cases // 50 < refused < cases - cases // 50  # a fuzzer that is always refused tests little


def is_short(error):
    """Return whether each problem is one printable line of at most about 2,000 characters."""
    lines, problems = str(error).splitlines(), getattr(error, "problems", [error])
    str(error).encode()
    return len(lines) == min(len(problems), 21) and max(map(len, lines)) < 2100


HOSTILE = [
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63, 10**30, -(10**400), 1e-320, 1e308, float("inf"), float("nan"),
    "", "auto", "none", "\0", "\ud800", "\u202e", "a\nb", "../../x", "~", "/dev/zero", "1e400", "9" * 5000, "x" * 10**5,
    [], {}, [[]], [{}], {"": 1}, {"a": {"b": {"c": {}}}}, ["("], ["(" * 3000], ["(a+)+$", "[[a", "a{99999999999}"],
    {"enabled": True}, {"type": "Adam"}, {"stage": 3}, b"bytes", object(), {1: 2}, {(1, 2): 3}, {None: None},
]  # fmt: skip


def cut(r, data):
    """Change a few bytes or characters: delete, repeat, replace, truncate, insert."""
    for _ in range(r.choice([0, 1, 1, 1, 2, 5])):
        at, n = r.randrange(len(data) + 1), r.choice([1, 1, 2, 8, 40])
        other = data[: r.randrange(len(data) + 1)][-n:]
        data = r.choice([
            data[:at] + data[at + n :], data[:at] + data[at : at + n] * r.choice([2, 3, 200]) + data[at + n :],
            data[:at] + other + data[at + len(other) :], data[:at], data[:at] + other + data[at:],
        ])  # fmt: skip
    return data


def garbled(r, text, alphabet):
    """Cut a text, and put characters of `alphabet` in some places."""
    text = cut(r, text)
    for _ in range(r.choice([0, 1, 2, 4])):
        at = r.randrange(len(text) + 1)
        text = text[:at] + r.choice(alphabet) + text[at + r.choice([0, 1]) :]
    return text


def places(node, path=()):
    """List the paths of all values in nested dicts and lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(found for key, child in items for found in places(child, (*path, key)))]
