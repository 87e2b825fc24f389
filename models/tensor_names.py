"""The names of a decoder's weights in files: rows of a `weights_layout`, see `jzero.weights.name_map`.

A row exists where the model has its leaf, so that the shapes of the parameters decide which layers have biases, norms,
experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig
from .lora import MODULES

Row = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # of the leaves
Cut = tuple[int, int, int]  # dimension, start, stop
# Llama's names; those of the layers follow that of the layer. {part} stands for `parts`, or for gate, up. Without it,
# one tensor has all parts: of each head in turn (qkv), or one after the other (gate_up). Those with a number in
# brackets are one tensor too. Matrices are [out, in] in files, but for Conv1D's. Without {expert}, a tensor has one of
# the matrices of all experts, gates and values with the axes `together`.
NAMES = {
    "embed": "model.embed_tokens", "layer": "model.layers.{layer}.", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "qkv": "self_attn.{part}_proj",
    "sinks": "self_attn.sinks", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "out": "self_attn.o_proj",
    "gate_up": "mlp.{part}_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "parts": "q k v",
    "matrices": "[out, in]", "router": "mlp.gate", "expert": "mlp.experts.{expert}.{part}", "together": "0 1 2 3",
    "expert_parts": "gate_proj up_proj down_proj", "shared": "mlp.shared_expert",
    "attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
LATENT = {
    "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up",
}  # fmt: skip
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
FUTURE = {"enorm": "embed_norm", "hnorm": "state_norm", "shared_head.norm": "norm", "eh_proj": "join"}


def tensor_rows(config: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    """List the rows of all weights.

    Args:
      names: those that differ from Llama's.
    """
    c, names, shapes = config, {**NAMES, **names}, config.shapes
    rows = padded_rows(f"{names['embed']}.weight", "ends/embed", c.vocab_size, shapes)
    if c.max_positions:
        rows.append({"name": f"{names['positions']}.weight", "leaf": "ends/positions"})
    for path, numbers in c.layer_paths.items():
        rows += layer_rows(c.of_layer(numbers[0]), names, shapes, path, numbers)
    for depth in range(c.future_layers):
        for name, leaf in FUTURE.items():
            at = f"model.layers.{c.num_layers + depth}.{name}"  # in files, these layers follow the others
            rows += module_rows(at, f"ends/future/{depth}/{leaf}", shapes)
    rows += module_rows(names["norm"], "ends/norm", shapes)
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
    """Describe a table whose entries after `size` along an axis are padding; matrices [in, out] are transposed."""
    whole = shapes[leaf][axis]
    rows: list[Row] = [{"name": name, "leaf": leaf, "slices": [[axis, 0, size]], "transposed": axis == 1}]
    return [*rows, *([{"name": None, "leaf": leaf, "slices": [[axis, size, whole]]}] if whole > size else [])]


def layer_rows(
    config: DecoderConfig, names: Mapping[str, str], shapes: Shapes, path: str = "stack", numbers: range = range(0)
) -> list[Row]:
    """List the rows of the layers at a path.

    Args:
      shapes: of all leaves.
      numbers: of these layers in files; the default stands for 0, 1, 2 and so on.
    """
    stacked, names = path.startswith("stack"), {**NAMES, **names}
    own = {leaf.removeprefix(f"{path}/"): x[stacked:] for leaf, x in shapes.items() if leaf.startswith(f"{path}/")}
    at = names["layer"] if stacked else names["layer"].replace("{layer}", str(numbers[0]))
    more = {"layers": [numbers.start, numbers.step]} if stacked and (numbers.start, numbers.step) != (0, 1) else {}
    rows = [row for kind in NORMS for row in module_rows(names[kind], kind, own)]
    rows += [*_attention(config, names, own), *_feed_forward(names, own)]
    if config.mixture:
        rows += _mixture(config, names, own)
    if names["matrices"] != "[out, in]":
        rows = [_as_in_conv1d(row) for row in rows]
    return [{**row, "name": at + row["name"], "leaf": f"{path}/{row['leaf']}", **more} for row in rows]


def _as_in_conv1d(row: Row) -> Row:
    """Describe the same matrix in files that have it as [in, out]."""
    matrix = "transposed" in row
    return {key: x[::-1] if key == "reshape" and matrix else x for key, x in row.items() if key != "transposed"}


def module_rows(name: str, leaf: str, shapes: Shapes, *cuts: Cut) -> list[Row]:
    """Describe a linear layer or a norm, or the part of a linear layer's outputs that `cuts` leave.

    Args:
      name: of the module in files; "[1]" at its end is the number of a part.
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


def _parts(name: str, parts: Mapping[str, Cut], whole: Cut) -> Iterator[tuple[str, Cut]]:
    """Yield the name and the cut of each part, or of the whole if the name has no {part}."""
    for part, cut in (parts if "{part}" in name else {"": whole}).items():
        yield name.replace("{part}", part), cut


