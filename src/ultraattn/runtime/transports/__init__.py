"""Ways to move buffers between ranks."""

from ultraattn.runtime.transports.base import Handle, Transport
from ultraattn.runtime.transports.gloo import GlooTransport

__all__ = ["GlooTransport", "Handle", "Transport"]
