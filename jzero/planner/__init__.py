"""Plans a program for GPUs that this machine does not have: compiles it, reads its memory and its collectives."""

from jzero.planner.gpus import GPUS, gpu, gpu_devices
from jzero.planner.ledger import Collective, Ledger, collectives
from jzero.planner.memory import Memory, memory

__all__ = ["GPUS", "Collective", "Ledger", "Memory", "collectives", "gpu", "gpu_devices", "memory"]
