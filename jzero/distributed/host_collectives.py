"""Collectives among hosts: processes exchange short texts through JAX's coordination service, not the devices.

They work before the devices run a common program and after one of them has failed, and they name the process that is
missing. Each call has a topic. The service keeps one value per topic and process, so all processes must call with the
same topics in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import jax
from jax.sharding import Mesh

from jzero import _compat
from jzero.errors import CheckpointError, ConfigError, LostProcessError, PassingError, in_a_line, some_of
from jzero.files import lasts
from jzero.tree import named

if TYPE_CHECKING:
    from jzero.config import Config

T = TypeVar("T")

NOTICE = 30.0  # seconds after which a waiting process prints the processes that are missing

_turns: dict[str, int] = {}


def gather_texts(topic: str, text: str, timeout: float = 3600.0) -> list[str]:
    """Gather every process's text, by rank. All processes must call it, in the same order for the same topic.

    Args:
      timeout: seconds to wait for the last process. An hour by default: another process may compile, or write a large
        checkpoint, before it calls.

    Raises:
      LostProcessError: names the processes that did not call in time.
    """
    if jax.process_count() == 1:
        return [text]
    client, key = _compat.coordination_service(), f"jzero/{topic}/{jax.process_index()}"
    client.key_value_set(key, text, allow_overwrite=True)
    notice = threading.Timer(NOTICE, _print_who_is_late, (topic,))
    notice.daemon = True
    notice.start()
    try:
        _wait_for_all(topic, timeout)
    finally:
        notice.cancel()
    texts = {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(f"jzero/{topic}")}
    _wait_for_all(topic, timeout)  # no process deletes its text before all have read it
    client.key_value_delete(key)
    return [texts[rank] for rank in range(jax.process_count())]


def share_problem(topic: str, text: str | None, timeout: float = 3600.0) -> str | None:
    """Return one process's text, the same on all; None if all give None. Fast enough to call every step.

    Raises:
      LostProcessError: names the processes that did not call in time.
    """
    if jax.process_count() == 1:
        return text
    _turns[topic] = turn = _turns.get(topic, 0) + 1
    # A key per turn, because a slow process may still be reading the previous one.
    client, key = _compat.coordination_service(), f"jzero/one of {topic}/{turn}"
    if text is not None:
        client.key_value_set(key, text, allow_overwrite=True)
    _wait_for_all(topic, timeout)
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def publish(key: str, text: str) -> None:
    """Set "KEY/RANK" in the coordination service, once: the first text counts.

    Raises:
      JaxRuntimeError: this process has set it before, or the service does not answer.
    """
    _compat.coordination_service().key_value_set(f"{key}/{jax.process_index()}", text)


def is_set(key: str) -> bool:
    """Return whether a process has set the key; False also after this script has left the job, or without an answer."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if client := _compat.coordination_service():
            client.key_value_try_get(key)
            return True
    return False


def published(key: str, seconds: float) -> dict[int, str]:
    """Return rank -> text of the processes that set "KEY/RANK" in the coordination service within `seconds`.

    Raises:
      JaxRuntimeError: the service does not answer.
    """
    client, end, found = _compat.coordination_service(), time.monotonic() + seconds, dict[int, str]()
    for rank in range(jax.process_count()):
        left = max(1, int(1000 * (end - time.monotonic())))
        try:
            found[rank] = client.blocking_key_value_get(f"{key}/{rank}", left)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return found


def run_on_all(topic: str, work: Callable[[], T]) -> T:
    """Return `work()`. If it raises on any process, every process raises.

    A ConfigError or OSError becomes the same ConfigError on all; another error stays what it is on its own process.
    """
    problem = None
    try:
        result = work()
    except LostProcessError:
        raise  # the lost process would not answer
    except (ConfigError, OSError) as error:
        passes, text = isinstance(error, PassingError), str(error)
        if isinstance(error, OSError):
            passes, text = not lasts(error), f"{error.filename}: {error.strerror}" if error.filename else text
        problem = f"{'passing' if passes else 'lasting'}:{text}"
    except Exception as error:  # or the others would wait for this process
        share_problem(topic, f"lasting:{topic}: process {jax.process_index()}: {in_a_line(error)}")
        raise
    if problem := share_problem(topic, problem):
        kind, _, text = problem.partition(":")
        raise (PassingError if kind == "passing" else ConfigError)(text)
    return result


