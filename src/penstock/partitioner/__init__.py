"""One training step over several devices, each within a budget.

Needs none of the devices: a partition is plain data.
"""

from penstock.partitioner._api import partition
from penstock.partitioner._check import check
from penstock.partitioner._partition import Collective, FrontierPoint, Partition

__all__ = ["Collective", "FrontierPoint", "Partition", "check", "partition"]
