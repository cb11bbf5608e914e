"""Shadow: checks of some steps against the user's program itself.

At these steps the program is called again: on fake tensors, which takes no memory and shows other
operators, and eagerly before the step, whose loss has to have the same bits. Both find changes that
are not in the graph: Python numbers that have changed since the capture.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import stacklevel_of_user
from penstock.executor.device.base import Device
from penstock.graph import Kind, Phase, StepGraph
from penstock.graph.batches import is_full_mask, replace_tensors, tensors_in
from penstock.graph.capturing.module_state import preserve_modules
from penstock.graph.capturing.step_program import StepProgram
from penstock.graph.executable import find_last_uses
from penstock.graph.verification import enable_autocast, verify_again
from penstock.memory import Tier, available_ram
from penstock.planner import Plan
from penstock.units import format_bytes

_logger = logging.getLogger(__name__)

_SMALL_BYTES = 4 * 2**20  # beyond a budget: half of the slack that it promises for allocators
_FRAME_FACTOR = 1.5  # Python's frames hold tensors longer than the graph needs them
_CAPTURE_SHARE = 0.05  # of the steps' time, for calls on fake tensors after the second step


class Shadow:
    """Checks of the steps of one `PlannedStep`.

    Args:
        program: The user's program, without a batch.
        every: The distance of checked steps; None: the first two steps and then at distances that
            double, if memory allows; 0: none.

    Attributes:
        is_postponed: Whether changed numbers have not been checked, for lack of time.
    """

    def __init__(self, program: StepProgram, every: int | None) -> None:
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 0
        ):
            raise ValueError(f"shadow={every!r}: pass a number of steps, 0 for none, or None")
        self._program = program
        self._every = every
        self._num_begun = 0
        self._num_steps = 0
        self._num_captures = 0
        self.is_postponed = False
        self._seconds = 0.0
        self._left_out = "shadow=0" if every == 0 else ""

    def begin(
        self,
        graph: StepGraph,
        plan: Plan,
        device: Device,
        batch: Any,
        step_seconds: float,
        drain: Callable[[], None],
        *,
        changed_numbers: Sequence[str] = (),
    ) -> torch.Tensor | None:
        """Check a step that is about to begin, if its turn has come; `step_seconds` is the time of
        all steps so far.

        After a change of numbers of the program, by their names, it is captured again whether or
        not it is the step's turn; where that has taken too much time, `is_postponed` is set.

        Returns:
            The loss of the program itself; None if it has not been called.

        Raises:
            CaptureError: The program does not do what was captured.
        """
        number = self._num_begun + 1
        is_due, is_suspect = self._is_due(number), bool(changed_numbers)
        self.is_postponed = False
        if not (is_due or is_suspect):
            return None
        if not self._can_check(graph):
            if is_suspect:
                warnings.warn(
                    f"{', '.join(changed_numbers[:3])} changed since the step was captured, and "
                    f"planned steps go on as captured, without a check: {self._left_out}",
                    stacklevel=stacklevel_of_user(),
                )
            return None
        has_time = self._has_time(number, step_seconds)
        self.is_postponed = is_suspect and not has_time and not self._may_exceed(number)
        if not is_due and self.is_postponed:
            return None
        begin = time.perf_counter()
        program = self._program._replace(batch=batch, accumulate=graph.captured.accumulate)
        try:
            with torch.inference_mode(False), enable_autocast(graph):
                if (is_due and has_time) or (is_suspect and not self.is_postponed):
                    self._capture_again(graph, program)
                    self.is_postponed = False
                if (
                    not is_due
                    or not self._has_room(graph, plan)
                    or _takes_other_branch(graph, batch)
                ):
                    return None
                # The eager call changes buffers before it restores them, and transfers of the last
                # step must move them as they were.
                drain()
                return self._call_eagerly(program, graph, device)
        finally:
            self._seconds += time.perf_counter() - begin

    def end(self, *, compared: bool) -> None:
        """Count a finished step."""
        self._num_begun += 1
        self._num_steps += compared

    def repeat(self, graph: StepGraph, device: Device, batch: Any) -> torch.Tensor | None:
        """Call the program eagerly once more, for a step whose loss differed."""
        program = self._program._replace(batch=batch, accumulate=graph.captured.accumulate)
        with enable_autocast(graph):
            return self._call_eagerly(program, graph, device)

    def give_up(self, reason: str) -> None:
        """Stop the comparison of losses."""
        self._left_out = reason
        warnings.warn(
            f"planned steps are not compared with eager ones: {reason}",
            stacklevel=stacklevel_of_user(),
        )

    def report(self) -> dict[str, Any]:
        """Return the fields of an `ExecutionReport` about these checks."""
        return {
            "num_shadow_steps": self._num_steps,
            "num_captures_again": self._num_captures,
            "shadow_seconds": self._seconds,
            "shadow_left_out": self._left_out,
        }

    def _is_due(self, number: int) -> bool:
        if self._every is None:
            return number & (number - 1) == 0
        return self._every > 0 and (number == 1 or number % self._every == 0)

    def _can_check(self, graph: StepGraph) -> bool:
        captured = graph.captured
        if self._every == 0:
            return False
        if captured is None:
            self._left_out = "the graph was not captured in this process"
        elif captured.is_sharded:
            self._left_out = "the model is sharded"
        elif captured.has_loss and self._program.loss is None:
            self._left_out = "bind was not given the loss= that the step was captured with"
        else:
            return True
        return False

    def _has_time(self, number: int, step_seconds: float) -> bool:
        """Return whether a call on fake tensors is worth its time; the first step was captured just
        before.
        """
        return number == 2 or (number > 2 and self._seconds <= _CAPTURE_SHARE * step_seconds)

    def _may_exceed(self, number: int) -> bool:
        """Return whether the program may be called once more, whatever that takes: twice between
        steps whose numbers are powers of two.
        """
        return self._num_captures < 2 * number.bit_length()

    def _capture_again(self, graph: StepGraph, program: StepProgram) -> None:
        verify_again(graph, program)
        self._num_captures += 1

    def _has_room(self, graph: StepGraph, plan: Plan) -> bool:
        """Return whether the eager call keeps within the budget, or was asked for."""
        if self._left_out:
            return False
        if self._every is not None:
            return True
        needed = _estimate_eager_bytes(graph) + _count_bytes_below(graph, plan)
        room = available_ram() // 2
        if plan.budget.device_bytes is not None:
            left = plan.budget.device_bytes - plan.peak_device_bytes
            room = min(room, max(_SMALL_BYTES, left))
        if needed > room:
            self._left_out = (
                f"an eager forward pass takes {format_bytes(needed)} and the budget leaves "
                f"{format_bytes(room)}; shadow=n does it nevertheless"
            )
        return needed <= room

    def _call_eagerly(
        self, program: StepProgram, graph: StepGraph, device: Device
    ) -> torch.Tensor | None:
        try:
            try:
                # No backward pass follows.
                with saved_tensors_hooks(lambda tensor: None, _refuse_saved_tensor):
                    return _compute_loss(program, graph, device)
            except Exception:  # it asks for gradients within the forward pass
                return _compute_loss(program, graph, device)
        except Exception as error:
            self.give_up(f"the eager call raised {type(error).__name__}: {error}")
            return None


def _estimate_eager_bytes(graph: StepGraph) -> int:
    """Return about the bytes of a forward pass that keeps nothing for the backward pass."""
    forward = [each for each in graph.operators if each.phase is Phase.FORWARD]
    dying = find_last_uses(graph, forward)
    resident, peak, held = 0, 0, set[int]()
    for index, each in enumerate(forward):
        for value in each.creates:
            held.add(graph.storage_of_value[value])
            resident += graph.num_bytes(value)
        peak = max(peak, resident + each.workspace_bytes)
        for storage in held.intersection(dying.get(index, ())):
            resident -= graph.storages[storage].num_bytes
    copies = sum(graph.storages[each].num_bytes for each in _find_copied(graph))
    return round(_FRAME_FACTOR * peak) + copies


def _count_bytes_below(graph: StepGraph, plan: Plan) -> int:
    """Return the bytes of a model in a file, or below a GPU, that an eager call reads to memory."""
    planned = plan.planned_graph(graph)  # whose operators may be in parts
    below = {
        planned.storage_of_value[copy.value]
        for copy in plan.copies
        if copy.tier is Tier.FILE or graph.device != "cpu"
    }
    storages = (planned.storages[index] for index in below)
    return sum(each.num_bytes for each in storages if each.kind in (Kind.PARAMETER, Kind.BUFFER))


def _find_copied(graph: StepGraph) -> set[int]:
    """Return the storages of a batch, buffers that steps change, and parameters that forward passes
    change, such as those of an embedding with `max_norm` or of a moving average.
    """
    forward = (each for each in graph.operators if each.phase is Phase.FORWARD)
    written = {graph.storage_of_value[value] for each in forward for value, _ in each.mutates}

    def is_copied(index: int) -> bool:
        storage = graph.storages[index]
        if storage.kind is Kind.PARAMETER:
            return index in written
        changes = storage.kind is Kind.BUFFER and storage.initial != storage.final
        return changes or storage.kind is Kind.INPUT

    return {index for index in range(len(graph.storages)) if is_copied(index)}


def _takes_other_branch(graph: StepGraph, batch: Any) -> bool:
    """Return whether Transformers omits a mask that the graph has, which gives other roundings."""
    full = graph.metadata.get("full_masks", ())
    tensors = tensors_in(batch, "batch") if "transformers" in sys.modules else ()
    return any(name not in full and is_full_mask(tensor) for name, tensor in tensors)


def _compute_loss(program: StepProgram, graph: StepGraph, device: Device) -> torch.Tensor:
    """Call the program; the model's tensors and the random state are restored."""
    root = nn.ModuleDict(program.roots())
    with _restore_state(root, graph, device), torch.enable_grad():
        if graph.device != "cpu":
            _copy_to_device(root, device.device)
        copy = lambda tensor, _: tensor.detach().clone().requires_grad_(tensor.requires_grad)  # noqa: E731
        batch = replace_tensors(program.batch, "batch", copy)
        losses = program._replace(batch=batch).iter_losses()
        return functools.reduce(operator.add, (each.detach() for each in losses)).clone()


