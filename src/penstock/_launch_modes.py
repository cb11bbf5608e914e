"""What `penstock run` does to a script: its activations leave, or its trainers run as planned."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.activations import Offload, OffloadReport
    from penstock.executor import ExecutionReport
    from penstock.integrations.transformers import PlannedTraining


class Offloading:
    """Saved activations leave the device.

    Args:
        offload: Made, not entered.
        trace_path: Where to write the last step as a Chrome trace.
        picture_path: Where to draw the last step.
    """

    def __init__(
        self, offload: Offload, trace_path: Path | None, picture_path: Path | None
    ) -> None:
        self._offload = offload
        self._trace_path, self._picture_path = trace_path, picture_path

    def running(self) -> AbstractContextManager[object]:
        """The block in which the script runs."""
        return self._offload

    def results(self) -> tuple[dict[str, Any], list[str]]:
        """Write what was asked for; return entries of the report, and lines for people."""
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
    """Each step of a trainer runs as planned.

    Args:
        options: Of `penstock.integrations.transformers.plan_trainers`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from penstock.integrations.transformers import plan_trainers

        self._trainers = plan_trainers(**options)
        self._trainings: list[PlannedTraining] = []

    def running(self) -> AbstractContextManager[object]:
        """The block in which the script runs."""
        stack = ExitStack()
        self._trainings = stack.enter_context(self._trainers)
        return stack

    def results(self) -> tuple[dict[str, Any], list[str]]:
        """Return entries of the report, and lines for people."""
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
        f"{report.num_steps} steps saved {format_bytes(report.saved_bytes)}; "
        f"{format_bytes(report.offloaded_bytes)} ({share:.0%}) left the device, "
        f"at most {format_bytes(report.peak_device_bytes)} were on it at once; "
        f"waited {format_seconds(report.stall_seconds)}",
        f"policy {report.policy}: {report.reason}",
    ]


def _planned_line(report: ExecutionReport) -> str:
    return (
        f"{report.num_steps} steps in {format_bytes(report.arena_bytes + report.workspace_bytes)}; "
        f"{format_bytes(sum(report.moved_bytes.values()))} moved in each; "
        f"{format_seconds(report.step_seconds)} a step (planned "
        f"{format_seconds(report.predicted_step_seconds)}), "
        f"waited {format_seconds(report.stall_seconds)}"
    )
