"""Plans of programs that run from fixed scratchpads: order, residency, offsets and spills."""

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
