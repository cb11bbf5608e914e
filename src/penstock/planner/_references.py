"""Plans without a search as finalists: paging on demand, by Belady, LRU and LRU with prefetch.

They take the program's own order and compute nothing twice, so they are allowed whatever is frozen.
"""

from __future__ import annotations

import dataclasses
import logging
import math

from penstock.errors import InfeasibleError
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound
from penstock.planner._request import PlanRequest
from penstock.planner.paging import (
    PAGING_POLICIES,
    PagingPolicy,
    estimate_paging_seconds,
    plan_by_paging,
)
from penstock.planner.search import interference_per_byte

_logger = logging.getLogger(__name__)

# A plan on demand that takes this many times as long in bytes alone gets no addresses; of short
# steps all do.
_HOPELESS, _FEW_OPERATORS = 1.25, 500


def fastest_with_references(request: PlanRequest, found: Plan | None, bound: Bound) -> Plan | None:
    """Return a plan, or one on demand for the same budget and machine that is faster.

    Example:
        >>> fastest_with_references(request, plan, bound)  # doctest: +SKIP

    Args:
        request: The step and what it is planned for. After its deadline nothing more is tried, if
            there is a plan.
        found: The plan that a search found; None if it found none.
        bound: For the plan that is returned, if it is another one.

    Returns:
        `found`, or what is faster; `notes["finalist"]` then says which. None if there is none.
    """
    best = found
    for policy in PAGING_POLICIES:
        if best is not None and not request.seconds_left():
            break
        unlimited = dataclasses.replace(request, deadline=math.inf)
        try:
            other = _plan_if_worth_it(unlimited if best is None else request, policy, best)
        except InfeasibleError:
            continue
        if other is None or (best is not None and _total_seconds(other) >= _total_seconds(best)):
            continue
        _logger.info("paging on demand (%s) is faster than what the search found", policy)
        best = other
    if best is None or best is found:
        return found
    notes = {**(found.notes if found is not None else {}), "finalist": best.method}
    return dataclasses.replace(best, bound=bound, method="auto", notes=notes)


def _plan_if_worth_it(request: PlanRequest, policy: PagingPolicy, best: Plan | None) -> Plan | None:
    """An policy's plan; None if it cannot be the fastest."""
    if best is not None and len(request.graph.operators) > _FEW_OPERATORS:
        seconds = estimate_paging_seconds(request, policy=policy)
        if seconds > best.step_seconds * _HOPELESS:
            return None
    return plan_by_paging(dataclasses.replace(request, progress=None), policy=policy)


def _total_seconds(plan: Plan) -> float:
    """Time of a step with what its copies cost computing, which is what the search minimises."""
    moved = plan.bytes_moved.items()
    return plan.step_seconds + sum(
        num_bytes * interference_per_byte(link, plan.machine) for link, num_bytes in moved
    )
