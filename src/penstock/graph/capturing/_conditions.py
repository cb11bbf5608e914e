"""Conditions under which a program is captured: one thread at a time, and errors that explain."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from unittest import mock

import torch

from penstock.compat.fake_tensors import FakeTensor
from penstock.compat.user_line import is_raised_by_user, user_line_of
from penstock.errors import CaptureError, PenstockError
from penstock.graph.capturing._program_lines import describe_line
from penstock.graph.capturing.recorder import Recorder

_lock = threading.RLock()
"""Held while a step is captured: parts of torch are patched then, for all threads."""


@contextlib.contextmanager
def isolate_capture() -> Iterator[None]:
    """Let one thread capture at a time, without garbage collection, and translate errors.

    Python would search the growing record for cycles again and again.
    """
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with _translate_torch_errors():
                yield
        finally:
            if was_enabled:
                gc.enable()


@contextlib.contextmanager
def _translate_torch_errors() -> Iterator[None]:
    """Turn errors that torch raises into errors that name the line of the program."""
    try:
        yield
    except (PenstockError, TypeError, ValueError):
        raise
    except Exception as error:
        is_unsupported = "supported for tensor subclasses" in str(error)
        if is_raised_by_user(error) and not is_unsupported:
            raise
        raise CaptureError(
            f"{describe_line(user_line_of(error))}: torch cannot run this on tensors without data, "
            f"as a capture does ({type(error).__name__}: {error}){_remedy(error)}"
        ) from error


def _remedy(error: Exception) -> str:
    """Name the alternative that models have, where it is known."""
    # Each version of torch words its refusal otherwise; the function that refuses keeps its name.
    calls = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any("grouped_mm" in text for text in (str(error), *calls)):
        return (
            '; models of Transformers with experts take experts_implementation="batched_mm", whose '
            "products torch can run"
        )
    return ""


@contextlib.contextmanager
def name_optimizer_in_errors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Add to errors in the optimizer's step the optimizer's class, and the alternatives."""
    try:
        yield
    except CaptureError as error:
        kind = type(optimizer).__name__
        tensors = [
            f"optimizer.param_groups[{number}][{key!r}]"
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, torch.Tensor)
        ]
        if tensors:
            way = f"{', '.join(tensors)} is a tensor: make it a Python number (schedules change it)"
        else:
            way = (
                "use one whose steps are alike (SGD, Adam, AdamW, Adagrad, RMSprop, NAdam, Adamax, "
                "Adadelta, Rprop, Muon), or this one without a plan under penstock.offload"
            )
        raise CaptureError(f"the optimizer {kind} cannot be captured: {error}; {way}") from error


@contextlib.contextmanager
def patch_transformers_checks(recorder: Recorder) -> Iterator[None]:
    """Let Transformers read constant values, and so branch as it does in eager mode.

    It asks whether a tensor is fake before it reads one, and takes another path with other kernels.
    In half precision that gives other bits, so there it may also read a batch's masks if they mask
    nothing; the step is then for such batches.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(library, "is_fake_tensor"):
        yield
        return

    def is_fake_tensor(tensor: object) -> bool:
        if not isinstance(tensor, FakeTensor):
            return False
        return not (recorder.is_constant(tensor) or recorder.follows_full_mask(tensor))

    with mock.patch.object(library, "is_fake_tensor", is_fake_tensor):
        yield
