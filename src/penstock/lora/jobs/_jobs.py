"""Several fine-tuning jobs on one base: their adapters come and go, and are trained together.

`_training.py` runs their steps; `_checkpoint.py` keeps them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from penstock.lora._adapters import Adapter
from penstock.lora.jobs import _checkpoint
from penstock.lora.jobs._checks import (
    check_adapters_kept,
    check_base,
    check_config,
    check_name,
    check_positions,
    count_writes,
    find_inexact_dtype,
)
from penstock.lora.jobs._comparison import Trial
from penstock.lora.jobs._data import SampleOrder
from penstock.lora.jobs._insertion import AdapterHost, check_owner, claim_base, release_base
from penstock.lora.jobs._job import JobSettings, TrainingJob, hold_interrupts
from penstock.lora.jobs._losses import Loss, check_loss, sum_cross_entropy
from penstock.lora.jobs._micro_batch import BLOCK_ROWS
from penstock.lora.jobs._optimizers import (
    MakeOptimizer,
    MakeSchedule,
    check_makers,
    make_optimizer,
    make_schedule,
)
from penstock.lora.jobs._packed_model import PackedModel
from penstock.lora.jobs._report import JobReport, JobsReport
from penstock.lora.jobs._row_sizes import find_row_sizes
from penstock.lora.jobs._training import PackingLimits, PassCounts, run_steps
from penstock.units import parse_count

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

_CHUNKS_PER_MICRO_BATCH = 4
_TRIAL_TARGETS = 16  # of a sample on which a user's loss is tried


class Jobs:
    """Fine-tuning jobs on one base, each trained as if it were alone.

    Each job has an adapter of its own; the base is in memory once and frozen. Micro-batches hold
    samples of many jobs back to back (LoRAFusion, arXiv:2510.00206, section 5), and a job's update
    follows exactly its own batch. In float32 on the CPU a job's losses and weights have the same
    bits whatever runs beside it, where `report().is_exact` says so.

    Example:
        >>> base = transformers.AutoModelForCausalLM.from_pretrained("...")  # doctest: +SKIP
        >>> jobs = Jobs(base, max_tokens=2048)  # doctest: +SKIP
        >>> jobs.add(  # doctest: +SKIP
        ...     "summaries",
        ...     [tokenizer(text)["input_ids"] for text in texts],
        ...     LoraConfig(r=16, lora_dropout=0.1),
        ...     optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        ...     batch_size=8,
        ...     num_steps=500,
        ... )
        >>> jobs.run()  # doctest: +SKIP
        >>> jobs.save("checkpoints")  # doctest: +SKIP

    Args:
        base_model: A causal language model of Transformers without adapters, whose dropouts are 0.
            It is changed as PEFT changes it, until `close`.
        max_tokens: The most tokens of a micro-batch, and of a sample. Filler may add a few rows.
        chunk_tokens: Tokens that samples of one job have together at most to be packed as one
            piece. A job's bits depend on it. None: a quarter of `max_tokens`.
        pipeline_depth: Micro-batches between a job's consecutive steps at least, as
            `penstock.lora.pack` takes it.
        packing_seconds: The most that the search for fewer micro-batches may take in a step.

    Raises:
        TypeError: The model is no causal language model of Transformers, or has adapters.
        ValueError: The model has dropout or positions with which jobs would depend on each other,
            another `Jobs` has it, or a number is below 1.
    """

    @torch.inference_mode(False)
    @torch.enable_grad()
    def __init__(
        self,
        base_model: PreTrainedModel,
        *,
        max_tokens: int,
        chunk_tokens: int | None = None,
        pipeline_depth: int = 1,
        packing_seconds: float = 0.1,
    ) -> None:
        max_tokens = parse_count(max_tokens, name="max_tokens", least=1)
        pipeline_depth = parse_count(pipeline_depth, name="pipeline_depth", least=1)
        if chunk_tokens is None:
            chunk_tokens = max(1, max_tokens // _CHUNKS_PER_MICRO_BATCH)
        chunk_tokens = parse_count(chunk_tokens, name="chunk_tokens", least=1)
        if chunk_tokens > max_tokens:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; accepted are 1 to {max_tokens}")
        check_owner(base_model, self)
        check_base(base_model)
        known = getattr(base_model.config.get_text_config(), "max_position_embeddings", None)
        self._most_tokens = min(max_tokens, known or max_tokens)
        check_positions(base_model, self._most_tokens)
        self._base = base_model
        self._base_hash = _checkpoint.fingerprint_base(base_model)
        self._num_writes = count_writes(base_model)
        self._trainable = [each for each in base_model.parameters() if each.requires_grad]
        self._sizes = find_row_sizes(base_model, max(max_tokens, 4 * BLOCK_ROWS))
        self._inexact = find_inexact_dtype(base_model) or self._sizes.reason
        self._num_threads = torch.get_num_threads()
        self._max_tokens, self._chunk_tokens = max_tokens, chunk_tokens
        self._packing = PackingLimits(pipeline_depth, packing_seconds)
        self._packed = PackedModel(base_model)
        self._host = AdapterHost(self._packed)
        self._jobs: dict[str, TrainingJob] = {}
        self._counts = PassCounts()
        self._tried: set[str] = set()
        self._own_checkpoints: set[Path] = set()
        claim_base(base_model, self)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def add(
        self,
        name: str,
        data: Any,
        config: LoraConfig,
        *,
        optimizer: MakeOptimizer,
        schedule: MakeSchedule | None = None,
        batch_size: int = 1,
        accumulation: int = 1,
        clipping: float | None = None,
        num_steps: int,
        seed: int = 0,
        loss: Loss | None = None,
    ) -> None:
        """Add a job, at any time between steps; nothing of the other jobs changes.

        The data is read once and checked, and where a layer gets its first adapter packed samples
        are compared with stock PEFT's result for each alone, before anything is trained.

        Args:
            name: Letters, digits, "_" and "-"; the name of the adapter and of its folder.
            data: A sequence, or an iterable that ends, of samples: each a mapping with `input_ids`
                and, where they differ, `labels` (integers in one dimension; -100 is no target), or
                the tokens alone. Each epoch has an order of its own from `seed`; batches go on over
                the end of an epoch. A sample without a target is refused, and one that is not the
                same at each reading fails the job.
            config: Plain LoRA on linear layers.
            optimizer: Makes the optimizer of the adapter's parameters.
            schedule: Makes the schedule of the optimizer's learning rate, which goes on after every
                update; None: a fixed rate.
            batch_size: Samples of one pass of a loop over this job alone.
            accumulation: Passes whose gradients make one update: the loss is the mean over all
                targets of `batch_size * accumulation` samples.
            clipping: The largest norm of an update's gradient; None: no limit.
            num_steps: Updates until the job is finished.
            seed: Of the adapter's initial weights, the order of samples and the dropout masks.
            loss: Takes the logits `(n, vocabulary)` and targets `(n,)` of some whole samples one
                after the other, -100 where there is no target, and returns the sum of the targets'
                losses: it is tried on random logits of a sample, and of the sample twice. None:
                cross entropy.

        Raises:
            TypeError: The config is of another kind, or optimizer, schedule or loss no function.
            ValueError: An argument, a sample, the config or the model is one that cannot be trained
                exactly; the message names the job and the remedy.
        """
        if name in self._jobs:
            raise ValueError(
                f"job {name!r} exists already; remove it first, or choose another name"
            )
        claim_base(self._base, self)  # again after close
        check_name(name, self._base)
        check_makers(name, optimizer, schedule)
        settings = self._check_settings(
            name,
            batch_size=batch_size,
            accumulation=accumulation,
            clipping=clipping,
            num_steps=num_steps,
            seed=seed,
        )
        plain = check_config(name, config)
        vocab_size: int = self._base.get_input_embeddings().num_embeddings  # pyright: ignore
        order = SampleOrder(
            name, data, seed=seed, max_tokens=self._most_tokens, vocab_size=vocab_size
        )
        if loss is not None:
            like = next(self._base.parameters())
            check_loss(name, loss, order.take_targets(_TRIAL_TARGETS), vocab_size, like)
        try:
            adapters = self._host.insert(name, plain, seed)
            self._try(name, adapters)
            parameters = [each for a in adapters.values() for each in (a.down, a.up)]
            made = make_optimizer(name, optimizer, parameters)
            self._jobs[name] = TrainingJob(
                name=name,
                config=plain,
                settings=settings,
                data=order,
                loss=sum_cross_entropy if loss is None else loss,
                adapters=adapters,
                optimizer=made,
                schedule=make_schedule(name, schedule, made),
            )
        except BaseException:
            self._host.delete(name)
            raise
        finally:
            self._thaw()

    @property
    def peft_model(self) -> Any:
        """The PEFT model with the adapters of all jobs, for evaluation; None without a job.

        Between steps `set_adapter(name)` of it makes a job's adapter active.
        """
        return self._host.peft

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(self, num_steps: int = 1) -> dict[str, JobReport]:
        """Make the next updates of every running job.

        Ctrl-C leaves every job at the end of one of its updates; the next call goes on from there.

        Args:
            num_steps: Updates of each job. More of them at once are packed into fewer passes.

        Returns:
            The progress of the jobs that were running, by name.

        Raises:
            ValueError: The number is below 1, or the model no longer has a running job's adapter as
                it was added.
        """
        num_steps = parse_count(num_steps, name="num_steps", least=1)
        running = [job for job in self._jobs.values() if job.state == "running"]
        self._check_adapters(running)
        self._watch_passes()
        run_steps(
            running,
            self._packed,
            self._sizes,
            num_steps=num_steps,
            packing=self._packing,
            counts=self._counts,
        )
        return {job.name: job.report() for job in running}

    def run(
        self,
        *,
        num_steps: int | None = None,
        lookahead: int = 1,
        on_step: Callable[[JobsReport], object] | None = None,
    ) -> JobsReport:
        """Train until no job is running.

        Args:
            num_steps: Updates of each job at most; None: as many as they have.
            lookahead: Updates of each job that are packed together: more of them fit into fewer
                passes. Bits do not depend on it.
            on_step: Is called with the progress of all jobs after `lookahead` updates of each. It
                may add, pause, resume and remove jobs, and save.

        Returns:
            The progress of all jobs.

        Raises:
            ValueError: A number is below 1.
        """
        if num_steps is not None:
            num_steps = parse_count(num_steps, name="num_steps", least=1)
        lookahead = parse_count(lookahead, name="lookahead", least=1)
        made = 0
        while any(job.state == "running" for job in self._jobs.values()):
            if num_steps is not None and made >= num_steps:
                break
            count = lookahead if num_steps is None else min(lookahead, num_steps - made)
            self.step(count)
            made += count
            if on_step is not None:
                on_step(self.report())
        return self.report()

    def pause(self, name: str) -> None:
        """Leave a running job as it is until `resume`.

        Raises:
            ValueError: The job does not exist or is not running.
        """
        self._change_state(name, "running", "paused")

    def resume(self, name: str) -> None:
        """Go on with a paused job.

        Raises:
            ValueError: The job does not exist or is not paused.
        """
        self._change_state(name, "paused", "running")

    def remove(self, name: str) -> None:
        """Take a job and its adapter out of the model.

        Raises:
            ValueError: The job does not exist.
        """
        self._find(name)
        self._host.delete(name)
        del self._jobs[name]
        self._thaw()

    def report(self) -> JobsReport:
        """Return the progress of all jobs, and of their micro-batches."""
        return JobsReport(
            is_exact=not self._inexact,
            inexact_reason=self._inexact or None,
            num_least_rows=self._sizes.least,
            num_most_rows=self._sizes.most,
            num_micro_batches=self._counts.micro_batches,
            num_least_micro_batches=self._counts.least_micro_batches,
            num_tokens=self._counts.tokens,
            num_filler_rows=self._counts.filler_rows,
            pipeline_depth=self._packing.depth,
            jobs=tuple(job.report() for job in self._jobs.values()),
        )

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint of all jobs, which replaces the one before when it is whole.

        `path/latest/NAME` has a job's adapter as PEFT saves it: stock
        `PeftModel.from_pretrained(base, path/latest/NAME)` loads it.

        Args:
            path: Folder of the checkpoints; it is made.

        Returns:
            The folder of the new checkpoint, to which `path/latest` is a link.

        Raises:
            ValueError: There is no job, or the folder's latest checkpoint is another run's, which
                this `Jobs` neither wrote nor restored; the model no longer has a job's adapter; or
                the state of an optimizer or schedule could not be restored.
        """
        if not self._jobs:
            raise ValueError("there is no job to save: add one first")
        jobs = tuple(self._jobs.values())
        self._check_adapters(jobs)
        return _checkpoint.write_checkpoint(
            Path(path), self._header(), self._host.peft, jobs, self._own_checkpoints
        )

    def save_adapter(self, name: str, path: str | Path) -> None:
        """Write the adapter of one job as PEFT saves it.

        Args:
            name: The job.
            path: Folder of the adapter; it is made.

        Raises:
            ValueError: The job does not exist.
        """
        _checkpoint.write_adapter(self._host.peft, self._find(name), Path(path))

    @torch.inference_mode(False)
    @torch.enable_grad()
    def restore(self, path: str | Path) -> None:
        """Put the jobs where they were when they were saved; training goes on with the same bits.

        Functions and data are not part of a checkpoint: make `Jobs` and add the jobs as before,
        then restore. Nothing is changed if a job does not fit.

        Args:
            path: Folder of the checkpoints.

        Raises:
            FileNotFoundError: There is no checkpoint.
            ValueError: The base, a number, or the data, config or settings of a job is another, or
                a job of the checkpoint was not added, or one was added that it has not.
        """
        folder, saved = _checkpoint.read_checkpoint(Path(path), self._header())
        if saved.keys() != self._jobs.keys():
            raise ValueError(
                f"the checkpoint has the jobs {sorted(saved)}; added are {sorted(self._jobs)}: "
                "restore first and add or remove then"
            )
        states = {
            name: _checkpoint.read_states(folder, saved[name], job, self._host.peft)
            for name, job in self._jobs.items()
        }
        with hold_interrupts():
            for name, job in self._jobs.items():
                _checkpoint.apply_states(states[name], saved[name], job, self._host.peft)
            self._own_checkpoints.add(folder)

    def close(self) -> None:
        """Take all adapters out of the base and leave it as it was, for another `Jobs`."""
        for name in list(self._jobs):
            self.remove(name)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
        release_base(self._base, self)

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_settings(self, name: str, **given: Any) -> JobSettings:
        for key in ("batch_size", "accumulation", "num_steps"):
            given[key] = parse_count(given[key], name=f"job {name!r}: {key}", least=1)
        given["seed"] = parse_count(given["seed"], name=f"job {name!r}: seed")
        clipping = given["clipping"]
        if clipping is not None:
            if isinstance(clipping, bool) or not isinstance(clipping, numbers.Real):
                raise TypeError(f"job {name!r}: clipping is {clipping!r}; accepted are numbers")
            given["clipping"] = clipping = float(clipping)
            if not (clipping > 0 and math.isfinite(clipping)):
                raise ValueError(f"job {name!r}: clipping is {clipping}; accepted are above 0")
        return JobSettings(chunk_tokens=self._chunk_tokens, **given)

    def _try(self, name: str, adapters: dict[str, Adapter]) -> None:
        """Compare packed samples with stock PEFT, once for each layer that has adapters."""
        if adapters.keys() <= self._tried:
            return
        trial = Trial(self._packed, name, adapters, self._sizes, self._most_tokens)
        reason = trial.run()
        self._inexact = self._inexact or reason
        self._tried |= adapters.keys()

    def _thaw(self) -> None:
        """Give all adapters gradients again: PEFT froze those that it made inactive."""
        for job in self._jobs.values():
            for each in job.parameters:
                each.requires_grad_(True)

    def _find(self, name: str) -> TrainingJob:
        if name not in self._jobs:
            raise ValueError(f"there is no job {name!r}; the jobs are {sorted(self._jobs)}")
        return self._jobs[name]

    def _change_state(self, name: str, before: Any, after: Any) -> None:
        job = self._find(name)
        if job.state != before:
            reason = f" ({job.reason})" if job.reason else ""
            raise ValueError(f"job {name!r} is {job.state}{reason}, not {before}")
        job.state = after

    def _header(self) -> dict[str, Any]:
        return {
            "max_tokens": self._max_tokens,
            "chunk_tokens": self._chunk_tokens,
            "base": self._base_hash,
        }

    def _check_adapters(self, jobs: Iterable[TrainingJob]) -> None:
        layers = self._packed.find_layers()
        for job in jobs:
            check_adapters_kept(job.name, job.adapters, layers)

    def _watch_passes(self) -> None:
        """Note it where passes are computed in other ways than those that were probed."""
        if self._inexact:
            return
        if torch.is_autocast_enabled(self._packed.device.type):
            self._inexact = "passes run under torch.autocast; rows were probed without"
        elif torch.get_num_threads() != self._num_threads:
            self._inexact = (
                f"rows were probed with {self._num_threads} threads, and passes run with "
                f"{torch.get_num_threads()}"
            )
        elif (
            count_writes(self._base) != self._num_writes
            or _checkpoint.fingerprint_base(self._base) != self._base_hash
        ):
            self._inexact = "parameters of the base were changed, as merging and unmerging does"
