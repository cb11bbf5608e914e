"""Training as with a checkpoint around every layer: only what layers exchange is kept."""

from __future__ import annotations

import dataclasses

from penstock.planner._plan import Budget, Plan
from penstock.planner._request import PlanRequest
from penstock.planner.paging._plan_paging import plan_by_paging
from penstock.planner.paging._recompute import Recomputation


def plan_checkpointing(request: PlanRequest) -> Plan:
    """Plan a step in which nothing moves and every layer runs again for its backward pass.

    Example:
        >>> plan_checkpointing(request).peak_device_bytes  # doctest: +SKIP
        4096

    Args:
        request: The step; it may have all the memory that it needs.
    """
    recomputation = Recomputation(request.graph)
    dropped = {saved.value for saved in recomputation.saved() if saved.is_droppable}
    order, _ = recomputation.order_without(dropped)
    plan = plan_by_paging(dataclasses.replace(request, budget=Budget()), order=order)
    return dataclasses.replace(plan, method="checkpointing")
