"""The line of the model that an operation of a trace comes from."""

from __future__ import annotations

import functools
import os
import sysconfig
from typing import Any

from jzero import _compat
from jzero.kernels.trace import Equation

MODEL, LAYERS, LIBRARIES = "model", "layers", "libraries"  # whose code: LAYERS are Flax and Optax


def source_line(eqn: Equation) -> str:
    """Return the line of the model that an operation in a jaxpr comes from, as "llama.py:159".

    A layer of Flax's that no line of the model calls has its own line; empty: neither.
    """
    return _line(eqn.source_info.traceback)


def source_function(eqn: Equation) -> str:
    """Return the model's function and line, as "Net.__call__ (net.py:12)"; empty if unknown."""
    frame = _frames(eqn.source_info.traceback).get(MODEL)
    return f"{frame.function_name.rpartition('<locals>.')[2]} ({_place(frame)})" if frame else ""


def calling_line() -> str:
    """Return the line of the model that runs now, as "llama.py:159"; empty if unknown."""
    return _line(_compat.current_traceback())


def source_of(eqn: Equation) -> Any:
    """Return the context in which new operations get the scopes and the line of an operation in a jaxpr.

    An operation inside of one that JAX itself compiles, as `jnp.fft.fft`, has no line of the model; it gets that of the
    call.
    """
    of_call = _compat.traceback_of_call()
    return _compat.source_context(eqn, eqn.source_info.traceback if of_call is None or source_line(eqn) else of_call)


def located_here(jaxpr: Any) -> Any:
    """Give the operations of a jaxpr without a line the one that runs now: `jax.make_jaxpr` cuts their tracebacks."""
    inner, here = getattr(jaxpr, "jaxpr", jaxpr), _compat.current_traceback()
    eqns = [
        eqn if source_line(eqn) else eqn.replace(source_info=eqn.source_info.replace(traceback=here))
        for eqn in inner.eqns
    ]
    located = inner.replace(eqns=eqns)
    return located if inner is jaxpr else jaxpr.replace(jaxpr=located)


def _line(traceback: Any) -> str:
    frames = _frames(traceback)
    frame = frames.get(MODEL, frames.get(LAYERS))
    return _place(frame) if frame else ""


def _place(frame: Any) -> str:
    return f"{os.path.basename(frame.file_name)}:{frame.line_num}"


def _frames(traceback: Any) -> dict[str, Any]:
    """Return the newest frame of the code of each owner."""
    frames = list(traceback.frames) if traceback else []
    return {_whose(frame.file_name): frame for frame in reversed(frames)}


@functools.cache
def _whose(path: str) -> str:
    return next((whose for folder, whose in _folders() if path.startswith(folder)), MODEL)


@functools.cache
def _folders() -> list[tuple[str, str]]:
    """Return folders and whose code they have, inner ones first."""
    import flax
    import jax
    import optax

    here, python = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sysconfig.get_path("stdlib")
    whose = {
        python: LIBRARIES,
        os.path.join(python, "site-packages"): MODEL,
        os.path.join(python, "dist-packages"): MODEL,
        jax.__path__[0]: LIBRARIES,
        flax.__path__[0]: LAYERS,
        optax.__path__[0]: LAYERS,
        here: LIBRARIES,
        os.path.join(here, "models"): MODEL,
    }
    return [(os.path.join(folder, ""), whose[folder]) for folder in sorted(whose, key=len, reverse=True)]
