"""Refinement: plans made again with measured times, if steps take longer than planned."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from penstock.errors import InfeasibleError
from penstock.executor.run.report import ExecutionReport
from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner import Budget, Plan, as_measured, refine
from penstock.units import format_seconds

_logger = logging.getLogger(__name__)

_MIN_SLOWDOWN = 1.25  # measured over planned time, from which on planning again may pay
_MAX_SHARE = 0.95  # of the old plan's time that a new one may take, by measured times
_PAYBACK_STEPS = 10  # steps that have to save the time of planning


class Refinement:
    """Decisions after the first steps of plans whether to go on with them.

    A plan whose steps are much slower than planned is made again with measured times, once, and
    within the memory that it has. The new one stays if its own first steps are faster.

    Args:
        time_limit: Seconds that planning may take.
        keep: Called with a graph and a plan for it that has proved faster.
    """

    def __init__(self, time_limit: float, keep: Callable[[StepGraph, Plan], None]) -> None:
        self._time_limit = time_limit
        self._keep = keep
        self._decided: set[str] = set()  # graphs
        self._replaced: dict[str, tuple[Plan, float]] = {}  # by graph; seconds of its steps

    def is_decided(self, graph: StepGraph) -> bool:
        """Return whether the plan for a graph does not change any more."""
        return graph.digest in self._decided

    def decide(
        self, plan: Plan, graph: StepGraph, report: ExecutionReport, held_bytes: Mapping[Tier, int]
    ) -> Plan:
        """Return the plan to go on with, after the report of a plan's first steps; `held_bytes` are
        allocated for plans.
        """
        before, measured = self._replaced.pop(graph.digest, None), report.step_seconds
        if before is None:
            better = self._find_better(plan, graph, report, held_bytes)
            if better is None:
                self._decided.add(graph.digest)
                return plan
            self._replaced[graph.digest] = plan, measured
            return better
        self._decided.add(graph.digest)
        old, seconds = before
        _logger.info(
            "the plan of measured times takes %s a step, the one before %s; going on with %s",
            format_seconds(measured),
            format_seconds(seconds),
            "it" if measured < seconds else "the one before",
        )
        if measured >= seconds:
            return old
        self._keep(graph, plan)
        return plan

    def keep_old(self, graph: StepGraph, reason: str) -> None:
        """Go on with a graph's old plan, as the new one cannot be bound."""
        _logger.info("going on with the plan as it was: %s", reason)
        self._replaced.pop(graph.digest, None)
        self._decided.add(graph.digest)

    def _find_better(
        self, plan: Plan, graph: StepGraph, report: ExecutionReport, held_bytes: Mapping[Tier, int]
    ) -> Plan | None:
        if report.step_seconds <= _MIN_SLOWDOWN * plan.step_seconds:
            return None
        timed = as_measured(plan, report, graph)
        saving = timed.step_seconds - timed.ideal_seconds
        if saving <= (1 - _MAX_SHARE) * timed.step_seconds:
            return None  # the operators are slower than planned, and no plan changes that
        time_limit = min(self._time_limit, _PAYBACK_STEPS * saving)
        _logger.info(
            "the first steps took %s, planned were %s: planning again with measured times, for %s",
            format_seconds(report.step_seconds),
            format_seconds(plan.step_seconds),
            format_seconds(time_limit),
        )
        budget = _budget_within(plan.budget, report.workspace_bytes, held_bytes)
        try:
            found = refine(
                dataclasses.replace(plan, budget=budget), report, graph, time_limit=time_limit
            )
        except InfeasibleError as error:
            _logger.info("no other plan was found: %s", error)
            return None
        return found if found.step_seconds < _MAX_SHARE * timed.step_seconds else None


def _budget_within(budget: Budget, workspace_bytes: int, held_bytes: Mapping[Tier, int]) -> Budget:
    """Return the budget of a plan that takes over from another, which keeps its memory until then.

    On the device both use one arena. Below it the new plan uses the old block, or a larger one
    that is allocated beside it.
    """
    arena_and_workspace = held_bytes[Tier.DEVICE] + workspace_bytes

    def beside(num_bytes: int | None, tier: Tier) -> int | None:
        held = held_bytes.get(tier, 0)
        return None if num_bytes is None else max(held, num_bytes - held)

    return Budget(
        device_bytes=min(budget.device_bytes or arena_and_workspace, arena_and_workspace),
        host_bytes=beside(budget.host_bytes, Tier.HOST),
        file_bytes=beside(budget.file_bytes, Tier.FILE),
    )
