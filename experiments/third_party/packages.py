"""Models from packages: the body of each function is what a user writes."""

from __future__ import annotations

import numpy as np

from .cases import ROWS, cross_entropy, images, third_party, tokens

RNG = np.random.default_rng(1)
GRAPHS = {
    "nodes": RNG.normal(size=(ROWS, 6, 4)).astype(np.float32),
    "edges": RNG.integers(0, 6, (ROWS, 2, 10)).astype(np.int32),
    "labels": RNG.integers(0, 3, ROWS).astype(np.int32),
}
ATOMS = {
    "positions": RNG.normal(size=(ROWS, 5, 3)).astype(np.float32),
    "energy": RNG.normal(size=ROWS).astype(np.float32),
}
SERIES = {
    "x": RNG.normal(size=(ROWS, 8, 3)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, 4, 1)).astype(np.float32),
}
POINTS = {"x": RNG.normal(size=(ROWS, 3)).astype(np.float32), "y": RNG.normal(size=(ROWS, 1)).astype(np.float32)}


@third_party("flaxmodels", images(64))
def flaxmodels_resnet():
    import flaxmodels

    net = flaxmodels.ResNet18(output="logits", pretrained=None, normalize=False, num_classes=10)

    def loss(module, batch, rng):
        return cross_entropy(module(batch["images"], train=rng is not None), batch["labels"])

    return net, loss


@third_party("mamba2-jax", tokens(16, 64), stack="backbone.layers")
def mamba2():
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(vocab_size=64, hidden_size=32, state_size=8, head_dim=16, chunk_size=8, num_hidden_layers=2)

    def build(rngs):
        net = Mamba2ForCausalLM(config, rngs=rngs)
        for layer in net.backbone.layers:
            layer.mixer.layer_idx = 0  # nothing reads it, and the layers of a stack must be alike
        return net

    def loss(module, batch):
        return cross_entropy(module(batch["inputs"])["logits"], batch["labels"])

    return build, loss


@third_party("mamba2-jax", SERIES)
def mamba2_forecaster():
    from mamba2_jax import Mamba2Forecaster

    def loss(module, batch):
        return ((module(batch["x"]) - batch["y"]) ** 2).mean()

    return lambda rngs: Mamba2Forecaster(
        3, d_model=16, n_layers=2, forecast_horizon=4, d_state=8, headdim=8, chunk_size=4, rngs=rngs
    ), loss


@third_party("jraphx", GRAPHS)
def jraphx_gcn():
    import jax
    from jraphx.nn.models import GCN

    def loss(module, batch):
        nodes = jax.vmap(lambda x, edges: module(x, edges))(batch["nodes"], batch["edges"])
        return cross_entropy(nodes.mean(axis=1), batch["labels"])

    return lambda rngs: GCN(4, 16, 2, out_features=3, norm="layer_norm", rngs=rngs), loss


@third_party("nano-moe-jax", tokens(8, 64), module="nano_moe")
def nano_moe():
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    net = NanoMoE(
        NanoMoEConfig(vocab_size=64, n_layers=2, n_heads=2, d_model=32, d_ff=64, block_size=8, dropout_rate=0.0)
    )

    def loss(module, batch):
        logits, _ = module(batch["inputs"])
        return cross_entropy(logits, batch["labels"])

    return net, loss


@third_party("e3x", ATOMS)
def e3x_energy():
    import e3x
    import jax.numpy as jnp
    from flax import linen

    class Energy(linen.Module):
        @linen.compact
        def __call__(self, positions):
            vectors = positions[:, :, None] - positions[:, None, :]
            x = e3x.nn.basis(
                vectors, max_degree=2, num=8, radial_fn=e3x.nn.reciprocal_bernstein,
                cutoff_fn=lambda r: e3x.nn.smooth_cutoff(r, cutoff=5.0),
            )  # fmt: skip
            x = e3x.nn.silu(e3x.nn.Dense(8)(x.sum(axis=2)))
            x = e3x.nn.TensorDense(8, max_degree=2)(x)
            return linen.Dense(1)(x[..., 0, 0, :]).sum(axis=(1, 2))

    def loss(module, batch):
        return jnp.mean((module(batch["positions"]) - batch["energy"]) ** 2)

    return Energy(), loss


