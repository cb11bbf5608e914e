"""Who plans in `plan.py`: the arms by name, each from a graph and budgets to a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from _plan_torch_budget import plan_torch_budget
from penstock.graph import StepGraph
from penstock.memory import Link, MachineProfile
from penstock.planner import Bound, Budget, Plan
from penstock.planner.baselines._genetic import plan_genetic
from penstock.planner.baselines._layers_lp import plan_layers_lp
from penstock.planner.baselines._on_demand import plan_on_demand
from penstock.planner.proofs._bounds import lower_bound
from penstock.planner.search._auto_plan import plan_auto

OURS = "penstock"
ABLATIONS: Mapping[str, dict[str, bool]] = {
    f"{OURS} without reordering": {"reorder": False},
    f"{OURS} without recomputation": {"recompute": False},
    f"{OURS} in the program's order, without recomputation": {
        "reorder": False,
        "recompute": False,
    },
}
REFERENCES: Mapping[str, Callable[..., Plan]] = {
    "on demand, LRU": functools.partial(plan_on_demand, arm="lru"),
    "LRU with prefetch (ODSwap)": functools.partial(plan_on_demand, arm="lru-prefetch"),
    "Belady, earliest prefetch": functools.partial(plan_on_demand, arm="belady"),
    "genetic (SwapAdvisor)": plan_genetic,
    "LP per layer (torchtitan)": plan_layers_lp,
    "torch's memory budget": plan_torch_budget,
}
ARMS = (*REFERENCES, OURS, *ABLATIONS)


class Planner:
    """A graph on a machine with a budget, and the arms on it; bounds are computed once each.

    Args:
        graph: A captured step.
        operator_seconds: Time of each operator.
        budget: Bytes of the tiers.
        machine: What is planned for.
        time_limit: Seconds, for arms that search.
        seed: Of their random numbers.
    """

    def __init__(
        self,
        graph: StepGraph,
        operator_seconds: Sequence[float],
        budget: Budget,
        machine: MachineProfile,
        *,
        time_limit: float,
        seed: int,
    ) -> None:
        self.graph, self.operator_seconds = graph, operator_seconds
        self.budget, self.machine = budget, machine
        self.time_limit, self.seed = time_limit, seed
        self._bounds: dict[tuple[bool, bool], Bound] = {}

    def bound(self, *, reorder: bool = True, recompute: bool = True) -> Bound:
        """What no plan under these frozen decisions beats."""
        key = reorder, recompute
        if key not in self._bounds:
            self._bounds[key] = lower_bound(
                self.graph,
                self.operator_seconds,
                self.budget,
                self.machine,
                reorder=reorder,
                recompute=recompute,
            )
        return self._bounds[key]

    def bound_of(self, arm: str) -> Bound:
        """The bound that an arm is held against: that of its frozen decisions."""
        return self.bound(**ABLATIONS.get(arm, {}))

    def plan(self, arm: str) -> Plan:
        """The plan of an arm.

        Raises:
            InfeasibleError: It finds none.
        """
        if arm in REFERENCES:
            return REFERENCES[arm](
                self.graph,
                operator_seconds=self.operator_seconds,
                budget=self.budget,
                machine=self.machine,
                time_limit=self.time_limit,
                seed=self.seed,
                progress=None,
            )
        frozen = ABLATIONS.get(arm, {})
        return plan_auto(
            self.graph,
            operator_seconds=self.operator_seconds,
            budget=self.budget,
            machine=self.machine,
            links=(Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE),
            bound=self.bound_of(arm),
            time_limit=self.time_limit,
            seed=self.seed,
            reorder=frozen.get("reorder", True),
            recompute=frozen.get("recompute", True),
        )
