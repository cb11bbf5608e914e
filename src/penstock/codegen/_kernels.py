"""Kernels of an operator: the implementation that a call takes, and Triton's tiles and launches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from penstock.compat.packages import is_installed

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
    return "Triton" if device_type == "cuda" and is_installed("triton") else "torch"


def ceil_div(length: int, block: int) -> int:
    """Return how many blocks cover a length."""
    return -(-length // block)


def ceil_power(number: int, least: int = 1) -> int:
    """Return the least power of two that is not below a number, nor below another power."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def product_precision() -> Literal["tf32", "ieee"]:
    """Return how Triton multiplies float32: as `torch.backends.cuda.matmul` says."""
    import torch

    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


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
