"""Checkpoints: written while training goes on, there whole or not at all, read by any layout.

    jzero.checkpoint.save(state, "runs/first")
    state = jzero.checkpoint.restore("runs/first", step.state_shardings)

What is stored are global arrays (a layer stack as a stack), in Orbax's format, so the mesh, the stage, the number of
processes and the pipeline's schedule may be others when it is read. A checksum of every leaf, the same for every
layout, is stored too and compared after reading.
"""

from jzero.checkpoint.reader import Checkpoint, restore
from jzero.checkpoint.writer import Save, forgive, save, wait

__all__ = ["Checkpoint", "Save", "forgive", "restore", "save", "wait"]
