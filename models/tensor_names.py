"""The names of a model's weights in files: rows of a `weights_layout`, see `jzero.weights.name_map`.

A row exists where the model has its leaf, so that the shapes of the parameters decide which layers have biases, norms,
experts.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from math import prod
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig
from .lora import MODULES
from .moe import MixtureConfig

Row = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # of the leaves
Cut = tuple[int, int, int]  # dimension, start, stop
# Llama's names; those of the layers follow that of the layer. The modules have the names of their leaves as keys.
# {part} stands for `parts`, or for gate, up. Without it, one tensor has all parts: of each head in turn (qkv), or one
# after the other (gate_up). Those with a number in brackets are one tensor too. Matrices are [out, in] in files, but
# for Conv1D's. Without {expert}, a tensor has one of the matrices of all experts, gates and values with the axes
# `together`.
NAMES = {
    "embed": "model.embed_tokens", "layer": "model.layers.{layer}.", "head": "lm_head", "ends/norm": "model.norm",
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    "qkv": "self_attn.{part}_proj", "parts": "q k v", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks", "attention/out": "self_attn.o_proj", "matrices": "[out, in]",
    "gate_up": "mlp.{part}_proj", "mlp/up": "mlp.up_proj", "mlp/down": "mlp.down_proj", "mlp/router": "mlp.gate",
    "expert": "mlp.experts.{expert}.{part}", "expert_parts": "gate_proj up_proj down_proj", "together": "0 1 2 3",
    "shared": "mlp.shared_expert", "mlp/shared_gate": "mlp.shared_expert_gate",
}  # fmt: skip
LATENT = {
    "attention/q_down": "self_attn.q_a_proj", "attention/q_norm": "self_attn.q_a_layernorm",
    "attention/kv_down": "self_attn.kv_a_proj_with_mqa", "attention/kv_norm": "self_attn.kv_a_layernorm",
    "attention/kv_up": "self_attn.kv_b_proj",
}  # fmt: skip
FUTURE = {"embed_norm": "enorm", "state_norm": "hnorm", "norm": "shared_head.norm", "join": "eh_proj"}


def tensor_rows(config: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    """List the rows of all weights; `names` are those that differ from Llama's."""
    c, names, shapes = config, {**NAMES, **names}, config.shapes
    rows = padded_rows(f"{names['embed']}.weight", "ends/embed", c.vocab_size, shapes)
    for path, numbers in c.layer_paths.items():
        rows += layer_rows(c.of_layer(numbers[0]), names, shapes, path, numbers)
    for depth in range(c.future_layers):  # in files, these layers follow the others
        at = f"model.layers.{c.num_layers + depth}."
        names |= {f"ends/future/{depth}/{leaf}": at + name for leaf, name in FUTURE.items()}
    rows += [{"name": name, "leaf": leaf} for leaf, name in names.items() if leaf in shapes]
    rows += [row for leaf, name in names.items() for row in module_rows(name, leaf, shapes)]
    rows += padded_rows(names.get("head_bias", ""), "ends/head_bias", c.vocab_size, shapes)
    if not c.tied:
        rows += padded_rows(f"{names['head']}.weight", "ends/head/kernel", c.vocab_size, shapes, axis=1)
    if lacking := [name for name in (c.lora.target_modules if c.lora else ()) if name not in linear_modules(rows)]:
        has = sorted(linear_modules(rows))
        raise ConfigError(
            f"lora.target_modules has {', '.join(lacking)}: files of {c.family} have no such modules; "
            + (f"it has {', '.join(has)}" if has else "leave lora out, and train all weights")
        )
    return rows


def padded_rows(name: str, leaf: str, size: int, shapes: Shapes, axis: int = 0) -> list[Row]:
    """Describe a table, if there is one; entries after `size` along an axis are padding; matrices are transposed."""
    if leaf not in shapes:
        return []
    whole = shapes[leaf][axis]
    rows: list[Row] = [{"name": name, "leaf": leaf, "slices": [[axis, 0, size]], "transposed": axis == 1}]
    return [*rows, *([{"name": None, "leaf": leaf, "slices": [[axis, size, whole]]}] if whole > size else [])]


def layer_rows(config: DecoderConfig, names: Mapping[str, str], shapes: Shapes, path: str, numbers: range) -> list[Row]:
    """List the rows of the layers at a path, which have these `numbers` in files."""
    c, stacked, names = config, path.startswith("stack"), {**(LATENT if config.latent else {}), **names}
    own = {leaf.removeprefix(f"{path}/"): x[stacked:] for leaf, x in shapes.items() if leaf.startswith(f"{path}/")}
    if c.latent:
        rows = module_rows(f"self_attn.{'q_b_proj' if c.latent.query_rank else 'q_proj'}", "attention/q_up", own)
    else:
        widths = dict(zip(names["parts"].split(), (c.num_groups, 1, 1), strict=True))
        rows = _fused_rows(names["qkv"], "attention/qkv", own, 1 if c.by_part else 2, widths)
        rows += [row for norm in ("q_norm", "k_norm") for row in _head_norm(c, names[norm], f"attention/{norm}", own)]
    rows += [row for leaf, name in names.items() for row in module_rows(name, leaf, own)]
    rows += _fused_rows(names["gate_up"], "mlp/gate_up", own, 1, {"gate": 1, "up": 1})
    if c.sinks:
        rows.append({"name": names["sinks"], "leaf": "attention/sinks", "reshape": [c.num_heads]})
    if c.mixture:
        rows += _mixture(c.mixture, names, own)
    for row in rows if names["matrices"] != "[out, in]" else ():
        if row.pop("transposed", None):
            row["reshape"] = row["reshape"][::-1]
    at = names["layer"] if stacked else names["layer"].replace("{layer}", str(numbers[0]))
    more = {"layers": [numbers.start, numbers.step]} if stacked and (numbers.start, numbers.step) != (0, 1) else {}
    return [{**row, "name": at + row["name"], "leaf": f"{path}/{row['leaf']}", **more} for row in rows]


