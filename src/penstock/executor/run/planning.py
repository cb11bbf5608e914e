"""Planning for `fit`: plans of one budget and machine, and again if steps take longer than planned.

Plans are kept in a cache between processes. Its entries are the planned graph, with its measured
times, and the plan: data with checksums, checked again when it is used. A damaged entry is planned
anew.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from penstock._version import __version__
from penstock.codegen import cache_entry
from penstock.errors import InfeasibleError
from penstock.executor.run.report import ExecutionReport
from penstock.graph import StepGraph, measure
from penstock.memory import FileStore, MachineProfile, Tier
from penstock.planner import Budget, Found, Plan, as_measured, check, plan, refine
from penstock.units import format_bytes, format_seconds

_logger = logging.getLogger(__name__)

_LOCK_SECONDS = 600.0  # another process may be planning the same
_MAX_ROUNDS = 4  # of planning with less, if several plans share an arena
_NUM_RUNS = 3  # of each operator, if their times are measured
_MIN_SLOWDOWN = 1.25  # measured over planned time, from which on planning again may pay
_MAX_SHARE = 0.95  # of the old plan's time that a new one may take, by measured times
_PAYBACK_STEPS = 10  # steps that have to save the time of planning


class PlannedGraph(NamedTuple):
    """A plan with the graph that it is for."""

    plan: Plan
    graph: StepGraph


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedPlanner:
    """The planner of `fit`: arguments of `penstock.planner.plan`, and a cache of plans."""

    device_memory: int | None
    host_memory: int | None
    store: FileStore | None
    machine: MachineProfile | str | None
    split_products: bool
    time_limit: float
    seed: int
    progress: Callable[[Found], None] | None
    cache: bool
    """True if plans are kept between processes."""
    _keys: dict[str, list[object]] = dataclasses.field(default_factory=dict)
    """Keys in the cache, by the digest of the planned graph."""

    def make_plan(self, graph: StepGraph, device_memory: int | None = None) -> PlannedGraph:
        """Return a plan from the cache, or one that is made now; `device_memory` is given if a plan
        has less than all together.
        """
        within = self
        if device_memory is not None:
            within = dataclasses.replace(self, device_memory=device_memory)
        found = within._load_or_make(graph) if self.cache else within._make(graph)
        _logger.info(
            "plan: %s of device memory, %s a step, at least %s",
            format_bytes(found.plan.peak_device_bytes),
            format_seconds(found.plan.step_seconds),
            format_seconds(found.plan.lower_bound_seconds),
        )
        self._keys[found.graph.digest] = within._key_of(graph)
        return found

    def keep(self, graph: StepGraph, refined: Plan) -> None:
        """Keep a refined plan in the place of the one that was made for its graph."""
        if self.cache:
            with cache_entry(
                "plans", self._keys[graph.digest], wait_seconds=_LOCK_SECONDS
            ) as entry:
                entry.save(lambda directory: _write(PlannedGraph(refined, graph), directory))

    def fit_one_arena(self, planned: Sequence[PlannedGraph]) -> list[PlannedGraph]:
        """Replan until plans that take turns keep within the budget together.

        They share the largest arena a of all of them, and operators of any of them take up to the
        largest workspace w: a + w must not exceed the budget.

        Raises:
            InfeasibleError: They do not after a few rounds.
        """
        found = list(planned)
        if self.device_memory is None:
            return found
        for _ in range(_MAX_ROUNDS):
            workspaces = [each.plan.planned_graph(each.graph).workspace_bytes for each in found]
            arena_bytes = self.device_memory - max(workspaces)
            if all(each.plan.arena_bytes <= arena_bytes for each in found):
                return found
            found = [
                each
                if each.plan.arena_bytes <= arena_bytes
                else self.make_plan(each.graph, arena_bytes + workspace)
                for each, workspace in zip(found, workspaces, strict=True)
            ]
        raise InfeasibleError(
            f"device_memory={format_bytes(self.device_memory)} holds each of the {len(found)} "
            "shapes alone, and not with one arena for all and the workspace of any: raise it, or "
            "make the shapes more alike"
        )

    def _load_or_make(self, graph: StepGraph) -> PlannedGraph:
        with cache_entry("plans", self._key_of(graph), wait_seconds=_LOCK_SECONDS) as entry:
            found = entry.load(_read)
            if found is None:
                found = made = self._make(graph)
                entry.save(lambda directory: _write(made, directory))
        kept = dataclasses.replace(found.graph, captured=graph.captured)
        return PlannedGraph(found.plan, kept)

    def _make(self, graph: StepGraph) -> PlannedGraph:
        if self.machine is None:
            graph = measure(graph, num_runs=_NUM_RUNS)
        arguments = {key: each for key, each in vars(self).items() if key not in ("cache", "_keys")}
        return PlannedGraph(plan(graph, **arguments), graph)

    def _key_of(self, graph: StepGraph) -> list[object]:
        """Return all data that a plan depends on."""
        store, machine = self.store, self.machine
        where = None if store is None else [os.path.abspath(store.path), store.max_bytes]
        profile: object = machine if isinstance(machine, str | None) else machine.to_dict()
        threads = torch.get_num_threads() if machine is None else None
        metadata = {name: repr(value) for name, value in sorted(graph.metadata.items())}
        versions = [__version__, torch.__version__]
        budgets = [self.device_memory, self.host_memory]
        limits = [self.time_limit, self.seed, self.split_products]
        return [versions, graph.digest, metadata, budgets, where, profile, threads, *limits]


def _read(directory: Path) -> PlannedGraph:
    graph = StepGraph.load(directory / "graph.json.gz")
    loaded = Plan.load(directory / "plan.json", graph=graph)
    check(graph, loaded)
    return PlannedGraph(loaded, graph)


def _write(planned: PlannedGraph, directory: Path) -> None:
    planned.graph.save(directory / "graph.json.gz")
    planned.plan.save(directory / "plan.json")


class Refinement:
    """Decisions after the first steps of plans whether to go on with them.

    A plan whose steps are much slower than planned is made again with measured times, once, and
    within the memory that it has. The new one stays if its own first steps are faster; `keep` is
    called with it.
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
