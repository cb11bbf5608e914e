"""How long operators and phases of planned steps took, call by call, in a few of the steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from penstock.executor._program import Program, Stage
from penstock.graph import StepGraph
from penstock.planner import Plan, Simulation

_MAX_STEPS = 5  # that are timed; a clock costs less than a tenth of a microsecond a call


class Timing:
    """The times of a program's calls.

    Args:
        graph: The step.
        plan: A plan for it.
        program: Its calls.
    """

    def __init__(self, graph: StepGraph, plan: Plan, program: Program) -> None:
        self._order = plan.order
        self._num_operators = len(graph.operators)
        self._phase_of_call = [
            graph.operators[plan.order[position]].phase.value for position in program.positions
        ]
        self._position_of_call = [
            position if stage is Stage.RUNNING else None
            for position, stage in zip(program.positions, program.stages, strict=True)
        ]
        self._steps: list[list[int]] = []  # nanoseconds of each call

    @property
    def wanted(self) -> bool:
        """Whether another step should be timed."""
        return len(self._steps) < _MAX_STEPS

    def note(self, begin_ns: int, ends_ns: Sequence[int]) -> None:
        """Take up a step: when it began, and when each call had returned."""
        begins = [begin_ns, *ends_ns[:-1]]
        self._steps.append([end - begin for begin, end in zip(begins, ends_ns, strict=True)])

    def operator_seconds(self) -> tuple[float | None, ...]:
        """For each operator the median of its runs; None if it has no calls, or none was timed."""
        runs: list[list[float]] = [[] for _ in range(self._num_operators)]
        for step in self._steps:
            for nanoseconds, position in zip(step, self._position_of_call, strict=True):
                if position is not None:
                    runs[self._order[position]].append(nanoseconds * 1e-9)
        return tuple(statistics.median(each) if each else None for each in runs)

    def phase_seconds(self) -> Mapping[str, float]:
        """For each phase the median over steps of what its operators took, with their waits."""
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


def predicted_phase_seconds(
    graph: StepGraph, plan: Plan, simulation: Simulation
) -> Mapping[str, float]:
    """For each phase what its operators take in a simulation, with their waits."""
    found: dict[str, float] = {}
    before = 0.0
    for index, (_, end) in zip(plan.order, simulation.positions, strict=True):
        phase = graph.operators[index].phase.value
        found[phase] = found.get(phase, 0.0) + end - before
        before = end
    return found
