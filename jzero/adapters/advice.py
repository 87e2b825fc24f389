"""What to write when the layers of a module cannot be cut out of its loss."""

from __future__ import annotations


def nnx_methods(name: str, path: str, reason: str) -> str:
    """Show the methods that an NNX module needs instead of a loss function."""
    return f"""stack = {path!r}: the layers cannot be cut out of the loss of {name}: {reason}.
Or write what comes before and after the layers as methods, and pass from_flax({name}, stack={path!r}) no loss_fn:

    class {name}(nnx.Module):
        def prefix(self, batch):    # what the first layer gets
            return x
        def suffix(self, x, batch):    # the loss, from what the last layer returns; every layer runs x = layer(x)
            return loss"""


def linen_methods(name: str, layer: str, path: str, layers: int, reason: str) -> str:
    """Show the model that replaces a Linen module and its loss function."""
    return f"""stack = {path!r}: the layers cannot be cut out of the loss of {name}: {reason}.
Or write the model in three parts, with Linen modules for the ends and for a layer:

    class {name}Model:
        def init(self, rng):
            keys = jax.random.split(rng, {layers} + 1)
            stack = jax.vmap(lambda key: {layer}(...).init(key, x)["params"])(keys[1:])
            return {{"ends": Ends(...).init(keys[0], batch)["params"], "stack": stack}}
        def prefix(self, ends, batch, rng):    # what the first layer gets
            return Ends(...).apply({{"params": ends}}, batch, method="prefix")
        def block(self, layer, x, rng):    # one layer
            return {layer}(...).apply({{"params": layer}}, x)
        def suffix(self, ends, x, batch, rng):    # the loss, from what the last layer returns
            return Ends(...).apply({{"params": ends}}, x, batch, method="suffix")
        def loss(self, params, batch, rng):
            return jzero.model.stack_loss(self, params, batch, rng)"""
