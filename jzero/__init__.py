"""jzero: DeepSpeed for JAX."""
