"""Plans of training steps: order, residency, recomputation and addresses, with a proof of how good.

Needs no GPU and, for checking a plan, no torch.
"""

from penstock.planner._check import check
from penstock.planner._plan import Bound, Budget, Copy, Placement, Plan, Transfer
from penstock.planner._simulate import Simulation, Stall, simulate

__all__ = [
    "Bound",
    "Budget",
    "Copy",
    "Placement",
    "Plan",
    "Simulation",
    "Stall",
    "Transfer",
    "check",
    "simulate",
]
