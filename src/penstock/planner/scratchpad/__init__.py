"""What of a program stays in fixed scratchpads, and where."""

from penstock.planner.scratchpad._check import check_scratchpad
from penstock.planner.scratchpad._plan_scratchpad import scratchpad
from penstock.planner.scratchpad._types import (
    NPU_POOLS,
    Residency,
    ScratchpadBuffer,
    ScratchpadGraph,
    ScratchpadOperator,
    ScratchpadPlan,
)

__all__ = [
    "NPU_POOLS",
    "Residency",
    "ScratchpadBuffer",
    "ScratchpadGraph",
    "ScratchpadOperator",
    "ScratchpadPlan",
    "check_scratchpad",
    "scratchpad",
]
