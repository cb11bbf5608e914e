"""A batch sampler that fills a cap of bytes, and a model of the bytes of a batch."""

from penstock.batching.sampler._byte_model import ByteModel as ByteModel
from penstock.batching.sampler._byte_model import Padded as Padded
from penstock.batching.sampler._byte_model import probe_batches as probe_batches
from penstock.batching.sampler._packing import SampleCosts as SampleCosts
from penstock.batching.sampler._sampler import BalancedBatchSampler as BalancedBatchSampler
