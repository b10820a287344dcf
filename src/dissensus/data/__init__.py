"""Data: batches that live on the device, sources and their readers, augmentations, tables and corruptions."""

from dissensus.data import augment, corruptions, formats, sources, tables
from dissensus.data.batches import Batches, TensorBatches, batches, split

__all__ = [
    "Batches",
    "TensorBatches",
    "augment",
    "batches",
    "corruptions",
    "formats",
    "sources",
    "split",
    "tables",
]
