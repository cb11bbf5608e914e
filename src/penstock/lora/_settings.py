"""Settings of a layer with adapters: those of now, and those of the pass that is recomputed.

Gradient checkpointing calls a layer again during the backward pass. By then the names of a batch's
adapters are gone, and other adapters may be active than in the first pass. Autograd numbers its
nodes one after the other; so do the changes of a layer's settings lie between numbers, and the node
that asks for the recomputation tells by its own which settings held in the first pass.

Each thread has numbers of its own, from 0 on, and a node does not tell its thread. So what a layer
was called with is noted by thread; where threads whose node it may be differ, it is refused.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from penstock.compat.autograd import current_graph_task_id, current_node, next_sequence_number
from penstock.compat.dynamo import disable_dynamo
from penstock.lora._adapters import AdapterRows

BASE = "__base__"
"""PEFT's name for rows of no adapter."""

_MAX_CHANGES = 256  # of settings between a first pass and its recomputation
_MAX_THREADS = 16  # that call a layer; of earlier ones the settings alone are kept
_MAX_SEEDS = 512  # calls of a layer with dropout between a first pass and its recomputation


class AdapterNames(list[str]):
    """Names of the adapters of a batch's samples, with their rows grouped once for all layers."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._samples: dict[str, list[int]] = {}
        for number, name in enumerate(self):
            self._samples.setdefault(name, []).append(number)
        self._rows: dict[tuple[Any, ...], tuple[tuple[str, ...], AdapterRows]] = {}

    @disable_dynamo
    def group_rows(
        self, available: Sequence[str], x: torch.Tensor
    ) -> tuple[tuple[str, ...], AdapterRows]:
        """Return the adapters that a layer has among those named, and its rows by adapter.

        Args:
            available: Names of the layer's adapters.
            x: The layer's input, of shape `(samples, *, in_features)`.
        """
        used = tuple(name for name in available if name in self._samples)
        num_rows = x.shape[:-1].numel()
        key = (used, num_rows, x.device)
        if key not in self._rows:
            samples = [self._samples[name] for name in used]
            self._rows[key] = used, _expand(samples, len(self), num_rows, x.device)
        return self._rows[key]


def _expand(
    samples: list[list[int]], num_samples: int, num_rows: int, device: torch.device
) -> AdapterRows:
    """Return the rows of each adapter's samples, which have as many rows each."""
    each = num_rows // max(num_samples, 1)
    starts = [
        numbers[0] * each if numbers[-1] - numbers[0] == len(numbers) - 1 else -1
        for numbers in samples
    ]
    order = None
    if -1 in starts:
        first = torch.tensor(
            [number * each for numbers in samples for number in numbers], device="cpu"
        )
        order = (first[:, None] + torch.arange(each, device="cpu")).flatten().to(device)
    return AdapterRows(
        num_rows, tuple(len(numbers) * each for numbers in samples), tuple(starts), order
    )


class Settings(NamedTuple):
    """Settings of a layer that decide which adapters a row gets.

    Attributes:
        names: Names of the adapters by sample; None where the active ones have every row.
        active: The active adapters.
        is_disabled: Whether no adapter is added.
    """

    names: AdapterNames | None
    active: tuple[str, ...]
    is_disabled: bool


@dataclass
class _SettingsChange:
    start: int  # the number of the thread's next node at the time of the change
    settings: Settings
    was_used: bool = False  # by a first pass of this layer


@dataclass
class _ThreadHistory:
    """Settings of a layer as one thread called it.

    Attributes:
        changes: The changes, in the order of their numbers.
        last_use: The number of the thread's next node at the time of the last first pass.
        is_trained: Whether a first pass was one of training, or had gradients on: others count
            only where no thread has such a one (reentrant checkpointing turns gradients off).
    """

    changes: list[_SettingsChange]
    last_use: int = -1
    is_trained: bool = False

    def append(self, start: int, settings: Settings) -> None:
        """Note that the settings change at a number."""
        self.changes.append(_SettingsChange(start, settings))
        if len(self.changes) > _MAX_CHANGES:
            del self.changes[: _MAX_CHANGES // 4]

    def find(self, number: int) -> _SettingsChange:
        """Return the change whose settings held at a number."""
        place = bisect.bisect_right(self.changes, number, key=lambda change: change.start) - 1
        if place < 0:
            raise RuntimeError(
                f"the adapters of a layer were changed more than {_MAX_CHANGES} times between a "
                "forward pass with gradient checkpointing and its backward pass; call backward() "
                "earlier"
            )
        return self.changes[place]


@dataclass
class _History:
    threads: dict[int, _ThreadHistory] = field(default_factory=dict)
    forgotten: list[_SettingsChange] = field(default_factory=list)  # of threads beyond the most
    last_task: int = -1  # the backward pass that the last change was made in
    seeds: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_SEEDS))

    def add_thread(self, number: int, settings: Settings) -> _ThreadHistory:
        """Begin the history of a thread with the settings that it finds."""
        if len(self.threads) >= _MAX_THREADS:
            # Its settings stand for any number from here on; two that differ decide as many do.
            oldest = self.threads.pop(next(iter(self.threads)))
            for change in oldest.changes if oldest.is_trained else ():
                is_new = change.settings not in [each.settings for each in self.forgotten]
                if change.was_used and is_new and len(self.forgotten) < 2:
                    self.forgotten.append(change)
        found = self.threads[number] = _ThreadHistory([_SettingsChange(-1, settings, True)])
        return found

    def find(self, number: int) -> list[_SettingsChange]:
        """Return the changes that may have held in the first pass of a node, by thread."""
        threads = list(self.threads.values())
        trained = [thread for thread in threads if thread.is_trained]
        return [thread.find(number) for thread in trained or threads] + self.forgotten


