"""Data: batches that live on the device, and small sets at hand."""

from dissensus.data.batches import Batches, TensorBatches, batches, split

__all__ = ["Batches", "TensorBatches", "batches", "split"]
