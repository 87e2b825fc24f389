"""Training in fp8: the products with weights of the layer stack, forward and backward, in 8-bit floating point.

- `quantized`: a weight in fp8, and how an array is scaled into it.
- `product`: the product of an activation with such a weight, and its two backward products.

`jzero.tracing.fp8_weights` chooses the weights. ZeRO casts the local shard before it gathers (`jzero.layout.zero`),
and the interpreter of `jzero.spread` meets the products of a model that knows nothing of it.
"""
