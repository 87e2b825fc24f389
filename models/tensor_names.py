"""The names of a decoder's weights in files: rows of a `weights_layout`, see `jzero.weights.name_map`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig, LatentConfig
from .lora import MODULES
from .moe import MixtureConfig

Row = dict[str, Any]
# Llama's names; those of the layers follow that of the layer. {part} stands for `parts`, or for gate, up. Without it,
# one tensor has all parts: of each head in turn (qkv), or one after the other (gate_up, and qkv with "[part]").
# Matrices are [out, in] in files, but for Conv1D's. Without {expert}, a tensor has one of the matrices of all experts,
# gates and values with the axes `together`.
NAMES = {
    "embed": "model.embed_tokens", "layer": "model.layers.{layer}.", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "qkv": "self_attn.{part}_proj",
    "sinks": "self_attn.sinks", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "out": "self_attn.o_proj",
    "gate_up": "mlp.{part}_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "parts": "q k v",
    "matrices": "[out, in]", "router": "mlp.gate", "expert": "mlp.experts.{expert}.{part}", "together": "0 1 2 3",
    "expert_parts": "gate_proj up_proj down_proj", "shared": "mlp.shared_expert",
}  # fmt: skip
LAYER = ("attention_norm", "mlp_norm", "qkv", "sinks", "q_norm", "k_norm", "out", "gate_up", "up", "down",
         "attention_post_norm", "mlp_post_norm", "router", "expert", "shared")  # fmt: skip


def tensor_rows(config: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    """List the rows of all weights.

    Args:
      names: those that differ from Llama's.
    """
    c, names = config, {**NAMES, **names}
    rows = embedding(f"{names['embed']}.weight", "ends/embed", c.vocab_size, c.vocab_rows)
    if c.max_positions:
        rows.append({"name": f"{names['positions']}.weight", "leaf": "ends/positions"})
    for path, numbers in c.layer_paths.items():
        rows += [_at(path, numbers, row) for row in layer_rows(c.of_layer(numbers[0]), names)]
    for depth in range(c.future_layers):
        rows += _future(c.num_layers + depth, depth)
    rows += _norm(c, names["norm"], "ends/norm")
    if not c.tied:
        (head,) = linear_rows(names["head"], "ends/head", bias=False)
        rows.append({**head, "columns": [0, c.vocab_size]})
        if c.vocab_rows > c.vocab_size:
            rows.append({"name": None, "leaf": "ends/head/kernel", "columns": [c.vocab_size, c.vocab_rows]})
    _check_adapters(c, rows)
    return rows


def layer_rows(config: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    """List the rows of the layers in a stack."""
    c, names = config, {**NAMES, **names}
    names |= {key: names["layer"] + names[key] for key in LAYER if key in names}
    before, after = c.norms != "after", c.norms in ("after", "both")

    def norm(kind: str, has: bool) -> list[Row]:
        return _norm(c, names[kind], f"stack/{kind}") if has else []

    rows = norm("attention_norm", before) + _attention(c, names) + norm("attention_post_norm", after)
    rows += norm("mlp_norm", before and c.parallel != "one_norm") + norm("mlp_post_norm", after)
    rows += _mixture(c.mixture, c.d_model, names) if c.mixture else _feed_forward(c, names)
    return rows if names["matrices"] == "[out, in]" else [_without_transposing(row) for row in rows]


def _without_transposing(row: Row) -> Row:
    """Describe the same part in files of Conv1D, [in, out]."""
    kept = {key: x for key, x in row.items() if key != "transposed"}
    return {**kept, "reshape": row["reshape"][::-1]} if "transposed" in row and "reshape" in row else kept


def _at(path: str, numbers: range, row: Row) -> Row:
    """Move a row of layers 0, 1, 2 and so on of a stack to layers of other numbers, or to one layer of its own."""
    row = {**row, "leaf": row["leaf"].replace("stack", path, 1)}
    if not path.startswith("stack"):
        return {**row, "name": row["name"].replace("{layer}", str(numbers[0]))}
    plain = (numbers.start, numbers.step) == (0, 1)
    return row if plain else {**row, "layers": [numbers.start, numbers.step]}


def norm_rows(name: str, leaf: str) -> list[Row]:
    return [{"name": f"{name}.weight", "leaf": f"{leaf}/scale"}, {"name": f"{name}.bias", "leaf": f"{leaf}/bias"}]


def linear_rows(name: str, leaf: str, bias: bool = True) -> list[Row]:
    rows = [{"name": f"{name}.weight", "leaf": f"{leaf}/kernel", "transposed": True}]
    return [*rows, {"name": f"{name}.bias", "leaf": f"{leaf}/bias"}] if bias else rows


def _norm(c: DecoderConfig, name: str, leaf: str) -> list[Row]:
    rows = norm_rows(name, leaf)
    return rows if c.norm == "layer" else rows[:1]


def _future(number: int, depth: int) -> list[dict[str, Any]]:
    """List the rows of the weights' table, see `jzero.weights.name_map`, but for the block's.

    Args:
      number: of the layer in files, where these follow the others.
      depth: 0 for the layer that predicts the second token.
    """
    names = {"enorm": "embed_norm", "hnorm": "state_norm", "shared_head.norm": "norm"}
    at, leaf = f"model.layers.{number}", f"ends/future/{depth}"
    rows: list[dict[str, Any]] = [
        {"name": f"{at}.{name}.weight", "leaf": f"{leaf}/{own}/scale"} for name, own in names.items()
    ]
    return [*rows, {"name": f"{at}.eh_proj.weight", "leaf": f"{leaf}/join/kernel", "transposed": True}]


def embedding(name: str, leaf: str, size: int, rows: int) -> list[Row]:
    """Describe a table whose rows after `size` are padding."""
    padding = {"name": None, "leaf": leaf, "rows": [size, rows]}
    return [{"name": name, "leaf": leaf, "rows": [0, size]}, *([padding] if rows > size else [])]


def _attention(c: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    out = linear_rows(names["out"], "stack/attention/out", c.out_bias)
    if c.latent:
        return [*_latent(c.latent, c.d_model, c.num_heads, names["layer"]), *out]
    G, leaf, dim = c.num_groups, "stack/attention/qkv", 1 if c.by_part else 2  # of the parameter, the parts'
    rows: list[Row] = []
    template, number = names["qkv"].removesuffix("[part]"), names["qkv"].endswith("[part]")
    parts = dict(zip(names["parts"].split(), ((0, G), (G, G + 1), (G + 1, G + 2)), strict=True))
    parts = parts if number or "{part}" in template else {"": (0, G + 2)}
    for i, (part, (start, stop)) in enumerate(parts.items()):
        name, width = template.replace("{part}", part), c.num_kv_heads * (stop - start) * c.head_dim
        end = f"[{i}]" if number else ""
        cut = {"slices": [[dim, start, stop]], "transposed": [1, 2, 3, 0], "reshape": [width, c.d_model]}
        rows.append({"name": f"{name}.weight{end}", "leaf": f"{leaf}/kernel", **cut})
        if c.qkv_bias:
            cut = {"slices": [[dim - 1, start, stop]], "reshape": [width]}
            rows.append({"name": f"{name}.bias{end}", "leaf": f"{leaf}/bias", **cut})
    for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads)) if c.qk_norm not in (None, "unscaled") else ():
        rows += _head_norm(c, names[f"{part}_norm"], f"stack/attention/{part}_norm", heads)
    rows += [{"name": names["sinks"], "leaf": "stack/attention/sinks", "reshape": [c.num_heads]}] if c.sinks else []
    return [*rows, *out]


def _head_norm(c: DecoderConfig, name: str, leaf: str, heads: int) -> list[Row]:
    row = {"name": f"{name}.weight", "leaf": f"{leaf}/scale"}
    if c.qk_norm == "shared":
        return norm_rows(name, leaf) if c.norm == "layer" else [row]
    if "{head}" not in name:
        return [{**row, "reshape": [heads, c.head_dim] if c.qk_norm == "each" else [heads * c.head_dim]}]
    group = heads // c.num_kv_heads
    rows = []
    for head in range(heads):
        (k, g), one = divmod(head, group), {"reshape": [c.head_dim]}
        cut = {"slices": [[0, k, k + 1], [1, g, g + 1]], **one}
        rows.append({**row, "name": row["name"].replace("{head}", str(head)), **cut})
    return rows


def _feed_forward(c: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    last = linear_rows(names["down"], "stack/mlp/down", c.mlp_bias)
    if not c.gated:
        return [*linear_rows(names["up"], "stack/mlp/up", c.mlp_bias), *last]
    rows, leaf = list[Row](), "stack/mlp/gate_up"
    parts = {"gate": (0, 1), "up": (1, 2)} if "{part}" in names["gate_up"] else {"": (0, 2)}
    for part, (start, stop) in parts.items():
        name, width = names["gate_up"].replace("{part}", part), c.d_ff * (stop - start)
        cut = {"slices": [[1, start, stop]], "transposed": [1, 2, 0], "reshape": [width, c.d_model]}
        rows.append({"name": f"{name}.weight", "leaf": f"{leaf}/kernel", **cut})
        if c.mlp_bias:
            rows.append({"name": f"{name}.bias", "leaf": f"{leaf}/bias", "rows": [start, stop], "reshape": [width]})
    return [*rows, *last]


def _latent(m: LatentConfig, d_model: int, heads: int, layer: str) -> list[Row]:
    """List the rows of latent attention but for the output's."""
    rows: list[Row] = []

    def add(name: str, leaf: str, **cut: Any) -> None:
        rows.append({"name": f"{layer}self_attn.{name}.weight", "leaf": f"stack/attention/{leaf}", **cut})

    def by_head(width: int, d_in: int) -> dict[str, Any]:
        return {"transposed": [1, 2, 0], "reshape": [heads * width, d_in]}

    if m.query_rank:
        add("q_a_proj", "q_down/kernel", transposed=True)
        add("q_a_layernorm", "q_norm/scale")
    add(
        "q_b_proj" if m.query_rank else "q_proj", "q_up/kernel", **by_head(m.plain + m.rotated, m.query_rank or d_model)
    )
    add("kv_a_proj_with_mqa", "kv_down/kernel", transposed=True)
    add("kv_a_layernorm", "kv_norm/scale")
    add("kv_b_proj", "kv_up/kernel", **by_head(m.plain + m.value, m.rank))
    return rows


