"""Models in plain Flax, free of mesh and ZeRO code."""
