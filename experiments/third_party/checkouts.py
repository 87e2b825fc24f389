"""Models that are not packaged, from checkouts of their repositories: see the README beside this."""

from __future__ import annotations

import numpy as np

from .cases import ROWS, cross_entropy, images, third_party, tokens

RNG = np.random.default_rng(2)
DIGITS = {"images": RNG.uniform(size=(ROWS, 784)).astype(np.float32)}
ONE_HOT = {
    "questions": np.eye(8, dtype=np.float32)[RNG.integers(0, 8, (ROWS, 6))],
    "answers": np.eye(8, dtype=np.float32)[RNG.integers(0, 8, (ROWS, 5))],
}
FRAMES = {
    "frames": RNG.integers(0, 256, (ROWS, 84, 84, 4)).astype(np.uint8),
    "actions": RNG.integers(0, 4, ROWS).astype(np.int32),
    "returns": RNG.uniform(size=ROWS).astype(np.float32),
}


@third_party("google/flax", images(32), module="imagenet.models")
def flax_imagenet_resnet():
    from imagenet import models

    net = models._ResNet1(num_classes=10, num_filters=8)

    def loss(module, batch, rng):
        return cross_entropy(module(batch["images"], train=rng is not None), batch["labels"])

    return net, loss


@third_party("google/flax", tokens(8, 64), module="lm1b.models")
def flax_lm1b():
    from lm1b import models

    net = models.TransformerLM(
        models.TransformerConfig(
            vocab_size=64, output_vocab_size=64, emb_dim=32, num_heads=2, num_layers=2, qkv_dim=32, mlp_dim=64,
            max_len=16, deterministic=True,
        )
    )  # fmt: skip

    def loss(module, batch):
        return cross_entropy(module(batch["labels"]), batch["labels"])

    return net, loss


@third_party("google/flax", DIGITS, module="vae.models")
def flax_vae():
    import jax
    import jax.numpy as jnp
    import optax
    from vae import models

    def loss(module, batch):
        images = batch["images"]
        noise_key = jax.random.key(0)
        mean, logvar = module.encoder(images)
        z = mean + jnp.exp(logvar / 2) * jax.random.normal(noise_key, (1, 20))
        likelihood = optax.sigmoid_binary_cross_entropy(module.decoder(z), images).sum(-1).mean()
        divergence = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1).mean()
        return (likelihood + divergence) / 784

    return models.VAE(latents=20), loss


@third_party("google/flax", ONE_HOT, module="seq2seq.models")
def flax_seq2seq():
    import optax
    from seq2seq import models

    net = models.Seq2seq(teacher_force=True, hidden_size=16, vocab_size=8)

    def loss(module, batch):
        logits, _ = module(batch["questions"], batch["answers"])
        return optax.softmax_cross_entropy(logits, batch["answers"][:, 1:]).mean()

    return net, loss


@third_party("google/flax", FRAMES, module="ppo.models")
def flax_ppo():
    import jax.numpy as jnp
    from ppo import models

    def loss(module, batch):
        log_probabilities, values = module(batch["frames"])
        chosen = jnp.take_along_axis(log_probabilities, batch["actions"][:, None], axis=1)[:, 0]
        return ((values[:, 0] - batch["returns"]) ** 2).mean() - (chosen * batch["returns"]).mean()

    return models.ActorCritic(num_outputs=4), loss


@third_party("google/flax", tokens(8, 64), module="transformer", stack="layers")
def flax_gemma():
    import jax.numpy as jnp
    import modules
    import transformer
    from transformer_cfg import TransformerConfig

    config = TransformerConfig(
        num_layers=2, num_embed=64, embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16, num_kv_heads=1,
        final_logit_softcap=30.0, use_post_attn_norm=True, use_post_ffw_norm=True, use_qk_norm=True,
        attention_types=(modules.AttentionType.GLOBAL,) * 2,
    )  # fmt: skip

    def loss(module, batch):
        rows, length = batch["inputs"].shape
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
        logits, _ = module(batch["inputs"], positions, None, mask)
        return cross_entropy(logits, batch["labels"])

    return lambda rngs: transformer.Transformer(config, rngs=rngs), loss


@third_party("jax-ml/bonsai", images(32), module="bonsai")
def bonsai_resnet():
    from bonsai.models.resnet.modeling import ModelConfig, ResNet
    from flax import nnx

    net = ResNet(ModelConfig([1, 1, 1, 1], num_classes=10), rngs=nnx.Rngs(0))  # built, or it stays in evaluation

    def loss(module, batch):
        return cross_entropy(module(batch["images"]), batch["labels"])

    return net, loss


@third_party("jax-ml/bonsai", images(16), module="bonsai", stack="layers")
def bonsai_vit():
    from bonsai.models.vit.modeling import ModelConfig, ViTClassificationModel

    config = ModelConfig(
        image_size=(16, 16), patch_size=(8, 8), num_channels=3, hidden_dim=32, attn_dropout_prob=0.0,
        dropout_prob=0.0, num_heads=2, mlp_dim=64, eps=1e-12, num_layers=2, num_labels=10,
    )  # fmt: skip

    def loss(module, batch):
        return cross_entropy(module(batch["images"], rngs=None), batch["labels"])

    return lambda rngs: ViTClassificationModel(config, rngs=rngs), loss


@third_party("jax-ml/bonsai", tokens(8, 64), module="bonsai")
def bonsai_qwen3():
    import jax.numpy as jnp
    from bonsai.models.qwen3.modeling import ModelConfig, Qwen3, init_cache

    config = ModelConfig(
        num_layers=2, vocab_size=64, emb_dim=32, mlp_dim=64, num_heads=2, head_dim=16, num_kv_heads=1,
        rope_theta=10_000, rope_scaling_factor=8.0, local_rope_theta=1e4, norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip

    def loss(module, batch):
        rows, length = batch["inputs"].shape
        cache = init_cache(config, rows, length, 0, jnp.float32)
        logits = module(batch["inputs"], cache=cache, segment_ids=jnp.ones((rows, length), jnp.int32))
        return cross_entropy(logits, batch["labels"])

    return lambda rngs: Qwen3(config, rngs=rngs), loss


@third_party("jax-ml/bonsai", images(16), module="bonsai")
def bonsai_vae():
    from bonsai.models.vae.modeling import VAE, ModelConfig

    config = ModelConfig(block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4)

    def loss(module, batch):
        return ((module(batch["images"]) - batch["images"]) ** 2).mean()

    return lambda rngs: VAE(config, rngs=rngs), loss
