"""A linear model for tests of what a run writes."""

import jax.numpy as jnp


class Regression:
    """The loss also gives its largest error."""

    has_aux = True

    def init(self, rng):
        return {"w": jnp.zeros((3,))}

    def loss(self, params, batch, rng):
        errors = batch["x"] @ params["w"] - batch["y"]
        return jnp.mean(errors**2), {"worst": jnp.max(jnp.abs(errors))}


CONFIG = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
