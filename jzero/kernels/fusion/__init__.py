"""Elementwise functions between two products, SwiGLU for one, as kernels.

XLA computes such a function in several passes over memory in the backward pass: one for its result, which the gradient
of the second product's weight needs, and one for the gradients of its operands.
"""
