"""The model during a capture: names of its modules and tensors, and changes by the step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from penstock.errors import CaptureError
from penstock.graph.capturing._program_lines import ProgramLines
from penstock.graph.capturing.fake_tensors import FakeTensors
from penstock.graph.capturing.module_state import ModuleSnapshot
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.step_graph import Kind, TensorView


def parameter_names(root: nn.Module) -> dict[int, str]:
    """Return the names of parameters by their identities."""
    return {id(each): _plain_name(name) for name, each in root.named_parameters()}


def _plain_name(name: str) -> str:
    """Return the name that the model itself has for its parameters."""
    return name.removeprefix("model.")


def adopt_model(root: nn.Module, recorder: Recorder, fakes: FakeTensors) -> dict[str, TensorView]:
    """Add parameters and buffers to a recorder; return their views by name."""
    tensors = {}
    for kind, named in (
        (Kind.PARAMETER, root.named_parameters(remove_duplicate=False)),
        (Kind.BUFFER, root.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            fake = fakes.of(tensor, name)
            tensors[name] = recorder.adopt(fake, _plain_name(name), kind)
    return tensors


class InitialPlaces:
    """The buffers of a model, and the memory of its tensors, as they are before the step."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._buffers = dict(root.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            self._views = [(each, each.detach()) for each in (*root.parameters(), *root.buffers())]

    def write_back(self) -> None:
        """Copy replaced buffers, and tensors assigned to `.data`, to the initial places.

        Raises:
            CaptureError: A buffer has another form than before.
        """
        replaced = []
        for name, tensor in self._root.named_buffers(remove_duplicate=False):
            old = self._buffers.get(name)
            if old is None or old is tensor:
                continue
            if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                raise CaptureError(
                    f"buffer {name!r} becomes {tensor.dtype} of shape {tuple(tensor.shape)} in a "
                    f"step and was {old.dtype} of {tuple(old.shape)}; a captured step has static "
                    "shapes"
                )
            replaced.append((old, tensor))
        copy_to_places([*replaced, *((place, tensor) for tensor, place in self._find_moved())])

    def restore(self) -> None:
        """Let tensors lie in their initial places again."""
        for tensor, place in self._find_moved():
            tensor.data = place

    def _find_moved(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for tensor, place in self._views:
            if tensor.untyped_storage()._cdata != place.untyped_storage()._cdata:
                yield tensor, place


@torch.no_grad()
def copy_to_places(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors to the places that come before them in the pairs; those that lie in such a
    place, as where two are swapped, with the numbers that they have before the first copy.
    """
    storages = {place.untyped_storage()._cdata for place, _ in pairs}
    contents = [
        tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor
        for _, tensor in pairs
    ]
    for (place, _), content in zip(pairs, contents, strict=True):
        place.copy_(content)


def refuse_lost_changes(
    before: ModuleSnapshot, modules: RunningModules, recorder: Recorder, lines: ProgramLines
) -> None:
    """Raise if the step has changed an attribute that planned steps would not change, or has made a
    parameter or a buffer, unless a constant one.
    """
    for module, key, tensor in before.additions():
        if isinstance(tensor, nn.Parameter) or not recorder.is_constant(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise CaptureError(
                f"the step makes the {kind} {key!r} of {modules.name_of(module)}, which planned "
                "steps would not: call the model once before, or register it in __init__"
            )
    for module, key, then, now in before.changes():
        is_number = isinstance(then, bool | int | float) and isinstance(now, bool | int | float)
        if (is_number and then != now) or id(then) in recorder.outside.used:
            line = lines.assignments.get((id(module), key))
            raise CaptureError(
                (f"{line}: " if line else "")
                + f"the step reads and changes the attribute {key!r} of {modules.name_of(module)}, "
                "which planned steps would not: keep it in a buffer (register_buffer); if only the "
                "first call does so, call the model once before"
            )


class RunningModules(contextlib.AbstractContextManager):
    """The modules that are running, followed by hooks on all modules in the block."""

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(each): _plain_name(name) for name, each in root.named_modules()}
        self._stack: list[str] = [""]
        self._hooks: list[Any] = []

    def current(self) -> str:
        """Return the name of the innermost one."""
        return self._stack[-1]

    def name_of(self, module: nn.Module) -> str:
        """Return a module's name for messages."""
        return repr(self._names[id(module)] or "model")

    def __enter__(self) -> None:
        thread = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                self._stack.append(self._names.get(id(module), self._stack[-1]))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                self._stack.pop()

        self._hooks = [
            torch_modules.register_module_forward_pre_hook(enter),
            torch_modules.register_module_forward_hook(leave, always_call=True),
        ]

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()
