"""Binder: plans of one model and optimizer become executions that share their memory."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from penstock.errors import GraphFileError, PlanError
from penstock.executor.device import device_of
from penstock.executor.device.base import Device
from penstock.executor.memory.blocks import SharedBlocks
from penstock.executor.memory.residency import CopyLayout, lay_out_copies
from penstock.executor.program.operators import ALIGNMENT_BYTES
from penstock.executor.run.debug import POISON
from penstock.executor.run.distributed import require_collective
from penstock.executor.run.execution import Execution
from penstock.executor.run.planning import PlannedGraph
from penstock.graph import StepGraph
from penstock.graph.bindings import find_initial_fill
from penstock.graph.capturing.capture import capture_program
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.executable import is_executable
from penstock.memory import FileStore
from penstock.planner import Plan, check
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.partitioner import Partition, PartitionedStep

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binder:
    """A model and an optimizer to which plans are bound."""

    program: StepProgram
    """The user's model, loss and `before_step`, without a batch."""
    optimizer: torch.optim.Optimizer
    """The model's optimizer."""
    store: FileStore | None
    """The file tier."""
    debug: bool
    """True to overwrite freed bytes, and to compare bytes that come back."""
    partitioned: PartitionedStep | None = None
    """This rank's part of a step over several devices, if it is one."""

    def bind(
        self, planned: Sequence[PlannedGraph], before: SharedBlocks | None = None
    ) -> list[Execution]:
        """Bind plans to one memory, or to that of plans that they replace if it is large enough;
        nothing of the model moves yet.
        """
        layouts: list[CopyLayout] = []
        known = [] if before is None else [*before.layouts]
        device = Device() if before is None else before.device
        for plan, graph in planned:
            if self.partitioned is None:
                require_collective(graph)
            if before is None:
                device = device_of(graph)
            _check_executable(graph)
            check(graph, plan)
            _check_alignment(plan)
            layouts.append(lay_out_copies(plan.planned_graph(graph), plan, [*known, *layouts]))
        blocks = SharedBlocks(layouts, self.store, device, before)
        try:
            workspaces = [plan.planned_graph(graph).workspace_bytes for plan, graph in planned]
            device.reserve_workspace(max(workspaces))
            executions = [
                Execution(
                    each,
                    self.program,
                    self.optimizer,
                    layout,
                    blocks,
                    self.debug,
                    self.partitioned,
                )
                for each, layout in zip(planned, layouts, strict=True)
            ]
        except BaseException:
            blocks.close(after=before)
            raise
        if self.debug and before is None:
            blocks.arena.tensor.fill_(POISON)
        return executions

    def distribute(self, partition: Partition, batch: Any) -> Binder:
        """Capture the step of all ranks' batch, and return the binder of this rank's part; model
        and optimizer are distributed.

        Raises:
            TypeError: It is no partition.
            ValueError: The process group has another number of ranks than the partition.
        """
        from torch.distributed.device_mesh import init_device_mesh

        from penstock.partitioner import Partition, apply

        if not isinstance(partition, Partition):
            raise TypeError(f"partition={partition!r}: must be what penstock.partition returns")
        num_ranks = distributed.get_world_size() if distributed.is_initialized() else 0
        if num_ranks != partition.devices:
            raise ValueError(
                f"partition= is for {partition.devices} ranks and the process group has "
                f"{num_ranks or 'not been made'}: start that many (torchrun --nproc-per-node), and "
                "call torch.distributed.init_process_group() before"
            )
        graph = self.capture(batch, is_whole=True)
        made = apply(
            partition,
            self.program.model,
            init_device_mesh(graph.device, partition.mesh),
            graph=graph,
            optimizer=self.optimizer,
            loss=self.program.loss,
        )
        return dataclasses.replace(self, partitioned=made)

    def capture(self, batch: Any, *, is_extra: bool = False, is_whole: bool = False) -> StepGraph:
        """Capture the step of a batch; refuse it before the time that planning takes.

        An extra batch may have another number of micro-batches than the first one. The batch may be
        that of all ranks, whose step will be split.
        """
        began = time.perf_counter()
        program = self.program._replace(batch=batch)
        # The last update of an epoch may have fewer micro-batches.
        if is_extra and program.accumulate is not None and isinstance(batch, list | tuple):
            program = program._replace(accumulate=len(batch))
        graph = capture_program(program, self.optimizer)
        if not is_whole:
            require_collective(graph)
        for name in graph.metadata["initial_state"]:
            find_initial_fill(graph, name)
        elapsed = format_seconds(time.perf_counter() - began)
        _logger.info("captured %d operators in %s", len(graph.operators), elapsed)
        return graph


def _check_executable(graph: StepGraph) -> None:
    if not is_executable(graph):
        raise GraphFileError(
            "this step graph was captured by a version of Penstock whose graphs do not count all "
            "workspace: capture the step again with penstock.capture, and plan that"
        )


def _check_alignment(plan: Plan) -> None:
    for placement in plan.placements:
        if placement.offset % ALIGNMENT_BYTES and placement.num_bytes:
            raise PlanError(
                f"value {placement.value} lies at byte {placement.offset} of the arena; operators "
                f"run at multiples of {ALIGNMENT_BYTES} only: plan it "
                "again with penstock.plan",
                rule="alignment",
            )
