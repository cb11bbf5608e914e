"""Planning for `fit`: plans of one budget and machine, kept in the cache between processes.

An entry of the cache is the planned graph, with its measured times, and the plan. Both are data
with checksums and are checked again when they are used; a damaged entry is planned anew.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from penstock._version import __version__
from penstock.codegen import cache_entry
from penstock.errors import InfeasibleError
from penstock.graph import StepGraph, measure
from penstock.memory import FileStore, MachineProfile
from penstock.planner import Found, Plan, check, plan
from penstock.units import format_bytes, format_seconds

_logger = logging.getLogger(__name__)

_LOCK_SECONDS = 600.0  # another process may be planning the same
_MAX_ROUNDS = 4  # of planning with less, if several plans share an arena
_NUM_RUNS = 3  # of each operator, if their times are measured


class PlannedGraph(NamedTuple):
    """A plan with the graph that it is for."""

    plan: Plan
    graph: StepGraph


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedPlanner:
    """The planner of `fit`: arguments of `penstock.planner.plan`, and a cache of plans.

    Attributes:
        cache: Whether plans are kept between processes.
    """

    device_memory: int | None
    host_memory: int | None
    store: FileStore | None
    machine: MachineProfile | str | None
    time_limit: float
    seed: int
    progress: Callable[[Found], None] | None
    cache: bool
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
        limits = [self.time_limit, self.seed]
        return [versions, graph.digest, metadata, budgets, where, profile, threads, *limits]


def _read(directory: Path) -> PlannedGraph:
    graph = StepGraph.load(directory / "graph.json.gz")
    loaded = Plan.load(directory / "plan.json", graph=graph)
    check(graph, loaded)
    return PlannedGraph(loaded, graph)


def _write(planned: PlannedGraph, directory: Path) -> None:
    planned.graph.save(directory / "graph.json.gz")
    planned.plan.save(directory / "plan.json")
