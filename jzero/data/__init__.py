"""Data: what it may be (`sources`), in what order it comes (`order`), and the loader that feeds it to a step.

`jzero.initialize(training_data=...)` makes the loader. `write_tokens` makes a file of tokens of text; `TokenFile` and
`Packed` make training data of that, in windows and in rows of whole documents.
"""

from jzero.data.loader import DataLoader, RepeatingLoader
from jzero.data.packing import Packed
from jzero.data.sources import Source
from jzero.data.tokens import BPE, Bytes, TokenFile, train_bpe, write_tokens

__all__ = [
    "BPE",
    "Bytes",
    "DataLoader",
    "Packed",
    "RepeatingLoader",
    "Source",
    "TokenFile",
    "train_bpe",
    "write_tokens",
]
