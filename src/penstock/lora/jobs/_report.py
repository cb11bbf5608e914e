"""Progress of one job, and of all jobs together, for a live table or for JSON."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tables import Report


@dataclass(frozen=True, kw_only=True)
class JobReport(Report, title="penstock.lora.Jobs: job", hidden={"losses"}):
    """Progress of one job; printing it shows a table without the losses."""

    name: str
    state: str
    """One of "running", "paused", "finished" and "failed"."""
    reason: str | None
    """The reason of a failure."""
    num_steps: int
    """Updates that were made."""
    num_planned_steps: int
    """Updates after which the job is finished."""
    loss: float | None
    """Mean over the targets of the last update's batch, before the update."""
    learning_rate: float | None
    """Rate of the next update."""
    num_tokens: int
    """Tokens of all updates."""
    tokens_per_second: float
    """Tokens of the job's last update by the seconds of that step of all jobs."""
    losses: tuple[float, ...]
    """Losses of all updates."""


@dataclass(frozen=True, kw_only=True)
class JobsReport(Report, title="penstock.lora.Jobs", hidden={"jobs"}):
    """All jobs of one base; printing it shows a table, in which each job has one row."""

    is_exact: bool
    """A job's losses and weights have the same bits beside any neighbours, as far as the probes of
    this machine, model and number of threads show."""
    inexact_reason: str | None
    """The reason where they may not."""
    num_least_rows: int
    """Rows of the smallest micro-batch: products of fewer rows round otherwise, or were not
    probed."""
    num_most_rows: int
    """Rows of the largest micro-batch."""
    num_micro_batches: int
    """Passes so far."""
    num_least_micro_batches: int
    """Passes that no packing of the same chunks into the same rows is below."""
    num_tokens: int
    """Tokens of samples in these passes."""
    num_filler_rows: int
    """Rows without a sample in these passes."""
    pipeline_depth: int
    """Micro-batches between a job's consecutive steps."""
    jobs: tuple[JobReport, ...]

    def _rows(self) -> list[tuple[str, object]]:
        def describe(job: JobReport) -> str:
            loss = "" if job.loss is None else f", loss {job.loss:.4g}"
            reason = "" if job.reason is None else f": {job.reason}"
            return f"{job.state}, {job.num_steps}/{job.num_planned_steps} steps{loss}{reason}"

        return [*super()._rows(), *((job.name, describe(job)) for job in self.jobs)]
