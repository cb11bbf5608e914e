"""Steps that are checked against the program itself: the graph is what it was when captured.

At some steps the program is called again: on stand-ins, which takes no memory and shows what it
would do otherwise now, and eagerly before the step, whose loss has to have the same bits. Either
sees what a graph cannot: numbers of Python that have changed since.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.executor._device import Device
from penstock.graph import Kind, Phase, StepGraph
from penstock.graph.batches import is_full_mask, replace_tensors, tensors_in
from penstock.graph.capturing.capture import verify
from penstock.graph.capturing.module_state import preserve_modules
from penstock.graph.capturing.step_program import StepProgram, call_model, loss_of
from penstock.memory import Tier, available_ram
from penstock.planner import Plan
from penstock.units import format_bytes

_logger = logging.getLogger(__name__)

_SMALL_BYTES = 4 * 2**20  # beyond a budget: half of what its promise leaves for allocators
_FRAMES = 1.5  # what Python holds longer than the graph needs it
_SHARE = 0.05  # of the steps' time, for calls on stand-ins after the second step


class Shadow:
    """Checks of the steps of one `PlannedStep`.

    Args:
        program: The user's program, without a batch; as far as `bind` knows it.
        every: At which steps: each of so many; None: the first two and then at distances that
            double, where memory allows; 0: none.

    Attributes:
        num_steps: Steps that were compared with an eager call.
        num_captures: Steps before which the program was called on stand-ins.
        seconds: What both have taken.
        left_out: Why there is no eager call, or no check at all; empty if there is.
    """

    def __init__(self, program: StepProgram, every: int | None) -> None:
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 0
        ):
            raise ValueError(f"shadow={every!r}: pass a number of steps, 0 for none, or None")
        self._program = program
        self._every = every
        self._num_begun = 0
        self.num_steps = 0
        self.num_captures = 0
        self.seconds = 0.0
        self.left_out = "shadow=0" if every == 0 else ""

    def begin(
        self,
        graph: StepGraph,
        plan: Plan,
        device: Device,
        batch: Any,
        step_seconds: float,
        drain: Callable[[], None],
    ) -> torch.Tensor | None:
        """Check a step that is about to begin, if it is one of those.

        Args:
            graph: The planned graph.
            plan: The plan.
            device: Where it runs.
            batch: Its batch, of the captured form.
            step_seconds: What the steps so far have taken.
            drain: Waits until nothing moves: the eager call changes buffers before it puts them
                back, and what still leaves at the end of a step has to leave as it was.

        Returns:
            The loss that the program itself has; None where it has not been called.

        Raises:
            CaptureError: The program does something else than what was captured.
        """
        number = self._num_begun + 1
        if not self._is_due(number) or not self._is_known(graph):
            return None
        begin = time.perf_counter()
        program = self._program._replace(batch=batch, accumulate=graph.captured.accumulate)
        try:
            with _autocast(graph):
                self._capture_again(graph, program, number, step_seconds)
                if not self._has_room(graph, plan) or _branches_elsewhere(graph, batch):
                    return None
                drain()
                return self._eagerly(program, graph, device)
        finally:
            self.seconds += time.perf_counter() - begin

    def end(self, *, compared: bool) -> None:
        """Count a step that is done."""
        self._num_begun += 1
        self.num_steps += compared

    def repeat(self, graph: StepGraph, device: Device, batch: Any) -> torch.Tensor | None:
        """Call the program eagerly once more, of a step whose loss was another one."""
        program = self._program._replace(batch=batch, accumulate=graph.captured.accumulate)
        with _autocast(graph):
            return self._eagerly(program, graph, device)

    def give_up(self, reason: str) -> None:
        """Compare losses no more."""
        self.left_out = reason
        warnings.warn(f"planned steps are not compared with eager ones: {reason}", stacklevel=5)

    def _is_due(self, number: int) -> bool:
        if self._every is None:
            return number & (number - 1) == 0
        return self._every > 0 and (number == 1 or number % self._every == 0)

    def _is_known(self, graph: StepGraph) -> bool:
        captured = graph.captured
        if captured is None:
            self.left_out = "the graph was not captured in this process"
        elif captured.is_sharded:
            self.left_out = "the model is sharded"
        elif captured.has_loss and self._program.loss is None:
            self.left_out = "bind was not given the loss= that the step was captured with"
        else:
            return True
        return False

    def _capture_again(
        self, graph: StepGraph, program: StepProgram, number: int, step_seconds: float
    ) -> None:
        if number == 1 or (number > 2 and self.seconds > _SHARE * step_seconds):
            return
        like = lambda tensor, path: _captured_like(graph, tensor, path)  # noqa: E731
        verify(
            graph.captured,
            program._replace(batch=replace_tensors(program.batch, "batch", like)),
            graph.device,
        )
        self.num_captures += 1

    def _has_room(self, graph: StepGraph, plan: Plan) -> bool:
        """Whether the eager call keeps within the budget, or was asked for."""
        if self.left_out:
            return False
        if self._every is not None:
            return True
        needed = eager_bytes(graph) + _bytes_below(graph, plan)
        room = available_ram() // 2
        if plan.budget.device_bytes is not None:
            left = plan.budget.device_bytes - plan.peak_device_bytes
            room = min(room, max(_SMALL_BYTES, left))
        if needed > room:
            self.left_out = (
                f"an eager forward pass takes {format_bytes(needed)} and the budget leaves "
                f"{format_bytes(room)}; shadow=n does it nevertheless"
            )
        return needed <= room

    def _eagerly(
        self, program: StepProgram, graph: StepGraph, device: Device
    ) -> torch.Tensor | None:
        try:
            try:
                with _without_saved_tensors():
                    return _loss(program, graph, device)
            except Exception:  # it asks for gradients within the forward pass
                return _loss(program, graph, device)
        except Exception as error:
            self.give_up(f"the eager call raised {type(error).__name__}: {error}")
            return None


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two losses have the same bits, or are both NaN."""
    first, second = one.item(), other.item()
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return float(first).hex() == float(second).hex()


