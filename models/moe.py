"""The feed-forward layer of a mixture of experts (Mixtral, arXiv:2401.04088; Qwen3-MoE, arXiv:2505.09388; the router of
DeepSeek-V3, arXiv:2412.19437).

Shape suffixes besides those of models/attention.py: E experts, N experts of a token, F width of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.errors import ConfigError
from jzero.layout.replicas import all_gather
from jzero.moe import balance_loss, balanced_bias, experts, route

# What a layer adds to what the layers before it report: means over the layers are in the step's metrics.
METRICS = ("balance_loss", "drop_rate")


@dataclass(frozen=True)
class MixtureConfig:
    """The shape of a mixture of experts, in the place of a feed-forward layer."""

    num_experts: int  # of a layer
    top_k: int  # of a token
    width: int  # inner width of an expert
    normalize: bool = True  # divides the weights of a token's experts by their sum; Mixtral always does
    score: Literal["softmax", "sigmoid"] = "softmax"  # of the router, see `jzero.route`
    scale: float = 1.0  # multiplies the weights
    groups: tuple[int, int, int] | None = None  # a token's experts are of its best ones, see `jzero.route` (DeepSeek)
    shared: int = 0  # inner width of one more expert, which all tokens use; 0: there is none
    shared_gate: bool = False  # multiplies its output by a sigmoid, of a product of its own (Qwen2-MoE)
    capacity_factor: float | None = None  # bounds the tokens of a row that an expert takes; None: no token is dropped
    scale_inputs: bool = False  # the weight of a token's only expert multiplies its input, not its output (Llama 4)
    biases: bool = False  # of the router, and of the experts' matrices (GPT-OSS)
    clamp: tuple[float, float] | None = None  # `ClampedSwiGLU`'s (alpha, limit) (GPT-OSS); None: activation(gate) * up
    balance: float = 0.01  # what the load-balancing loss counts in the loss, as its mean over the layers
    # Balances by a bias too, which is state: its move after each micro-batch, by the counts of all replicas, see
    # `jzero.balanced_bias`. 0: it stays as it is; None: there is none.
    bias_rate: float | None = None

    def __post_init__(self):
        if self.scale_inputs and self.top_k != 1:
            raise ConfigError(
                f"MixtureConfig: top_k = {self.top_k} (num_experts_per_tok): must be 1 with scale_inputs, since "
                "a token's experts have one input"
            )


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Gates times sigmoids of alpha times them, times values plus 1; both within a limit (OpenAI, arXiv:2508.10925)."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, value: jax.Array) -> jax.Array:
        gate, value = jnp.minimum(gate, self.limit), jnp.clip(value, -self.limit, self.limit)
        return (value + 1) * gate * nnx.sigmoid(self.alpha * gate)


class Mixture(nnx.Module):
    """Gated experts and their router, whose scores are float32."""

    def __init__(
        self, config: MixtureConfig, d_model: int, activation: Callable[[jax.Array], jax.Array], *, rngs: nnx.Rngs,
        init: nnx.Initializer, last: nnx.Initializer,
    ):  # fmt: skip
        self.config, self.activation, c = config, activation, config
        self.router = nnx.Linear(d_model, c.num_experts, use_bias=c.biases, kernel_init=init, rngs=rngs)
        self.gate_up = nnx.Param(init(rngs.params(), (c.num_experts, d_model, 2, c.width)))
        self.down = nnx.Param(last(rngs.params(), (c.num_experts, c.width, d_model)))
        if c.biases:
            self.gate_up_bias = nnx.Param(jnp.zeros((c.num_experts, 2, c.width)))
            self.down_bias = nnx.Param(jnp.zeros((c.num_experts, d_model)))
        if c.shared:
            self.shared_gate_up = nnx.Param(init(rngs.params(), (d_model, 2, c.shared)))
            self.shared_down = nnx.Param(last(rngs.params(), (c.shared, d_model)))
        if c.shared_gate:
            self.shared_gate = nnx.Linear(d_model, 1, use_bias=False, kernel_init=init, rngs=rngs)
        if c.bias_rate is not None:
            self.bias = nnx.BatchStat(jnp.zeros(c.num_experts, jnp.float32))

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:  # (y_BSD, metrics)
        c, kernel_DE = self.config, self.router.kernel[...]
        logits_BSE = x_BSD.astype(jnp.float32) @ kernel_DE.astype(jnp.float32)
        if self.router.bias is not None:
            logits_BSE += self.router.bias[...].astype(jnp.float32)
        bias_E = None if c.bias_rate is None else self.bias[...]
        routing = route(
            logits_BSE, c.top_k, score=c.score, normalize=c.normalize, scale=c.scale, bias=bias_E,
            groups=c.groups, capacity_factor=c.capacity_factor,
        )  # fmt: skip
        tokens_BSD, used = x_BSD, routing
        if c.scale_inputs:
            tokens_BSD = x_BSD * routing.weights.astype(x_BSD.dtype)
            used = replace(routing, weights=jnp.ones_like(routing.weights))
        y_BSD = experts(
            tokens_BSD, used, self.gate_up[...], self.down[...], activation=self.activation,
            glu=ClampedSwiGLU(*c.clamp) if c.clamp else None,
            biases=(self.gate_up_bias[...], self.down_bias[...]) if c.biases else None,
        )  # fmt: skip
        if c.shared:
            gate_up_BS2F = jnp.einsum("bsd,dgf->bsgf", x_BSD, self.shared_gate_up[...])
            gate_BSF, up_BSF = (part_BS1F.squeeze(2) for part_BS1F in jnp.split(gate_up_BS2F, 2, axis=2))
            shared_BSD = (self.activation(gate_BSF) * up_BSF) @ self.shared_down[...]
            y_BSD += nnx.sigmoid(self.shared_gate(x_BSD)) * shared_BSD if c.shared_gate else shared_BSD
        if bias_E is not None and c.bias_rate:
            counts_E = all_gather(routing.counts[None]).sum(0)
            self.bias[...] = balanced_bias(bias_E, counts_E, c.bias_rate)
        return y_BSD, dict(zip(METRICS, (balance_loss(routing), routing.drop_rate), strict=True))
