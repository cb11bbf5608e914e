"""Tables that are read where they lie: rows are gathered from memory larger than the device's."""

from penstock.unified import _placement, optim  # noqa: F401 (which fills `_tensor.HANDLERS`)
from penstock.unified._hot_rows import HotRows
from penstock.unified._report import UnifiedReport
from penstock.unified._sampler import Neighborhood, NeighborSampler
from penstock.unified._sharing import share_through_multiprocessing
from penstock.unified._tensor import UnifiedTensor
from penstock.unified._unify import empty, unify

__all__ = [
    "HotRows",
    "NeighborSampler",
    "Neighborhood",
    "UnifiedReport",
    "UnifiedTensor",
    "empty",
    "optim",
    "unify",
]

share_through_multiprocessing()
