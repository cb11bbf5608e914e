"""Plans of training steps: order, residency, recomputation and addresses, with a proof of how good.

Needs no GPU and, for checking a plan, no torch.
"""

from penstock.planner._api import plan
from penstock.planner._check import check
from penstock.planner._plan import Bound, Budget, Copy, Found, Placement, Plan, Transfer
from penstock.planner._simulate import Simulation, Stall, simulate
from penstock.planner.optima._brute_force import brute_force
from penstock.planner.optima._exact import exact
from penstock.planner.optima._peak import Peak, min_peak, min_working_set
from penstock.planner.packing._check import check_packing
from penstock.planner.packing._pack import pack
from penstock.planner.packing._types import Buffer, Packing
from penstock.planner.proofs._bounds import lower_bound
from penstock.planner.scratchpads._check import check_scratchpad
from penstock.planner.scratchpads._scratchpad import scratchpad
from penstock.planner.scratchpads._types import (
    NPU_POOLS,
    Residency,
    ScratchpadBuffer,
    ScratchpadGraph,
    ScratchpadOperator,
    ScratchpadPlan,
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
