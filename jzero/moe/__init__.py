"""Mixtures of experts.

routing       the experts of each token, and the balance of their loads
expert_layer  a mixture as one operation of a model, on one device and on a group that acts as one
rows          tokens as rows of the experts' products, to the devices that have their experts, and back
"""

from jzero.kernels.grouped_product import grouped_dot
from jzero.moe.expert_layer import experts
from jzero.moe.routing import Routing, balance_loss, balanced_bias, route

__all__ = ["Routing", "balance_loss", "balanced_bias", "experts", "grouped_dot", "route"]
