"""Fake tensors in the places of a model's, an optimizer's and a batch's real ones.

They have shape, strides, dtype and device but no memory, and they share storages as the real ones
do. The real ones are put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn

from penstock.compat.dispatch import no_dispatch
from penstock.compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    make_fake,
    make_parameter,
)
from penstock.errors import CaptureError
from penstock.graph.capturing.module_state import ModuleSnapshot, preserve_modules

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
        self.device = device
        self.local = local
        self._below = below
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id: (real, fake)
        self._made: set[int] = set()
        self._base_of_storage: dict[int, torch.Tensor] = {}

    def __contains__(self, real: object) -> bool:
        return id(real) in self._of

    def of(self, real: torch.Tensor, name: str) -> torch.Tensor:
        """Return the fake tensor of a real one, also of one on the meta device.

        It is the same for the same tensor, and a leaf; one that was made here stays as it is. Of a
        tensor that ranks share it has this rank's part. `name` is for messages.

        Raises:
            CaptureError: It is sparse, complex, or of a class that computes otherwise.
        """
        if id(real) in self._made:
            return real
        if id(real) not in self._of:
            local = self.local.get(id(real), real)
            _check_kind(local, name)
            fake = self._make(local)
            if isinstance(real, nn.Parameter):
                fake = make_parameter(fake, requires_grad=real.requires_grad)
            if real.requires_grad and not fake.requires_grad:
                fake.requires_grad_()
            self._of[id(real)] = (real, fake)
            self._made.add(id(fake))
        return self._of[id(real)][1]

    def _make(self, real: torch.Tensor) -> FakeTensor:
        is_below = self._below and real.dim() > 0 and real.device.type == "cpu"
        device = self.device if real.is_meta or is_below else real.device
        storage = real.untyped_storage()
        base = self._base_of_storage.get(storage._cdata)
        if base is None:
            whole = self._make_empty(real, device)
            if whole.untyped_storage().nbytes() == storage.nbytes() and not real.storage_offset():
                self._base_of_storage[storage._cdata] = whole
                return whole
            num_elements = storage.nbytes() // real.element_size()
            with self._mode:
                base = torch.empty(num_elements, dtype=real.dtype, device=device)
            self._base_of_storage[storage._cdata] = base
        with self._mode, torch.no_grad():
            if base.dtype != real.dtype:
                num_elements = base.untyped_storage().nbytes() // base.element_size()
                base = base.as_strided((num_elements,), (1,)).view(real.dtype)
            fake = base.as_strided(real.shape, real.stride(), real.storage_offset()).detach()
        assert isinstance(fake, FakeTensor)
        return fake

    def _make_empty(self, real: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor of a real one's form in memory of its own."""
        with no_dispatch():
            meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
            return make_fake(self._mode, meta, device)

    def make_separate(self, real: torch.Tensor, name: str) -> torch.Tensor:
        """Return a fake tensor in memory of its own, also where real ones share theirs."""
        _check_kind(real, name)
        device = self.device if real.is_meta else real.device
        return self._make_empty(real, device).requires_grad_(real.requires_grad)

    @contextlib.contextmanager
    def replace_in(self, root: nn.Module) -> Iterator[ModuleSnapshot]:
        """Put the fake tensors into a model for the block, which gets its state with them."""
        with preserve_modules(root):
            for module in root.modules():
                self._replace_in(module)
            yield ModuleSnapshot(root)

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