@third_party("jaxkan", POINTS)
def jaxkan_kan():
    from jaxkan.models.KAN import KAN

    def loss(module, batch):
        return ((module(batch["x"]) - batch["y"]) ** 2).mean()

    return KAN([3, 8, 1], "base", {"k": 3, "G": 3}, 0), loss  # built: its grids are arrays outside of NNX's sight


@third_party("flaxdiff", images(16) | {"noise": RNG.normal(size=(ROWS, 16, 16, 3)).astype(np.float32)})
def flaxdiff_unet():
    import jax.numpy as jnp
    from flaxdiff.models.simple_unet import Unet

    attention = {"heads": 2, "dtype": jnp.float32, "flash_attention": False, "use_projection": False}
    net = Unet(
        emb_features=16, feature_depths=(8, 16), attention_configs=(None, attention), num_res_blocks=1, norm_groups=4
    )

    def loss(module, batch):
        noise, text = batch["noise"], jnp.zeros((len(batch["noise"]), 4, 16))
        predicted = module(batch["images"] + noise, jnp.full(len(noise), 0.5), text)
        return jnp.mean((predicted - noise) ** 2)

    return net, loss


@third_party("recurrentgemma", tokens(8, 64))
def recurrentgemma_griffin():
    import jax.numpy as jnp
    from recurrentgemma import jax as recurrentgemma
    from recurrentgemma.common import GriffinConfig, TemporalBlockType

    config = GriffinConfig(
        vocab_size=64, width=32, mlp_expanded_width=64, num_heads=2, lru_width=32,
        block_types=(TemporalBlockType.RECURRENT, TemporalBlockType.ATTENTION), embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8, logits_soft_cap=30.0,
    )  # fmt: skip
    net = recurrentgemma.Griffin(config)

    def loss(module, batch):
        positions = jnp.broadcast_to(jnp.arange(8), batch["inputs"].shape)
        return cross_entropy(module(batch["inputs"], positions, return_cache=False)[0], batch["labels"])

    return net, loss


@third_party("google-tunix", tokens(8, 64), module="tunix", stack="layers")
def tunix_qwen3():
    import jax.numpy as jnp
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = ModelConfig(
        num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16, num_kv_heads=1,
        rope_theta=10_000, norm_eps=1e-6,
    )  # fmt: skip

    def loss(module, batch):
        rows, length = batch["inputs"].shape
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
        logits, _ = module(batch["inputs"], positions, None, mask)
        return cross_entropy(logits, batch["labels"])

    return lambda rngs: Qwen3(config, rngs=rngs), loss


@third_party("qwix", tokens(16, 64), trainable_parameters=["lora"])
def qwix_lora():
    import numpy as np
    import qwix
    from flax import nnx
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(vocab_size=64, hidden_size=32, state_size=8, head_dim=16, chunk_size=8, num_hidden_layers=2)
    base = Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    rule = qwix.LoraProvider(module_path=".*(in_proj|out_proj)", rank=4, alpha=8.0)
    net = qwix.apply_lora_to_model(base, rule, np.ones((1, 16), np.int32), rngs=nnx.Rngs(1))

    def loss(module, batch):
        return cross_entropy(module(batch["inputs"])["logits"], batch["labels"])

    return net, loss


@third_party("equinox", images(8, channels=1))
def equinox_mlp():
    import equinox as eqx
    import jax

    def make(key):
        return eqx.nn.MLP(64, 10, 32, 2, key=key)

    _, static = eqx.partition(make(jax.random.key(0)), eqx.is_array)

    class Model:
        def init(self, rng):
            return eqx.filter(make(rng), eqx.is_array)

        def loss(self, params, batch, rng):
            logits = jax.vmap(eqx.combine(params, static))(batch["images"].reshape(-1, 64))
            return cross_entropy(logits, batch["labels"])

    return Model()


@third_party("dm-haiku", tokens(8, 64), module="haiku")
def haiku_lstm():
    import haiku as hk
    import jax

    def forward(tokens):
        x, core = hk.Embed(64, 16)(tokens), hk.LSTM(32)
        hidden, _ = hk.dynamic_unroll(core, x, core.initial_state(len(tokens)), time_major=False)
        return hk.Linear(64)(hidden)

    net = hk.without_apply_rng(hk.transform(forward))

    class Model:
        def init(self, rng):
            return net.init(rng, jax.numpy.zeros((1, 8), int))

        def loss(self, params, batch, rng):
            return cross_entropy(net.apply(params, batch["inputs"]), batch["labels"])

    return Model()
