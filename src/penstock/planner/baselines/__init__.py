"""The planners of others, built from their papers, to be measured against."""

from penstock.planner.baselines._checkpointing import plan_checkpointing
from penstock.planner.baselines._genetic import plan_genetic
from penstock.planner.baselines._on_demand import (
    ON_DEMAND,
    OnDemand,
    plan_on_demand,
    seconds_by_bytes,
)
from penstock.planner.baselines._order import peak_of_program_order

__all__ = [
    "ON_DEMAND",
    "OnDemand",
    "peak_of_program_order",
    "plan_checkpointing",
    "plan_genetic",
    "plan_on_demand",
    "seconds_by_bytes",
]
