"""torch's own activation memory budget, as a choice of what is recomputed.

`torch._functorch.config.activation_memory_budget` is a share of what forward would save at most;
torch's knapsack solver says which values are worth their memory, and everything else is made again.
Nothing is swapped. The largest budget whose step fits is taken, as a user would.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner import Budget, Plan
from penstock.planner.baselines._on_demand import plan_on_demand
from penstock.planner.baselines._recompute import Recomputation

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


def plan_torch_budget(
    graph: StepGraph,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: object = None,
) -> Plan:
    """Plan as `aot_autograd` would with the largest budget that fits.

    Raises:
        InfeasibleError: Not even with everything recomputed.
    """
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

    del time_limit, progress
    recomputation = Recomputation(graph)
    choices = [saved for saved in recomputation.saved() if saved.is_droppable]
    total = sum(saved.num_bytes for saved in choices)
    memory = [saved.num_bytes / max(1, total) for saved in choices]
    seconds = [sum(operator_seconds[i] for i in saved.chain or ()) for saved in choices]
    for share in BUDGETS:
        dropped = {saved.value for saved in choices}
        if choices and share < 1:
            _, kept, _ = dp_knapsack(memory, seconds, share)
            dropped -= {choices[index].value for index in kept}
        order, _ = recomputation.order_without(dropped if share < 1 else ())
        try:
            return plan_on_demand(
                graph,
                operator_seconds=operator_seconds,
                budget=budget,
                machine=machine,
                order=order,
                candidates=(),
                seed=seed,
                method="torch-budget",
                notes={"activation_memory_budget": share},
            )
        except InfeasibleError:
            continue
    raise InfeasibleError(
        f"no activation memory budget fits device_memory={budget.device_bytes}", proved=False
    )
