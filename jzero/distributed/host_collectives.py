"""What processes tell each other outside of the devices, through the service that started JAX on all of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from jzero.errors import ConfigError, some_of

NOTICE = 30.0  # seconds after which a process says for whom it waits

_turns: dict[str, int] = {}


def agree(what: str, mine: str, timeout: float = 3600.0) -> list[str]:
    """Every process's text, by rank. All processes call it, in the same order for the same `what`.

    Args:
      timeout: seconds to wait for the last process.

    Raises:
      ConfigError: processes that did not call it.
    """
    if jax.process_count() == 1:
        return [mine]
    client, key = service(), f"jzero/{what}/{jax.process_index()}"
    client.key_value_set(key, mine, allow_overwrite=True)
    notice = threading.Timer(NOTICE, _say_who_is_late, (what,))
    notice.daemon = True
    notice.start()
    try:
        _wait_for_all(what, timeout)
    finally:
        notice.cancel()
    texts = {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(f"jzero/{what}")}
    _wait_for_all(what, timeout)  # nobody removes what somebody has not read
    client.key_value_delete(key)
    return [texts[rank] for rank in range(jax.process_count())]


def anyone(what: str, mine: str | None, timeout: float = 3600.0) -> str | None:
    """The text of a process that gives one, the same on all; None if all give None, which is quick enough for a step.

    Raises:
      ConfigError: processes that did not call it.
    """
    if jax.process_count() == 1:
        return mine
    _turns[what] = turn = _turns.get(what, 0) + 1
    client, key = service(), f"jzero/one of {what}/{turn}"  # of this turn, which a slow process may still be reading
    if mine is not None:
        client.key_value_set(key, mine, allow_overwrite=True)
    _wait_for_all(what, timeout)
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def together(what: str, work: Callable[[], Any]) -> Any:
    """What `work` gives; a mistake or a fault of files that it meets on one process is a ConfigError on all."""
    result, problem = None, None
    try:
        result = work()
    except (ConfigError, OSError) as error:
        problem = str(error)
    if problem := anyone(what, problem):
        raise ConfigError(problem)
    return result


def service() -> Any:
    """The service's, if there are several processes."""
    from jax._src import distributed

    return distributed.global_state.client


def _say_who_is_late(what: str) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service has gone: the waiting ends with that error
        there = {int(name.rpartition("/")[2]) for name, _ in service().key_value_dir_get(f"jzero/{what}")}
        late = sorted(set(range(jax.process_count())) - there)
        if late and jax.process_index() == min(there, default=None):
            who = f"process {jax.process_index()} waits for process {some_of(late)}"
            print(f"jzero: {who} ({what}): all must make this call", file=sys.stderr, flush=True)


def _wait_for_all(what: str, timeout: float) -> None:
    try:
        service().wait_at_barrier(f"jzero/{what}", int(1000 * timeout))
    except jax.errors.JaxRuntimeError as error:
        late = re.search(r"task names:((?:\s+\d+)+)", str(error))
        raise ConfigError(
            f"{what}: process {jax.process_index()} waited {timeout:g} s for all processes to do the same, in vain for "
            f"{', '.join(late[1].split()) if late else 'some'}; every process must make the same calls, in one order"
        ) from error


def check_same(what: str, mine: dict[str, Any]) -> None:
    """Raise, on every process, a ConfigError with the differences unless all processes say the same.

    Args:
      what: what it is about, for the message.
      mine: what JSON can hold.
    """
    text = json.dumps(mine, sort_keys=True, default=str)
    hashes = agree(what, hashlib.sha256(text.encode()).hexdigest())
    if len(set(hashes)) == 1:
        return
    first = [hashes.index(one) for one in hashes]  # only one of those that say the same sends all of it
    texts = agree(f"{what} differs", text if first[jax.process_index()] == jax.process_index() else "")
    said = [_flat(json.loads(texts[rank])) for rank in first]
    problems = []
    for key in sorted(set().union(*said)):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(said):
            values.setdefault(one.get(key, "nothing"), []).append(rank)
        if len(values) > 1:
            each = "; ".join(f"{value} on rank {some_of(ranks)}" for value, ranks in values.items())
            problems.append(f"{what}: the processes differ in {key}: {each}")
    raise ConfigError(*problems)


def _flat(tree: Any, path: str = "") -> dict[str, str]:
    if isinstance(tree, dict) and tree:
        parts = [_flat(value, f"{path}.{key}" if path else key) for key, value in tree.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {path: json.dumps(tree)}
