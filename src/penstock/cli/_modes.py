"""Modes of `penstock run`: activations are offloaded, or trainers run as planned."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.activations import Offload, OffloadReport
    from penstock.integrations.transformers import PlannedTraining, TrainingReport

_logger = logging.getLogger(__name__)


class NothingPlannedError(PenstockError):
    """A script under --plan trains with a loop of its own, or not at all."""


class Offloading:
    """The mode in which saved activations leave the device."""

    def __init__(
        self, offload: Offload, trace_path: Path | None, picture_path: Path | None
    ) -> None:
        self._offload = offload
        self._trace_path, self._picture_path = trace_path, picture_path

    @property
    def has_trained(self) -> bool:
        """True if there is anything to report."""
        return self._offload.report().num_saved > 0

    def running(self) -> AbstractContextManager[object]:
        """Return the context manager in which the script runs."""
        return self._offload

    def finish(self) -> None:
        """Accept a script that has come to its end."""

    def results(self) -> tuple[dict[str, Any], list[str]]:
        """Write the trace and the picture; return entries of the report, and lines to print."""
        report = self._offload.report()
        if self._trace_path or self._picture_path:
            from penstock.report import draw_timeline, write_chrome_trace

            timeline = self._offload.timeline()
            if self._trace_path:
                write_chrome_trace(timeline, self._trace_path)
            if self._picture_path:
                draw_timeline(timeline, self._picture_path)
        entries = {
            "offload": report.to_dict(),
            "trace": str(self._trace_path) if self._trace_path else None,
            "picture": str(self._picture_path) if self._picture_path else None,
        }
        return entries, _offload_lines(report)


class Planning:
    """The mode in which each step of a trainer runs as planned.

    `options` are those of `plan_trainers`. If it is optional, a script that trains with a loop of
    its own runs without a plan.
    """

    def __init__(self, options: dict[str, Any], *, is_optional: bool = False) -> None:
        from penstock.integrations.transformers import plan_trainers

        self._trainers = plan_trainers(**options)
        self._trainings: list[PlannedTraining] = []
        self._is_optional = is_optional
        self._has_own_loop = False
        self._has_planned_itself = False

    @property
    def has_trained(self) -> bool:
        """True if there is anything to report."""
        return any(each.report() is not None for each in self._trainings)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surround the script with the planning of its trainers."""
        from unittest import mock

        import torch

        backward = torch.autograd.backward

        def checked_backward(*args: Any, **kwargs: Any) -> Any:
            self._check_loop()
            return backward(*args, **kwargs)

        with (
            mock.patch.object(torch.autograd, "backward", checked_backward),  # of Tensor.backward
            self._trainers as self._trainings,
        ):
            yield

    def finish(self) -> None:
        """Accept a script that has come to its end, if steps of it were planned.

        Raises:
            NothingPlannedError: No step was planned, and planning is not optional.
        """
        if not (self._is_optional or self.has_trained or self._has_planned_itself):
            raise NothingPlannedError(
                "no transformers.Trainer took a step in the script, so nothing was planned; "
                "--plan=auto accepts that"
            )

    def _check_loop(self) -> None:
        """Refuse the first backward pass of a loop of the script's own, or say so once."""
        from penstock.integrations.transformers import is_training

        if self._has_own_loop or is_training():
            return
        if _is_called_by_penstock():  # penstock.fit, called by the script
            self._has_planned_itself = True
            return
        line = _script_line()
        said = (
            f"{line} calls backward() outside of a transformers.Trainer: --plan plans the steps "
            "of a Trainer, and nothing of this loop"
        )
        if not self._is_optional:
            raise NothingPlannedError(
                f"{said}. Call penstock.fit in the script, run it without --plan to offload its "
                "activations, or with --plan=auto to go on without a plan"
            )
        self._has_own_loop = True
        _logger.warning("%s; it goes on without a plan (--plan=auto)", said)

    def results(self) -> tuple[dict[str, Any], list[str]]:
        """Return entries of the report, and lines to print."""
        reports = [training.report() for training in self._trainings]
        done = [report for report in reports if report is not None]
        lines = [_planned_line(report) for report in done]
        return (
            {"planned": [report.to_dict() for report in done]},
            lines or ["no transformers.Trainer took a step in the script; nothing was planned"],
        )


def _offload_lines(report: OffloadReport) -> list[str]:
    if report.num_saved == 0:
        return ["the script saved no activations for a backward pass; nothing was offloaded"]
    share = report.offloaded_bytes / max(report.saved_bytes, 1)
    return [
        f"{_count(report.num_steps, 'step')} saved {format_bytes(report.saved_bytes)}; "
        f"{format_bytes(report.offloaded_bytes)} ({share:.0%}) left the device, "
        f"at most {format_bytes(report.peak_device_bytes)} were on it at once; "
        f"waited {format_seconds(report.stall_seconds)}",
        f"policy {report.policy}: {report.reason}",
    ]


_HERE = Path(__file__).parent
_PACKAGE = _HERE.parent


def _is_called_by_penstock() -> bool:
    """Return whether a backward pass is part of a capture, and not the script's own."""
    for frame in traceback.extract_stack()[::-1]:
        path = Path(frame.filename)
        if _PACKAGE in path.parents and path != Path(__file__):
            return path.parent != _HERE  # frames of `penstock run` itself are around every script
    return False


def _script_line() -> str:
    """Return the innermost line that belongs to no installed package."""
    import torch

    packages = (str(Path(torch.__file__).parents[1]), str(_PACKAGE), "<frozen")
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(packages):
            return f"{frame.filename}:{frame.lineno}"
    return "the script"


def _planned_line(report: TrainingReport) -> str:
    line = (
        f"{_count(report.num_planned_steps, 'step')} by {_count(report.num_plans, 'plan')} in "
        f"{format_bytes(report.arena_bytes + report.workspace_bytes)}; "
        f"{format_bytes(sum(report.moved_bytes.values()))} moved in each; "
        f"{format_seconds(report.step_seconds)} a step (planned "
        f"{format_seconds(report.predicted_step_seconds)}), "
        f"waited {format_seconds(report.stall_seconds)}"
    )
    if report.num_padded_steps:
        line += f"; {report.num_padded_steps} padded"
    if report.num_ordinary_steps:
        line += f"; {_count(report.num_ordinary_steps, 'ordinary step')} beside them"
    return line


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