def _mixture(mixture: MixtureConfig, d_model: int, names: Mapping[str, str]) -> list[Row]:
    shape, c = [mixture.width, d_model], mixture
    router, expert = names["router"], names["expert"]
    rows = linear_rows(router, "stack/mlp/router", c.biases)
    if c.bias_rate is not None:
        # Near 4, as in V3, bfloat16 rounds by up to 0.008: that changes the routing.
        rows.append({"name": f"{router}.e_score_correction_bias", "leaf": "stack/mlp/bias", "state": True})
    parts = names["expert_parts"].split()
    for number in range(c.num_experts if "{expert}" in expert else 0):
        one, numbered = [0, number, number + 1], expert.replace("{expert}", str(number))
        *gate_and_up, down = (f"{numbered.replace('{part}', part)}.weight" for part in parts)
        for i, name in enumerate(gate_and_up):
            cut = {"slices": [one, [2, i, i + 1]], "transposed": [0, 2, 3, 1], "reshape": shape}
            rows.append({"name": name, "leaf": "stack/mlp/gate_up", **cut})
        cut = {"slices": [one], "transposed": [0, 2, 1], "reshape": shape[::-1]}
        rows.append({"name": down, "leaf": "stack/mlp/down", **cut})
    if "{expert}" not in expert:
        at, wide = expert.removesuffix(".{part}"), [c.num_experts, 2 * c.width]
        axes = [int(axis) for axis in names["together"].split()]
        whole = {"transposed": axes, "reshape": [c.num_experts, d_model, 2 * c.width]}
        rows.append({"name": f"{at}.gate_up_proj", "leaf": "stack/mlp/gate_up", **whole})
        rows.append({"name": f"{at}.down_proj", "leaf": "stack/mlp/down"})
        if c.biases:
            own = {"transposed": [axis - (axis > 1) for axis in axes if axis != 1], "reshape": wide}
            rows.append({"name": f"{at}.gate_up_proj_bias", "leaf": "stack/mlp/gate_up_bias", **own})
            rows.append({"name": f"{at}.down_proj_bias", "leaf": "stack/mlp/down_bias"})
    if c.shared:
        name = names["shared"]
        for i, part in enumerate(parts[:2]):
            cut = {"slices": [[1, i, i + 1]], "transposed": [1, 2, 0], "reshape": [c.shared, d_model]}
            rows.append({"name": f"{name}.{part}.weight", "leaf": "stack/mlp/shared_gate_up", **cut})
        rows.append({"name": f"{name}.{parts[2]}.weight", "leaf": "stack/mlp/shared_down", "transposed": True})
        rows += linear_rows(f"{name}_gate", "stack/mlp/shared_gate", bias=False) if c.shared_gate else []
    return rows


def linear_modules(rows: list[Row]) -> set[str]:
    """Return the modules of `LoRAConfig` that files have; those of experts have no adapters."""
    own = [row["name"] or "" for row in rows if ".experts." not in (row["name"] or "")]
    return {name.removesuffix(".weight").rpartition(".")[2] for name in own if "shared_expert" not in name} & {*MODULES}


def _check_adapters(c: DecoderConfig, rows: list[Row]) -> None:
    """Refuse adapters of modules that the family's files do not have, such as one of several in one matrix."""
    modules = linear_modules(rows)
    if lacking := [name for name in (c.lora.target_modules if c.lora else ()) if name not in modules]:
        has = sorted(modules)
        raise ConfigError(
            f"lora.target_modules has {', '.join(lacking)}: files of {c.family} have no such modules; "
            + (f"it has {', '.join(has)}" if has else "leave lora out, and train all weights")
        )
