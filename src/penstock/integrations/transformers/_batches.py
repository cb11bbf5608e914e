"""A trainer's batches: the forms of an epoch, padding that does not change the loss, and buckets.

An update is a list of micro-batches. Two updates have the same kind if they differ only in the
lengths to which their rows were padded.

An epoch is read before training in a process of its own: random states, files and other state of a
data set are those of a copy of the process, so training is not affected.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock.compat.random_numbers import keep_all_random_states

_logger = logging.getLogger(__name__)

Batch = dict[str, Any]
Update = list[Batch]
Lengths = tuple[int, ...]
"""The length of all rows of an update; and that of their targets for a model with encoder and
decoder."""
Kind = tuple[Any, ...]

_TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask")
_MASK = "attention_mask"
_MASKS = (_MASK, "decoder_attention_mask")
_IGNORED = -100  # cross entropy leaves out this label
_MOST_WASTE = 0.03  # share of padding among all positions
_MAX_SECONDS = 20.0  # for reading an epoch
_MAX_BATCHES = 5000


class Padding:
    """Padding on the right: masked positions with ignored labels."""

    def __init__(self, pad_token: int, is_encoder_decoder: bool) -> None:
        self._has_targets = is_encoder_decoder
        self._fills = {
            "input_ids": pad_token,
            "decoder_input_ids": pad_token,
            _MASK: 0,
            "decoder_attention_mask": 0,
            "token_type_ids": 0,
            "position_ids": 0,
            "special_tokens_mask": 1,
            "labels": _IGNORED,
        }

    def find_lengths(self, update: Update) -> Lengths | None:
        """Return the greatest lengths among micro-batches; None if they cannot be padded."""
        found = [self._find_batch_lengths(batch) for batch in update]
        if None in found:
            return None
        return tuple(map(max, zip(*[each for each in found if each is not None], strict=True)))

    def find_kind(self, update: Update) -> Kind:
        """Return the kind of an update; updates of one kind can be padded to one form."""
        return tuple(self._find_batch_kind(batch) for batch in update)

    def resize(self, update: Update, lengths: Lengths) -> Update:
        """Return the update with rows of these lengths: padded, or cut if they are longer."""
        return [self._resize_batch(batch, lengths) for batch in update]

    def _find_batch_lengths(self, batch: Batch) -> Lengths | None:
        mask = batch.get(_MASK)
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return None
        lengths: list[int | None] = [mask.shape[1], None]
        for name, value in batch.items():
            group = self._find_length(name, value)
            if group is not None:
                length = value.shape[1]
                if lengths[group] not in (None, length):
                    return None
                lengths[group] = length
            elif isinstance(value, torch.Tensor) and mask.shape[1] in value.shape[1:]:
                return None  # an unknown tensor with an axis of positions
        return tuple(each for each in lengths if each is not None)

    def _find_length(self, name: str, value: object) -> int | None:
        """Return the index of the length of a tensor's rows; None if it is not padded."""
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or name not in self._fills:
            return None
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return None
        return int(self._has_targets and name in _TARGETS)

    def _find_batch_kind(self, batch: Batch) -> Kind:
        return tuple(
            (name, str(value.dtype), value.shape[0])
            if self._find_length(name, value) is not None
            else (name, *read_form(value))
            for name, value in sorted(batch.items())
        )

    def _resize_batch(self, batch: Batch, lengths: Lengths) -> Batch:
        resized = {}
        for name, value in batch.items():
            group = self._find_length(name, value)
            if group is not None and value.shape[1] != lengths[group]:
                missing = lengths[group] - value.shape[1]  # below zero it cuts
                value = torch.nn.functional.pad(value, (0, missing), value=self._fills[name])
            resized[name] = value
        return resized


def read_form(value: object, *, with_masks: bool = False) -> Kind:
    """Return the form of a batch or of a part of it; batches of one form have one plan.

    With masks, masks that mask nothing are a form of their own.
    """
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, Mapping):
        full = [name for name in _MASKS if with_masks and _is_full(value.get(name))]
        found = ((name, *read_form(each)) for name, each in sorted(value.items()))
        return (*found, ("full", *full)) if full else tuple(found)
    if isinstance(value, list | tuple):
        return tuple(read_form(each, with_masks=with_masks) for each in value)
    return (repr(value),)


def mask_partly(update: Update) -> Update:
    """Return an update of the same form with masks that mask something, to plan for any mask."""
    made = []
    for batch in update:
        changed = {name: batch[name].clone() for name in _MASKS if _is_full(batch.get(name))}
        for mask in changed.values():
            mask[0, -1] = 0
        made.append({**batch, **changed})
    return made


def _is_full(mask: object) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask == 1).all())


