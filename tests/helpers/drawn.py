"""Parameters from NumPy: the program in which a model draws its own takes seconds to compile."""

import jax
import numpy as np


def drawn(shapes, seed=0):
    """Numbers near 0, and near 1 the scales of norms."""
    rng = np.random.default_rng(seed)

    def values(path, x):
        mean = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return np.asarray(rng.normal(mean, 0.2, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(values, shapes)


def zeros(shapes):
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
