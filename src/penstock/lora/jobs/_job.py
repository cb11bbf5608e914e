"""One job: its adapter, optimizer and schedule, and the update that follows its own batch alone."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from penstock.lora._adapters import Adapter
from penstock.lora.jobs._data import SampleOrder, TokenSample
from penstock.lora.jobs._losses import Loss
from penstock.lora.jobs._micro_batch import TokenChunk, count_targets
from penstock.lora.jobs._report import JobReport
from penstock.lora.jobs._seeds import derive_seed

if TYPE_CHECKING:
    from peft import LoraConfig

State = Literal["running", "paused", "finished", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """The arguments of a job that decide its bits, as plain numbers.

    Attributes:
        batch_size: Samples of one pass of a loop over this job alone.
        accumulation: Passes whose gradients make one update.
        clipping: The largest norm of an update's gradient; None: no limit.
        num_steps: Updates until the job is finished.
        seed: Of the adapter's initial weights, the order of samples and the dropout masks.
        chunk_tokens: Tokens of a chunk of several samples at most.
    """

    batch_size: int
    accumulation: int
    clipping: float | None
    num_steps: int
    seed: int
    chunk_tokens: int

    @property
    def num_samples(self) -> int:
        """Samples of one update."""
        return self.batch_size * self.accumulation


@dataclass(eq=False)
class TrainingJob:
    """A job with all that changes while it is trained."""

    name: str
    config: LoraConfig
    settings: JobSettings
    data: SampleOrder
    loss: Loss
    adapters: Mapping[str, Adapter]
    """By layer the job's parameters themselves."""
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    state: State = "running"
    reason: str = ""
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    losses: list[float] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        """The matrices of all layers, down and up in turn."""
        return [each for a in self.adapters.values() for each in (a.down, a.up)]

    def draw(self, step: int) -> JobUpdate:
        """Read the samples of an update, by its number, and cut them into chunks.

        Raises:
            Exception: Whatever the data raises.
            ValueError: A sample is no longer what it was when the job was added.
        """
        count = self.settings.num_samples
        samples = [self.data.read(step * count + i) for i in range(count)]
        groups = cut_into_chunks(samples, self.settings.chunk_tokens)
        chunks = [self._make_chunk(step, number, group) for number, group in enumerate(groups)]
        return JobUpdate(self, step, chunks)

    def _make_chunk(self, step: int, number: int, samples: Sequence[TokenSample]) -> TokenChunk:
        return TokenChunk(
            job=self.name,
            number=number,
            samples=samples,
            adapters={
                name: Adapter(_leaf(each.down), _leaf(each.up), each.scaling, each.dropout)
                for name, each in self.adapters.items()
            },
            seeds={
                name: derive_seed(self.settings.seed, "mask", name, step, number)
                for name in self.adapters
            },
        )

    def fail(self, reason: str) -> None:
        """End the job; its adapter stays as it is."""
        self.state, self.reason = "failed", reason

    def report(self) -> JobReport:
        """Return the job's progress."""
        groups = self.optimizer.param_groups
        return JobReport(
            name=self.name,
            state=self.state,
            reason=self.reason or None,
            num_steps=self.num_steps,
            num_planned_steps=self.settings.num_steps,
            loss=self.losses[-1] if self.losses else None,
            learning_rate=float(groups[0]["lr"]) if groups and "lr" in groups[0] else None,
            num_tokens=self.num_tokens,
            tokens_per_second=self.tokens_per_second,
            losses=tuple(self.losses),
        )


def _leaf(parameter: Tensor) -> Tensor:
    """Return a leaf with a gradient of its own that shares a parameter's storage."""
    return parameter.detach().requires_grad_()


def cut_into_chunks(samples: Sequence[TokenSample], most: int) -> list[list[TokenSample]]:
    """Return samples in order in groups of at most `most` tokens, or of one sample."""
    groups: list[list[TokenSample]] = []
    room = 0
    for sample in samples:
        if not groups or sample.num_tokens > room:
            groups.append([])
            room = most
        groups[-1].append(sample)
        room -= sample.num_tokens
    return groups


