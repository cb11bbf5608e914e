"""Private names of torch's compiler front end."""

from types import FunctionType

from torch._compile import _disable_dynamo as disable_dynamo

__all__ = ["disable_dynamo", "skip_frames"]


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
