"""Plans a program for GPUs that this machine does not have: compiles it, reads its memory and its collectives."""

from jzero.planner.bytes_by_stage import bytes_by_stage
from jzero.planner.collectives import Collective, Collectives, collectives
from jzero.planner.gpus import GPUS, gpu, gpu_devices
from jzero.planner.memory import Memory, memory
from jzero.planner.products import Product, Products, products
from jzero.planner.state_bytes import StateBytes, state_bytes

__all__ = [
    "GPUS", "Collective", "Collectives", "Memory", "Product", "Products", "StateBytes", "bytes_by_stage", "collectives",
    "gpu", "gpu_devices", "memory", "products", "state_bytes",
]  # fmt: skip
