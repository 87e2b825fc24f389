"""Mixtures of experts in the `transformers` library: config.json and the names of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig
from .moe import MixtureConfig


class Names(NamedTuple):
    """The names that a family gives to what it has.

    Attributes:
      layer: the mixture in a layer.
      parts: an expert's gate, up and down.
      experts, width: keys of config.json; transformers 5 calls the first num_local_experts in each family.
      shared: of the width of the expert that all tokens use, or of how many times that of the others.
      dense: the key of the layers without a mixture.
      router: its name in the mixture.
      together: a tensor has one of the matrices of all experts, gates and values of an expert with these axes.
      fields: of `MixtureConfig`, which the family always has.
    """

    layer: str
    parts: tuple[str, str, str]
    experts: str
    width: str
    shared: str | None = None
    dense: str | None = None
    router: str = "gate"
    together: tuple[int, ...] = ()
    fields: Mapping[str, Any] = MappingProxyType({})


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DEEPSEEK = (
    "mlp",
    PROJECTIONS,
    "n_routed_experts",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
)
NAMES = {
    "deepseek_v2": Names(*DEEPSEEK, fields={"balance": 0.0, "normalize": False}),
    "deepseek_v3": Names(*DEEPSEEK, fields={"balance": 0.0, "score": "sigmoid", "bias_rate": 1e-3}),
    "mixtral": Names(
        "block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size",
        fields={"normalize": True},
    ),
    "gpt_oss": Names(
        "mlp", ("gate", "up", "down"), "num_local_experts", "intermediate_size", router="router",
        together=(0, 1, 3, 2), fields={"normalize": True, "biases": True},
    ),
    "llama4_text": Names(
        "feed_forward", PROJECTIONS, "num_local_experts", "intermediate_size", "intermediate_size", "moe_layers",
        "router", (0, 1, 2, 3), {"balance": 0.0, "normalize": False, "score": "sigmoid", "scale_inputs": True},
    ),
    "qwen3_moe": Names(
        "mlp", PROJECTIONS, "num_experts", "moe_intermediate_size",
        dense="mlp_only_layers",
    ),
    "qwen2_moe": Names(
        "mlp", PROJECTIONS, "num_experts", "moe_intermediate_size",
        "shared_expert_intermediate_size", "mlp_only_layers", fields={"shared_gate": True},
    ),
}  # fmt: skip
EXPERTS = "num_local_experts"
FIXED = {"router_jitter_noise": 0.0}
DENSE = ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "interleave_moe_layer_step", "moe_layers")
TIMES = "n_shared_experts"
# family -> {topk_method: how many of a group's scores count}; 0: there are no groups. V3's always has some.
METHODS = {"deepseek_v2": {"greedy": 0, "group_limited_greedy": 1}, "deepseek_v3": {"noaux_tc": 2}}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {EXPERTS: 8, "num_experts_per_tok": 2},
    "llama4_text": {EXPERTS: 16, "num_experts_per_tok": 1},
    "gpt_oss": {EXPERTS: 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}
BALANCE = 0.001  # transformers' default of router_aux_loss_coef


def mixture_of(there: Mapping[str, Any], trained: bool = False) -> MixtureConfig | None:
    """Read the mixture of a config.json; None if its family has none.

    Args:
      trained: there are weights, whose bias stays as it is.

    Raises:
      ConfigError: keys that are missing, noise in the router.
    """
    family = there["model_type"]
    if family not in NAMES:
        return None
    names, there = NAMES[family], {**DEFAULTS.get(family, {}), **there}
    there.setdefault(names.experts, there.get(EXPERTS))
    shared = [names.shared] if names.shared and names.shared != TIMES else []  # DeepSeek's may be null: none
    wanted_keys = (names.experts, names.width, "num_experts_per_tok", *shared)
    missing = [key for key in wanted_keys if there.get(key) is None]
    problems = [f"config.json has no {key}" for key in missing]
    for key, value in FIXED.items():
        if (there.get(key) or value) != value:
            problems.append(f"config.json has {key} = {there[key]!r}: models/moe.py has only {value!r}")
    if problems:
        raise ConfigError(*problems)
    fields: dict[str, Any] = {"normalize": bool(there.get("norm_topk_prob", False))}
    # transformers adds the loss only then, and most downloads have a coefficient without it.
    balance = there.get("router_aux_loss_coef", BALANCE) if there.get("output_router_logits") else 0.0
    fields |= {"balance": balance, **names.fields}
    fields |= {"bias_rate": 0.0} if trained and "bias_rate" in fields else {}
    if names.shared:
        fields["shared"] = (there[names.shared] or 0) * (there[names.width] if names.shared == TIMES else 1)
    fields["groups"] = _groups(there, there[names.experts])
    if "swiglu_limit" in there:
        fields["clamp"] = there["swiglu_alpha"], there["swiglu_limit"]
    return MixtureConfig(
        there[names.experts], there["num_experts_per_tok"], there[names.width],
        scale=there.get("routed_scaling_factor", 1.0), **fields,
    )  # fmt: skip


def _groups(there: Mapping[str, Any], experts: int) -> tuple[int, int, int] | None:
    """Read the groups that limit a token's experts, see `jzero.route`; None without them, or with one.

    Raises:
      ConfigError: no such method, or groups that do not fit the experts.
    """
    methods = METHODS.get(there["model_type"])
    if methods is None or methods.get(there["topk_method"]) == 0:
        return None
    (count, kept), best = (
        ((there.get(key) or 0) for key in ("n_group", "topk_group")),
        methods.get(there["topk_method"]),
    )
    top_k, size = there["num_experts_per_tok"], experts // count if count and experts % count == 0 else 0
    if best is None or not 1 <= kept <= count or kept * size < top_k or size < best:
        raise ConfigError(
            f"config.json has topk_method = {there['topk_method']!r}, n_group = {there.get('n_group')}, topk_group = "
            f"{there.get('topk_group')}: must be {' or '.join(methods)}, a number of groups that divides the {experts} "
            f"experts, and as many of them, at most n_group, as have the {top_k} of a token"
        )
    return (count, kept, best) if count > 1 else None


def mixture_json(family: str, mixture: MixtureConfig, there: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json has of a mixture; a download's own keys of its balance loss stay."""
    names = NAMES[family]
    content: dict[str, Any] = {
        names.experts: mixture.num_experts,
        EXPERTS: mixture.num_experts,
        "num_experts_per_tok": mixture.top_k,
        names.width: mixture.width,
        **({} if there else {"router_aux_loss_coef": mixture.balance, "output_router_logits": False}),
        **({names.shared: mixture.shared} if names.shared else {}),
    }
    if names.shared == TIMES:
        content |= {TIMES: mixture.shared // mixture.width, "routed_scaling_factor": mixture.scale}
        groups, methods = mixture.groups or (1, 1, 0), {best: name for name, best in METHODS[family].items()}
        content["topk_method"] = method = methods.get(groups[2], next(iter(METHODS[family])))
        content |= {"n_group": groups[0], "topk_group": groups[1]} if METHODS[family][method] else {}
    content |= {} if "normalize" in names.fields else {"norm_topk_prob": mixture.normalize}
    return content | dict(zip(("swiglu_alpha", "swiglu_limit"), mixture.clamp or (), strict=False))


def dense_of(there: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the numbers of the layers without a mixture."""
    if there["model_type"] not in NAMES:
        return ()
    only, step, first, every, sparse = (there.get(key) for key in DENSE)
    layers, step = range(there["num_hidden_layers"]), step or every or 1
    if sparse is not None:
        return tuple(i for i in layers if i not in sparse)
    return tuple(i for i in layers if i in (only or ()) or (i + 1) % step or i < (first or 0))


def dense_json(config: DecoderConfig, there: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json has of them; a download's own keys stay if they still hold."""
    dense, key = config.dense_layers, NAMES[config.family].dense
    if there and dense_of(there) == dense:
        return {key: there[key] for key in DENSE if key in there}
    if key == "mlp_only_layers":
        return {key: list(dense), "decoder_sparse_step": 1}
    if key == "moe_layers":
        return {key: [i for i in range(config.num_layers) if i not in dense]}
    return {key: len(dense)} if key else {}


def mixture_rows(family: str, mixture: MixtureConfig, d_model: int, layer: str) -> list[dict[str, Any]]:
    """List the rows of the weights' table, see `jzero.weights.name_map`: an expert's matrices are tensors of a file."""
    names, shape, c = NAMES[family], [mixture.width, d_model], mixture
    router = f"{layer}{names.layer}.{names.router}"
    rows: list[dict[str, Any]] = [{"name": f"{router}.weight", "leaf": "stack/mlp/router/kernel", "transposed": True}]
    if mixture.bias_rate is not None:
        # Near 4, as in V3, bfloat16 rounds by up to 0.008: that changes the routing.
        rows.append({"name": f"{router}.e_score_correction_bias", "leaf": "stack/mlp/bias", "state": True})
    if names.together:
        at, axes, wide = f"{layer}{names.layer}.experts", names.together, [c.num_experts, 2 * c.width]
        whole = {"transposed": axes, "reshape": [c.num_experts, d_model, 2 * c.width]}
        rows.append({"name": f"{at}.gate_up_proj", "leaf": "stack/mlp/gate_up", **whole})
        rows.append({"name": f"{at}.down_proj", "leaf": "stack/mlp/down"})
        if c.biases:
            own = {"transposed": [axis - (axis > 1) for axis in axes if axis != 1], "reshape": wide}
            rows.append({"name": f"{router}.bias", "leaf": "stack/mlp/router/bias"})
            rows.append({"name": f"{at}.gate_up_proj_bias", "leaf": "stack/mlp/gate_up_bias", **own})
            rows.append({"name": f"{at}.down_proj_bias", "leaf": "stack/mlp/down_bias"})
    for expert in range(0 if names.together else c.num_experts):
        gate, up, down = (f"{layer}{names.layer}.experts.{expert}.{part}.weight" for part in names.parts)
        one = [0, expert, expert + 1]
        for i, name in enumerate((gate, up)):
            cut = {"slices": [one, [2, i, i + 1]], "transposed": [0, 2, 3, 1], "reshape": shape}
            rows.append({"name": name, "leaf": "stack/mlp/gate_up", **cut})
        cut = {"slices": [one], "transposed": [0, 2, 1], "reshape": shape[::-1]}
        rows.append({"name": down, "leaf": "stack/mlp/down", **cut})
    if names.shared and mixture.shared:
        name, width = f"{layer}{names.layer}.shared_expert{'s' * (names.shared == TIMES)}", mixture.shared
        for i, part in enumerate(names.parts[:2]):
            cut = {"slices": [[1, i, i + 1]], "transposed": [1, 2, 0], "reshape": [width, d_model]}
            rows.append({"name": f"{name}.{part}.weight", "leaf": "stack/mlp/shared_gate_up", **cut})
        last = {f".{names.parts[2]}": "shared_down", **({"_gate": "shared_gate/kernel"} if c.shared_gate else {})}
        for part, leaf in last.items():
            rows.append({"name": f"{name}{part}.weight", "leaf": f"stack/mlp/{leaf}", "transposed": True})
    return rows
