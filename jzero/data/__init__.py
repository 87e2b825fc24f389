"""Training data: its kinds (`sources`), its order (`order`), and the loader that feeds it to a train step (`loader`).

`jzero.initialize(training_data=...)` makes the loader. `write_tokens` encodes text into a file of tokens; `TokenFile`
(windows) and `Packed` (rows of whole documents) turn that file into training data. `Chat` makes rows of conversations,
`Pairs` of preferences.
"""

from jzero.data.chat import Chat, Pairs
from jzero.data.loader import DataLoader, RepeatingLoader, steps_per_epoch
from jzero.data.mixture import Mixture
from jzero.data.packing import Packed
from jzero.data.sources import Source
from jzero.data.tokens import TokenFile, Tokenizer, write_tokens

__all__ = [
    "Chat",
    "DataLoader",
    "Mixture",
    "Packed",
    "Pairs",
    "RepeatingLoader",
    "Source",
    "TokenFile",
    "Tokenizer",
    "steps_per_epoch",
    "write_tokens",
]
