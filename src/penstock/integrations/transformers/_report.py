"""The report of a planned training: all of its plans, and the steps without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.executor import ExecutionReport
from penstock.tables import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingReport(Report, title="penstock.plan_training", hidden={"plans"}):
    """Steps of a training and their plans; times and bytes are means of steps."""

    num_steps: int
    """Updates of the model."""
    num_planned_steps: int
    """Updates that ran as planned."""
    num_padded_steps: int
    """Planned updates with a batch that was padded up to the length of a plan."""
    num_ordinary_steps: int
    """Updates without a plan, under `penstock.offload`."""
    padding: str
    """``"padded"``, or the reason why batches are not padded to the lengths of plans."""
    padded_share: float
    """Share of padding among all positions of planned steps."""
    num_plans: int
    """Number of plans that were run."""
    arena_bytes: int
    """Device memory for values, of the largest plan."""
    workspace_bytes: int
    """Device memory for workspaces of operators, of the largest plan."""
    host_bytes: int
    """Host memory of copies."""
    file_bytes: int
    """File space of copies."""
    moved_bytes: dict[str, int]
    """Bytes of a planned step on each link."""
    step_seconds: float
    """Time of a planned step: the mean of the plans' medians, weighted by steps."""
    predicted_step_seconds: float
    """Simulated time of a planned step, averaged in the same way."""
    stall_seconds: float
    """Time of a planned step for which the computation waited for transfers."""
    plans: tuple[ExecutionReport, ...]
    """The report of each plan, in their order; a plan that was bound again has two."""


def summarize_plans(plans: Sequence[ExecutionReport]) -> dict[str, Any]:
    """Return the fields of a training's report that follow from the reports of its plans."""
    num_planned = sum(each.num_steps for each in plans)
    divisor = max(1, num_planned)

    def total(values: Iterable[Any]) -> Any:
        return sum(each.num_steps * value for each, value in zip(plans, values, strict=True))

    sizes = ("arena_bytes", "workspace_bytes", "host_bytes", "file_bytes")
    times = ("step_seconds", "predicted_step_seconds", "stall_seconds")
    links = dict.fromkeys(link for each in plans for link in each.moved_bytes)
    return {
        "num_planned_steps": num_planned,
        "moved_bytes": {
            link: total(each.moved_bytes.get(link, 0) for each in plans) // divisor
            for link in links
        },
        "plans": tuple(plans),
        **{name: max((getattr(each, name) for each in plans), default=0) for name in sizes},
        **{name: total(getattr(each, name) for each in plans) / divisor for name in times},
    }
