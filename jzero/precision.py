"""The dtype of each quantity in a train step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import ConfigError
from jzero.loss_scale import Scaler

_FLOAT32 = np.dtype(np.float32)

_DTYPES = {name: np.dtype(t) for name, t in (("fp32", jnp.float32), ("fp16", jnp.float16), ("bf16", jnp.bfloat16))}
_MOMENTS = _DTYPES | {"fp8": np.dtype(jnp.float8_e5m2)}


@dataclass(frozen=True)
class Precision:
    """The dtype of each quantity in a train step.

    Attributes:
      compute: parameters and activations in the model.
      master: the parameters that the optimizer updates; frozen parameters are kept in `compute`.
      accum: the sum of the micro-batches' gradients.
      reduce: gradients on the wire.
      optimizer_state: moments.
      at_random: whether moments are rounded up or down at random, not to the nearest.
      check_overflow: whether a step with a non-finite gradient is skipped.
      scaler: the loss scaler's settings; scale 1 unless fp16.
      auto_cast: whether the floats of a batch are cast to `compute`: all, none, or "auto", see `tracing.auto_cast`.
      why: why `compute` is what it is, if the config leaves it open.
    """

    compute: Any = _FLOAT32
    master: Any = _FLOAT32
    accum: Any = _FLOAT32
    reduce: Any = _FLOAT32
    optimizer_state: Any = _FLOAT32
    at_random: bool = False
    check_overflow: bool = True
    scaler: Scaler = field(default_factory=Scaler)
    auto_cast: bool | Literal["auto"] = False
    why: str = ""

    @classmethod
    def from_config(cls, config: Any, why: str = "") -> Precision:
        """Read the policy from a `Config`: `precision`, `fp16`, `bf16`, `data_types` and `communication_data_type`."""
        compute, wire = _DTYPES[config.precision], config.communication_data_type
        fp16 = config.precision == "fp16" and config.fp16
        bf16 = config.precision == "bf16" and config.bf16
        moments = config.optimizer.state_dtype if config.optimizer else "fp32"
        at_random = moments != "fp32"
        if bf16 and bf16.bf16_optimizer_states:
            moments = "bf16"
        low_masters = (fp16 and fp16.fp16_master_weights_and_grads) or (bf16 and bf16.bf16_master_weights_and_grads)
        return cls(
            compute=compute,
            master=compute if low_masters else _FLOAT32,
            accum=_DTYPES[config.data_types.grad_accum_dtype],
            reduce=_DTYPES[wire] if wire else compute,
            optimizer_state=_MOMENTS[moments],
            at_random=at_random,
            check_overflow=bool(bf16.check_grad_overflow) if bf16 else True,
            scaler=_scaler(fp16) if fp16 else Scaler(),
            auto_cast=fp16.auto_cast if fp16 else bf16.auto_cast if bf16 else False,
            why=why,
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


def settle_precision(config: Any, params: Any, device: jax.Device) -> tuple[Any, str]:
    """Decide `bf16.enabled` and `fp16.enabled` where the config has "auto".

    In DeepSpeed's files the Hugging Face Trainer fills these in, from its command line. Here the parameters' dtype
    decides, and for float32 parameters the device: half precision where it has matrix units for it, with float32
    masters.

    Args:
      config: a `Config`.
      params: the parameters or their shapes.
      device: one of the run's.

    Returns:
      The config with both settled, and the reason in words; "" if there was nothing to settle.
    """
    open_ = {name for name in ("bf16", "fp16") if f"{name}.enabled" in config.autos}
    if not open_ or config.bf16.enabled or config.fp16.enabled:
        return config, ""
    sizes: dict[str, int] = {}
    for x in jax.tree.leaves(params):
        if jnp.issubdtype(x.dtype, jnp.floating):
            sizes[x.dtype.name] = sizes.get(x.dtype.name, 0) + x.size
    stored = max(sizes, key=lambda name: sizes[name], default="float32")
    wanted = {"bfloat16": ("bf16",), "float16": ("fp16",)}.get(stored, _fast(device))
    choice = next((name for name in wanted if name in open_), None)
    kind = getattr(device, "device_kind", device.platform)
    reason = f"the parameters are {stored}" + (f" and this is a {kind}" if stored == "float32" else "")
    fix = 'write "enabled": true or false to decide'
    words = " and ".join(f'{name}.enabled "auto"' for name in sorted(open_))
    why = f"{words}: {choice or 'fp32'}, since {reason}; {fix}"
    if choice:
        section = getattr(config, choice).model_copy(update={"enabled": True})
        config = config.model_copy(update={choice: section})
    return config, why


def _fast(device: jax.Device) -> tuple[str, ...]:
    """Return the half precisions that a device is fast in, the better one first."""
    if device.platform == "cpu":
        return ()
    return ("fp16",) if _is_below(device, 8.0) else ("bf16", "fp16")  # tensor cores take bfloat16 from Ampere on


def _is_below(device: jax.Device, capability: float) -> bool:
    """Return whether a device is an NVIDIA GPU of less than a compute capability; AMD's and TPUs have none."""
    own = str(getattr(device, "compute_capability", ""))
    return device.platform in ("gpu", "cuda") and own.replace(".", "").isdigit() and float(own) < capability


def check_fp8(config: Any, precision: Precision, device: jax.Device) -> None:
    """Raise a ConfigError if a config asks for fp8 in a precision or on a device that does not have it."""
    if not config.fp8.enabled:
        return
    if precision.compute != jnp.bfloat16:
        raise ConfigError(
            f'fp8.enabled = true in {config.precision}: what is not multiplied in fp8 needs bfloat16; set "bf16": '
            '{"enabled": true}'
        )
    if _is_below(device, 8.9):
        raise ConfigError(
            f"fp8.enabled = true on {device.device_kind} (compute capability {device.compute_capability}): fp8 "
            "matmuls need 8.9 or higher (Ada, Hopper, Blackwell); turn fp8 off"
        )
