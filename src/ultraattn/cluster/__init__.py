"""Where: nodes, links, measured costs."""

from ultraattn.cluster.cluster import PRESETS, Cluster
from ultraattn.cluster.costs import Costs, Kernel
from ultraattn.cluster.tables import KernelTable, Link

__all__ = ["PRESETS", "Cluster", "Costs", "Kernel", "KernelTable", "Link"]
