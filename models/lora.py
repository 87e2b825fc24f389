"""Low-rank adapters (Hu et al., arXiv:2106.09685), with the names of the `peft` library.

lora = LoRAConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
config = from_hf("Qwen3-8B", lora=lora)  # train with "trainable_parameters": ["lora_"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.errors import ConfigError

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRAConfig:
    """The adapters of a decoder, in the words of peft's `LoraConfig`, with its defaults.

    A module with an adapter computes W x + (lora_alpha / r) B A x. B starts at zero.

    Attributes:
      r: the rank.
      target_modules: the modules with an adapter; "all-linear" stands for all of `MODULES`.
    """

    r: int = 8
    lora_alpha: float = 8
    target_modules: Sequence[str] = ("q_proj", "v_proj")

    def __post_init__(self):
        asked = self.target_modules
        targets = MODULES if asked == "all-linear" else (asked,) if isinstance(asked, str) else tuple(asked)
        if not targets or set(targets) - set(MODULES):
            raise ConfigError(
                f'LoRAConfig: target_modules = {asked!r}: must be "all-linear", or a list of {", ".join(MODULES)}'
            )
        if self.r < 1:
            raise ConfigError(f"LoRAConfig: r = {self.r}: must be at least 1")
        object.__setattr__(self, "target_modules", tuple(name for name in MODULES if name in targets))

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r


class LoRALinear(nnx.Linear):
    """A linear layer that computes several modules side by side, each with an adapter of its own or without.

    Its kernel is named as that of nnx.Linear; the adapter of q_proj is q_proj/lora_a [in, r], q_proj/lora_b [r, out].

    Args:
      widths: module -> its width, in the order of the outputs.
      options: of nnx.Linear.
    """

    def __init__(self, d_in: int, widths: Mapping[str, int], lora: LoRAConfig, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(d_in, sum(widths.values()), rngs=rngs, **options)
        self.widths, self.scale = tuple(widths.items()), lora.scale
        start_a = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # peft's; nnx.LoRA's is wider
        for name, width in widths.items():
            if name in lora.target_modules:
                setattr(self, name, nnx.LoRA(d_in, lora.r, width, a_initializer=start_a, rngs=rngs))

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        y, parts, start = super().__call__(inputs, out_sharding), [], 0
        for name, width in self.widths:
            part, adapter = y[..., start : start + width], getattr(self, name, None)
            parts.append(part if adapter is None else part + self.scale * adapter(inputs))
            start += width
        return jnp.concatenate(parts, axis=-1)


def adapters_table(lora: LoRAConfig, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe the adapters of the matrices in `rows`, see `adapters` in `jzero.weights.name_map`."""
    tensors, matrices = [], []
    for row in rows:
        path = (row["name"] or "").removesuffix(".weight")
        module = path.rpartition(".")[2]
        if module not in lora.target_modules:
            continue
        leaf = row["leaf"].removesuffix("kernel") + module
        for part in "AB":
            name = f"base_model.model.{path}.lora_{part}.weight"
            tensors.append({"name": name, "leaf": f"{leaf}/lora_{part.lower()}", "transposed": True})
        matrices.append({"leaf": row["leaf"], "columns": row["columns"], "a": f"{leaf}/lora_a", "b": f"{leaf}/lora_b"})
    # The tensors show the modules, and dropout changes only the training.
    may_differ = ["task_type", "base_model_name_or_path", "inference_mode", "target_modules", "lora_dropout"]
    table = {"scale": lora.scale, "matrices": matrices, "tensors": tensors}
    return {"config": config_json(lora), "may_differ": may_differ, **table}


def config_json(lora: LoRAConfig) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def linear(
    d_in: int, widths: Mapping[str, int], lora: LoRAConfig | None, *, rngs: nnx.Rngs, **options: Any
) -> nnx.Linear:
    """Make a layer that computes several modules side by side, with the adapters that `lora` asks for."""
    if lora is None or not set(widths) & set(lora.target_modules):
        return nnx.Linear(d_in, sum(widths.values()), rngs=rngs, **options)
    return LoRALinear(d_in, widths, lora, rngs=rngs, **options)
