"""Times of operators and phases, measured call by call in a few planned steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from penstock.executor.program.executable import BoundaryStage, Executable
from penstock.graph import StepGraph
from penstock.planner import Plan

_MAX_STEPS = 5  # that are timed; a clock costs less than a tenth of a microsecond a call


class Timing:
    """The times of an executable's calls."""

    def __init__(self, graph: StepGraph, plan: Plan, executable: Executable) -> None:
        self._order = plan.order
        self._num_operators = len(graph.operators)
        self._phase_of_call = [
            graph.operators[plan.order[position]].phase.value for position in executable.positions
        ]
        self._position_of_call = [
            position if stage is BoundaryStage.RUNNING else None
            for position, stage in zip(executable.positions, executable.stages, strict=True)
        ]
        self._steps: list[list[int]] = []  # nanoseconds of each call

    @property
    def is_open(self) -> bool:
        """True if another step is to be timed."""
        return len(self._steps) < _MAX_STEPS

    def record(self, begin_ns: int, ends_ns: Sequence[int]) -> None:
        """Record a step by its begin and the end of each call."""
        begins = [begin_ns, *ends_ns[:-1]]
        self._steps.append([end - begin for begin, end in zip(begins, ends_ns, strict=True)])

    def compute_operator_seconds(self) -> tuple[float | None, ...]:
        """Return the median of each operator's runs; None if it has no timed call."""
        runs: list[list[float]] = [[] for _ in range(self._num_operators)]
        for step in self._steps:
            for nanoseconds, position in zip(step, self._position_of_call, strict=True):
                if position is not None:
                    runs[self._order[position]].append(nanoseconds * 1e-9)
        return tuple(statistics.median(each) if each else None for each in runs)

    def compute_phase_seconds(self) -> Mapping[str, float]:
        """Return for each phase the median over steps of its operators' time, stalls included."""
        sums = []
        for step in self._steps:
            total = dict.fromkeys(self._phase_of_call, 0.0)
            for nanoseconds, phase in zip(step, self._phase_of_call, strict=True):
                total[phase] += nanoseconds * 1e-9
            sums.append(total)
        phases = dict.fromkeys(self._phase_of_call)
        return {
            phase: statistics.median(total[phase] for total in sums) for phase in phases if sums
        }
