"""Models in plain Flax, without a word about meshes or ZeRO."""
