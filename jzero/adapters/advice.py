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
