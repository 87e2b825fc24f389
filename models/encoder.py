"""An encoder: a stack of the decoder's blocks without its causal mask, with LayerNorm and biases (BERT, ViT)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import jax.numpy as jnp
from flax import nnx

from jzero.attention_kernels import Attend, kernel_note
from jzero.errors import ConfigError

from .decoder_config import GPT_BLOCKS, DecoderConfig, check_fields
from .downloads import ADVICE, Download, count_problems
from .transformer import Transformer

# A field -> the key of config.json.
KEYS = {
    "num_layers": "num_hidden_layers", "d_model": "hidden_size", "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size", "norm_eps": "layer_norm_eps",
}  # fmt: skip


@dataclass(frozen=True)
class EncoderBlockConfig(DecoderConfig):
    """The config of a block whose tokens see all others, or the first `row_length` ones."""

    causal = False
    row_length: int | None = None  # type: ignore[misc]
    owner: type | None = None  # type: ignore[misc]


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder, and the `download` it comes from.

    Of a subclass:
      norms: as in `DecoderConfig`.
      names: model_type and class in `transformers`.
      keys: of config.json, for its own fields.
      fixed: the values that other keys must have, or stand for if they are missing.
      absent: the values of keys that config.json may lack.
    """

    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    norm_eps: float = 1e-12
    attention: Attend = "auto"
    download: Download | None = field(default=None, compare=False, repr=False, kw_only=True)

    norms: ClassVar[Literal["before", "sum"]]
    names: ClassVar[tuple[str, str]]
    keys: ClassVar[Mapping[str, str]]
    fixed: ClassVar[Mapping[str, Any]]
    absent: ClassVar[Mapping[str, Any]]
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
        there = {"layer_norm_eps": 1e-12, **cls.absent}  # transformers' defaults
        there |= {key: value for key, value in download.config.items() if value is not None}
        keys = {field: key for field, key in {**KEYS, **cls.keys}.items() if field not in changes}
        problems = count_problems(there, keys.values(), [key for field, key in keys.items() if field != "norm_eps"])
        problems += [
            f"config.json has {key} = {there[key]!r}: must be {value!r}"
            for key, value in cls.fixed.items()
            if there.get(key, value) != value
        ]
        if problems:
            raise ConfigError(*problems)
        return cls(**{**{field: there[key] for field, key in keys.items()}, "download": download, **changes})

    def weights_layout(self, tensors: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Describe the parameters in `transformers`, see `jzero.weights.name_map`, by the rows of the tensors."""
        sizes = {key: getattr(self, field) for field, key in {**KEYS, **self.keys}.items()}
        names = {"model_type": self.names[0], "architectures": [self.names[1]]}
        config = {**names, **sizes, **self.fixed}
        return {"config": config, "may_differ": ["architectures"], "advice": ADVICE, "tensors": tensors, **more}

    @property
    def block(self) -> EncoderBlockConfig:
        """The config of the blocks."""
        return EncoderBlockConfig(
            self.num_layers, self.d_model, self.num_heads, self.num_heads, self.d_ff, norm_eps=self.norm_eps,
            attention=self.attention, norms=self.norms, activation="gelu", row_length=self.row_length,
            owner=type(self), **GPT_BLOCKS,
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.block.head_dim


class Encoder(Transformer):
    """The base of encoders."""

    config: Any  # of a subclass of EncoderConfig

    @property
    def block(self) -> EncoderBlockConfig:
        return self.config.block

    def report_notes(self, dtype: jnp.dtype) -> list[str]:
        return [kernel_note(self.config.attention, dtype, self.config.head_dim)]


def linear(d_in: int, d_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)