def _attention(c: DecoderConfig, names: Mapping[str, str], own: Shapes) -> list[Row]:
    rows = list[Row]()
    if c.latent:
        for name, leaf in (*LATENT.items(), ("q_b_proj" if c.latent.query_rank else "q_proj", "q_up")):
            rows += module_rows(f"self_attn.{name}", f"attention/{leaf}", own)
    else:
        dim, G = 1 if c.by_part else 2, c.num_groups  # of the parts
        cuts = dict(zip(names["parts"].split(), ((dim, 0, G), (dim, G, G + 1), (dim, G + 1, G + 2)), strict=True))
        for name, cut in _parts(names["qkv"], cuts, (dim, 0, G + 2)):
            rows += module_rows(name, "attention/qkv", own, cut)
        for kind in ("q_norm", "k_norm"):
            rows += _head_norm(c, names[kind], f"attention/{kind}", own)
    if c.sinks:
        rows.append({"name": names["sinks"], "leaf": "attention/sinks", "reshape": [c.num_heads]})
    return [*rows, *module_rows(names["out"], "attention/out", own)]


def _head_norm(c: DecoderConfig, name: str, leaf: str, own: Shapes) -> list[Row]:
    row, shape = {"name": f"{name}.weight", "leaf": f"{leaf}/scale"}, own.get(f"{leaf}/scale", ())
    if len(shape) < 3:
        return module_rows(name, leaf, own)
    K, G, C = shape
    if "{head}" not in name:
        return [{**row, "reshape": [K * G, C] if c.qk_norm == "each" else [K * G * C]}]
    return [
        {"name": row["name"].replace("{head}", str(k * G + g)), "leaf": row["leaf"],
         "slices": [[0, k, k + 1], [1, g, g + 1]], "reshape": [C]}
        for k in range(K) for g in range(G)
    ]  # fmt: skip


def _feed_forward(names: Mapping[str, str], own: Shapes) -> list[Row]:
    rows = module_rows(names["up"], "mlp/up", own)
    for name, cut in _parts(names["gate_up"], {"gate": (1, 0, 1), "up": (1, 1, 2)}, (1, 0, 2)):
        rows += module_rows(name, "mlp/gate_up", own, cut)
    return [*rows, *module_rows(names["down"], "mlp/down", own)]


def _mixture(c: DecoderConfig, names: Mapping[str, str], own: Shapes) -> list[Row]:
    router, expert, shared = names["router"], names["expert"], names["shared"]
    *gate_and_up, down = names["expert_parts"].split()
    rows = [*module_rows(router, "mlp/router", own), *module_rows(f"{shared}_gate", "mlp/shared_gate", own)]
    if c.mixture and c.mixture.bias_rate is not None:
        # Near 4, as in V3, bfloat16 rounds by up to 0.008: that changes the routing.
        rows.append({"name": f"{router}.e_score_correction_bias", "leaf": "mlp/bias", "state": True})
    E, D, _, F = own["mlp/gate_up"]
    for number in range(E if "{expert}" in expert else 0):
        one, name = (0, number, number + 1), expert.replace("{expert}", str(number)) + ".weight"
        for i, part in enumerate(gate_and_up):
            rows.append(_matrix(name.replace("{part}", part), "mlp/gate_up", own, one, (2, i, i + 1), axis=1))
        rows.append(_matrix(name.replace("{part}", down), "mlp/down", own, one, axis=1))
    if "{expert}" not in expert:
        axes = [int(axis) for axis in names["together"].split()]
        biases = [axis - (axis > 1) for axis in axes if axis != 1]
        for part, leaf, cut in (
            ("gate_up_proj", "gate_up", {"transposed": axes, "reshape": [E, D, 2 * F]}),
            ("gate_up_proj_bias", "gate_up_bias", {"transposed": biases, "reshape": [E, 2 * F]}),
            ("down_proj", "down", {}),
            ("down_proj_bias", "down_bias", {}),
        ):
            if f"mlp/{leaf}" in own:
                rows.append({"name": expert.replace("{part}", part), "leaf": f"mlp/{leaf}", **cut})
    if "mlp/shared_down" in own:
        for i, part in enumerate(gate_and_up):
            rows.append(_matrix(f"{shared}.{part}.weight", "mlp/shared_gate_up", own, (1, i, i + 1)))
        rows.append(_matrix(f"{shared}.{down}.weight", "mlp/shared_down", own))
    return rows


def linear_modules(rows: list[Row]) -> set[str]:
    """Return the modules of `LoRAConfig` that files have; those of experts have no adapters."""
    own = [row["name"] or "" for row in rows if ".experts." not in (row["name"] or "")]
    return {name.removesuffix(".weight").rpartition(".")[2] for name in own if "shared_expert" not in name} & {*MODULES}
