"""Private APIs of JAX and CPython: one function each, with the reason that no public one serves.

No other module of jzero but `_compat.kernels` uses a private name of another package
(tests/pages/test_import_order.py checks it). All of these exist in Python 3.11 and 3.12 and in jax 0.10.2 and 0.11.2.
JAX is imported on first use, because the launcher works without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports multiprocessing
    from concurrent.futures import ProcessPoolExecutor


def backends_are_initialized() -> bool:
    """Return whether JAX has started its devices; from then on this process cannot join others.

    `jax.distributed.initialize` refuses too, but only once all processes have connected, and does not name the process.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def coordination_service() -> Any:
    """Return the client of the service that `jax.distributed.initialize` started: a key-value store with barriers.

    JAX's public `multihost_utils` gathers through the devices: there a process that failed, or runs another program,
    hangs all others, and the error does not name it.
    """
    from jax._src import distributed

    return distributed.global_state.client


def before_threads_end(callback: Callable[..., Any], *args: Any) -> None:
    """Call `callback(*args)` when Python ends, while threads still run and new ones may start.

    `atexit` callbacks run later, when Python has joined its threads and allows no new ones; `concurrent.futures` uses
    the same private hook (https://github.com/python/cpython/issues/86128). Python 3.12.0 and 3.12.1 allow no new
    threads even here (https://github.com/python/cpython/issues/113964).
    """
    threading._register_atexit(callback, *args)  # type: ignore[attr-defined]


def python_unpickler() -> type:
    """Return CPython's unpickler in Python, a table of operations.

    Its subclass can leave operations out. That in C, the public one, knows all of them, and grows its memo to the
    largest number in the file: gigabytes for a pickle of ten bytes.
    """
    return pickle._Unpickler  # type: ignore[attr-defined]


