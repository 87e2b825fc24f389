"""The tutorial's data: scikit-learn's handwritten digits, as 28 x 28 images."""

from __future__ import annotations

import numpy as np

Digits = tuple[np.ndarray, np.ndarray]  # images [n, 28, 28] in 0..1, labels [n]


def load() -> tuple[Digits, Digits]:
    """Load (1,437 training digits, 360 test digits), with every class in proportion."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8) / 16, np.ones((3, 3)))  # every pixel three times: 24 x 24
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype(np.float32)
    labels = labels.astype(np.int32)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return (x, y), (x_test, y_test)


def accuracy(module, digits: Digits) -> float:
    """Compute the fraction of digits that the module classifies correctly."""
    images, labels = digits
    return float(np.mean(np.argmax(module(images), axis=-1) == labels))