class JobUpdate:
    """The gradient of one update: those of its chunks, added up in the order of the chunks.

    The order is the job's own whatever the order of micro-batches: sums of floating-point numbers
    have the bits of their order. Gradients of chunks that are not next wait.

    Attributes:
        job: The job.
        step: Number of the update.
        chunks: All chunks of the update.
        num_targets: Targets of all of them, by which the sum of losses is divided (the token mean
            over the whole batch, as Transformers' `num_items_in_batch`).
    """

    def __init__(self, job: TrainingJob, step: int, chunks: list[TokenChunk]) -> None:
        self.job, self.step, self.chunks = job, step, chunks
        self.num_targets = count_targets(chunks)
        self._waiting: dict[int, tuple[float, list[Tensor | None]]] = {}
        self._total: list[Tensor | None] = [None] * len(job.parameters)
        self._loss, self._next = 0.0, 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_wanted(self) -> bool:
        """Tell that this is the job's next update, and the job is running."""
        return self.job.state == "running" and self.job.num_steps == self.step

    @property
    def is_applied(self) -> bool:
        """Tell that the job has made this update."""
        return self.job.num_steps > self.step

    @property
    def is_complete(self) -> bool:
        """Tell that all chunks were added."""
        return self._next == len(self.chunks)

    def add(self, chunk: TokenChunk, loss: float) -> None:
        """Take the gradients of a chunk's leaves, and its part of the loss."""
        leaves = [each for a in chunk.adapters.values() for each in (a.down, a.up)]
        self._waiting[chunk.number] = (loss, [leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
        while (found := self._waiting.pop(self._next, None)) is not None:
            self._loss += found[0]
            self._total = [
                gradient if total is None else total if gradient is None else total.add_(gradient)
                for total, gradient in zip(self._total, found[1], strict=True)
            ]
            self._next += 1

    def apply(self) -> None:
        """Clip, step and schedule: the job is afterwards one step further, or has failed.

        An interrupt waits until that is done.
        """
        job = self.job
        if not math.isfinite(self._loss):
            return job.fail(f"the loss of step {job.num_steps} is {self._loss}")
        if not _are_finite([each for each in self._total if each is not None]):
            return job.fail(f"a gradient of step {job.num_steps} is not finite")
        with hold_interrupts():
            self._step()

    def _step(self) -> None:
        job = self.job
        memory = [parameter.detach() for parameter in job.parameters]
        before = [each.clone() for each in memory]
        for parameter, gradient in zip(job.parameters, self._total, strict=True):
            parameter.grad = gradient
        try:
            if job.settings.clipping is not None:
                torch.nn.utils.clip_grad_norm_(job.parameters, job.settings.clipping)
            job.optimizer.step()
            _keep_memory(job.parameters, memory)
        except Exception as error:
            for parameter, saved in zip(job.parameters, before, strict=True):
                parameter.data.copy_(saved)
            job.fail(f"the optimizer of step {job.num_steps} raised {describe(error)}")
            return
        finally:
            for parameter in job.parameters:
                parameter.grad = None
        job.losses.append(self._loss)
        job.num_steps += 1
        job.num_tokens += self.num_tokens
        try:
            if job.schedule is not None:
                job.schedule.step()
        except Exception as error:
            job.fail(f"the schedule after step {job.num_steps - 1} raised {describe(error)}")
            return
        if job.num_steps >= job.settings.num_steps:
            job.state = "finished"


def _keep_memory(parameters: list[Tensor], memory: list[Tensor]) -> None:
    """Put parameters back into their memory, which leaves of later updates share.

    Some optimizers do not change a parameter in place, but give it another tensor as `.data`.
    """
    for parameter, own in zip(parameters, memory, strict=True):
        if parameter.data_ptr() != own.data_ptr():
            own.copy_(parameter.detach())
            parameter.data = own


def _are_finite(gradients: list[Tensor]) -> bool:
    """Tell that all numbers are finite; their norm is where they are, unless it overflows."""
    return bool(torch.nn.utils.get_total_norm(gradients).isfinite()) or all(
        bool(each.isfinite().all()) for each in gradients
    )


def describe(error: BaseException) -> str:
    """Return an exception as a reason for a report."""
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done; other threads than the first get none anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[Any] = []
    try:
        before = signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    except ValueError:  # an interpreter within another one's thread
        yield
        return
    try:
        yield
    finally:
        # None stands for a handler that was not set from Python, which cannot be set again.
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if held and callable(before):
            before(*held[0])
        elif held and before != signal.SIG_IGN:
            raise KeyboardInterrupt
