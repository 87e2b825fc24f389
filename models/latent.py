"""Latent attention in config.json, and the names of its weights (DeepSeek-AI, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LatentConfig:
    """The shape of latent attention: all heads' keys and values come from one short vector of a token, its latent.

    Attributes:
      rank: the width of the latent.
      query_rank: of another one, for the queries; None: they come from the layer's input.
      plain, rotated: the dimensions of a head's queries and keys without RoPE, and with it; all heads share the
        rotated ones of the keys.
      value: the width of a head's values.
    """

    rank: int
    query_rank: int | None
    plain: int
    rotated: int
    value: int

    def num_parameters(self, d_model: int, heads: int) -> int:
        """Count the parameters of a layer's attention."""
        queries = (self.query_rank or d_model) * heads * (self.plain + self.rotated)
        queries += (d_model + 1) * self.query_rank if self.query_rank else 0
        keys = d_model * (self.rank + self.rotated) + self.rank + self.rank * heads * (self.plain + self.value)
        return queries + keys + heads * self.value * d_model


KEYS = {
    "rank": "kv_lora_rank", "query_rank": "q_lora_rank", "plain": "qk_nope_head_dim", "rotated": "qk_rope_head_dim",
    "value": "v_head_dim",
}  # fmt: skip


def latent_of(there: Mapping[str, Any]) -> LatentConfig | None:
    """Read the latent attention of a config.json; None if its family has none."""
    return LatentConfig(**{field: there[key] for field, key in KEYS.items()}) if KEYS["rank"] in there else None


def latent_json(latent: LatentConfig) -> dict[str, Any]:
    """Return what config.json has of it."""
    sizes = {KEYS[field.name]: getattr(latent, field.name) for field in fields(latent)}
    return {**sizes, "head_dim": latent.rotated, "qk_head_dim": latent.plain + latent.rotated}


def latent_rows(latent: LatentConfig, d_model: int, heads: int, layer: str) -> list[dict[str, Any]]:
    """List the rows of the weights' table, see `jzero.weights.name_map`, but for the output's."""
    m, rows = latent, []

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
