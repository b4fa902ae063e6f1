"""Where: nodes, links, measured costs."""

from ultraattn.cluster.cluster import PRESETS, Cluster

__all__ = ["PRESETS", "Cluster"]
