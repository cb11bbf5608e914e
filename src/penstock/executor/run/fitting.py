"""Fitting: captures and plans of a step that `fit` makes, for its batches and for further ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from penstock.executor.program.operators import executable
from penstock.executor.run.distributed import require_collective
from penstock.executor.run.planning import PlannedGraph, Planning
from penstock.executor.run.refinement import Refinement
from penstock.executor.state.entries import initial_fill
from penstock.graph import StepGraph, capture
from penstock.graph.step_program import StepProgram
from penstock.units import format_seconds

_logger = logging.getLogger(__name__)


class Fitting:
    """The model, optimizer and budget of a step that `fit` makes.

    Args:
        program: The user's program, without a batch.
        optimizer: The model's optimizer.
        planning: Makes its plans.

    Attributes:
        refinement: Decides whether a plan is made again after its first steps.
    """

    def __init__(
        self, program: StepProgram, optimizer: torch.optim.Optimizer, planning: Planning
    ) -> None:
        self._program = program
        self._optimizer = optimizer
        self._planning = planning
        self.refinement = Refinement(planning.time_limit, planning.keep)

    def plan_batches(self, batch: Any, extra_batches: Sequence[Any]) -> list[PlannedGraph]:
        """Capture and plan the step of each batch, for one memory."""
        accumulate = self._program.accumulate
        planned = [self._planning.make_plan(self._capture(batch, accumulate))]
        planned += map(self._plan_extra, extra_batches)
        return self._planning.fit_one_arena(planned)

    def extend(self, planned: Sequence[PlannedGraph], batch: Any) -> list[PlannedGraph]:
        """Capture and plan the step of one more batch, in the memory of the others."""
        return self._planning.fit_one_arena([*planned, self._plan_extra(batch)])

    def _plan_extra(self, batch: Any) -> PlannedGraph:
        accumulate = self._program.accumulate
        # The last update of an epoch may have fewer micro-batches.
        if accumulate is not None and isinstance(batch, list | tuple):
            accumulate = len(batch)
        return self._planning.make_plan(self._capture(batch, accumulate))

    def _capture(self, batch: Any, accumulate: int | None) -> StepGraph:
        began = time.perf_counter()
        program = self._program
        captured = capture(
            program.model,
            self._optimizer,
            batch,
            loss=program.loss,
            before_step=program.before_step,
            accumulate=accumulate,
        )
        graph = executable(captured)
        require_collective(graph)
        for name in graph.metadata["initial_state"]:
            initial_fill(graph, name)  # refused before the time that planning takes
        elapsed = format_seconds(time.perf_counter() - began)
        _logger.info("captured %d operators in %s", len(graph.operators), elapsed)
        return graph
