"""Plans that were made, kept between processes: the same step and budget is planned once.

What is kept is the graph that was planned, with its measured times, and the plan. Both are data
with checksums and are checked again when they are used; a damaged entry is planned anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.codegen import cache_entry
from penstock.errors import PenstockError
from penstock.graph import StepGraph
from penstock.planner import Plan, check

_logger = logging.getLogger(__name__)

_LOCK_SECONDS = 600.0  # another process may be planning the same


class Planned(NamedTuple):
    """A plan with the graph that it is for."""

    graph: StepGraph
    plan: Plan


class PlanEntry:
    """One plan's place in the cache.

    Args:
        directory: The place; None where there is no cache.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def load(self) -> Planned | None:
        """Return what is kept there, if it is right."""
        if self._directory is None or not self._directory.is_dir():
            return None
        try:
            graph = StepGraph.load(self._directory / "graph.json.gz")
            plan = Plan.load(self._directory / "plan.json", graph=graph)
            check(graph, plan)
        except FileNotFoundError:
            return None
        except (OSError, PenstockError) as error:
            _logger.warning("planning again: %s is unusable: %s", self._directory, error)
            return None
        return Planned(graph, plan)

    def save(self, planned: Planned) -> None:
        """Keep a plan; readers see a whole one or none."""
        if self._directory is None:
            return
        temporary = self._directory.with_name(f"{self._directory.name}.{os.getpid()}")
        try:
            temporary.mkdir(mode=0o700)
            planned.graph.save(temporary / "graph.json.gz")
            planned.plan.save(temporary / "plan.json")
            if self._directory.exists():
                _remove(self._directory)
            temporary.rename(self._directory)
        except OSError as error:
            _logger.warning("the plan could not be kept in %s: %s", self._directory, error)
            _remove(temporary)


@contextmanager
def plan_entry(key: list[object]) -> Iterator[PlanEntry]:
    """Lock a plan's place in the cache.

    Args:
        key: What the plan depends on, as plain data.

    Yields:
        The entry; one that keeps nothing where there is no usable cache directory.
    """
    with cache_entry("plans", key, wait_seconds=_LOCK_SECONDS) as entry:
        yield PlanEntry(entry.path)


def _remove(directory: Path) -> None:
    if directory.is_dir():
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
