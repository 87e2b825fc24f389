"""The DeepSpeed tutorial's SimpleModel: 784 -> 128 -> 10 with a ReLU.

Shape suffixes: B batch, I input width, O output width.
"""

import jax
import optax
from flax import nnx


class MLP(nnx.Module):
    """Two linear layers: images [B, 28, 28] or [B, 784] -> logits [B, 10]."""

    def __init__(self, d_in: int = 784, d_hidden: int = 128, d_out: int = 10, *, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(d_in, d_hidden, rngs=rngs)
        self.fc2 = nnx.Linear(d_hidden, d_out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # jzero passes parameters in the compute dtype and the batch in its own, which would widen the products.
        x_BI = x.reshape(len(x), -1).astype(self.fc1.kernel.dtype)
        return self.fc2(nnx.relu(self.fc1(x_BI)))


def cross_entropy(model: MLP, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Compute the mean cross-entropy of (images, labels)."""
    images, labels_B = batch
    logits_BO = model(images).astype("float32")  # half precision is too coarse for the sum of exponentials
    return optax.softmax_cross_entropy_with_integer_labels(logits_BO, labels_B).mean()
