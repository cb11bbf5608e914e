"""Paging: plans that evict when an operator needs room, in the order of the program."""

from penstock.planner.paging._accesses import peak_of_program_order
from penstock.planner.paging._checkpointing import plan_checkpointing
from penstock.planner.paging._plan_paging import (
    PAGING_POLICIES,
    PagingPolicy,
    estimate_paging_seconds,
    plan_by_paging,
)

__all__ = [
    "PAGING_POLICIES",
    "PagingPolicy",
    "estimate_paging_seconds",
    "peak_of_program_order",
    "plan_by_paging",
    "plan_checkpointing",
]
