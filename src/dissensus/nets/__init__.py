"""Ready-made networks. Each is a function that returns an ordinary ``nn.Module``."""

from dissensus.nets.cnn import cnn
from dissensus.nets.mlp import mlp

__all__ = ["cnn", "mlp"]
