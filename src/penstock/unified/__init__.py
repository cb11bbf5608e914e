"""Tables that are read where they lie: rows are gathered from memory larger than the device's."""

from penstock.unified import optim
from penstock.unified._table import UnifiedReport
from penstock.unified._tensor import UnifiedTensor, share_through_multiprocessing
from penstock.unified._unify import empty, unify
from penstock.unified.device.hot_rows import HotRows
from penstock.unified.overrides import rules  # noqa: F401 (which registers the overrides)

__all__ = [
    "HotRows",
    "UnifiedReport",
    "UnifiedTensor",
    "empty",
    "optim",
    "unify",
]

share_through_multiprocessing()