def eager_bytes(graph: StepGraph) -> int:
    """Return about what a forward pass takes of which nothing is kept for the backward pass."""
    forward = [operator for operator in graph.operators if operator.phase is Phase.FORWARD]
    last: dict[int, int] = {}
    for index, operator in enumerate(forward):
        for value in (*operator.needs, *operator.makes):
            last[graph.storage_of_value[value]] = index
    dying: dict[int, list[int]] = {}
    for storage, index in last.items():
        dying.setdefault(index, []).append(storage)
    here, most, held = 0, 0, set[int]()
    for index, operator in enumerate(forward):
        for value in operator.creates:
            held.add(graph.storage_of_value[value])
            here += graph.num_bytes(value)
        most = max(most, here + operator.workspace_bytes)
        for storage in held.intersection(dying.get(index, ())):
            here -= graph.storages[storage].num_bytes
    copies = sum(each.num_bytes for each in graph.storages if _is_copied(each))
    return round(_FRAMES * most) + copies


def _bytes_below(graph: StepGraph, plan: Plan) -> int:
    """Return what an eager call brings to memory of a model in a file, or below a GPU."""
    planned = plan.planned_graph(graph)  # whose operators may be in parts
    below = {
        planned.storage_of_value[copy.value]
        for copy in plan.copies
        if copy.tier is Tier.FILE or graph.device != "cpu"
    }
    storages = (planned.storages[index] for index in below)
    return sum(each.num_bytes for each in storages if each.kind in (Kind.PARAMETER, Kind.BUFFER))


def _is_copied(storage: Any) -> bool:
    """Whether it is a buffer that steps change, or part of a batch."""
    changes = storage.kind is Kind.BUFFER and storage.initial != storage.final
    return changes or storage.kind is Kind.INPUT


def _branches_elsewhere(graph: StepGraph, batch: Any) -> bool:
    """Whether Transformers leaves a mask out that the graph has, which gives other roundings."""
    full = graph.metadata.get("full_masks", ())
    tensors = tensors_in(batch, "batch") if "transformers" in sys.modules else ()
    return any(name not in full and is_full_mask(tensor) for name, tensor in tensors)


def _loss(program: StepProgram, graph: StepGraph, device: Device) -> torch.Tensor:
    """Call the program; the model's tensors and the random state are as before.

    Numbers and lists of numbers in the modules' attributes stay as the call has left them, as they
    would without a plan: counters that matter later are noticed then.
    """
    root = nn.ModuleDict(program.roots())
    random_state = device.random_state()
    names = {
        name for name, view in graph.tensors.items()
        if _is_copied(graph.storages[graph.storage_of_value[view.value]])
    }  # fmt: skip
    buffers = [
        (tensor, tensor.detach().clone())
        for name, tensor in root.named_buffers(remove_duplicate=False)
        if name in names
    ]
    places = [
        (tensor, tensor.data)
        for tensors in (root.named_parameters, root.named_buffers)
        for _, tensor in tensors(remove_duplicate=False)
    ]
    try:
        with preserve_modules(root, only_tensors=True), torch.enable_grad():
            if graph.device != "cpu":
                _bring_to(root, device.device)
            total = None
            batch = replace_tensors(program.batch, "batch", _copied)
            for part in batch if program.accumulate else [batch]:
                value = loss_of(call_model(program.model, part), part, program.loss)
                if (num_parts := program.accumulate or 1) > 1:
                    value = value / num_parts
                value = value.detach()
                total = value if total is None else total + value
            assert total is not None
            return total.clone()
    finally:
        for tensor, place in places:  # the program may have assigned to `.data`
            if not tensor.is_set_to(place):
                tensor.data = place
        with torch.no_grad():
            for tensor, content in buffers:
                tensor.copy_(content)
        device.set_random_state(random_state)


def _bring_to(root: nn.Module, device: torch.device) -> None:
    """Let modules hold copies on the device of what lies below it."""
    for module in root.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor.dim() and tensor.device != device:
                    copy = tensor.detach().to(device)
                    if isinstance(tensor, nn.Parameter):
                        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    held[key] = copy  # pyright: ignore[reportArgumentType]


def _copied(tensor: torch.Tensor, path: str) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _captured_like(graph: StepGraph, tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return a tensor that lies in memory as the captured batch's did, and that is no full mask
    where the graph is for any.
    """
    view = graph.tensors[path]
    if path not in graph.metadata.get("full_masks", ()) and is_full_mask(tensor):
        tensor = tensor.clone()
        tensor[0, -1] = 0
    if tensor.stride() == view.stride:
        return tensor
    made = torch.empty_strided(view.shape, view.stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _autocast(graph: StepGraph) -> Iterator[None]:
    """Be in autocast as the capture was."""
    name = graph.metadata.get("autocast")
    if name is None:
        yield
        return
    with torch.autocast(graph.device, getattr(torch, name)):
        yield


class _Dropped(Exception):
    """A tensor that was to be saved for the backward pass is asked for."""


@contextlib.contextmanager
def _without_saved_tensors() -> Iterator[None]:
    """Let autograd save nothing: no backward pass follows."""

    def unpack(_: object) -> torch.Tensor:
        raise _Dropped

    pack: Callable[[torch.Tensor], None] = lambda tensor: None  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
