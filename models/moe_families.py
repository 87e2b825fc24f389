"""Mixtures of experts in the `transformers` library: config.json and the names of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jzero.errors import ConfigError

from .moe import MixtureConfig


class Names(NamedTuple):
    """How a family calls what it has.

    Attributes:
      layer: the mixture in a layer.
      parts: an expert's gate, up and down.
      experts, width: keys of config.json; transformers 5 calls the first num_local_experts in each family.
      shared: of the width of the expert that all tokens use, which has a gate.
      fixed: what its config.json needs besides, and what the decoder needs of it.
    """

    layer: str
    parts: tuple[str, str, str]
    experts: str
    width: str
    fixed: dict[str, Any]
    shared: str | None = None


NAMES = {
    "mixtral": Names("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size", {}),
    "qwen3_moe": Names(
        "mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts", "moe_intermediate_size",
        {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen2_moe": Names(
        "mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts", "moe_intermediate_size",
        {"decoder_sparse_step": 1, "mlp_only_layers": []}, "shared_expert_intermediate_size",
    ),
}  # fmt: skip
EXPERTS = "num_local_experts"
DEFAULTS = {"mixtral": {EXPERTS: 8, "num_experts_per_tok": 2}}
BALANCE = 0.001  # transformers' default of router_aux_loss_coef


def mixture_of(there: Mapping[str, Any]) -> MixtureConfig | None:
    """Read the mixture of a config.json; None if its family has none.

    Raises:
      ConfigError: keys that are missing, layers without experts among those with them, noise in the router.
    """
    family = there["model_type"]
    if family not in NAMES:
        return None
    names, there = NAMES[family], {**DEFAULTS.get(family, {}), **there}
    there.setdefault(names.experts, there.get(EXPERTS))
    wanted_keys = (names.experts, names.width, "num_experts_per_tok", *([names.shared] if names.shared else []))
    missing = [key for key in wanted_keys if there.get(key) is None]
    problems = [f"config.json has no {key}" for key in missing]
    wanted = {**names.fixed, "router_jitter_noise": 0.0}
    for key, value in wanted.items():
        if (there.get(key) or value) != value:
            problems.append(f"config.json has {key} = {there[key]!r}: models/moe.py has only {value!r}")
    if problems:
        raise ConfigError(*problems)
    return MixtureConfig(
        there[names.experts], there["num_experts_per_tok"], there[names.width],
        normalize=family == "mixtral" or bool(there.get("norm_topk_prob", False)),
        balance=there.get("router_aux_loss_coef", BALANCE),
        shared=there[names.shared] if names.shared else 0, shared_gate=names.shared is not None,
    )  # fmt: skip


def mixture_json(family: str, mixture: MixtureConfig) -> dict[str, Any]:
    """Return what config.json has of a mixture."""
    names = NAMES[family]
    content = {
        names.experts: mixture.num_experts,
        EXPERTS: mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        names.width: mixture.width,
        "router_aux_loss_coef": mixture.balance,
        "output_router_logits": False,
        **names.fixed,
        **({names.shared: mixture.shared} if names.shared else {}),
    }
    return content if family == "mixtral" else content | {"norm_topk_prob": mixture.normalize}


def mixture_rows(family: str, mixture: MixtureConfig, d_model: int, layer: str) -> list[dict[str, Any]]:
    """List the rows of the weights' table, see `jzero.weights.name_map`: an expert's matrices are tensors of a file."""
    names, shape = NAMES[family], [mixture.width, d_model]
    router = {"name": f"{layer}{names.layer}.gate.weight", "leaf": "stack/mlp/router/kernel", "transposed": True}
    rows = [router]
    for expert in range(mixture.num_experts):
        gate, up, down = (f"{layer}{names.layer}.experts.{expert}.{part}.weight" for part in names.parts)
        one = [0, expert, expert + 1]
        for i, name in enumerate((gate, up)):
            cut = {"slices": [one, [2, i, i + 1]], "transposed": [0, 2, 3, 1], "reshape": shape}
            rows.append({"name": name, "leaf": "stack/mlp/gate_up", **cut})
        cut = {"slices": [one], "transposed": [0, 2, 1], "reshape": shape[::-1]}
        rows.append({"name": down, "leaf": "stack/mlp/down", **cut})
    if names.shared:
        name, width = f"{layer}{names.layer}.shared_expert", mixture.shared
        for i, part in enumerate(names.parts[:2]):
            cut = {"slices": [[1, i, i + 1]], "transposed": [1, 2, 0], "reshape": [width, d_model]}
            rows.append({"name": f"{name}.{part}.weight", "leaf": "stack/mlp/shared_gate_up", **cut})
        for part, leaf in ((f".{names.parts[2]}", "shared_down"), ("_gate", "shared_gate/kernel")):
            rows.append({"name": f"{name}{part}.weight", "leaf": f"stack/mlp/{leaf}", "transposed": True})
    return rows
