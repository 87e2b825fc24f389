"""Low-rank adapters (Hu et al., arXiv:2106.09685), with the names of the `peft` library.

lora = LoRAConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
model = jzero.models.from_hf("Qwen3-8B", lora=lora)  # train with "trainable_parameters": ["lora_"]
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.errors import ConfigError

from .quantized import Kind, quantize, quantized_matmul

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRAConfig:
    """The adapters of a decoder, in the words of peft's `LoraConfig`, with its defaults.

    A module with an adapter computes W x + (lora_alpha / r) B A x. B starts at zero.
    """

    r: int = 8  # the rank
    lora_alpha: float = 8
    target_modules: Sequence[str] = ("q_proj", "v_proj")  # "all-linear" stands for all of `MODULES`
    quantized: Kind | None = None  # the layers' matrices are frozen, in 4 bits (NF4) or 8; see models/quantized.py

    def __post_init__(self):
        asked = self.target_modules
        targets = MODULES if asked == "all-linear" else (asked,) if isinstance(asked, str) else tuple(asked)
        if not targets or set(targets) - set(MODULES):
            raise ConfigError(
                f'LoRAConfig: target_modules = {asked!r}: must be "all-linear", or a list of {", ".join(MODULES)}'
            )
        if self.quantized not in (None, *get_args(Kind)):
            raise ConfigError(f"LoRAConfig: quantized = {self.quantized!r}: must be None, {', '.join(get_args(Kind))}")
        if self.r < 1:
            raise ConfigError(f"LoRAConfig: r = {self.r}: must be at least 1")
        object.__setattr__(self, "target_modules", tuple(name for name in MODULES if name in targets))

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r


class FusedLinear(nnx.LinearGeneral):
    """A linear layer that computes several modules in one product: its kernel [in, *shape] is cut along one dimension.

    The modules lie along the dimension `cut` of the outputs' `shape`, and have `widths` there. The adapter of q_proj is
    q_proj/lora_a [in, r], q_proj/lora_b [r, out]; out is in the order of the kernel's part.
    """

    def __init__(
        self, d_in: int, shape: tuple[int, ...], cut: int, widths: Mapping[str, int], lora: LoRAConfig | None = None,
        *, rngs: nnx.Rngs, **options: Any,
    ):  # fmt: skip
        super().__init__(d_in, shape, rngs=rngs, **options)
        self.cut, self.widths, self.scale = cut - len(shape), tuple(widths.items()), lora.scale if lora else 0.0
        other = prod(shape) // shape[cut]
        start_a = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # peft's; nnx.LoRA's is wider
        for name, width in self.widths:
            if lora and name in lora.target_modules:
                setattr(self, name, nnx.LoRA(d_in, lora.r, width * other, a_initializer=start_a, rngs=rngs))
        if lora and lora.quantized:  # the parameters of the quantised matrix take the place of the kernel
            for name, value in quantize(self.kernel[...], lora.quantized)._asdict().items():
                setattr(self, name, nnx.Param(value))
            del self.kernel

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> tuple[jax.Array, ...]:  # type: ignore[override]
        """Return one array for each module, [..., *shape] with its width along the cut dimension."""
        at = [*accumulate(width for _, width in self.widths)][:-1]
        # Cut before the product, so that what adds them to its parts can run as one kernel: see `kernels.fusion`.
        wide = (1,) * (inputs.ndim - 1)
        biases = [] if self.bias is None else jnp.split(self.bias[...].reshape(wide + self.bias.shape), at, self.cut)
        if hasattr(self, "kernel"):
            x, kernel, *biases = self.promote_dtype((inputs, self.kernel[...], *biases), dtype=self.dtype)
            numbers = (((x.ndim - 1,), (0,)), ((), ()))
            dot_general = self.dot_general or jax.lax.dot_general
            y = dot_general(x, kernel, numbers, precision=self.precision, out_sharding=out_sharding)
        else:
            y = quantized_matmul(self, inputs)
        if biases and len(self.widths) == 1:  # before the adapter, as peft
            y, biases = y + biases[0].astype(y.dtype), []
        y = self._adapted(inputs, y)
        parts = jnp.split(y, at, axis=self.cut)
        # Added to the whole product, XLA writes the bias as an array as large as the product, for cuBLAS to add.
        if biases:
            parts = [part + own.astype(part.dtype) for part, own in zip(parts, biases, strict=True)]
        return tuple(parts)

    def _adapted(self, inputs: jax.Array, y: jax.Array) -> jax.Array:
        """Add the products of all adapters as one: rows of B are zero in the columns of other modules.

        XLA lets cuBLAS add it to the product with the kernel; one for each module would be a pass over memory each.
        """
        shape, cut, before, pairs = y.shape[inputs.ndim - 1 :], y.ndim - inputs.ndim + 1 + self.cut, 0, []
        for name, width in self.widths:
            if adapter := getattr(self, name, None):
                b = adapter.lora_b[...]
                b = b.reshape(len(b), *shape[:cut], width, *shape[cut + 1 :])
                around = [(0, 0, 0)] * b.ndim
                around[1 + cut] = before, shape[cut] - width - before, 0
                pairs.append((adapter.lora_a[...], jax.lax.pad(b, jnp.zeros((), b.dtype), around)))
            before += width
        if not pairs:
            return y
        a, b = zip(*pairs, strict=True)
        # The scale of B's few rows is a part of the kernel that joins them, and no pass over rows of tokens.
        return y + jnp.tensordot(inputs @ jnp.concatenate(a, 1), jnp.concatenate(b, 0) * self.scale, 1)


class LoRALinear(FusedLinear):
    """A linear layer of one module with an adapter, or a quantised matrix."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:  # type: ignore[override]
        return super().__call__(inputs, out_sharding)[0]


def adapters_table(lora: LoRAConfig, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe the adapters of the matrices in `rows`, see `adapters` in `jzero.weights.name_map`."""
    tensors, matrices = [], []
    for row in rows:
        path = (row["name"] or "").removesuffix(".weight")
        module = path.rpartition(".")[2]
        if module not in lora.target_modules:
            continue
        leaf = row["leaf"].removesuffix("kernel") + module
        cut = {key: row[key] for key in ("columns", "slices") if row.get(key)}
        matrices.append({"leaf": row["leaf"], **cut, "a": f"{leaf}/lora_a", "b": f"{leaf}/lora_b"})
        layers = {key: x for key, x in row.items() if key == "layers"}
        for part in "AB":
            name = f"base_model.model.{path}.lora_{part}.weight"
            tensors.append({"name": name, "leaf": f"{leaf}/lora_{part.lower()}", "transposed": True, **layers})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
        "r": lora.r, "lora_alpha": lora.lora_alpha, "target_modules": [*lora.target_modules], "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "rank_pattern": {},
        "alpha_pattern": {},
    }  # fmt: skip
    # The tensors show the modules, and dropout changes only the training.
    may_differ = ["task_type", "base_model_name_or_path", "inference_mode", "target_modules", "lora_dropout"]
    table = {"scale": lora.scale, "matrices": matrices, "tensors": tensors}
    return {**table, "config": config, "may_differ": may_differ}
