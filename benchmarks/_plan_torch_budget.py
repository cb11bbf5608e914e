"""torch's own activation memory budget, as a choice of what is recomputed.

`torch._functorch.config.activation_memory_budget` is a share of what forward would save at most;
torch's knapsack solver says which values are worth their memory, and everything else is made again.
Nothing is swapped. The largest budget whose step fits is taken, as a user would.
"""

from __future__ import annotations

from penstock.errors import InfeasibleError
from penstock.planner import Plan, PlanRequest
from penstock.planner.paging import Recomputation, plan_by_paging

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


def plan_torch_budget(request: PlanRequest) -> Plan:
    """Plan as `aot_autograd` would with the largest budget that fits.

    Raises:
        InfeasibleError: Not even with everything recomputed.
    """
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

    recomputation = Recomputation(request.graph)
    choices = [saved for saved in recomputation.saved() if saved.is_droppable]
    total = sum(saved.num_bytes for saved in choices)
    memory = [saved.num_bytes / max(1, total) for saved in choices]
    seconds = [sum(request.operator_seconds[i] for i in saved.chain or ()) for saved in choices]
    for share in BUDGETS:
        dropped = {saved.value for saved in choices}
        if choices and share < 1:
            _, kept, _ = dp_knapsack(memory, seconds, share)
            dropped -= {choices[index].value for index in kept}
        order, _ = recomputation.order_without(dropped if share < 1 else ())
        try:
            return plan_by_paging(
                request,
                order=order,
                candidates=(),
                method="torch-budget",
                notes={"activation_memory_budget": share},
            )
        except InfeasibleError:
            continue
    raise InfeasibleError(
        f"no activation memory budget fits device_memory={request.budget.device_bytes}",
        proved=False,
    )
