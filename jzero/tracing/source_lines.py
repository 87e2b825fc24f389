"""The line of the model that an operation of a trace comes from."""

from __future__ import annotations

import functools
import os
import sysconfig
from typing import Any

from jzero import _compat


def source_line(eqn: Any) -> str:
    """Return the line of the model that an operation in a jaxpr comes from, as "llama.py:159"; empty if unknown."""
    return _line(eqn.source_info.traceback)


def source_function(eqn: Any) -> str:
    """Return its function and line, as "Net.__call__ (net.py:12)"; empty if unknown."""
    frame = _frame(eqn.source_info.traceback)
    return f"{frame.function_name.rpartition('<locals>.')[2]} ({_line(eqn.source_info.traceback)})" if frame else ""


def calling_line() -> str:
    """Return the line of the model that runs now, as "llama.py:159"; empty if unknown."""
    return _line(_compat.current_traceback())


def source_of(eqn: Any) -> Any:
    """Return the context in which new operations get the scopes and the line of an operation in a jaxpr.

    An operation inside of one that JAX itself compiles, as `jnp.fft.fft`, has no line of the model; it gets that of the
    call.
    """
    of_call = _compat.traceback_of_call()
    return _compat.source_context(eqn, eqn.source_info.traceback if of_call is None or source_line(eqn) else of_call)


def _line(traceback: Any) -> str:
    frame = _frame(traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.line_num}" if frame else ""


def _frame(traceback: Any) -> Any:
    """Return the newest frame that is the model's; where there is none, one of Flax or Optax; None: neither."""
    frames = list(traceback.frames) if traceback else []
    newest = {_whose(frame.file_name): frame for frame in reversed(frames)}
    return newest.get("model", newest.get("layers"))


@functools.cache
def _whose(path: str) -> str:
    return next((whose for folder, whose in _folders() if path.startswith(folder)), "model")


@functools.cache
def _folders() -> list[tuple[str, str]]:
    """Return folders and whose code they have: the model's, that of layers, or other libraries'; inner ones first."""
    import flax
    import jax
    import optax

    here, python = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sysconfig.get_path("stdlib")
    whose = {
        python: "libraries",
        os.path.join(python, "site-packages"): "model",
        os.path.join(python, "dist-packages"): "model",
        jax.__path__[0]: "libraries",
        flax.__path__[0]: "layers",
        optax.__path__[0]: "layers",
        here: "libraries",
        os.path.join(here, "models"): "model",
    }
    return [(os.path.join(folder, ""), whose[folder]) for folder in sorted(whose, key=len, reverse=True)]
