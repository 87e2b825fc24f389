"""Models in plain Flax; nothing here knows of meshes or ZeRO."""
