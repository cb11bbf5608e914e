"""Steps of several jobs: their chunks in micro-batches, and each job's update after its last chunk.

A job's bits do not depend on its neighbours, because

- chunks are cut by the job's own data, and their gradients are added in the job's order;
- each chunk has leaves of its own, attention and loss of its own rows, and masks from its own seed;
- rows of a product keep their bits at the numbers of rows that were probed (`_row_sizes.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.lora._packing import pack
from penstock.lora._schedule import JobBatches, Schedule
from penstock.lora.jobs._job import JobUpdate, TrainingJob, describe
from penstock.lora.jobs._losses import check_total
from penstock.lora.jobs._micro_batch import MicroBatch, TokenChunk, join_targets
from penstock.lora.jobs._packed_model import PackedModel
from penstock.lora.jobs._row_sizes import RowSizes


@dataclass
class PassCounts:
    """Passes so far, for the report."""

    micro_batches: int = 0
    least_micro_batches: int = 0
    tokens: int = 0
    filler_rows: int = 0


@dataclass(frozen=True)
class PackingLimits:
    """Arguments of `penstock.lora.pack`: the pipeline's depth and the seconds of its search."""

    depth: int
    seconds: float


def run_steps(
    jobs: Sequence[TrainingJob],
    packed: PackedModel,
    sizes: RowSizes,
    *,
    num_steps: int,
    packing: PackingLimits,
    counts: PassCounts,
) -> None:
    """Make the next updates of some jobs.

    Args:
        jobs: Jobs that are running.
        packed: The model.
        sizes: Rows of micro-batches.
        num_steps: Updates of each job at most.
        packing: The limits of their packing.
        counts: Is added to.
    """
    started = time.perf_counter()
    updates = {job.name: found for job in jobs if (found := _draw(job, num_steps))}
    if not updates:
        return
    schedule = _pack(updates, sizes, packing)
    counts.least_micro_batches += schedule.lower_bound
    with packed.open():
        for pieces in schedule.micro_batches:
            parts = [(updates[piece.job][piece.step], piece.piece) for piece in pieces]
            wanted = [part for part in parts if part[0].is_wanted]
            if wanted:
                _run_micro_batch(wanted, packed, sizes, counts)
            for update in {id(update): update for update, _ in wanted}.values():
                if update.is_complete:
                    update.apply()
    elapsed = time.perf_counter() - started
    for found in updates.values():
        made = sum(update.num_tokens for update in found if update.is_applied)
        found[0].job.seconds += elapsed
        found[0].job.tokens_per_second = made / elapsed


def _draw(job: TrainingJob, num_steps: int) -> list[JobUpdate]:
    """Return a job's next updates; an exception of its data is the job's failure."""
    first = job.num_steps
    last = min(first + num_steps, job.settings.num_steps)
    try:
        return [job.draw(step) for step in range(first, last)]
    except Exception as error:
        job.fail(f"its data raised {describe(error)}")
        return []


def _pack(updates: dict[str, list[JobUpdate]], sizes: RowSizes, packing: PackingLimits) -> Schedule:
    batches = [
        JobBatches(name, [[chunk.num_rows for chunk in update.chunks] for update in found])
        for name, found in updates.items()
    ]
    return pack(batches, sizes.most, pipeline_depth=packing.depth, time_limit=packing.seconds)


def _run_micro_batch(
    parts: list[tuple[JobUpdate, int]], packed: PackedModel, sizes: RowSizes, counts: PassCounts
) -> None:
    chunks = [update.chunks[number] for update, number in parts]
    num_rows = sizes.fit(sum(chunk.num_rows for chunk in chunks))
    batch = MicroBatch(chunks, num_rows, packed.device)
    logits = batch.split(packed.run(batch))
    losses: list[Tensor] = []
    kept: list[tuple[JobUpdate, TokenChunk, Tensor]] = []
    for (update, _), chunk, rows in zip(parts, chunks, logits, strict=True):
        try:
            total = update.job.loss(rows, join_targets(chunk, rows.device))
            check_total(total)
        except Exception as error:
            update.job.fail(f"its loss raised {describe(error)}")
            continue
        kept.append((update, chunk, total))
        losses.append(total.sum() / update.num_targets)
    if losses:
        torch.autograd.backward(losses)
    for (update, chunk, _), loss in zip(kept, losses, strict=True):
        update.add(chunk, float(loss.detach()))
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    counts.micro_batches += 1
    counts.tokens += num_tokens
    counts.filler_rows += num_rows - num_tokens
