"""Launches of Triton kernels: compiled ahead, and what is wrong with one is said by its launch."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest

pytest.importorskip("triton")


def test_a_kernel_that_python_cannot_parse_in_time_is_left_to_its_launch():
    """Until 3.12, parsing fails now and then while other threads parse."""
    from penstock.rgnn.backends.triton._launch import KernelLaunch, compile_together

    class Kernel:
        device_caches: ClassVar[dict[int, Any]] = {}

        def warmup(self, *arguments: Any, **options: Any) -> None:
            raise error

    launch = KernelLaunch(Kernel(), (1,), (), {})
    error: Exception = SystemError("AST constructor recursion depth mismatch")
    compile_together(lambda take: take(launch))
    error = ValueError("what is wrong with the kernel")
    with pytest.raises(ValueError, match="wrong with the kernel"):
        compile_together(lambda take: take(launch))


def test_what_failed_in_a_thread_is_not_kept():
    """As Triton 3.8 keeps it, whose launches would raise the same without compiling again."""
    from triton.runtime._async_compile import active_mode

    from penstock.rgnn.backends.triton._launch import KernelLaunch, compile_together

    class Kernel:
        device_caches: ClassVar[dict[int, Any]] = {0: ({}, {})}

        def warmup(self, *arguments: Any, **options: Any) -> None:
            cache, _ = self.device_caches[0]
            for key, compile_it in (("good", str), ("bad", lambda: 1 // 0)):
                mode = active_mode.get()
                ends = len(inspect.signature(mode.submit).parameters) - 2  # one more in 3.9
                made = mode.submit(key, compile_it, *[lambda _: None] * ends)
                cache[key] = made if key == "bad" else made.future.result()

    compile_together(lambda take: take(KernelLaunch(Kernel(), (1,), (), {})))
    assert Kernel.device_caches[0][0] == {"good": ""}
