"""The loss of a step: read as soon as it is computed, and checked before the update if possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from penstock.errors import NonFiniteLossError, UnlikeEagerError
from penstock.executor.memory.blocks import PlanMemory
from penstock.executor.program.operators import Call
from penstock.graph import Phase, StepGraph
from penstock.graph.encoding import dtype_from_name
from penstock.graph.step_graph import views_in
from penstock.memory import Tier

_ROUNDING_POWER = 0.75  # of the unit of rounding: what losses of sums in another order differ by


class LossCheck:
    """The loss of a plan's steps, whose update begins at the position `commit`.

    Attributes:
        place: A view of the loss at the end of a step; None if the graph has none.
        expected: The loss of the program itself, for the step under way; None if it is not known.
        num_steps: Steps that were finished.
    """

    def __init__(self, memory: PlanMemory, commit: int) -> None:
        self._device = memory.blocks.device
        view = memory.graph.loss
        self.place = None if view is None else memory.view_operand(view, len(memory.plan.order) - 1)
        self.expected: torch.Tensor | None = None
        self.num_steps = 0
        is_rounded = memory.plan.splits_products
        self._tolerance = _find_tolerance(memory.graph) if is_rounded else 0.0
        self._early = _find_early_place(memory, commit)
        self._reading: Callable[[], torch.Tensor]

    def iter_calls_at(self, position: int) -> Iterator[Call]:
        """Yield the calls at a boundary that read and check the loss before the update."""
        if self._early is not None:
            computed, checked, _ = self._early
            if position == computed:
                yield self.start_reading
            if position == checked:
                yield self.check_early

    def start_reading(self) -> None:
        """Begin to read the loss: a device that is behind goes on with the backward pass."""
        assert self._early is not None
        self._reading = self._device.start_reading(self._early[2])

    def check_early(self) -> None:
        """Check the loss before the update."""
        self._check(
            self._reading(),
            self.num_steps + 1,
            "nothing has been updated",
            "skip this batch, or lower the learning rate",
        )

    def check_late(self) -> None:
        """Check the loss after the step, if the update precedes it."""
        if self._early is None and self.place is not None:
            outcome = "everything has been updated with it"
            self._check(self.place, self.num_steps, outcome, "load the last checkpoint")

    def is_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two losses of a step have the same bits, or are both NaN; where products
        run in slices, whether they differ by no more than rounding.
        """
        first, second = one.item(), other.item()
        if math.isnan(first) or math.isnan(second):
            return math.isnan(first) and math.isnan(second)
        if self._tolerance:
            return math.isclose(first, second, rel_tol=self._tolerance, abs_tol=self._tolerance)
        return float(first).hex() == float(second).hex()

    def _check(self, value: torch.Tensor, step: int, outcome: str, remedy: str) -> None:
        loss = value.item()
        if self.expected is not None and not self.is_equal(value, self.expected):
            expected = self.expected.item()
            raise UnlikeEagerError(
                f"step {step}: the planned loss is {loss!r} and the program itself, "
                f"called eagerly, has {expected!r}; it depends on something that its graph has as "
                "it was when it was captured, as a number of Python that has changed: keep that in "
                f"a buffer or in a tensor of the batch ({outcome})",
                loss=loss,
                expected=expected,
            )
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss is {loss}: {outcome}; {remedy}", loss=loss)


def _find_tolerance(graph: StepGraph) -> float:
    """Return by how much losses may differ that add products in another order.

    It is a power of the unit of rounding of the coarsest dtype of the forward pass: 6e-6 with
    float32, 0.03 with bfloat16.
    """
    forward = (each for each in graph.operators if each.phase is Phase.FORWARD)
    dtypes = {dtype_from_name(view.dtype) for each in forward for view in views_in(each.args)}
    units = [torch.finfo(each).eps for each in dtypes if each.is_floating_point]
    return max(units, default=0.0) ** _ROUNDING_POWER


def _find_early_place(memory: PlanMemory, commit: int) -> tuple[int, int, torch.Tensor] | None:
    """Return the boundaries after the loss's operator and before the update, and its result."""
    view = memory.graph.loss
    if view is None or not memory.graph.num_bytes(view.value):
        return None
    checked = min(commit, len(memory.plan.order) - 1)
    made = [
        interval
        for interval in memory.index.intervals[view.value]
        if interval.tier is Tier.DEVICE and interval.transfer is None
        if 0 <= interval.start < checked
    ]
    if not made:
        return None  # the update precedes it
    first = min(made, key=lambda each: each.start)
    return first.start + 1, checked, memory.view_in(first, view)
