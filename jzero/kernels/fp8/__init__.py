"""Training in fp8: the matmuls with weights of the layer stack, forward and backward, in 8-bit floating point.

- `quantized`: a weight in fp8, and how an array is scaled into it.
- `matmul`: the matmul of an activation with such a weight, its two backward matmuls, and the casts.

`jzero.tracing.fp8_weights` chooses the weights. ZeRO casts the local shard before it gathers (`jzero.layout.zero`),
and the interpreter of `jzero.spread` meets the matmuls of a model that knows nothing of it.
"""
