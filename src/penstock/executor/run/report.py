"""Reports of planned steps: measurements next to the plan's predictions.

Operators and phases are measured call by call in a few steps.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.executor.program.executable import BoundaryStage, Executable
from penstock.graph import StepGraph
from penstock.memory import Link
from penstock.planner import Plan, Simulation, simulate
from penstock.tables import Report

_MAX_STEPS = 5  # that are timed; a clock costs less than a tenth of a microsecond a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionReport(Report, title="penstock.bind", hidden={"operator_seconds"}):
    """Measurements of the steps since the plan was bound, next to the plan's predictions."""

    num_steps: int
    """Steps that were finished."""
    num_operators: int
    """Operators of a step, those that run again included."""
    step_seconds: float
    """Median time of a step; without the first one, if there are more."""
    predicted_step_seconds: float
    """Time of a step in the plan's simulation."""
    phase_seconds: dict[str, float]
    """Times of forward pass, backward pass and optimizer in a step, stalls included; measured in
    the first five steps after the first one, and empty before."""
    predicted_phase_seconds: dict[str, float]
    """Times of the phases in the plan's simulation."""
    stall_seconds: float
    """Time of a step in which the computation waited for transfers."""
    predicted_stall_seconds: float
    """Stalls in the plan's simulation."""
    moved_bytes: dict[str, int]
    """Bytes that a step moved, by link."""
    predicted_moved_bytes: dict[str, int]
    """Bytes that the plan moves, by link."""
    bytes_per_second: dict[str, float]
    """Bandwidth of each link while it was busy."""
    predicted_bytes_per_second: dict[str, float]
    """Bandwidth of each link in the machine's profile."""
    arena_bytes: int
    """Device memory for values."""
    workspace_bytes: int
    """Device memory that operators may take beyond the arena: the declared workspace of kernels,
    and results before they are copied to their places."""
    held_bytes: int | None
    """Arena and workspace of a GPU in segments of torch's allocator (`torch.cuda.memory_reserved`):
    of whole 2 MiB, at least 20 below 10 MiB, and one for small tensors. None on CPUs."""
    host_bytes: int
    """Host memory of copies."""
    undo_bytes: int
    """Copies of state that a step changes before its update, as running statistics and queues:
    beyond 4 MiB in host memory, or in the file if there is a store."""
    predicted_host_bytes: int
    """Peak of copies in host memory, as planned."""
    file_bytes: int
    """File space of copies."""
    predicted_file_bytes: int
    """Peak of copies in the file, as planned."""
    num_copied_results: int
    """Operators of a step whose results are copied to their places, as torch cannot write there."""
    direct_io: bool | None
    """True if the file is read and written past the page cache; None without a file."""
    is_refined: bool
    """True if the plan was made with times of earlier steps (`penstock.planner.refine`)."""
    debug: bool
    """True if freed bytes are overwritten and transfers compared."""
    num_shadow_steps: int = 0
    """Steps whose loss was compared with that of the program itself, called eagerly before them."""
    num_captures_again: int = 0
    """Steps before which the program was called on tensors without data, and compared operator by
    operator with the captured graph."""
    shadow_seconds: float = 0.0
    """Time of both in all steps; not part of `step_seconds`."""
    shadow_left_out: str = ""
    """The reason why losses are not compared with eager ones; empty if they are."""
    num_recorded: int = 0
    """Operators of a step that a GPU replays from CUDA graphs."""
    operator_seconds: tuple[float | None, ...] = ()
    """Time of each operator of the planned graph, measured in the same steps; None if it makes no
    call. `penstock.planner.refine` plans with them."""

    @property
    def disk_alone_seconds(self) -> float:
        """Time of a step's transfers with the file, each alone at the measured bandwidth."""
        rates = self.bytes_per_second
        moved = self.moved_bytes.items()
        return sum(n / rates[link] for link, n in moved if "file" in link and rates[link])

    def _rows(self) -> list[tuple[str, object]]:
        return [*super()._rows(), ("disk_alone_seconds", self.disk_alone_seconds)]


def predict(
    captured: StepGraph, planned: StepGraph, plan: Plan, links: Iterable[Link]
) -> dict[str, Any]:
    """Return a plan's predictions as fields of a report; of the two graphs the planned one may have
    operators that are parts of those of the captured one.
    """
    simulation = simulate(captured, plan)
    return {
        "predicted_step_seconds": plan.step_seconds,
        "predicted_phase_seconds": _predict_phases(planned, plan, simulation),
        "predicted_stall_seconds": simulation.stall_seconds,
        "predicted_moved_bytes": {link.value: n for link, n in plan.bytes_moved.items()},
        "predicted_bytes_per_second": {
            link.value: plan.machine.links[link].bytes_per_second for link in links
        },
        "predicted_host_bytes": plan.peak_host_bytes,
        "predicted_file_bytes": plan.peak_file_bytes,
    }


def _predict_phases(graph: StepGraph, plan: Plan, simulation: Simulation) -> dict[str, float]:
    """Return the times of the phases in a simulation, stalls included."""
    seconds: dict[str, float] = {}
    before = 0.0
    for index, (_, end) in zip(plan.order, simulation.positions, strict=True):
        phase = graph.operators[index].phase.value
        seconds[phase] = seconds.get(phase, 0.0) + end - before
        before = end
    return seconds


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
