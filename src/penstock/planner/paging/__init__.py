"""Paging: plans that evict when an operator needs memory, in the order of the program."""

from penstock.planner.paging._accesses import peak_of_program_order
from penstock.planner.paging._checkpointing import Recomputation, plan_checkpointing
from penstock.planner.paging._plan_paging import (
    PAGING_POLICIES,
    PagingPolicy,
    count_arena_bytes,
    estimate_paging_seconds,
    find_swap_links,
    find_swap_rates,
    plan_by_paging,
    require_tiers,
)

__all__ = [
    "PAGING_POLICIES",
    "PagingPolicy",
    "Recomputation",
    "count_arena_bytes",
    "estimate_paging_seconds",
    "find_swap_links",
    "find_swap_rates",
    "peak_of_program_order",
    "plan_by_paging",
    "plan_checkpointing",
    "require_tiers",
]
