"""Plans for a trainer's batches: some lengths, to which others are padded, and ordinary steps.

Lengths are learned from an epoch of the trainer's loader. Batches are padded if that does not
change the loss: masked positions, labels that are ignored, no random numbers; that is tried out on
the model before it trains. Otherwise each form of batches has a plan of its own.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.activations import offload
from penstock.compat.random_numbers import keep_all_random_states
from penstock.errors import InfeasibleError
from penstock.executor import ExecutionReport, PlannedStep, fit
from penstock.integrations.transformers._batches import (
    Kind,
    Lengths,
    Padding,
    Update,
    choose_buckets,
    choose_longer,
    group_updates,
    mask_partly,
    read_epoch,
    read_form,
    take_rows,
)
from penstock.integrations.transformers._loss import TrainerLoss
from penstock.tables import Report
from penstock.units import format_bytes, parse_bytes

_logger = logging.getLogger(__name__)

_MOST_BUCKETS = 6
_MOST_FORMS = 16  # plans made before training, without padding
_RARE = 2  # ordinary steps of a form without a plan before it gets one
_ROOM = 0.5  # share of an ordinary step's free bytes for saved tensors; the rest for operators
_SECONDS = 60.0  # default time for planning, as in `fit`
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative; sums in another order
_HALF_TOLERANCE = 2e-2


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


class PlannedShapes:
    """A planned step for the forms of a trainer's updates, made before its first step."""

    def __init__(
        self,
        trainer: Any,
        loss: TrainerLoss,
        options: Mapping[str, Any],
        lengths: Sequence[int | Sequence[int]] | None,
        *,
        first: tuple[Update, torch.Tensor | int | None],
    ) -> None:
        self._trainer, self._loss, self._options = trainer, loss, dict(options)
        self._optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        config = getattr(loss.model, "config", None)
        tokens = (
            getattr(each, "pad_token_id", None) for each in (trainer.processing_class, config)
        )
        # The position is masked, so any token is right.
        pad_token = next((token for token in tokens if token is not None), 0)
        self._pad = Padding(pad_token, bool(getattr(config, "is_encoder_decoder", False)))
        self._most_positions = getattr(config, "max_position_embeddings", None)
        self._planned: dict[Kind, list[Lengths]] = {}
        self._forms: set[Kind] = set()
        self._unplanned: Counter[Kind] = Counter()
        # Transformers runs other kernels if a mask masks nothing; in half precision their
        # roundings differ, so a plan for such masks is for no others.
        self._dtypes = {each.dtype for each in loss.parameters() if each.dtype.is_floating_point}
        self._is_half = trainer.args.bf16 or not self._dtypes <= _TOLERANCES.keys()
        self._num_ordinary = self._num_padded = self._positions = self._padded_positions = 0
        update, self._num_items = first
        epoch = self._read_updates(update)
        self._padding = self._decide_padding(epoch, lengths)
        chosen = self._choose_updates(epoch, lengths)
        if self._pads:
            chosen = [mask_partly(each) for each in chosen]
        self._step = self._fit([self._note(each) for each in chosen])
        _logger.info(
            "planned for %d forms of batches; %s: %s",
            len(chosen),
            "padding" if self._pads else "no padding",
            ", ".join(str(self._pad.find_lengths(each) or "one form") for each in chosen),
        )

    @property
    def _pads(self) -> bool:
        return self._padding == "padded"

    def step(self, update: Update, num_items: torch.Tensor | int | None) -> torch.Tensor | None:
        """Take a step; return the loss, or None if it has to be an ordinary step."""
        self._num_items = num_items
        fitting = self._find_fitting(update)
        if fitting is None and self._may_run_ordinary(update):
            self._num_ordinary += 1
            return None
        if fitting is None:
            fitting = self._plan_now(update)
        loss = self._step(self._loss.make_batch(fitting, num_items))
        num_positions, num_own = _count_positions(fitting), _count_positions(update)
        self._num_padded += num_positions > num_own
        self._positions += num_positions
        self._padded_positions += num_positions - num_own
        return loss

    @contextmanager
    def offload_step(self) -> Iterator[None]:
        """Offload in the block of an ordinary step, within the budget beside model and state."""
        self._step.release()
        with offload(
            self._options["store"],
            device_memory=max(1, int(self._count_free_bytes() * _ROOM)),
            min_bytes="64KiB",
        ):
            yield

    def close(self) -> None:
        """Move model and optimizer to memory of their own."""
        self._step.close()

    def report(self) -> TrainingReport:
        """Sum up the steps of all plans."""
        plans = self._step.reports()
        num_planned = sum(each.num_steps for each in plans)

        def total(values: Iterable[Any]) -> Any:
            return sum(each.num_steps * value for each, value in zip(plans, values, strict=True))

        sizes = ("arena_bytes", "workspace_bytes", "host_bytes", "file_bytes")
        times = ("step_seconds", "predicted_step_seconds", "stall_seconds")
        links = dict.fromkeys(link for each in plans for link in each.moved_bytes)
        moved = {link: total(each.moved_bytes.get(link, 0) for each in plans) for link in links}
        divisor = max(1, num_planned)
        return TrainingReport(
            num_steps=num_planned + self._num_ordinary,
            num_planned_steps=num_planned,
            num_padded_steps=self._num_padded,
            num_ordinary_steps=self._num_ordinary,
            padding=self._padding,
            padded_share=self._padded_positions / max(1, self._positions),
            num_plans=len(self._forms),
            moved_bytes={link: num_bytes // divisor for link, num_bytes in moved.items()},
            plans=tuple(plans),
            **{name: max((getattr(each, name) for each in plans), default=0) for name in sizes},
            **{name: total(getattr(each, name) for each in plans) / divisor for name in times},
        )

    def _read_updates(self, first: Update) -> list[Update]:
        """Return the updates of an epoch, or the first one alone if they cannot be read."""
        args = self._trainer.args
        loader = self._trainer.callback_handler.train_dataloader
        batches = read_epoch(loader, with_masks=self._is_half)
        if not batches:
            return [first]
        prepared = {id(each): dict(self._trainer._prepare_inputs(each)) for each in batches}
        updates = group_updates(
            [prepared[id(each)] for each in batches], args.gradient_accumulation_steps
        )
        return updates[: max(1, self._trainer.state.max_steps)]

    def _read_form(self, update: Update) -> Kind:
        return read_form(update, with_masks=self._is_half)

    def _find_lengths(self, update: Update) -> Lengths | None:
        return self._pad.find_lengths(update) if self._pads else None

    def _find_fitting(self, update: Update) -> Update | None:
        """Return the update in a form that has a plan, padded if need be; None if there is none."""
        if self._read_form(update) in self._forms:
            return update
        lengths = self._find_lengths(update)
        if lengths is None:
            return None
        longer = choose_longer(lengths, self._planned.get(self._pad.find_kind(update), []))
        return None if longer is None else self._pad.resize(update, longer)

    def _choose_updates(
        self, epoch: list[Update], lengths: Sequence[int | Sequence[int]] | None
    ) -> list[Update]:
        """Return an update of each form that is planned before training."""
        forms: dict[Kind, Update] = {}
        counts: Counter[Kind] = Counter()
        if not self._pads:
            for each in epoch:
                forms.setdefault(self._read_form(each), each)
                counts[self._read_form(each)] += 1
            return [forms[form] for form, _ in counts.most_common(_MOST_FORMS)]
        seen: dict[Kind, Counter[Lengths]] = {}
        for each in epoch:
            kind, own = self._pad.find_kind(each), self._pad.find_lengths(each)
            assert own is not None
            forms.setdefault(kind, each)
            seen.setdefault(kind, Counter())[own] += 1
        frequent = max(seen, key=lambda kind: seen[kind].total())
        top = tuple(map(max, zip(*(each for one in seen.values() for each in one), strict=True)))
        chosen = []
        for kind, update in forms.items():
            if kind != frequent:  # the last batch of an epoch, which has any length in the next one
                choice = [top]
            elif lengths is not None:
                choice = [_expand_lengths(each, len(top)) for each in lengths]
            else:
                choice = choose_buckets(seen[kind], _MOST_BUCKETS)
            chosen += [self._pad.resize(update, each) for each in choice]
        return chosen

    def _fit(self, updates: list[Update]) -> PlannedStep:
        args, num_items = self._trainer.args, self._num_items
        batches = [self._loss.make_batch(each, num_items) for each in updates]
        accumulates = args.gradient_accumulation_steps > 1
        options = dict(self._options)
        options["time_limit"] = options.get("time_limit", _SECONDS) / len(batches)
        return fit(
            self._loss,
            self._optimizer,
            batches[0],
            before_step=self._loss.clip,
            accumulate=len(updates[0]) if accumulates else None,
            extra_batches=batches[1:],
            **options,
        )

    def _note(self, update: Update) -> Update:
        """Note that the form of an update has a plan."""
        self._forms.add(self._read_form(update))
        lengths = self._find_lengths(update)
        if lengths is not None:
            self._planned.setdefault(self._pad.find_kind(update), []).append(lengths)
        return update

    def _plan_now(self, update: Update) -> Update:
        """Plan for an update of another form, in the middle of training."""
        lengths = self._find_lengths(update)
        if lengths is not None:  # similar lengths will follow
            most = self._most_positions or max(lengths) * 2
            longer = tuple(max(each, min(most, -(-each * 9 // 64) * 8)) for each in lengths)
            update = self._pad.resize(update, longer)
        _logger.warning(
            "no plan for a batch %s; planning for it now", _describe(update), stacklevel=2
        )
        planned = mask_partly(update) if self._pads else update
        try:
            self._step.add(self._loss.make_batch(planned, self._num_items))
        except InfeasibleError as error:
            raise InfeasibleError(f"a batch {_describe(update)}: {error}") from error
        self._note(planned)
        return update

    def _may_run_ordinary(self, update: Update) -> bool:
        """Return whether an update without a plan runs as an ordinary step: rare, and it fits."""
        store = self._options.get("store")
        if not isinstance(store, str | os.PathLike) or self._count_free_bytes() <= 0:
            return False
        lengths = self._find_lengths(update)
        key = (
            self._read_form(update) if lengths is None else ("padded", self._pad.find_kind(update))
        )
        self._unplanned[key] += 1
        if self._unplanned[key] > _RARE:
            return False
        if not self._num_ordinary:
            _logger.warning(
                "no plan for a batch %s: an ordinary step, under offload in the %s that the budget "
                "leaves; further ones are counted in the report",
                _describe(update),
                format_bytes(self._count_free_bytes()),
            )
        return True

    def _count_free_bytes(self) -> int:
        """Return the budget minus parameters, their gradients, buffers and optimizer state."""
        model = self._loss.model
        values = (value for each in self._optimizer.state.values() for value in each.values())
        state = [value for value in values if isinstance(value, torch.Tensor)]
        gradients = [each for each in model.parameters() if each.requires_grad]
        tensors = [*model.parameters(), *model.buffers(), *gradients, *state]
        budget = parse_bytes(self._options["device_memory"], name="device_memory")
        return budget - sum(each.nbytes for each in tensors)

    def _decide_padding(
        self, epoch: list[Update], chosen: Sequence[int | Sequence[int]] | None
    ) -> str:
        """Return "padded", or the reason why batches are not padded."""
        lengths = [self._pad.find_lengths(each) for each in epoch]
        known = [each for each in lengths if each is not None]
        if len(known) < len(lengths):
            return "not padded: batches have no attention_mask, or tensors that are not known"
        if chosen is None and len({read_form(each) for each in epoch}) == 1 and len(epoch) > 1:
            return "not padded: all batches have one form"
        shortest = min(zip(known, epoch, strict=True), key=lambda pair: sum(pair[0]))[1]
        longest = tuple(map(max, zip(*known, strict=True)))
        if longest == self._pad.find_lengths(shortest):
            longest = tuple(each + 1 for each in longest)
            if self._most_positions is not None and max(longest) > self._most_positions:
                return "not padded: batches have the greatest length that the model takes"
        return self._try_padding(shortest, longest)

    def _try_padding(self, update: Update, longer: Lengths) -> str:
        """Compare losses of two rows without and with padding."""
        rows = [take_rows(update[0], 2)]
        buffers = [(each, each.clone()) for each in self._loss.buffers()]
        losses = []
        with keep_all_random_states(), torch.no_grad():
            before = torch.get_rng_state()
            for each in (rows, self._pad.resize(rows, longer)):
                batch = self._loss.make_batch(each, self._num_items)
                one = batch[0] if isinstance(batch, list) else batch
                losses.append(self._loss(**one).float().item())
            is_random = not torch.equal(before, torch.get_rng_state())
            for buffer, value in buffers:
                buffer.copy_(value)
        if is_random:
            return "not padded: the model draws random numbers (dropout), by positions"
        tolerance = (
            _HALF_TOLERANCE if self._is_half else max(_TOLERANCES[each] for each in self._dtypes)
        )
        if abs(losses[0] - losses[1]) > tolerance * abs(losses[0]):
            return f"not padded: the loss of a batch would be {losses[1]} instead of {losses[0]}"
        return "padded"


def check_lengths(lengths: Sequence[int | Sequence[int]] | None) -> None:
    """Refuse lengths that are neither positive numbers nor tuples of them.

    Raises:
        ValueError: They are not; the message names the argument.
    """
    for given in lengths if lengths is not None else [1]:
        found = (given,) if isinstance(given, int) else tuple(given)
        if not found or not all(isinstance(each, int) and each > 0 for each in found):
            raise ValueError(
                f"lengths={lengths!r}: each has to be a positive number, or a pair of them for a "
                "model with encoder and decoder"
            )
    if lengths is not None and not lengths:
        raise ValueError("lengths=[]: name at least one length, or None to learn them")


def _expand_lengths(given: int | Sequence[int], num: int) -> Lengths:
    found = (given,) * num if isinstance(given, int) else tuple(given)
    if len(found) != num:
        raise ValueError(f"lengths: {given!r} has to be {num} numbers for this model's batches")
    return found


def _count_positions(update: Update) -> int:
    return sum(
        each["attention_mask"].numel()
        for each in update
        if isinstance(each.get("attention_mask"), torch.Tensor)
    )


def _describe(update: Update) -> str:
    shapes = [
        f"{name} {tuple(value.shape)}"
        for name, value in update[0].items()
        if isinstance(value, torch.Tensor)
    ]
    return f"of {len(update)} x [{', '.join(shapes)}]" if len(update) > 1 else ", ".join(shapes)
