"""Launches of Triton kernels: compiled ahead, and what is wrong with one is said by its launch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")


def test_a_kernel_that_python_cannot_parse_in_time_is_left_to_its_launch():
    """Until 3.12, parsing fails now and then while other threads parse."""
    from penstock.rgnn._backends._triton._launch import Launch, compile_together

    class Kernel:
        def warmup(self, *arguments: Any, **options: Any) -> None:
            raise error

    launch = Launch(Kernel(), (1,), (), {})
    error: Exception = SystemError("AST constructor recursion depth mismatch")
    compile_together(lambda take: take(launch))
    error = ValueError("what is wrong with the kernel")
    with pytest.raises(ValueError, match="wrong with the kernel"):
        compile_together(lambda take: take(launch))
