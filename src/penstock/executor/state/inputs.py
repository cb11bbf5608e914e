"""Inputs of a step: the places that its operators read batches and changing numbers from."""

from __future__ import annotations

import torch

from penstock.executor.memory.views import PlanMemory, narrow_expanded
from penstock.graph import Kind, TensorView
from penstock.memory import Tier


def find_input_places(memory: PlanMemory) -> list[tuple[str, TensorView, torch.Tensor]]:
    """Return names, views and places of the inputs that operators read, in the plan's graph."""
    graph = memory.graph
    found = []
    for name, view in graph.tensors.items():
        storage = graph.storages[memory.storage_of(view)]
        if storage.persistent or storage.kind is Kind.SCALAR:
            continue
        if not storage.num_bytes:
            if graph.consumers[view.value]:  # none of an input whose parts have storages
                found.append((name, view, memory.view_unplanned(view)))
            continue
        for interval in memory.index.intervals[view.value]:
            if interval.tier is Tier.DEVICE and interval.start == 0 and interval.transfer is None:
                found.append((name, view, memory.view_in(interval, view)))
    return found


def copy_elements(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor to a place of its shape, which may be expanded."""
    place = narrow_expanded(target)
    place.copy_(source.detach().as_strided(place.shape, source.stride()))
