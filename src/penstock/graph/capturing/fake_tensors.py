"""Fake tensors in the places of a model's, an optimizer's and a batch's real ones.

They have shape, strides, dtype and device but no memory, and they share storages as the real ones
do. The real ones are put back afterwards.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn

from penstock.compat.fake_tensors import FakeTensor, FakeTensorMode
from penstock.errors import CaptureError
from penstock.graph.batches import replaced

_KINDS_OF_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class FakeTensors:
    """The fake tensors of real ones, each made only once.

    Args:
        mode: The fake tensor mode that they belong to.
        device: The device of tensors that are on the meta device.
        local: This rank's parts of the tensors that ranks share, by the identities of these.
        below: Whether tensors on the CPU, but for single numbers, count as on the device, as where
            a plan keeps them on a lower tier.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        device: torch.device,
        local: Mapping[int, torch.Tensor] = MappingProxyType({}),
        *,
        below: bool = False,
    ) -> None:
        self._mode = mode
        self._device = device
        self.local = local
        self._below = below
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id: (real, fake)
        self._made: set[int] = set()
        self._base_of_storage: dict[int, torch.Tensor] = {}
        self._inside: list[tuple[nn.Module, dict[str, Any]]] = []
        self._registered: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._held: list[tuple[Any, Any]] = []  # the modules' containers, as they were

    def __contains__(self, real: object) -> bool:
        return id(real) in self._of

    def of(self, real: torch.Tensor, name: str) -> torch.Tensor:
        """Return the fake tensor of a real one.

        Args:
            real: A dense tensor, also one on the meta device, or one of which this rank's part is
                known. A fake tensor made here is returned as it is.
            name: Its name in messages.

        Returns:
            The same for the same tensor; a leaf, with the real one's `requires_grad`.

        Raises:
            CaptureError: It is sparse, complex, or of a class that computes otherwise.
        """
        if id(real) in self._made:
            return real
        if id(real) not in self._of:
            local = self.local.get(id(real), real)
            _check_kind(local, name)
            with self._mode, torch.no_grad():
                fake = self._make(local)
                if isinstance(real, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=real.requires_grad)
            if real.requires_grad and not fake.requires_grad:
                fake.requires_grad_()
            self._of[id(real)] = (real, fake)
            self._made.add(id(fake))
        return self._of[id(real)][1]

    def _make(self, real: torch.Tensor) -> torch.Tensor:
        is_below = self._below and real.dim() > 0 and real.device.type == "cpu"
        device = self._device if real.is_meta or is_below else real.device
        storage = real.untyped_storage()
        base = self._base_of_storage.get(storage._cdata)
        if base is None:
            whole = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
            if whole.untyped_storage().nbytes() == storage.nbytes() and not real.storage_offset():
                self._base_of_storage[storage._cdata] = whole
                return whole
            num_elements = storage.nbytes() // real.element_size()
            base = torch.empty(num_elements, dtype=real.dtype, device=device)
            self._base_of_storage[storage._cdata] = base
        if base.dtype != real.dtype:
            base = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,))
            base = base.view(real.dtype)
        return base.as_strided(real.shape, real.stride(), real.storage_offset()).detach()

    def in_batch(self, value: Any, name: str) -> Any:
        """Replace the tensors of a batch, each by one in memory of its own.

        Tensors that share memory today, such as inputs that are their own labels, may be others
        tomorrow.
        """
        return replaced(value, name, self._make_separate)

    def _make_separate(self, real: torch.Tensor, name: str) -> torch.Tensor:
        _check_kind(real, name)
        device = self._device if real.is_meta else real.device
        with self._mode, torch.no_grad():
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        return fake.requires_grad_(real.requires_grad)

    def in_state(self, state: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Replace the tensors of an optimizer's state; everything else stays."""
        return {
            key: self.of(item, name) if isinstance(item, torch.Tensor) else item
            for key, item in state.items()
        }

    @contextlib.contextmanager
    def replace_in(self, module: nn.Module) -> Iterator[None]:
        """Put the fake tensors into a model for the block, and restore it afterwards."""
        modules = list(module.modules())
        with preserve_modules(module) as held:
            try:
                for each in modules:
                    self._replace_in(each)
                self._inside = [(each, dict(each.__dict__)) for each in modules]
                self._registered = [
                    (each, dict(each._parameters), dict(each._buffers)) for each in modules
                ]
                self._held = held
                yield
            finally:
                self._inside, self._registered, self._held = [], [], []

    def changed_attributes(self) -> Iterator[tuple[nn.Module, str, Any, Any]]:
        """Yield modules' attributes that have been assigned anew: module, name, before, now."""
        for module, before in self._inside:
            for key, now in module.__dict__.items():
                if key in before and before[key] is not now:
                    yield module, key, before[key], now

    def put_tensors_back(self, is_constant: Callable[[torch.Tensor], bool]) -> None:
        """Let the modules hold their fake tensors again, without gradients.

        Other attributes that a call has assigned stay, also tensors: a program that reads them when
        it is called again is one whose steps differ. Only where all of these are constant
        (positions that the first call has made) attributes are as before.

        Args:
            is_constant: Returns whether no data can change a fake tensor's numbers.
        """
        for module, parameters, buffers in self._registered:
            for now, before in zip(_tensors_of(module), (parameters, buffers), strict=True):
                now.clear()
                now.update(before)
            for parameter in parameters.values():
                if parameter is not None:
                    parameter.grad = None
        for module, before in self._inside:
            for key, value in list(module.__dict__.items()):
                if before.get(key) is not value and _are_constant(value, is_constant):
                    if key in before:
                        module.__dict__[key] = before[key]
                    else:
                        del module.__dict__[key]
        own = {id(each) for module, *_ in self._registered for each in _tensors_of(module)}
        for value, content in self._held:
            if id(value) not in own and _are_constant(value, is_constant):
                _refill(value, content)

    def _replace_in(self, module: nn.Module) -> None:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = self.of(tensor, name)  # pyright: ignore
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and value in self:
                module.__dict__[name] = self.of(value, name)
            # As the flat list of weights that recurrent layers keep.
            elif type(value) in (list, tuple) and any(item in self for item in value):
                items = [self.of(item, name) if item in self else item for item in value]
                module.__dict__[name] = type(value)(items)


@contextlib.contextmanager
def preserve_modules(
    module: nn.Module, *, only_tensors: bool = False
) -> Iterator[list[tuple[Any, Any]]]:
    """Restore modules' attributes, tensors and containers after the block.

    Args:
        module: The root of the modules.
        only_tensors: Whether numbers and containers of numbers stay as they are then.

    Yields:
        The containers among the attributes, with copies of them.
    """
    modules = list(module.modules())
    saved = [
        (each, dict(each.__dict__), dict(each._parameters), dict(each._buffers)) for each in modules
    ]
    held = [
        (value, copy.copy(value))
        for each in modules
        for value in each.__dict__.values()
        if type(value) in (list, dict)
    ]
    try:
        yield held
    finally:
        for each, attributes, parameters, buffers in saved:
            now = each.__dict__
            stay = _plain_items(now) if only_tensors else {}
            now.clear()
            now.update(attributes)
            now.update(stay)
            for tensors, before in zip(_tensors_of(each), (parameters, buffers), strict=True):
                tensors.clear()
                tensors.update(before)
        for value, content in held:
            if not (only_tensors and _is_plain(value)):
                _refill(value, content)


def _refill(container: Any, content: Any) -> None:
    """Put the former content of a list or dictionary back."""
    container.clear()
    container.update(content) if isinstance(container, dict) else container.extend(content)


def _plain_items(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that hold no tensors."""
    return {key: value for key, value in attributes.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return next(_tensors_in(value), None) is None


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _are_constant(value: Any, is_constant: Callable[[torch.Tensor], bool]) -> bool:
    """Return whether an attribute holds fake tensors, and all of them are constant."""
    fakes = [each for each in _tensors_in(value) if isinstance(each, FakeTensor)]
    return bool(fakes) and all(map(is_constant, fakes))


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors of an attribute, and of the containers and objects that it holds."""
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


def _check_kind(real: torch.Tensor, name: str) -> None:
    if type(real) not in _KINDS_OF_TENSORS and not isinstance(real, nn.Parameter):
        raise CaptureError(
            f"{name} is a {type(real).__name__}, whose operators a capture does not see; "
            "pass ordinary tensors (of a sharded model: each rank its local ones)"
        )
    if real.layout is not torch.strided or real.is_complex() or real.is_nested:
        raise CaptureError(
            f"{name} has layout {real.layout} and {real.dtype}; a step graph has dense "
            "tensors of real numbers: keep complex ones as real pairs (torch.view_as_real), or "
            "train under penstock.offload"
        )
