"""One training step over several devices, each within a budget.

Needs none of the devices: a partition is plain data. `apply` puts one into effect on the ranks of a
`DeviceMesh`.
"""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily
from penstock.partitioner._api import partition
from penstock.partitioner._check import check
from penstock.partitioner._joint_plan import JointPlan, SplitChoice, plan
from penstock.partitioner._partition import Collective, FrontierPoint, Partition

if TYPE_CHECKING:
    from penstock.partitioner._apply import PartitionedStep, apply

__all__ = [
    "Collective",
    "FrontierPoint",
    "JointPlan",
    "Partition",
    "PartitionedStep",
    "SplitChoice",
    "apply",
    "check",
    "partition",
    "plan",
]

__getattr__, __dir__ = load_lazily(__name__)
