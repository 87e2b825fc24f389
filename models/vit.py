"""A vision transformer that classifies images (Dosovitskiy et al., arXiv:2010.11929).

Shape suffixes: B batch, S patches and the class token, made even, D model width, P pixels of a patch, O classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jzero.errors import ConfigError
from jzero.loss import Mean

from .attention import Carry, linear_of
from .decoder_config import ViTConfig
from .norms import make_norm
from .transformer import Transformer, stacked


class ViT(Transformer):
    """The model as prefix, stack and suffix.

    A batch is {"images": [B, height, width, channels], "labels": [B] int32}; images are floats, as transformers' image
    processor scales them, but with the channels last. Negative labels are ignored.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        self.patches = linear_of(c, c.num_channels * c.patch_size**2, c.d_model, "patches", rngs, bias=True)
        self.class_token = nnx.Param(jnp.zeros((1, 1, c.d_model)))
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, c.num_patches + 1, c.d_model)))
        self.stack = stacked([c], c.num_layers, rngs)
        self.norm = make_norm(c, rngs)
        self.head = linear_of(c, c.d_model, c.num_classes, "head", rngs, bias=True)

    def prefix(self, batch: dict[str, jax.Array]) -> Carry:
        c, images = self.config, batch["images"]
        B, height, width, channels = images.shape
        if (height, width, channels) != (c.image_size, c.image_size, c.num_channels):
            raise ConfigError(
                f"images have the shape {images.shape[1:]}, but the model's are "
                f"{(c.image_size, c.image_size, c.num_channels)}, with the channels last"
            )
        n, p = c.image_size // c.patch_size, c.patch_size
        patches_BSP = images.reshape(B, n, p, n, p, channels).transpose(0, 1, 3, 5, 2, 4).reshape(B, n * n, -1)
        # jzero passes parameters in the compute dtype and the batch in its own, which would widen the products.
        patches_BSP = patches_BSP.astype(self.patches.kernel.dtype)
        # Positions are part of the product, as one more word of each row. XLA would compute the gradient of a sum with
        # a table in a layout with the batch last, which then the whole stack has, with transposes around each product:
        # 9 of 80 ms of a step of 256 images on an H200. Rows of a multiple of 16 bytes are fast.
        S = n * n + 1
        places_SP = jnp.eye(S + S % 2, S + -S % 8, dtype=patches_BSP.dtype)
        assert self.patches.bias is not None  # a layer of Flax may have none
        kernel_PD, bias_D, positions_SD = self.patches.kernel[...], self.patches.bias[...], self.positions[0]
        table_SD = positions_SD + jnp.concatenate([self.class_token[0], jnp.broadcast_to(bias_D, (n * n, c.d_model))])
        inputs = jnp.pad(patches_BSP, ((0, 0), (1, S % 2), (0, 0))), jnp.broadcast_to(places_SP, (B, *places_SP.shape))
        x_BSP = jnp.concatenate(inputs, 2)
        return Carry(x_BSP @ jnp.concatenate([kernel_PD, jnp.pad(table_SD, ((0, -S % 8), (0, 0)))]))

    def suffix(self, x: Carry, batch: dict[str, jax.Array]) -> Mean:
        labels_B = batch["labels"]
        losses_B = optax.softmax_cross_entropy_with_integer_labels(self.outputs(x), jnp.maximum(labels_B, 0))
        return Mean(jnp.sum(losses_B, where=labels_B >= 0), (labels_B >= 0).sum())

    def outputs(self, x: Carry, batch: Any = None) -> jax.Array:
        """Compute the logits [B, O] in float32 from the stack's output."""
        return self.head(self.norm(x.x_BSD[:, 0])).astype(jnp.float32)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute logits [B, O] in float32, without remat or parallelism."""
        return self.outputs(Carry(self.through(self.prefix({"images": images}))))

    def weights_layout(self) -> dict[str, Any]:
        c, table, name = self.config, super().weights_layout(), "vit.embeddings.patch_embeddings.projection.weight"
        assert table is not None  # its class has all that a ViTConfig can have
        kept = table["download"]["config"] if c.download else {}
        for key in ("id2label", "label2id") if len(kept.get("id2label") or ()) != c.num_classes else ():
            kept.pop(key, None)  # they are of other classes
        kernel = [c.d_model, c.num_channels, c.patch_size, c.patch_size]  # of torch's convolution
        row = {"name": name, "leaf": "ends/patches/kernel", "transposed": True, "reshape": kernel}
        return {**table, "tensors": [*table["tensors"], row]}