@contextlib.contextmanager
def _restore_state(root: nn.Module, graph: StepGraph, device: Device) -> Iterator[None]:
    """Restore a model's tensors and the random state after a call.

    Numbers and lists of numbers in the modules' attributes stay as after the call, as they would
    without a plan: so counters that matter in later steps are found there.
    """
    random_state = device.get_random_state()
    copied = _find_copied(graph)
    changed = {
        name for name, view in graph.tensors.items() if graph.storage_of_value[view.value] in copied
    }
    tensors = [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
    copies = [(tensor, tensor.detach().clone()) for name, tensor in tensors if name in changed]
    places = [(tensor, tensor.data) for _, tensor in tensors]
    try:
        with preserve_modules(root, only_tensors=True):
            yield
    finally:
        for tensor, place in places:  # the program may have assigned to `.data`
            if not tensor.is_set_to(place):
                tensor.data = place
        with torch.no_grad():
            for tensor, content in copies:
                tensor.copy_(content)
        device.set_random_state(random_state)


def _copy_to_device(root: nn.Module, device: torch.device) -> None:
    """Let modules hold copies on the device of tensors below it."""
    for module in root.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor.dim() and tensor.device != device:
                    copy = tensor.detach().to(device)
                    if isinstance(tensor, nn.Parameter):
                        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    held[key] = copy  # pyright: ignore[reportArgumentType]


def _refuse_saved_tensor(_: object) -> torch.Tensor:
    raise RuntimeError("a forward pass was to keep no tensors")
