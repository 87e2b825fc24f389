"""Mixtures of experts in a config.json of `transformers`: what is no field of its own there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.errors import ConfigError

from .moe import MixtureConfig

EXPERTS = "num_local_experts"  # what transformers 5 calls their number in each family
DENSE = ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "interleave_moe_layer_step", "moe_layers")
TIMES = "n_shared_experts"  # DeepSeek's expert that all tokens use has the width of so many others
# family -> {topk_method: how many of a group's scores count}; 0: there are no groups. V3's always has some.
METHODS = {"deepseek_v2": {"greedy": 0, "group_limited_greedy": 1}, "deepseek_v3": {"noaux_tc": 2}}
BALANCE = 0.001  # transformers' default of router_aux_loss_coef


def mixture_of(fields: dict[str, Any], there: Mapping[str, Any], trained: bool = False) -> MixtureConfig:
    """Make the mixture of a config.json.

    Args:
      fields: those that keys of their own, or the family, decide.
      trained: there are weights, whose bias stays as it is.
    """
    # transformers adds the loss only then, and most downloads have a coefficient without it.
    balance = there.get("router_aux_loss_coef", BALANCE) if there.get("output_router_logits") else 0.0
    fields = {"balance": balance, **fields, "groups": _groups(there, fields["num_experts"])}
    if trained and "bias_rate" in fields:
        fields["bias_rate"] = 0.0
    if there["model_type"] in METHODS:
        fields["shared"] = fields.get("shared", 0) * fields["width"]
    if "swiglu_limit" in there:
        fields["clamp"] = there["swiglu_alpha"], there["swiglu_limit"]
    return MixtureConfig(**fields)


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


def mixture_json(family: str, mixture: MixtureConfig, downloaded: bool) -> dict[str, Any]:
    """Return what config.json has of a mixture; a download's own keys of its balance loss stay."""
    content: dict[str, Any] = {EXPERTS: mixture.num_experts}
    content |= {} if downloaded else {"router_aux_loss_coef": mixture.balance, "output_router_logits": False}
    if family in METHODS:
        groups, methods = mixture.groups or (1, 1, 0), {best: name for name, best in METHODS[family].items()}
        method = methods.get(groups[2], next(iter(METHODS[family])))
        content |= {TIMES: mixture.shared // mixture.width, "topk_method": method}
        content |= {"n_group": groups[0], "topk_group": groups[1]} if METHODS[family][method] else {}
    return content | dict(zip(("swiglu_alpha", "swiglu_limit"), mixture.clamp or (), strict=False))


def dense_of(there: Mapping[str, Any]) -> tuple[int, ...]:
    """Read the numbers of the layers without a mixture."""
    only, step, first, every, sparse = (there.get(key) for key in DENSE)
    layers, step = range(there["num_hidden_layers"]), step or every or 1
    if sparse is not None:
        return tuple(i for i in layers if i not in sparse)
    return tuple(i for i in layers if i in (only or ()) or (i + 1) % step or i < (first or 0))


def dense_json(dense: tuple[int, ...], layers: int, key: str | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json has of them, in the family's key; a download's own keys stay while they hold."""
    if own and dense_of({**own, "num_hidden_layers": max(layers, own["num_hidden_layers"])}) == dense:
        return {key: own[key] for key in DENSE if key in own}
    if key == "mlp_only_layers":
        return {key: list(dense), "decoder_sparse_step": 1}
    if key == "moe_layers":
        return {key: [i for i in range(layers) if i not in dense]}
    return {key: len(dense)} if key else {}
