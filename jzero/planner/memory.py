"""The device memory of a compiled program."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory that one device needs for one execution of a program."""

    arguments: int
    outputs: int
    aliased: int  # outputs that reuse a donated argument's memory
    temps: int
    code: int  # not in the peak; 0 on compilers that do not report it

    @property
    def peak(self) -> int:
        """arguments + outputs - aliased + temps: the bytes that must be free on the device."""
        return self.arguments + self.outputs - self.aliased + self.temps

    def __repr__(self) -> str:
        parts = {"arguments": self.arguments, "outputs": self.outputs, "aliased": self.aliased, "temps": self.temps}
        listed = ", ".join(f"{name} {value / 2**30:.3f}" for name, value in parts.items())
        return f"Memory(peak {self.peak / 2**30:.3f} GiB: {listed})"


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Read the compiler's memory analysis of a program, per device.

    Donate the state; otherwise its old and its new copy both count.

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
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temps=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
