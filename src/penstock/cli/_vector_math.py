"""A guard against PyTorch's first-call race, for runs whose results are compared bit by bit.

On the CPU, PyTorch hands `tanh`, `exp` and their like to MKL's vector mathematics from all its
threads at once. MKL chooses the kernel of each function at its first call, and MKL 2024.2, which
the wheels of PyTorch hold, does not guard that choice: once in a few dozen processes, one thread
computes its part of the very first call with a kernel of lower accuracy (pytorch/pytorch#188792).
Everything after it then differs in its last bits, in a run that is otherwise deterministic.
"""

from __future__ import annotations

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    *("erf", "erfc", "erfinv", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2"),
    *("rsqrt", "sqrt"),
)


def settle_vector_math() -> None:
    """Call every function once from a single thread, so that its kernel is chosen for good."""
    import torch

    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype, device="cpu")  # in the domain of all of them
        for name in _FUNCTIONS:
            getattr(torch, name)(half)
