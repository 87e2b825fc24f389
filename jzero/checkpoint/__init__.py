"""Checkpoints: written in the background, complete or absent, readable by any layout.

    jzero.checkpoint.save(state, "runs/first")
    state = jzero.checkpoint.restore("runs/first", step.state_shardings)

A checkpoint contains global arrays (a layer stack as one stack) in Orbax's format. The mesh, the ZeRO stage, the number
of processes and the pipeline schedule may therefore differ when it is read. It also contains a checksum of every leaf
that does not depend on the layout; reading compares it.
"""

from jzero.checkpoint.async_save import Save, forgive, last_save, save, wait
from jzero.checkpoint.reader import Checkpoint
from jzero.checkpoint.restoring import restore

__all__ = ["Checkpoint", "Save", "forgive", "last_save", "restore", "save", "wait"]
