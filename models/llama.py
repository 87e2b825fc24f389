"""A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases (Touvron et al., arXiv:2302.13971).

Shape suffixes, as in `x_BSD`:

    B  batch                 H  query heads              F  feed-forward width
    S  sequence              K  key-value heads, K <= H  V  vocabulary
    D  model width           C  width of a head          1  a broadcast axis
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.pipeline import vocab_parallel

Attend = Literal["auto", "cudnn", "xla"]
Hidden = jax.Array | tuple[jax.Array, jax.Array]  # x_BSD, or (x_BSD, segments_BS) for packed documents


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a decoder.

    `attention` chooses the kernel: "auto" is cuDNN's fused one for half precision on GPUs, and XLA's otherwise.
    """

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    vocab_size: int = 32_000
    tied: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    attention: Attend = "auto"

    def __post_init__(self):
        for name, whole, part in (
            ("num_heads must divide d_model", self.d_model, self.num_heads),
            ("num_kv_heads must divide num_heads", self.num_heads, self.num_kv_heads),
        ):
            if whole % part:
                raise ValueError(f"LlamaConfig: {name}, but {part} does not divide {whole}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Count all parameters, embedding and head included."""
        return self.num_layers * self.layer_parameters + self.d_model * (1 + self.vocab_size * (1 if self.tied else 2))

    @property
    def layer_parameters(self) -> int:
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.d_model * (heads * self.head_dim + 3 * self.d_ff + 2)

    def flops_per_token(self, sequence: int) -> float:
        """Count the model FLOPs of one training token, forward and backward, without recomputation.

        That is 6 per parameter outside the input embedding (a lookup), and 6 * layers * width * sequence for causal
        attention: two products, half of each masked.
        """
        used = self.num_layers * self.layer_parameters + self.d_model * (1 + self.vocab_size)
        return 6.0 * used + 6.0 * self.num_layers * self.d_model * sequence


PRESETS = {
    "tiny": LlamaConfig(4, 128, 4, 2, 384, vocab_size=256),
    "125m": LlamaConfig(12, 768, 12, 12, 2048, tied=True),
    "1b": LlamaConfig(16, 2048, 32, 8, 8192),
    "8b": LlamaConfig(32, 4096, 32, 8, 14336),
    "70b": LlamaConfig(80, 8192, 64, 8, 28672),
    "405b": LlamaConfig(126, 16384, 128, 8, 53248),
}


def preset(name: str, **changes) -> LlamaConfig:
    """Return a preset by name, with changes: `preset("8b", vocab_size=128_256)`."""
    if name not in PRESETS:
        raise ValueError(f"Llama preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)


def rope(x_BSHC: jax.Array, theta: float) -> jax.Array:
    """Rotate queries or keys by their positions, rotate-half convention (Su et al., arXiv:2104.09864).

    The angles are float32: in half precision, the angles of distant positions would round to the same value.
    """
    half = x_BSHC.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_S1C = jnp.arange(x_BSHC.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle_S1C), jnp.sin(angle_S1C)
    a, b = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHC.dtype)


def attention_kernel(choice: Attend, dtype: jnp.dtype) -> Literal["cudnn", "xla"]:
    """Resolve "auto" for this backend and dtype."""
    if choice != "auto":
        return choice
    half = dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if half and jax.default_backend() == "gpu" else "xla"


class Attention(nnx.Module):
    """Causal grouped-query attention; one product makes queries, keys and values.

    With segments, a token attends only to its own segment. Positions need not restart at a segment's start, because
    RoPE encodes distances. cuDNN takes segments as a bias, which costs time: 2 x 4,096 tokens with 32 heads of 64 take
    2.24 ms forward and backward on an H200, and 1.39 ms without segments.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        heads = c.num_heads + 2 * c.num_kv_heads
        self.qkv = _linear(c.d_model, heads * c.head_dim, 0.02, rngs)
        self.out = _linear(c.num_heads * c.head_dim, c.d_model, 0.02 / (2 * c.num_layers) ** 0.5, rngs)

    def __call__(self, x_BSD: jax.Array, segments_BS: jax.Array | None = None) -> jax.Array:
        c = self.config
        B, S, _ = x_BSD.shape
        qkv = self.qkv(x_BSD).reshape(B, S, -1, c.head_dim)
        q_BSHC, k_BSKC, v_BSKC = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        q_BSHC, k_BSKC = rope(q_BSHC, c.rope_theta), rope(k_BSKC, c.rope_theta)
        kernel, dtype = attention_kernel(c.attention, x_BSD.dtype), x_BSD.dtype
        if kernel == "xla" and dtype == jnp.float16:  # XLA has no float16 attention products on CPUs
            q_BSHC, k_BSKC, v_BSKC = (x.astype(jnp.float32) for x in (q_BSHC, k_BSKC, v_BSKC))
        mask_B1SS = None if segments_BS is None else (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None]
        o_BSHC = jax.nn.dot_product_attention(
            q_BSHC, k_BSKC, v_BSKC, mask=mask_B1SS, is_causal=True, implementation=kernel
        )
        return self.out(o_BSHC.reshape(B, S, -1).astype(dtype))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)); one product makes gate and up."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        c = config
        self.gate_up = _linear(c.d_model, 2 * c.d_ff, 0.02, rngs)
        self.down = _linear(c.d_ff, c.d_model, 0.02 / (2 * c.num_layers) ** 0.5, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_BSF, up_BSF = jnp.split(self.gate_up(x_BSD), 2, axis=-1)
        return self.down(nnx.silu(gate_BSF) * up_BSF)


class Block(nnx.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: Hidden) -> Hidden:
        x_BSD, segments_BS = x if isinstance(x, tuple) else (x, None)
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), segments_BS)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD if segments_BS is None else (x_BSD, segments_BS)


class Llama(nnx.Module):
    """The decoder as prefix (embedding), stack (blocks) and suffix (norm, head, loss).

    A batch is {"inputs": [B, S] int32, "labels": [B, S] int32}; negative labels are ignored. With "segments" [B, S]
    int32, from `jzero.data.Packed`, tokens attend only to their own segment.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        self.embed = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.vocab_size, c.d_model)))

        @nnx.split_rngs(splits=c.num_layers)
        @nnx.vmap
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(c, rngs=rngs)

        self.stack = blocks(rngs)  # each parameter has a leading layer axis
        self.norm = nnx.RMSNorm(c.d_model, epsilon=c.norm_eps, rngs=rngs)
        if not c.tied:
            self.head = _linear(c.d_model, c.vocab_size, 0.02, rngs)

    def prefix(self, batch: dict[str, jax.Array]) -> Hidden:
        x_BSD = vocab_parallel.embed(self.embed[...], batch["inputs"])
        return (x_BSD, batch["segments"]) if "segments" in batch else x_BSD

    def suffix(self, x: Hidden, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return (sum of the tokens' cross-entropies, number of tokens)."""
        x_BSD = x[0] if isinstance(x, tuple) else x
        return vocab_parallel.cross_entropy(self.norm(x_BSD), self.head_DV, batch["labels"])

    def report_notes(self, dtype: jnp.dtype) -> list[str]:
        """Return the lines for the run report, given the compute dtype."""
        asked = self.config.attention
        return [f"attention kernel {attention_kernel(asked, dtype)} (attention={asked!r}, {dtype})"]

    def weights_layout(self) -> dict[str, Any]:
        """Describe the parameters in Hugging Face's `LlamaForCausalLM`, see `jzero.weights.name_map`."""
        return huggingface(self.config)

    def __call__(self, tokens_BS: jax.Array, segments_BS: jax.Array | None = None) -> jax.Array:
        """Compute logits [B, S, V] in float32, without remat or parallelism: for evaluation and generation."""
        graph, layers = nnx.split(self.stack)
        x = self.prefix({"inputs": tokens_BS} | ({} if segments_BS is None else {"segments": segments_BS}))
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, layers)
        x_BSD = x[0] if isinstance(x, tuple) else x
        return (self.norm(x_BSD) @ self.head_DV).astype(jnp.float32)

    @property
    def head_DV(self) -> jax.Array:
        return self.embed[...].T if self.config.tied else self.head.kernel[...]

    @property
    def vocabulary(self) -> dict[str, int]:
        """{parameter: its vocabulary dimension}: a pipeline divides these among its stages."""
        return {"embed": 0} if self.config.tied else {"embed": 0, "head/kernel": 1}

    @property
    def fused_matrices(self) -> dict[str, tuple[int, ...]]:
        """The widths of the matrices that share one parameter; Muon orthogonalises each for itself."""
        c = self.config
        kv = c.num_kv_heads * c.head_dim
        return {"stack/attention/qkv/kernel": (c.d_model, kv, kv), "stack/mlp/gate_up/kernel": (c.d_ff, c.d_ff)}


def huggingface(config: LlamaConfig) -> dict[str, Any]:
    """Describe the parameters of a config in the `transformers` library, versions 4 and 5."""
    c, layer = config, "model.layers.{layer}."  # jzero.weights fills in {layer}
    kv, q = c.num_kv_heads * c.head_dim, c.d_model

    def matrix(name: str, leaf: str, columns: list[int] | None = None) -> dict[str, Any]:
        return {"name": f"{name}.weight", "leaf": f"{leaf}/kernel", "columns": columns, "transposed": True}

    return {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": c.d_model,
            "intermediate_size": c.d_ff,
            "num_hidden_layers": c.num_layers,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "tie_word_embeddings": c.tied,
            "hidden_act": "silu",
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_theta,  # transformers 4
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},  # transformers 5
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 4096,  # RoPE itself has no limit
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "may_differ": ["architectures", "max_position_embeddings", "bos_token_id", "eos_token_id", "rope_parameters"],
        "absent": {"rope_theta": 10_000.0},
        "ignored": ["model.layers.*.self_attn.rotary_emb.inv_freq"],  # in older downloads; rope_theta implies them
        "tensors": [
            {"name": "model.embed_tokens.weight", "leaf": "ends/embed"},
            {"name": layer + "input_layernorm.weight", "leaf": "stack/attention_norm/scale"},
            matrix(layer + "self_attn.q_proj", "stack/attention/qkv", [0, q]),
            matrix(layer + "self_attn.k_proj", "stack/attention/qkv", [q, q + kv]),
            matrix(layer + "self_attn.v_proj", "stack/attention/qkv", [q + kv, q + 2 * kv]),
            matrix(layer + "self_attn.o_proj", "stack/attention/out"),
            {"name": layer + "post_attention_layernorm.weight", "leaf": "stack/mlp_norm/scale"},
            matrix(layer + "mlp.gate_proj", "stack/mlp/gate_up", [0, c.d_ff]),
            matrix(layer + "mlp.up_proj", "stack/mlp/gate_up", [c.d_ff, 2 * c.d_ff]),
            matrix(layer + "mlp.down_proj", "stack/mlp/down"),
            {"name": "model.norm.weight", "leaf": "ends/norm/scale"},
            *([] if c.tied else [matrix("lm_head", "ends/head")]),
        ],
    }


def _linear(d_in: int, d_out: int, std: float, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, use_bias=False, kernel_init=nnx.initializers.normal(std), rngs=rngs)
