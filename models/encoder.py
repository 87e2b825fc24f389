"""An encoder: a stack of the decoder's blocks without its causal mask, with LayerNorm and biases (BERT, ViT)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx

from jzero.attention_kernels import Attend, kernel_note
from jzero.errors import ConfigError

from .decoder_config import DecoderConfig, check_fields
from .downloads import ADVICE, Download, config_problems
from .families import EPS, SIZES, Family
from .tensor_names import end_rows, layer_rows, padded_rows
from .transformer import Transformer

# A field -> the key of config.json.
KEYS = {field: key for field, key in {**SIZES, **EPS}.items() if field != "vocab_size"}


@dataclass(frozen=True)
class EncoderBlockConfig(DecoderConfig):
    """The config of a block whose tokens see all others, or the first `row_length` ones."""

    causal = False
    row_length: int | None = None  # type: ignore[misc]
    owner: type | None = None  # type: ignore[misc]


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder, and the `download` it comes from; a subclass has the `row` of its family."""

    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    norm_eps: float = 1e-12
    attention: Attend = "auto"
    download: Download | None = field(default=None, compare=False, repr=False, kw_only=True)

    row: ClassVar[Family]
    row_length: ClassVar[int | None] = None

    def __post_init__(self):
        _ = self.block  # its config checks this one

    @classmethod
    def read(cls, download: Download, **changes: Any) -> Self:
        """Read the shape from a config.json of `transformers`.

        Raises:
          ConfigError: keys are missing or have other values; all problems at once.
        """
        check_fields(cls, changes)
        there = {"layer_norm_eps": 1e-12, **cls.row.absent}  # transformers' defaults
        there |= {key: value for key, value in download.config.items() if value is not None}
        keys = {field: key for field, key in {**KEYS, **cls.row.keys}.items() if field not in changes}
        counts = [key for field, key in keys.items() if field != "norm_eps"]
        if problems := config_problems(there, keys.values(), counts, cls.row.needs):
            raise ConfigError(*problems)
        return cls(**{**{field: there[key] for field, key in keys.items()}, "download": download, **changes})

    @property
    def block(self) -> EncoderBlockConfig:
        """The config of the blocks."""
        return EncoderBlockConfig(
            self.num_layers, self.d_model, self.num_heads, self.num_heads, self.d_ff, norm_eps=self.norm_eps,
            attention=self.attention, row_length=self.row_length, owner=type(self), **self.row.fixed,
        )  # fmt: skip


class Encoder(Transformer):
    """The base of encoders."""

    def report_notes(self, dtype: jnp.dtype) -> list[str]:
        return [kernel_note(self.config.attention, dtype, self.block.head_dim)]

    def weights_layout(self) -> dict[str, Any]:
        """Describe the parameters in `transformers`, see `jzero.weights.name_map`."""
        c, row, shapes = self.config, self.config.row, self.shapes
        sizes = {key: getattr(c, field) for field, key in {**KEYS, **row.keys}.items()}
        rows = [*end_rows(row.names, shapes), *layer_rows(c.block, row.names, shapes)]
        for leaf in self.vocabulary:
            rows += padded_rows(row.names[leaf], f"ends/{leaf}", c.vocab_size, shapes)
        return {
            "config": {"architectures": [row.architecture], **sizes, **row.needs},
            "download": c.download and c.download.table(getattr(c, "vocab_size", None)),
            "may_differ": ["architectures"], "advice": ADVICE, "aliases": row.aliases, "ignored": row.ignored,
            "tensors": rows,
        }  # fmt: skip


def linear(d_in: int, d_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)