def close_transport(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a process that nobody waits for.

    Otherwise the garbage collector closes them after the event loop, and prints "RuntimeError: Event loop is closed"
    (https://github.com/python/cpython/issues/114177).
    """
    process._transport.close()  # type: ignore[attr-defined]


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser, as `--name` or `-n`; argparse lists them only in its help text."""
    return [name for action in parser._actions for name in action.option_strings]


def exit_code_of_uncaught() -> int:
    """Return the exit code of the exception that ended the main thread: 130 for Ctrl-C, otherwise 1; 0 without one.

    Python 3.12 records it in `sys.last_exc` and deprecates `sys.last_type`; 3.11 has only the latter.
    """
    kind = type(sys.last_exc) if hasattr(sys, "last_exc") else getattr(sys, "last_type", None)
    return 0 if kind is None else 130 if issubclass(kind, KeyboardInterrupt) else 1


def inner_jaxprs(eqn: Any) -> list[Any]:
    """List the jaxprs that an operation runs: the body of a scan, the branches of a condition, ...

    `jax.extend` promises no compatibility; there is no other way to read a traced program (jax 0.10 and 0.11).
    """
    from jax.extend.core import jaxprs_in_params

    return list(jaxprs_in_params(eqn.params))


def has_effect(eqn: Any) -> bool:
    """Return whether an operation does more than compute its results: a callback, a print.

    Collectives have the name of their axis among their effects, which no public name tells apart (jax 0.10 and 0.11).
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def is_constant(x: Any) -> bool:
    """Return whether an operand in a jaxpr is a number written in it, not a variable."""
    from jax.extend.core import Literal

    return isinstance(x, Literal)


@functools.cache
def make_sharding_errors_cheap() -> None:
    """Make a tracer's error for `.sharding` cheap, as it is since jax 0.11; Flax asks at each random key of a module.

    In jax 0.10 the property searches all equations so far, for an error message that nobody sees: 400 linear layers
    took 30 s instead of 2 s. Without the property, `Tracer.__getattr__` raises the same error.
    """
    import jax
    from jax._src import core

    if jax.__version_info__ < (0, 11) and "sharding" in vars(core.Tracer):
        del core.Tracer.sharding  # type: ignore[misc]


def without_dead_code(traced: Any) -> Any:
    """Return the jaxpr of a traced function without what its outputs do not need, also inside jit, scan and checkpoint.

    XLA removes the same. `jax.interpreters.partial_eval.dce_jaxpr` is not a documented API (jax 0.10 and 0.11).
    """
    from jax.interpreters import partial_eval

    return partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))[0]


@functools.cache
def _memory_view() -> Any:
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    view = Primitive("memory_view")
    view.def_abstract_eval(lambda x, *, space: x.update(memory_space=space))
    mlir.register_lowering(view, lambda ctx, x, *, space: [x])
    return view


def memory_view(x: Any, space: Any) -> Any:
    """Call the memory of a traced array `space` without moving the array.

    JAX refuses operations between arrays of host and of device memory. On a GPU both are one address space, and a
    kernel may read and write pinned host memory. `jax.extend.core.Primitive` promises no compatibility (jax 0.10 and
    0.11).
    """
    return _memory_view().bind(x, space=space)


def as_device_array(x: Any) -> Any:
    """View a traced array of host memory as one of the device's, see `memory_view`; return others as they are."""
    import jax

    return memory_view(x, jax.memory.Space.Device) if is_host_array(x) else x


def is_host_array(x: Any) -> bool:
    """Return whether a traced array lies in host memory."""
    import jax

    return jax.typeof(x).memory_space == jax.memory.Space.Host


def trace_state() -> Any:
    """Return what identifies the running trace: equal values mean that arrays of one may be used in the other.

    `jax.extend.core` makes no promise of stability; Flax compares traces by the same function.
    """
    from jax.extend import core

    return core.get_opaque_trace_state(convention="nnx")


def source_context(eqn: Any, traceback: Any) -> Any:
    """Return the context in which new operations get the scopes of an operation in a jaxpr, and this traceback.

    As in `jax.core.eval_jaxpr`; no public function sets both (jax 0.10 and 0.11).
    """
    from jax._src import source_info_util

    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(traceback, name_stack=names)


def traceback_of_call() -> Any:
    """Return the traceback that `source_context` has set, if it has; None outside of one."""
    from jax._src import source_info_util

    return source_info_util._source_info_context.context.traceback


def current_traceback() -> Any:
    """Return the traceback that an operation would have here; jaxprs show theirs, and JAX no other (0.10 and 0.11)."""
    from jax._src import source_info_util

    return source_info_util.current().traceback


@contextlib.contextmanager
def own_source() -> Iterator[None]:
    """Give new operations the line of the code that runs.

    While JAX differentiates a traced function, new operations get the line of the operation that it runs, also those of
    the forward pass of a custom_vjp. No public function ends that (jax 0.10 and 0.11).
    """
    from jax._src import source_info_util

    thread = source_info_util._source_info_context
    before = thread.context
    thread.context = source_info_util.new_source_info().replace(name_stack=before.name_stack)
    try:
        yield
    finally:
        thread.context = before


def closed_jaxpr(jaxpr: Any) -> Any:
    """Return a jaxpr with its constants; checkpoints hold one that has none (jax 0.10 and 0.11)."""
    from jax.extend.core import ClosedJaxpr

    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many it carries; the rest are scanned over.

    Jax 0.10 has the numbers among the scan's parameters, jax 0.11 a private tree of its operands.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def needed_part(traced: Any) -> tuple[Callable[[list[Any]], list[Any]], list[bool]]:
    """Remove from a traced function everything that its outputs do not need, also inside jit, scan and checkpoint.

    `jax.interpreters.partial_eval.dce_jaxpr` keeps debug prints and callbacks, which would then run twice, so they
    are removed first. Neither it nor `eval_jaxpr` is a documented API (jax 0.10 and 0.11).

    Args:
      traced: as from `jax.make_jaxpr`.

    Returns:
      A function of the flat inputs (any value for unused ones), and a flag per input: whether it is used.
    """
    from jax._src import core
    from jax.extend.core import ClosedJaxpr, Jaxpr
    from jax.interpreters import partial_eval

    def silent(jaxpr: Any) -> Any:
        eqns = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("debug_callback", "debug_print"):
                continue
            params = {name: silent_inside(value) for name, value in eqn.params.items()}
            eqns.append(eqn.replace(params=params, effects=quiet(eqn.effects)))
        return jaxpr.replace(eqns=eqns, effects=quiet(jaxpr.effects))

    def silent_inside(value: Any) -> Any:
        if isinstance(value, Jaxpr):  # jax 0.12: all have their constants
            return silent(value)
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=silent(value.jaxpr))
        if isinstance(value, tuple) and any(isinstance(x, ClosedJaxpr | Jaxpr) for x in value):
            return tuple(map(silent_inside, value))
        return value

    def quiet(effects: Any) -> set[Any]:
        return {effect for effect in effects if "Debug" not in type(effect).__name__}

    jaxpr, used = partial_eval.dce_jaxpr(silent(traced.jaxpr), [True] * len(traced.jaxpr.outvars))

    def run(inputs: list[Any]) -> list[Any]:
        return core.eval_jaxpr(jaxpr, traced.consts, *[x for x, use in zip(inputs, used, strict=True) if use])

    return run, list(used)


def subclass(cls: Any, space: dict[str, Any]) -> Any:
    """Make a subclass of an NNX module's class, with the keyword `pytree` of that class.

    Flax keeps it as a private attribute, and gives it to no subclass (flax 0.12).
    """
    keywords = {} if getattr(cls, "_pytree__is_pytree", True) else {"pytree": False}
    return type(cls)(cls.__name__, (cls,), space, **keywords)


def terminate(pool: ProcessPoolExecutor) -> None:
    """Stop the processes of a pool in the middle of their work; Python 3.14 has `terminate_workers`."""
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