def read_on_all(what: str, work: Callable[[], T], of: object = "") -> T:
    """Run `work` on every process; if it raises on any process, every process raises a CheckpointError.

    Args:
      what: the name of the work, the same on all processes.
      work: called once.
      of: the object of the work; may differ between processes.
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = work()
    except Exception as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{f'{what} {of}'.strip()}: {in_a_line(error)}"
        if jax.process_count() > 1:
            problem += f" (process {jax.process_index()})"
    if problem := share_problem(what, problem):
        raise CheckpointError(problem)
    return result  # type: ignore[return-value]  # no process had a problem, so work returned


def check_same(topic: str, values: Mapping[str, object]) -> None:
    """Compare values, which must fit JSON, between all processes.

    Raises:
      ConfigError: on every process, with each key that differs and its values by rank.
    """
    text = json.dumps(values, sort_keys=True, default=str)
    hashes = gather_texts(topic, hashlib.sha256(text.encode()).hexdigest())
    if len(set(hashes)) == 1:
        return
    first = [hashes.index(one) for one in hashes]  # one process per distinct text sends all of it
    texts = gather_texts(f"{topic} differs", text if first[jax.process_index()] == jax.process_index() else "")
    flat = [_flat(json.loads(texts[rank])) for rank in first]
    problems = []
    for key in sorted(set().union(*flat)):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(flat):
            ranks.setdefault(one.get(key, "nothing"), []).append(rank)
        if len(ranks) > 1:
            each = "; ".join(f"{value} on rank {some_of(some)}" for value, some in ranks.items())
            problems.append(f"{topic}: the processes differ in {key}: {each}")
    raise ConfigError(*problems)


class Guard:
    """Compares config, mesh and parameters of a train step now, and every new program before its first run.

    So a difference is an error and not a hang in a collective.

    Raises:
      ConfigError: on all processes, with the values that differ and their ranks.
    """

    def __init__(self, mesh: Mesh, config: Config, leaves: object):
        self.shared = any(device.process_index != jax.process_index() for device in mesh.devices.flat)
        self.agreed: set[tuple] = set()
        if self.shared and jax.process_count() > 1:
            settings = config.model_dump(mode="json", warnings=False)
            parameters = {leaf.name: f"{list(leaf.shape)} {leaf.spec}" for leaf in jax.tree.leaves(leaves)}
            values = {"config": settings, "parameters": parameters, "jax": jax.__version__, "mesh": dict(mesh.shape)}
            check_same("train step", values)

    def check(self, call: str, batch: object, extra: object) -> None:
        """Compare the shapes of a batch and what goes with it, once for each program."""
        if not self.shared:
            return
        parts = batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch  # the caller's names of leaves
        shapes = {name: f"{x.dtype}{list(x.shape)}" for name, x in named((parts, extra)).items()}
        program = call, tuple(shapes.items())
        if program not in self.agreed:
            check_same("train step", {"call": call, "batch": shapes})
            self.agreed.add(program)


def _flat(tree: object, path: str = "") -> dict[str, str]:
    if isinstance(tree, dict) and tree:
        parts = [_flat(value, f"{path}.{key}" if path else key) for key, value in tree.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {path: json.dumps(tree)}


def _print_who_is_late(topic: str) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service has gone; the barrier raises that error
        arrived = {
            int(name.rpartition("/")[2])
            for name, _ in _compat.coordination_service().key_value_dir_get(f"jzero/{topic}")
        }
        late = sorted(set(range(jax.process_count())) - arrived)
        if late and jax.process_index() == min(arrived, default=None):  # one process prints for all
            who = f"process {jax.process_index()} waits for process {some_of(late)}"
            print(f"jzero: {who} ({topic}): all processes must make this call", file=sys.stderr, flush=True)


def _wait_for_all(topic: str, timeout: float) -> None:
    try:
        _compat.coordination_service().wait_at_barrier(f"jzero/{topic}", int(1000 * timeout))
    except jax.errors.JaxRuntimeError as error:
        # The service lists the missing processes only in its message: "... task names:\n 1\n 3".
        late = re.search(r"task names:((?:\s+\d+)+)", str(error))
        if "DEADLINE_EXCEEDED" not in str(error):  # such as UNAVAILABLE: the process that coordinates has ended
            raise LostProcessError(
                f"{topic}: process {jax.process_index()} lost process 0, which coordinates the job: see its own error "
                f"({in_a_line(error)})"
            ) from error
        raise LostProcessError(
            f"{topic}: process {jax.process_index()} timed out after {timeout:g} s waiting for "
            f"{'process ' + ', '.join(late[1].split()) if late else 'other processes'}; all processes must make the "
            "same calls in the same order"
        ) from error
