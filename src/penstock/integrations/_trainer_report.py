"""The report of a planned training: all of its plans, and the steps that no plan was for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from penstock.executor import ExecutionReport
from penstock.tables import report_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Steps of a training, with the plans that they ran by; times and bytes are means of steps."""

    num_steps: int
    """Updates of the model."""
    num_planned_steps: int
    """Of them, those that ran as planned."""
    num_padded_steps: int
    """Of the planned ones, those whose batch was padded up to the length of a plan."""
    num_ordinary_steps: int
    """Updates without a plan, under `penstock.offload`."""
    padding: str
    """Whether batches are padded to the lengths of plans, and if not, why."""
    padded_share: float
    """Of all positions of planned steps, those that the padding has added."""
    num_plans: int
    """Plans that steps have run by."""
    arena_bytes: int
    """Device memory for values; of the plan that takes most."""
    workspace_bytes: int
    """Device memory that operators may take beyond that; of the plan that takes most."""
    host_bytes: int
    """Host memory of copies."""
    file_bytes: int
    """File space of copies."""
    moved_bytes: dict[str, int]
    """Of a planned step, for each link."""
    step_seconds: float
    """Of a planned step: the mean over plans of their medians, by their numbers of steps."""
    predicted_step_seconds: float
    """As the plans' simulations have it."""
    stall_seconds: float
    """Of a planned step: time for which the computation waited for transfers."""
    plans: tuple[ExecutionReport, ...]
    """Of each plan, in the order in which they were made; of one that was bound again, twice."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "plans"
        ]
        return report_table(rows, title="penstock.plan_training")


def training_report(
    plans: Sequence[ExecutionReport],
    *,
    num_plans: int,
    num_padded: int,
    num_ordinary: int,
    padding: str,
    padded_share: float,
) -> TrainingReport:
    """Sum up the reports of plans.

    Args:
        plans: Those that have run.
        num_plans: How many different ones.
        num_padded: Steps with padding.
        num_ordinary: Steps without a plan.
        padding: Whether batches are padded, or why not.
        padded_share: Of all positions, those of padding.

    Returns:
        The report.
    """
    num_planned = sum(each.num_steps for each in plans)

    def mean(value: str) -> float:
        total = sum(getattr(each, value) * each.num_steps for each in plans)
        return total / max(1, num_planned)

    def most(value: str) -> int:
        return max((getattr(each, value) for each in plans), default=0)

    links = dict.fromkeys(link for each in plans for link in each.moved_bytes)
    moved = {
        link: sum(each.moved_bytes.get(link, 0) * each.num_steps for each in plans)
        // max(1, num_planned)
        for link in links
    }
    return TrainingReport(
        num_steps=num_planned + num_ordinary,
        num_planned_steps=num_planned,
        num_padded_steps=num_padded,
        num_ordinary_steps=num_ordinary,
        padding=padding,
        padded_share=padded_share,
        num_plans=num_plans,
        arena_bytes=most("arena_bytes"),
        workspace_bytes=most("workspace_bytes"),
        host_bytes=most("host_bytes"),
        file_bytes=most("file_bytes"),
        moved_bytes=moved,
        step_seconds=mean("step_seconds"),
        predicted_step_seconds=mean("predicted_step_seconds"),
        stall_seconds=mean("stall_seconds"),
        plans=tuple(plans),
    )
