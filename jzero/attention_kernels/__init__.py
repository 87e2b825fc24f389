"""Attention.

attention  `jzero.attention`: attention by the kernel that suits the program's devices
choice     which kernel that is, and why; FlashAttention-3 for Hopper, of the package flash-attn3-jax
"""
