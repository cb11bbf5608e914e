"""Kernels of an operator: the implementation that a call takes, and launches of Triton's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

KernelName = Literal["C++", "Triton", "torch"]


def name_kernels(device_type: str, is_built: Callable[[], bool]) -> KernelName:
    """Return the implementation that computes an operator on a device: C++, Triton's, or torch's.

    Example:
        >>> name_kernels("cpu", lambda: True), name_kernels("cpu", lambda: False)
        ('C++', 'torch')

    Args:
        device_type: Type of the operands' device.
        is_built: Returns whether the operator's C++ could be built; asked on the CPU only.
    """
    if device_type == "cpu":
        return "C++" if is_built() else "torch"
    return "Triton" if device_type == "cuda" and _has_triton() else "torch"


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


COMPILER_OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": True}
"""Options of all kernels: `a * b + c` is rounded once. Until Triton 3.9, which warns, they are so
where nothing is said."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TritonLaunch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: The kernel.
        grid: Programs in each dimension.
        arguments: Arguments by place.
        constants: Arguments by name.
        num_warps: Warps of a program.
        num_stages: Tiles on their way.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    def __call__(self) -> None:
        """Launch the kernel, unless there is nothing to do."""
        if 0 not in self.grid:
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **COMPILER_OPTIONS}


Run = Callable[[TritonLaunch], None]
"""Takes each launch of a call, in order; `launch` runs it."""


def launch(each: TritonLaunch) -> None:
    """Launch a kernel."""
    each()


def use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU current: Triton launches there, whatever its arguments are on."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    import torch

    return torch.cuda.device(device)
