"""Mixtures of experts.

routing          the experts of each token, and the balance of their loads
mixture          experts: a mixture as one operation of a model
local_experts    what one device computes
rows             tokens as rows of the experts' products, and back
grouped_product  the product of each group of rows with its own matrix
exchange         rows to the devices that have their experts, and back
on_group         how an operation runs on the devices that act as one
"""

from jzero.moe.grouped_product import grouped_dot
from jzero.moe.mixture import experts
from jzero.moe.routing import Routing, balance_loss, balanced_bias, route

__all__ = ["Routing", "balance_loss", "balanced_bias", "experts", "grouped_dot", "route"]
