"""The dtype of each quantity in a train step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jzero.loss_scale import Scaler

_FLOAT32 = np.dtype(np.float32)

_DTYPES = {name: np.dtype(t) for name, t in (("fp32", jnp.float32), ("fp16", jnp.float16), ("bf16", jnp.bfloat16))}


@dataclass(frozen=True)
class Precision:
    """The dtype of each quantity in a train step.

    Attributes:
      compute: parameters and activations in the model.
      master: the parameters that the optimizer updates; frozen parameters are kept in `compute`.
      accum: the sum of the micro-batches' gradients.
      reduce: gradients on the wire.
      optimizer_state: moments.
      check_overflow: whether a step with a non-finite gradient is skipped.
      scaler: the loss scaler's settings; scale 1 unless fp16.
      auto_cast: whether the floats of a batch are cast to `compute`: all, none, or "auto", see `jzero.auto_cast`.
    """

    compute: Any = _FLOAT32
    master: Any = _FLOAT32
    accum: Any = _FLOAT32
    reduce: Any = _FLOAT32
    optimizer_state: Any = _FLOAT32
    check_overflow: bool = True
    scaler: Scaler = field(default_factory=Scaler)
    auto_cast: bool | Literal["auto"] = False

    @classmethod
    def from_config(cls, config: Any) -> Precision:
        """Read the policy from a `Config`: `precision`, `fp16`, `bf16`, `data_types` and `communication_data_type`."""
        compute, wire = _DTYPES[config.precision], config.communication_data_type
        fp16 = config.precision == "fp16" and config.fp16
        bf16 = config.precision == "bf16" and config.bf16
        low_masters = (fp16 and fp16.fp16_master_weights_and_grads) or (bf16 and bf16.bf16_master_weights_and_grads)
        return cls(
            compute=compute,
            master=compute if low_masters else _FLOAT32,
            accum=_DTYPES[config.data_types.grad_accum_dtype],
            reduce=_DTYPES[wire] if wire else compute,
            optimizer_state=compute if bf16 and bf16.bf16_optimizer_states else _FLOAT32,
            check_overflow=bool(bf16.check_grad_overflow) if bf16 else True,
            scaler=_scaler(fp16) if fp16 else Scaler(),
            auto_cast=fp16.auto_cast if fp16 else bf16.auto_cast if bf16 else False,
        )


def _scaler(fp16: Any) -> Scaler:
    dynamic = not fp16.loss_scale
    return Scaler(
        dynamic=dynamic,
        initial=2.0**fp16.initial_scale_power if dynamic else float(fp16.loss_scale),
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=float(fp16.min_loss_scale),
    )


def cast(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree; the others stay as they are.

    >>> cast({"w": jnp.ones(2), "ids": jnp.arange(2)}, jnp.bfloat16)["w"].dtype
    dtype(bfloat16)
    """
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
