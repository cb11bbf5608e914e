"""Private names of torch's compiler front end.

What `torch.compiler` has for the same is not used where modules are imported: it imports Dynamo,
which takes longer than torch itself.
"""

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from torch._compile import _disable_dynamo as disable_dynamo

__all__ = ["disable_dynamo", "mark_constant", "run_uncompiled", "skip_frames"]

F = TypeVar("F", bound=FunctionType)


def mark_constant(function: F) -> F:
    """Have a function run while its caller is traced, as `torch.compiler.assume_constant_result`.

    Args:
        function: The function; its result is a constant of what is compiled.

    Returns:
        The function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def run_uncompiled(*, reason: str) -> Callable[[F], F]:
    """Keep a function, and what it calls, out of compiled graphs, as `torch.compiler.disable`.

    Args:
        reason: Said where a graph breaks there.

    Returns:
        A decorator.
    """

    def mark(function: F) -> F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        skip_frames(function)
        return function

    return mark


def skip_frames(function: FunctionType) -> bool:
    """Keep Dynamo from compiling a function where it is called between two compiled pieces.

    Traced as part of another function it stays inlinable, so `torch.compiler.disable`, which breaks
    the graph there, will not do; it also costs 10 microseconds a call.

    Args:
        function: The function.

    Returns:
        Whether this release of torch has a way to do it.
    """
    from torch._C._dynamo import eval_frame

    if not hasattr(eval_frame, "set_code_exec_strategy"):  # then: one needless small graph
        return False
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    return True
