"""Who plans in `plan.py`: the arms by name, each from a graph and budgets to a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from _plan_torch_budget import plan_torch_budget
from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner import Bound, Budget, Plan, PlanRequest, lower_bound, plan
from penstock.planner.paging import plan_by_paging
from planners.layers_lp import plan_layers_lp

OURS = "penstock"


class Freedom(NamedTuple):
    """What a planner of ours may decide."""

    reorder: bool = True
    recompute: bool = True


ABLATIONS: Mapping[str, Freedom] = {
    f"{OURS} without reordering": Freedom(reorder=False),
    f"{OURS} without recomputation": Freedom(recompute=False),
    f"{OURS} in the program's order, without recomputation": Freedom(False, False),
}
ODSWAP = "LRU with prefetch (ODSwap)"
STOCK, CHECKPOINTING = "stock", "checkpointing every layer"  # not in the table: points of a picture
REFERENCES: Mapping[str, Callable[..., Plan]] = {
    "on demand, LRU": functools.partial(plan_by_paging, policy="lru"),
    ODSWAP: functools.partial(plan_by_paging, policy="lru-prefetch"),
    "Belady, earliest prefetch": functools.partial(plan_by_paging, policy="belady"),
    "LP per layer (torchtitan)": plan_layers_lp,
    "torch's memory budget": plan_torch_budget,
}
GENETIC = "genetic (SwapAdvisor)"
ARMS = (*REFERENCES, GENETIC, OURS, *ABLATIONS)


class Planner:
    """A graph on a machine with a budget, and the arms on it.

    Args:
        graph: A captured step.
        budget: Bytes of the tiers.
        machine: What is planned for.
        time_limit: Seconds, for arms that search.
        bound_seconds: For each bound of `bound_of`; None: those of the plans.
        seed: Of their random numbers.
    """

    def __init__(
        self,
        graph: StepGraph,
        budget: Budget,
        machine: MachineProfile,
        *,
        time_limit: float,
        bound_seconds: float | None = None,
        seed: int,
    ) -> None:
        self.graph, self.budget, self.machine = graph, budget, machine
        self.request = PlanRequest(graph=graph, budget=budget, machine=machine, seed=seed)
        self.bound_seconds, self.time_limit, self.seed = bound_seconds, time_limit, seed

    @functools.cached_property
    def bound(self) -> Bound:
        """What no plan of the captured graph beats, whatever it decides."""
        return lower_bound(self.request)

    def bound_of(self, arm: str, plan: Plan) -> Bound:
        """What no plan beats in which as much is frozen, of the graph that a plan is for."""
        if self.bound_seconds is None:
            return plan.bound
        graph, free = plan.planned_graph(self.graph), ABLATIONS.get(arm, Freedom())
        request = dataclasses.replace(
            self.request.of(graph), reorder=free.reorder, recompute=free.recompute
        )
        bound = lower_bound(request.within(self.bound_seconds))
        return max(bound, plan.bound, key=lambda each: each.seconds)

    def plan(self, arm: str) -> Plan:
        """The plan of an arm.

        Raises:
            InfeasibleError: It finds none.
        """
        if arm in REFERENCES:
            return REFERENCES[arm](self.request)
        free = ABLATIONS.get(arm, Freedom())
        return plan(
            self.graph,
            device_memory=self.budget.device_bytes,
            host_memory=self.budget.host_bytes,
            machine=self.machine,
            method="genetic" if arm == GENETIC else "auto",
            time_limit=self.time_limit,
            seed=self.seed,
            reorder=free.reorder,
            recompute=free.recompute,
        )
