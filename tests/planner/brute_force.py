"""Every plan of a tiny graph: what the planners are measured against."""

import dataclasses

from penstock.errors import InfeasibleError
from penstock.planner import Plan, PlanRequest, lower_bound
from penstock.planner.exact import Limit, fastest_of_order, orders_of

_SAME = 1 + 1e-6  # a plan this close to the bound, which is rounded down, is not searched further


def brute_force(request: PlanRequest, *, max_again: int = 1) -> Plan:
    """Find the fastest plan by trying all.

    What comes back comes in the order in which it is needed, and what leaves leaves in the order in
    which it is free; all else is free. Host and device only.

    Args:
        request: A step of about nine operators at most, with a host tier.
        max_again: How many operators may run again, each once.

    Returns:
        The plan; `notes["complete"]` says whether all were tried (or none can be faster).

    Raises:
        InfeasibleError: No plan was found; `proved` says whether all were tried.
    """
    limit, bound = Limit(request.deadline), lower_bound(request)
    best: Plan | None = None
    complete = True
    max_again = max_again if request.recompute else 0
    for order in orders_of(request.graph, reorder=request.reorder, max_again=max_again):
        if best is not None and best.step_seconds <= bound.seconds * _SAME:
            break
        if limit.is_over():
            complete = False
            break
        best = fastest_of_order(request, order, best, limit)
    complete = complete and not limit.is_over()
    if best is None:
        raise InfeasibleError(
            f"no plan for {request.budget.device_bytes} bytes was found among "
            + ("all" if complete else "those tried in time"),
            proved=complete,
        )
    return dataclasses.replace(best, bound=bound, notes={"complete": complete})
