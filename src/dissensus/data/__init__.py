"""Data: batches that live on the device, sources and their readers, augmentations, tables, features, corruptions."""

from dissensus.data import augment, corruptions, features, formats, sources, tables
from dissensus.data.batches import TensorBatches, batches, split
from dissensus.data.unlabelled import Batches

__all__ = [
    "Batches",
    "TensorBatches",
    "augment",
    "batches",
    "corruptions",
    "features",
    "formats",
    "sources",
    "split",
    "tables",
]
