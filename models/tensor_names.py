"""The names of a decoder's weights in files: rows of a `weights_layout`, see `jzero.weights.name_map`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.errors import ConfigError

from .blocks import norm_rows
from .decoder_config import DecoderConfig
from .latent import latent_rows
from .lora import MODULES
from .moe_families import mixture_rows

Row = dict[str, Any]
# Llama's names; those of the layers follow that of the layer. {part} stands for q, k, v, or for gate, up. Without it,
# one tensor has all parts: of each head in turn (qkv), or one after the other (gate_up, and qkv with "[part]").
NAMES = {
    "embed": "model.embed_tokens", "layer": "model.layers.{layer}.", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "qkv": "self_attn.{part}_proj",
    "sinks": "self_attn.sinks", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "out": "self_attn.o_proj",
    "gate_up": "mlp.{part}_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
OUTSIDE = ("embed", "norm", "head", "layer")  # of the layers


def tensor_rows(config: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    """List the rows of all weights.

    Args:
      names: those that differ from Llama's.
    """
    c, names = config, {**NAMES, **names}
    names = {key: names["layer"] + x if key not in OUTSIDE else x for key, x in names.items()}

    rows = embedding(f"{names['embed']}.weight", "ends/embed", c.vocab_size, c.vocab_rows)
    for path, numbers in c.layer_paths.items():
        rows += [_at(path, numbers, row) for row in _layer(c.of_layer(numbers[0]), names)]
    for depth in range(c.future_layers):
        rows += _future(c.num_layers + depth, depth)
    rows += _norm(c, names["norm"], "ends/norm")
    if not c.tied:
        rows.append(_matrix(names["head"], "ends/head", [0, c.vocab_size]))
        if c.vocab_rows > c.vocab_size:
            rows.append({"name": None, "leaf": "ends/head/kernel", "columns": [c.vocab_size, c.vocab_rows]})
    _check_adapters(c, rows)
    return rows


def _layer(c: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    """List the rows of the layers in a stack."""
    before, after = c.norms != "after", c.norms != "before"

    def norm(kind: str, has: bool) -> list[Row]:
        return _norm(c, names[kind], f"stack/{kind}") if has else []

    rows = norm("attention_norm", before) + _attention(c, names) + norm("attention_post_norm", after)
    rows += norm("mlp_norm", before and c.parallel != "one_norm") + norm("mlp_post_norm", after)
    mixture = c.mixture and mixture_rows(c.family, c.mixture, c.d_model, names["layer"])
    return rows + (mixture or _feed_forward(c, names))


def _at(path: str, numbers: range, row: Row) -> Row:
    """Move a row of layers 0, 1, 2 and so on of a stack to layers of other numbers, or to one layer of its own."""
    row = {**row, "leaf": row["leaf"].replace("stack", path, 1)}
    if not path.startswith("stack"):
        return {**row, "name": row["name"].replace("{layer}", str(numbers[0]))}
    plain = (numbers.start, numbers.step) == (0, 1)
    return row if plain else {**row, "layers": [numbers.start, numbers.step]}


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


def _matrix(name: str, leaf: str, columns: list[int] | None = None) -> Row:
    return {"name": f"{name}.weight", "leaf": f"{leaf}/kernel", "columns": columns, "transposed": True}


def _bias(name: str, leaf: str, has: bool) -> list[Row]:
    return [{"name": f"{name}.bias", "leaf": f"{leaf}/bias"}] if has else []


def _attention(c: DecoderConfig, names: Mapping[str, str]) -> list[Row]:
    out = names["out"], "stack/attention/out"
    if c.latent:
        return [*latent_rows(c.latent, c.d_model, c.num_heads, names["layer"]), _matrix(*out)]
    G, leaf, rows = c.num_groups, "stack/attention/qkv", []
    template, number = names["qkv"].removesuffix("[part]"), names["qkv"].endswith("[part]")
    parts = {"q": (0, G), "k": (G, G + 1), "v": (G + 1, G + 2)}
    parts = parts if number or "{part}" in template else {"": (0, G + 2)}
    for i, (part, (start, stop)) in enumerate(parts.items()):
        name, width = template.replace("{part}", part), c.num_kv_heads * (stop - start) * c.head_dim
        end = f"[{i}]" if number else ""
        cut = {"slices": [[2, start, stop]], "transposed": [1, 2, 3, 0], "reshape": [width, c.d_model]}
        rows.append({"name": f"{name}.weight{end}", "leaf": f"{leaf}/kernel", **cut})
        if c.qkv_bias:
            cut = {"slices": [[1, start, stop]], "reshape": [width]}
            rows.append({"name": f"{name}.bias{end}", "leaf": f"{leaf}/bias", **cut})
    for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads)) if c.qk_norm not in (None, "unscaled") else ():
        rows += _head_norm(c, names[f"{part}_norm"], f"stack/attention/{part}_norm", heads)
    rows += [{"name": names["sinks"], "leaf": "stack/attention/sinks", "reshape": [c.num_heads]}] if c.sinks else []
    return [*rows, _matrix(*out), *_bias(*out, c.out_bias)]


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
    down = names["down"], "stack/mlp/down"
    last = [_matrix(*down), *_bias(*down, c.mlp_bias)]
    if not c.gated:
        up = names["up"], "stack/mlp/up"
        return [_matrix(*up), *_bias(*up, c.mlp_bias), *last]
    rows, leaf = [], "stack/mlp/gate_up"
    parts = {"gate": (0, 1), "up": (1, 2)} if "{part}" in names["gate_up"] else {"": (0, 2)}
    for part, (start, stop) in parts.items():
        name, width = names["gate_up"].replace("{part}", part), c.d_ff * (stop - start)
        cut = {"slices": [[1, start, stop]], "transposed": [1, 2, 0], "reshape": [width, c.d_model]}
        rows.append({"name": f"{name}.weight", "leaf": f"{leaf}/kernel", **cut})
        if c.mlp_bias:
            rows.append({"name": f"{name}.bias", "leaf": f"{leaf}/bias", "rows": [start, stop], "reshape": [width]})
    return [*rows, *last]


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
            + (f"it has {', '.join(has)}" if has else "adapters have no names there")
        )
