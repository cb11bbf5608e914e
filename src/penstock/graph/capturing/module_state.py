"""The state of modules: their modes and attributes, and the lists and dictionaries among these.

Modes decide the course of a step: of modules, of parameters (frozen or not), autocast.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from penstock.compat.fake_tensors import FakeTensor
from penstock.graph.encoding import dtype_name

_ATOMS = {bool, int, float, str, bytes, type(None)}


@contextlib.contextmanager
def preserve_modules(root: nn.Module, *, only_tensors: bool = False) -> Iterator[None]:
    """Restore the state of modules after the block; if `only_tensors`, numbers and containers of
    numbers stay as the block leaves them.
    """
    before = ModuleSnapshot(root)
    try:
        yield
    finally:
        before.restore(only_tensors=only_tensors)


class ModuleSnapshot:
    """The state of a module and of the modules in it, at the time when it is made."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = [
            (each, dict(each.__dict__), dict(each._parameters), dict(each._buffers))
            for each in root.modules()
        ]
        self._containers = [
            (value, copy.copy(value))
            for _, attributes, *_ in self._modules
            for value in attributes.values()
            if type(value) in (list, dict)
        ]

    def restore(self, *, only_tensors: bool = False) -> None:
        """Restore all of it; numbers and containers of numbers only if not `only_tensors`."""
        for module, attributes, *_ in self._modules:
            now = module.__dict__
            plain = {}
            if only_tensors:
                plain = {key: each for key, each in now.items() if _is_plain(each)}
            now.clear()
            now.update(attributes | plain)
        self._restore_registered()
        for container, content in self._containers:
            if not (only_tensors and _is_plain(container)):
                _refill(container, content)

    def restore_tensors(self, is_constant: Callable[[torch.Tensor], bool]) -> None:
        """Restore parameters, without gradients, and buffers.

        Other attributes that a call has assigned stay, also tensors: a program that reads them when
        it is called again is one whose steps differ. Only where all of these are constant
        (positions that the first call has made) attributes are as before.
        """
        self._restore_registered()
        registered: set[int] = set()
        for module, attributes, parameters, _ in self._modules:
            registered |= {id(module._parameters), id(module._buffers)}
            for parameter in parameters.values():
                if parameter is not None:
                    parameter.grad = None
            for key, value in list(module.__dict__.items()):
                if attributes.get(key) is value or not _are_constant(value, is_constant):
                    continue
                if key in attributes:
                    module.__dict__[key] = attributes[key]
                else:
                    del module.__dict__[key]
        for container, content in self._containers:
            if id(container) not in registered and _are_constant(container, is_constant):
                _refill(container, content)

    def changes(self) -> Iterator[tuple[nn.Module, str, Any, Any]]:
        """Yield attributes that have been assigned anew: module, name, before, now."""
        for module, before, *_ in self._modules:
            for key, now in module.__dict__.items():
                if key in before and before[key] is not now:
                    yield module, key, before[key], now

    def additions(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Yield parameters and buffers that were not there: module, name, tensor."""
        for module, _, parameters, buffers in self._modules:
            for now, then in ((module._parameters, parameters), (module._buffers, buffers)):
                for key, tensor in now.items():
                    if tensor is not None and then.get(key) is None:
                        yield module, key, tensor

    def _restore_registered(self) -> None:
        for module, _, parameters, buffers in self._modules:
            _refill(module._parameters, parameters)
            _refill(module._buffers, buffers)


def _refill(container: Any, content: Any) -> None:
    """Put the former content of a list or dictionary back."""
    container.clear()
    container.update(content) if isinstance(container, dict) else container.extend(content)


def _is_plain(value: Any) -> bool:
    """Return whether an attribute holds no tensors."""
    return next(_tensors_in(value), None) is None


def _are_constant(value: Any, is_constant: Callable[[torch.Tensor], bool]) -> bool:
    """Return whether an attribute holds fake tensors, and all of them are constant."""
    fakes = [each for each in _tensors_in(value) if isinstance(each, FakeTensor)]
    return bool(fakes) and all(map(is_constant, fakes))


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors of an attribute, and of the containers and objects that it holds."""
    if type(value) in _ATOMS:  # most attributes are, and the tests below take long
        return
    if isinstance(value, torch.Tensor):
        yield value
        return
    if not depth or isinstance(value, nn.Module | type | FunctionType):
        return
    items = value if isinstance(value, list | tuple | set) else ()
    if isinstance(value, Mapping):
        items = value.values()
    elif not items:
        items = getattr(value, "__dict__", {}).values()
    for each in list(items):
        yield from _tensors_in(each, depth - 1)


def modules_in(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, and of a loss that is one, with their names in a graph."""
    for name, root in roots.items():
        yield from root.named_modules(prefix=name)


def parameters_in(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter | None]]:
    """Yield each module's entries for parameters, in the order of the modules."""
    for name, module in modules_in(roots):
        for key, parameter in module._parameters.items():
            yield f"{name}.{key}", parameter


def evaluation_modules(roots: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules that are in evaluation mode."""
    return [name for name, module in modules_in(roots) if not module.training]


def frozen_parameters(roots: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the parameters that require no gradient."""
    named = parameters_in(roots)
    return [name for name, each in named if each is not None and not each.requires_grad]


def autocast_of(device: str) -> str | None:
    """Return the dtype that autocast has on a kind of device; None where it is off."""
    if not torch.is_autocast_enabled(device):
        return None
    return dtype_name(torch.get_autocast_dtype(device))
