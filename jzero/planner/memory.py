"""The device memory of a compiled program."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import jax

from jzero.planner.hlo import read

if TYPE_CHECKING:
    from jzero.train_step import TrainStep


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory that one device needs for one execution of a program."""

    arguments: int
    outputs: int
    aliased: int  # outputs that reuse a donated argument's memory
    temps: int
    code: int  # not in the peak; 0 on compilers that do not report it
    host: int = 0  # of host memory, not in the peak

    @property
    def peak(self) -> int:
        """arguments + outputs - aliased + temps: the bytes that must be free on the device."""
        return self.arguments + self.outputs - self.aliased + self.temps

    def __repr__(self) -> str:
        parts = {"arguments": self.arguments, "outputs": self.outputs, "aliased": self.aliased, "temps": self.temps}
        listed = ", ".join(f"{name} {value / 2**30:.3f}" for name, value in parts.items())
        host = f"; host {self.host / 2**30:.3f}" if self.host else ""
        return f"Memory(peak {self.peak / 2**30:.3f} GiB: {listed}{host})"


def memory(compiled: jax.stages.Compiled, step: TrainStep | None = None) -> Memory:
    """Read the compiler's memory analysis of a program, per device.

    Donate the state; otherwise its old and its new copy both count.

    Args:
        step: the step that was compiled, if its config offloads. The compilers for CPUs and for GPUs that are not there
            count a state in host memory as the device's; only a real GPU's tells the two apart. Activations in host
            memory (`cpu_checkpointing`) every GPU's compiler counts as such, and the one for CPUs as the device's.

    Raises:
        ValueError: the backend that compiled the program reports no memory analysis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> memory(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
        Memory(peak 0.004 GiB: arguments 0.004, outputs 0.004, aliased 0.004, temps 0.000)
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend reports no memory analysis; compile for 'cpu' or for a GPU of jzero.planner")
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    counted = step.host_bytes if step and not stats.host_argument_size_in_bytes else 0
    return Memory(
        arguments=stats.argument_size_in_bytes - counted,
        outputs=stats.output_size_in_bytes - counted,
        aliased=stats.alias_size_in_bytes - counted,
        temps=stats.temp_size_in_bytes + _flash_scratch(compiled),
        code=stats.generated_code_size_in_bytes,
        host=host + counted,
    )


def _flash_scratch(compiled: jax.stages.Compiled) -> int:
    """Count what one backward pass of FlashAttention-3 allocates outside of XLA's memory, the largest of the program.

    It sums the gradients of queries in float32, and those of keys and values if several heads share them; lengths are
    rounded up to blocks of 128.
    """
    if "flash_attn3_jax" not in sys.modules:
        return 0
    found = [0]
    for computation in read(compiled).computations.values():
        for op in computation.values():
            if op.target == "flash_mha_bwd":
                queries, keys = ((b, -(-s // 128) * 128, h, c) for b, s, h, c in (x.dims for x in op.arrays[:2]))
                found.append(4 * prod(queries) + (8 * prod(keys) if keys != queries else 0))
    return max(found)