def module_rows(name: str, leaf: str, shapes: Shapes, *cuts: Cut) -> list[Row]:
    """Describe a linear layer or a norm, or the part of a linear layer's outputs that `cuts` leave.

    "[1]" at the end of its name in files is the number of a part.
    """
    name, bracket, number = name.partition("[")
    rows = list[Row]()
    if f"{leaf}/kernel" in shapes:
        rows.append(_matrix(f"{name}.weight{bracket}{number}", f"{leaf}/kernel", shapes, *cuts))
    if f"{leaf}/scale" in shapes:
        rows.append({"name": f"{name}.weight", "leaf": f"{leaf}/scale"})
    if f"{leaf}/bias" in shapes:
        slices = [(dim - 1, start, stop) for dim, start, stop in cuts]
        size = prod(_sizes(shapes[f"{leaf}/bias"], slices))
        cut = {"slices": [*map(list, slices)], "reshape": [size]}
        rows.append({"name": f"{name}.bias{bracket}{number}", "leaf": f"{leaf}/bias", **cut})
    return rows


def _matrix(name: str, leaf: str, shapes: Shapes, *cuts: Cut, axis: int = 0) -> Row:
    """Describe a matrix [out, in], which is the part of a leaf that `cuts` leave; `axis` is that of its inputs."""
    *outputs, inputs = axes = [*(i for i in range(len(shapes[leaf])) if i != axis), axis]
    sizes = _sizes(shapes[leaf], cuts)
    reshape = [prod(sizes[i] for i in outputs), sizes[inputs]]
    return {"name": name, "leaf": leaf, "slices": [*map(list, cuts)], "transposed": axes, "reshape": reshape}


def _sizes(shape: Sequence[int], cuts: Sequence[Cut]) -> list[int]:
    kept = {dim: stop - start for dim, start, stop in cuts}
    return [kept.get(dim, size) for dim, size in enumerate(shape)]


def _fused_rows(name: str, leaf: str, own: Shapes, dim: int, widths: Mapping[str, int]) -> list[Row]:
    """Describe a linear layer of several parts along a dimension: part by part, or whole if the name has no {part}."""
    stops = [*accumulate(widths.values())]
    starts = [0, *stops[:-1]]
    parts = zip(widths, starts, stops, strict=True) if "{part}" in name else [("", 0, stops[-1])]
    return [row for part, a, b in parts for row in module_rows(name.format(part=part), leaf, own, (dim, a, b))]


def _head_norm(c: DecoderConfig, name: str, leaf: str, own: Shapes) -> list[Row]:
    if len(shape := own.get(f"{leaf}/scale", ())) < 3:
        return module_rows(name, leaf, own)
    K, G, C = shape
    if "{head}" not in name:
        reshape = [K * G, C] if c.qk_norm == "each" else [K * G * C]
        return [{"name": f"{name}.weight", "leaf": f"{leaf}/scale", "reshape": reshape}]
    return [
        {"name": f"{name.format(head=k * G + g)}.weight", "leaf": f"{leaf}/scale",
         "slices": [[0, k, k + 1], [1, g, g + 1]], "reshape": [C]}
        for k in range(K) for g in range(G)
    ]  # fmt: skip


def _mixture(mixture: MixtureConfig, names: Mapping[str, str], own: Shapes) -> list[Row]:
    expert, shared = names["expert"], names["shared"]
    gate, up, down = names["expert_parts"].split()
    matrices: list[tuple[str, str, list[Cut]]]
    matrices = [(gate, "gate_up", [(1, 0, 1)]), (up, "gate_up", [(1, 1, 2)]), (down, "down", [])]
    rows = list[Row]()
    if mixture.bias_rate is not None:
        # Near 4, as in V3, bfloat16 rounds by up to 0.008: that changes the routing.
        rows.append({"name": f"{names['mlp/router']}.e_score_correction_bias", "leaf": "mlp/bias", "state": True})
    E, D, _, F = own["mlp/gate_up"]
    for number, (part, leaf, cuts) in product(range(E if "{expert}" in expert else 0), matrices):
        name, one = expert.format(expert=number, part=part), [(dim + 1, start, stop) for dim, start, stop in cuts]
        rows.append(_matrix(f"{name}.weight", f"mlp/{leaf}", own, (0, number, number + 1), *one, axis=1))
    if "{expert}" not in expert:
        axes = [int(axis) for axis in names["together"].split()]
        biases = [axis - (axis > 1) for axis in axes if axis != 1]
        for part, leaf, whole in (
            ("gate_up_proj", "gate_up", {"transposed": axes, "reshape": [E, D, 2 * F]}),
            ("gate_up_proj_bias", "gate_up_bias", {"transposed": biases, "reshape": [E, 2 * F]}),
            ("down_proj", "down", {}),
            ("down_proj_bias", "down_bias", {}),
        ):
            if f"mlp/{leaf}" in own:
                rows.append({"name": expert.format(part=part), "leaf": f"mlp/{leaf}", **whole})
    for part, leaf, cuts in matrices if mixture.shared else []:
        rows.append(_matrix(f"{shared}.{part}.weight", f"mlp/shared_{leaf}", own, *cuts))
    return rows


def linear_modules(rows: list[Row]) -> set[str]:
    """Return the modules of `LoRAConfig` that files have; those of experts have no adapters."""
    own = [row["name"] or "" for row in rows if ".experts." not in (row["name"] or "")]
    return {name.removesuffix(".weight").rpartition(".")[2] for name in own if "shared_expert" not in name} & {*MODULES}
