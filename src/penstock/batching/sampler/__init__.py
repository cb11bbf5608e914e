"""A batch sampler that fills a cap of bytes, and a model of the bytes of a batch."""

from penstock.batching.sampler._byte_model import ByteModel, Padded, probe_batches
from penstock.batching.sampler._costs import SampleCosts
from penstock.batching.sampler._sampler import BalancedBatchSampler

__all__ = ["BalancedBatchSampler", "ByteModel", "Padded", "SampleCosts", "probe_batches"]
