"""Initialization of models on the meta device: parameters are made in the plan's memory, module by
module, so that a model may be larger than memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.executor.state.safetensors import SafetensorsFile

Path = str | os.PathLike[str]
Initializer = Callable[[nn.Module], object] | Path | Sequence[Path]
"""The source of a model's first numbers: a function of one module, or safetensors files."""


class Initialization:
    """First numbers of a model's tensors on the meta device.

    Args:
        modules: The model, and the loss if it is a module.
        initialize: A function that is called with each module that has such tensors, or files;
            None: each module's own `reset_parameters`.

    Raises:
        ValueError: A tensor would stay without numbers; nothing has been touched.
    """

    def __init__(self, modules: Sequence[nn.Module], initialize: Initializer | None) -> None:
        self._owners = [
            (name, owner, keys)
            for root in modules
            for name, owner in root.named_modules()
            if (keys := _find_meta_tensors(owner))
        ]
        self._call: Callable[[nn.Module], object] | None = None
        self._files: list[SafetensorsFile] = []
        if not self._owners:
            if initialize is not None:
                raise ValueError(
                    f"initialize={initialize!r}: no parameter or buffer is on the meta device; "
                    "leave it out, and load numbers into a model in memory by its load_state_dict()"
                )
            return
        if callable(initialize):
            self._call = initialize
        elif initialize is not None:
            paths = [initialize] if isinstance(initialize, str | os.PathLike) else initialize
            self._files = [SafetensorsFile(path) for path in paths]
            self._check_files()
        else:
            self._check_modules()

    @property
    def is_needed(self) -> bool:
        """Return whether any tensor was on the meta device."""
        return bool(self._owners)

    def run(self, done: Callable[[torch.Tensor], None]) -> None:
        """Initialize the tensors, once they have places; call `done` with each that has numbers."""
        for name, owner, keys in self._owners:
            with torch.no_grad():
                if self._files:
                    for key in keys:
                        full = f"{name}.{key}".lstrip(".")
                        for file in self._files:
                            if full in file:
                                file.read(full, _tensor_at(owner, key))
                elif self._call is not None:
                    self._call(owner)
                else:
                    owner.reset_parameters()  # pyright: ignore
            for key in keys:
                done(_tensor_at(owner, key))

    def _check_files(self) -> None:
        names: dict[int, str] = {}
        found: set[int] = set()  # tied tensors are one object, of which one name is enough
        for name, owner, keys in self._owners:
            for key in keys:
                full, tensor = f"{name}.{key}".lstrip("."), _tensor_at(owner, key)
                names[id(tensor)] = full
                for file in self._files:
                    if full in file:
                        _check_form(file, full, tensor)
                        found.add(id(tensor))
        for identity, name in names.items():
            if identity not in found:
                paths = ", ".join(file.path for file in self._files)
                raise ValueError(
                    f"initialize: {paths} has no tensor {name!r}; add a file that has it, or, for "
                    "a buffer that no state_dict has, make it in memory before: what is not on "
                    "the meta device keeps its numbers"
                )

    def _check_modules(self) -> None:
        for name, owner, keys in self._owners:
            if not hasattr(owner, "reset_parameters"):
                tensor = f"{name}.{keys[0]}".lstrip(".")
                raise ValueError(
                    f"{tensor} is on the meta device and {type(owner).__name__} has no "
                    "reset_parameters(): pass initialize=, a function that gives a module its "
                    "first numbers, or a safetensors file"
                )


def _check_form(file: SafetensorsFile, name: str, tensor: torch.Tensor) -> None:
    here, there = (tensor.dtype, tuple(tensor.shape)), file.form_of(name)
    if here != there:
        raise ValueError(
            f"initialize: {name!r} is {there[0]} of shape {there[1]} in {file.path} and {here[0]} "
            f"of {here[1]} in the model"
        )


def _find_meta_tensors(owner: nn.Module) -> list[str]:
    tensors: dict[str, Any] = {**owner._parameters, **owner._buffers}
    return [key for key, tensor in tensors.items() if tensor is not None and tensor.is_meta]


def _tensor_at(owner: nn.Module, key: str) -> torch.Tensor:
    tensor = owner._parameters.get(key)
    found = owner._buffers[key] if tensor is None else tensor
    assert found is not None
    return found
