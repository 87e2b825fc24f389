"""`jzero train.py`: the same script on every GPU of every host, and all of it stopped when one process dies."""
