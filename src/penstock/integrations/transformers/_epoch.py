"""The batches of an epoch, read before training in a process of its own.

Random states, files and other state of a data set are those of a copy of the process, so training
is not affected.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock.integrations.transformers._batches import Batch, read_form

_logger = logging.getLogger(__name__)

_MAX_SECONDS = 20.0
_MAX_BATCHES = 5000


def read_epoch(loader: object, *, with_masks: bool = False) -> list[Batch] | None:
    """Read the batches of an epoch as a trainer's loader would draw them.

    Batches of one form are one object. At most as many are read as 20 seconds allow. Returns None
    if reading would affect training, as for an iterable data set.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return None
    with preserve_random_states():
        try:
            indices = _draw_indices(loader)
        except Exception as error:  # a sampler that cannot be copied; it is the user's code
            _logger.info("the sampler cannot be copied, lengths are learned in training: %s", error)
            return None
        return _read(loader, indices, with_masks)


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python after the block."""
    # Data sets that seed NumPy use its legacy state.
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _draw_indices(loader: DataLoader[Any]) -> list[list[int]]:
    sampler = copy.deepcopy(loader.batch_sampler, {id(loader.dataset): loader.dataset})
    assert sampler is not None
    return [list(each) for _, each in zip(range(_MAX_BATCHES), sampler, strict=False)]


def _read(
    loader: DataLoader[Any], indices: list[list[int]], with_masks: bool
) -> list[Batch] | None:
    reader = DataLoader(
        loader.dataset,
        batch_sampler=indices,
        collate_fn=_NewForms(loader.collate_fn, with_masks),
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=loader.worker_init_fn,
    )
    found: list[Batch] = []
    known: dict[Any, Batch] = {}
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


class _NewForms:
    """A collator that returns the form of each batch, and the batch itself if its form is new."""

    def __init__(self, collate: Callable[[list[Any]], Any], with_masks: bool) -> None:
        self._collate, self._with_masks = collate, with_masks
        self._seen: set[Any] = set()

    def __call__(self, samples: list[Any]) -> tuple[Any, Batch | None]:
        batch = dict(self._collate(samples))
        form = read_form(batch, with_masks=self._with_masks)
        if form in self._seen:
            return form, None
        self._seen.add(form)
        return form, batch