def take_rows(batch: Batch, num_rows: int) -> Batch:
    """Return the first rows of a batch; its attention mask tells the tensors that have rows."""
    present = batch[_MASK].shape[0]
    return {
        name: value[:num_rows]
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == present
        else value
        for name, value in batch.items()
    }


def choose_buckets(seen: Counter[Lengths], most: int) -> list[Lengths]:
    """Choose lengths to pad to: few, and with little padding.

    With lengths l in increasing order, c(i, j) the padding of those from i to j to the greatest,
    and W(k, j) the least padding of the first j in k buckets:

        W(k, j) = min over i < j of W(k - 1, i) + c(i, j)

    Example:
        >>> choose_buckets(Counter({(10,): 90, (11,): 10, (40,): 50}), 2)
        [(11,), (40,)]

    Args:
        seen: The lengths with their counts.
        most: The greatest number of buckets.

    Returns:
        The buckets, increasing: the fewest with at most 3 % padding, or `most` with the least.
    """
    lengths = sorted(seen)
    counts = [seen[each] for each in lengths]
    total = sum(count * sum(each) for each, count in zip(lengths, counts, strict=True))
    num = len(lengths)
    cost = [[0] * (num + 1) for _ in range(num)]
    for i in range(num):
        for j in range(i + 1, num + 1):
            top = sum(_find_greatest(lengths[i:j]))
            members = zip(lengths[i:j], counts[i:j], strict=True)
            cost[i][j] = sum(count * (top - sum(each)) for each, count in members)
    least: list[list[float]] = [[0.0] + [float("inf")] * num]
    ends: list[list[int]] = []
    for _ in range(min(most, num)):
        row, cuts = [float("inf")] * (num + 1), [0] * (num + 1)
        for j in range(1, num + 1):
            row[j], cuts[j] = min((least[-1][i] + cost[i][j], i) for i in range(j))
        least.append(row)
        ends.append(cuts)
        if row[num] <= _MOST_WASTE * total:
            break
    found, j = [], num
    for cuts in reversed(ends):
        found.append(_find_greatest(lengths[cuts[j] : j]))
        j = cuts[j]
    return sorted(set(found))


def choose_longer(lengths: Lengths, choices: Sequence[Lengths]) -> Lengths | None:
    """Return the choice with the least padding for an update; None if all are too short."""
    fitting = [
        each
        for each in choices
        if len(each) == len(lengths) and all(a >= b for a, b in zip(each, lengths, strict=True))
    ]
    return min(fitting, key=sum, default=None)


def group_updates(batches: Sequence[Batch], num_micro_batches: int) -> list[Update]:
    """Group the batches of an epoch by update; the last one may have fewer."""
    each = iter(batches)
    return list(iter(lambda: list(itertools.islice(each, num_micro_batches)), []))


def _find_greatest(lengths: Sequence[Lengths]) -> Lengths:
    return tuple(map(max, zip(*lengths, strict=True)))


def read_epoch(loader: object, *, with_masks: bool = False) -> list[Batch] | None:
    """Read the batches of an epoch as a trainer's loader would draw them.

    Batches of one form are one object. At most as many are read as 20 seconds allow. Returns None
    if reading would affect training, as for an iterable data set.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return None
    with keep_all_random_states():
        try:
            sampler = copy.deepcopy(loader.batch_sampler, {id(loader.dataset): loader.dataset})
            indices = [list(each) for each in itertools.islice(sampler, _MAX_BATCHES)]
        except Exception as error:  # a sampler that cannot be copied; it is the user's code
            _logger.info("the sampler cannot be copied, lengths are learned in training: %s", error)
            return None
        return _read(loader, indices, with_masks)


def _read(
    loader: DataLoader[Any], indices: list[list[int]], with_masks: bool
) -> list[Batch] | None:
    seen: set[Kind] = set()

    def collate(samples: list[Any]) -> tuple[Kind, Batch | None]:
        """Return the form of a batch, and the batch itself if its form is new."""
        collated: Any = loader.collate_fn(samples)
        batch: Batch = dict(collated)
        form = read_form(batch, with_masks=with_masks)
        is_new = form not in seen
        seen.add(form)
        return form, batch if is_new else None

    reader = DataLoader(
        loader.dataset,
        batch_sampler=indices,
        collate_fn=collate,
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=loader.worker_init_fn,
    )
    found: list[Batch] = []
    known: dict[Kind, Batch] = {}
    begin = time.monotonic()
    try:
        for form, batch in reader:
            if batch is not None:
                known[form] = batch
            found.append(known[form])
            if time.monotonic() - begin > _MAX_SECONDS:
                _logger.info("lengths are those of %d batches of an epoch", len(found))
                break
    except Exception as error:  # raised by the user's data set, and again when it trains
        _logger.info("an epoch cannot be read ahead, lengths are learned in training: %s", error)
        return None
    return found
