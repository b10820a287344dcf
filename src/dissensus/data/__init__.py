"""Data: batches on the device, data sets and their readers, augmentations, tables, features, corruptions."""

from dissensus.data import augment, corruptions, features, formats, sources, tables
from dissensus.data.batches import TensorBatches, batches, bootstrap_counts
from dissensus.data.catalogue import DatasetInfo
from dissensus.data.splits import Split, split
from dissensus.data.unlabelled import Batches

__all__ = [
    "Batches",
    "DatasetInfo",
    "Split",
    "TensorBatches",
    "augment",
    "batches",
    "bootstrap_counts",
    "corruptions",
    "features",
    "formats",
    "sources",
    "split",
    "tables",
]
