"""Private names of torch's modules, and their buffers as they are kept there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

_COPIED_BYTES = 2**20  # of a buffer: statistics are smaller; tables, which nothing changes, larger

has_global_hooks = _has_any_global_hook
"""Return whether hooks are registered that torch calls for all modules."""


def has_cached_weights(module: nn.Module) -> bool:
    """Return whether `torch.nn.utils.parametrize.cached` is on and keeps a module's weights."""
    return parametrize._cache_enabled > 0 and parametrize.is_parametrized(module)


@contextlib.contextmanager
def refuse_changed_buffers(modules: Iterable[Any], message: str) -> Iterator[None]:
    """Raise if modules change their buffers in the block, and put back what they were.

    Of a buffer over 1 MiB no copy is kept: its numbers stay as they are then.

    Args:
        modules: The modules; what is no `nn.Module` has no buffers.
        message: The error's.

    Raises:
        ValueError: A buffer was written or replaced, added or removed.
    """
    owners = [one for each in modules if isinstance(each, nn.Module) for one in each.modules()]
    named: list[dict[str, Tensor | None]] = [dict(one._buffers.items()) for one in owners]
    kept = [_KeptBuffer(each) for of in named for each in of.values() if each is not None]
    is_changed = False
    try:
        yield
    finally:
        for owner, before in zip(owners, named, strict=True):
            now = dict(owner._buffers.items())
            if _identify(now) != _identify(before):
                is_changed = True
                if isinstance(owner._buffers, dict):  # and not of a scripted module
                    owner._buffers.clear()
                    owner._buffers.update(before)
        for each in kept:
            is_changed |= each.put_back()
    if is_changed:
        raise ValueError(message)


def _identify(named: dict[str, Tensor | None]) -> list[tuple[str, int]]:
    return [(name, id(each)) for name, each in named.items()]


class _KeptBuffer:
    """A buffer, its version, and a copy of it if it is small."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._version = read_version(buffer)
        is_plain = type(buffer) is Tensor and buffer.layout == torch.strided
        is_plain = is_plain and not buffer.is_quantized and buffer.device.type != "meta"
        is_copied = is_plain and buffer.nbytes <= _COPIED_BYTES
        self._copy = buffer.detach().clone() if is_copied else None

    def put_back(self) -> bool:
        """Return whether the buffer was written since, and undo that if there is a copy."""
        is_written = read_version(self._buffer) != self._version
        # Kernels of batch norms write running statistics without a new version of the tensor.
        if self._copy is not None and not torch.equal(
            *map(_view_bytes, (self._buffer, self._copy))
        ):
            is_written, is_inference = True, torch.is_inference_mode_enabled()
            with torch.no_grad(), torch.inference_mode(is_inference or self._buffer.is_inference()):
                self._buffer.copy_(self._copy)
        return is_written


def read_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _view_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes, in which a NaN is equal to itself."""
    return tensor.detach().reshape(-1).view(torch.uint8)
