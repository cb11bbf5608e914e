"""Plans of training steps: order, residency, recomputation and addresses, with a proof of how good.

Needs no GPU and, for checking a plan, no torch.
"""

from penstock.planner._api import plan
from penstock.planner._check import check
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound, Budget, Copy, Found, Placement, Transfer
from penstock.planner._refine import as_measured, refine
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import Simulation, Stall, simulate
from penstock.planner.bounds import lower_bound
from penstock.planner.exact import Peak, exact, min_peak, min_working_set
from penstock.planner.packing import Buffer, Packing, check_packing, pack
from penstock.planner.scratchpad import (
    NPU_POOLS,
    Residency,
    ScratchpadBuffer,
    ScratchpadGraph,
    ScratchpadOperator,
    ScratchpadPlan,
    check_scratchpad,
    scratchpad,
)

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
    "PlanRequest",
    "Residency",
    "ScratchpadBuffer",
    "ScratchpadGraph",
    "ScratchpadOperator",
    "ScratchpadPlan",
    "Simulation",
    "Stall",
    "Transfer",
    "as_measured",
    "check",
    "check_packing",
    "check_scratchpad",
    "exact",
    "lower_bound",
    "min_peak",
    "min_working_set",
    "pack",
    "plan",
    "refine",
    "scratchpad",
    "simulate",
]