class _ThreadNumber(threading.local):
    """A number for each thread that no other has, also after its end."""

    def __init__(self) -> None:
        self.number = next(_thread_numbers)


_thread_numbers = itertools.count()
_thread = _ThreadNumber()
_histories: weakref.WeakKeyDictionary[torch.nn.Module, _History] = weakref.WeakKeyDictionary()


def is_recomputing() -> bool:
    """Return whether this thread is in a backward pass, where only a recomputation calls layers."""
    return current_graph_task_id() != -1


def note_change(layer: torch.nn.Module, before: Settings, after: Settings) -> None:
    """Note that the settings of a layer change from here on."""
    if before == after:
        return
    history = _history_of(layer)
    history.last_task = current_graph_task_id()
    thread = history.threads.get(_thread.number)
    if thread is None:
        thread = history.add_thread(_thread.number, before)
    thread.append(next_sequence_number(), after)


def note_use(layer: torch.nn.Module, now: Settings) -> None:
    """Note that a layer is called with its settings of now in a first pass."""
    history = _history_of(layer)
    thread = history.threads.get(_thread.number)
    if thread is None:
        thread = history.add_thread(_thread.number, now)
    elif thread.changes[-1].settings != now:  # which another thread has set since the last pass
        thread.append(thread.last_use + 1, now)
    thread.changes[-1].was_used = True
    thread.last_use = next_sequence_number()
    thread.is_trained = thread.is_trained or layer.training or torch.is_grad_enabled()


def find_settings(layer: torch.nn.Module, now: Settings) -> Settings | None:
    """Return the settings that a layer had in the first pass of what is now recomputed.

    Args:
        layer: The layer.
        now: The settings of now.

    Returns:
        The settings; None where they are those of now, or this is a first pass, which is noted.

    Raises:
        RuntimeError: They are not known.
    """
    if not is_recomputing():
        note_use(layer, now)
        return None
    history = _histories.get(layer)
    node = current_node()
    if history is None or node is None or not history.threads:
        return None
    found = history.find(node._sequence_nr())
    changed_here = history.last_task == current_graph_task_id()
    if changed_here and any(change.settings != now for change in found):
        raise RuntimeError(
            "adapters were changed by a function that gradient checkpointing calls again in the "
            "backward pass; call set_adapter() or disable_adapter() outside of the function"
        )
    used = [change.settings for change in found if change.was_used]
    if not used:
        raise RuntimeError(
            "a layer with adapters is called in a backward pass, in checkpointing within "
            "checkpointing or by a hook, after its adapters or adapter_names were changed; use one "
            "level of gradient checkpointing, and call the model outside of backward passes"
        )
    if any(settings != used[0] for settings in used):
        raise RuntimeError(
            "several threads have called a layer with different adapters or adapter_names, and "
            "gradient checkpointing does not tell in which of them the forward pass was; train in "
            "one thread, or call penstock.lora.fuse(penstock.lora.unfuse(model)), which forgets "
            "earlier passes, before another one trains"
        )
    return None if used[0] == now else used[0]


# Compiled code calls these, where the wrapper costs nothing beside the cut in the graph.
note_change_uncompiled = disable_dynamo(note_change)
note_use_uncompiled = disable_dynamo(note_use)
find_settings_uncompiled = disable_dynamo(find_settings)


def note_seeds(layer: torch.nn.Module, seeds: Sequence[int]) -> None:
    """Note the seeds that a layer drew; in a recomputation they must be those of a first pass.

    Raises:
        RuntimeError: A recomputation drew others.
    """
    history = _history_of(layer)
    if not is_recomputing():
        history.seeds.extend(seeds)
    elif not history.seeds or any(seed not in history.seeds for seed in seeds):
        raise RuntimeError(
            "a layer with dropout is called in a backward pass with another random state than in "
            "the forward pass, so that its mask would be another; use gradient checkpointing with "
            "preserve_rng_state=True (the default), or an adapter with lora_dropout=0"
        )


def forget(layer: torch.nn.Module) -> None:
    """Drop what is noted of a layer."""
    _histories.pop(layer, None)


def _history_of(layer: torch.nn.Module) -> _History:
    history = _histories.get(layer)
    if history is None:
        history = _histories[layer] = _History()
    return history
