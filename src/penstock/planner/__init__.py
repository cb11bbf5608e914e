"""Plans of training steps: order, residency, recomputation and addresses, with a proof of how good.

Needs no GPU and, for checking a plan, no torch.
"""

from penstock.planner._api import plan
from penstock.planner._bounds import lower_bound
from penstock.planner._brute_force import brute_force
from penstock.planner._check import check
from penstock.planner._exact import Peak, exact, min_peak, min_working_set
from penstock.planner._pack import pack
from penstock.planner._pack_check import check_packing
from penstock.planner._pack_types import Buffer, Packing
from penstock.planner._plan import Bound, Budget, Copy, Found, Placement, Plan, Transfer
from penstock.planner._scratchpad import scratchpad
from penstock.planner._scratchpad_check import check_scratchpad
from penstock.planner._scratchpad_types import (
    NPU_POOLS,
    Residency,
    ScratchpadBuffer,
    ScratchpadGraph,
    ScratchpadOperator,
    ScratchpadPlan,
)
from penstock.planner._simulate import Simulation, Stall, simulate

__all__ = [
    "NPU_POOLS",
    "Bound",
    "Budget",
    "Buffer",
    "Copy",
    "Found",
    "Packing",
    "Peak",
    "Placement",
    "Plan",
    "Residency",
    "ScratchpadBuffer",
    "ScratchpadGraph",
    "ScratchpadOperator",
    "ScratchpadPlan",
    "Simulation",
    "Stall",
    "Transfer",
    "brute_force",
    "check",
    "check_packing",
    "check_scratchpad",
    "exact",
    "lower_bound",
    "min_peak",
    "min_working_set",
    "pack",
    "plan",
    "scratchpad",
    "simulate",
]
