"""Training GraphSAGE for an epoch: the same batches, with features from different places.

The graph is Tolokers, copies of it side by side, with wide features. Every arm gets the same seeds,
so their losses have to be equal, and the benchmark fails where they are not. Batches are sampled,
and their features fetched, one batch ahead in another thread, whatever the arm.

A file is opened anew for each repetition, when none of its pages is in memory, which is checked:
no mapping and no cache outlives a repetition. A second epoch follows at once. `peak_bytes` has what
is in memory of the features after both: pages in the page cache, rows in the process.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from _rows import BenchmarkRow
from _unified_arms import fill, rows_of
from _unified_file import drop_cache, page_cache_bytes
from penstock.units import format_bytes

NUM_COPIES, WIDTH, HIDDEN = 64, 256, 64
FANOUTS, BATCH_SIZE, NUM_BATCHES = (10, 5), 1024, 40
REPETITIONS = 3
CACHE_FRACTION = 0.2
MAPPED = "numpy.memmap, a cold file"  # what other arms of the file are held against
SECOND = ", second epoch"

Fetch = Callable[[torch.Tensor], torch.Tensor]
"""The features of some nodes, whose numbers are on the CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A place that features are fetched from."""

    open: Callable[[], tuple[Fetch, Any]]
    """Opens it: what fetches from it, and the table if it is one of ours, else None."""
    is_file: bool = False
    """Whether that is the file, which is cold before it is opened."""
    num_epochs: int = 1
    """Without opening it again; a second one finds what the first one has left in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """What an epoch took, and what it was like."""

    seconds: float
    processor_seconds: float
    """Of all processors."""
    loss: float
    """The mean of all batches."""
    reads: str
    """Where the table's rows came from in the end; "" if it is none of ours."""
    resident_bytes: dict[str, int]
    """What is in memory of the features, by tier."""


def epoch_rows(
    device: str, directory: str | None, where: Any, arms: list[str] | None = None
) -> list[BenchmarkRow]:
    """A row for each place of the features, or those of `arms`; none where there is no graph."""
    path = Path(os.environ.get("PENSTOCK_DATA", ""), "graphs", "tolokers.npz")
    if not path.exists():
        print("unified: no graphs/tolokers.npz in $PENSTOCK_DATA; no epoch", file=sys.stderr)
        return []
    data, sampler = tiled_graph(path)
    features = torch.empty(data.num_nodes, WIDTH)
    fill(features)
    features /= 1000
    epochs: dict[str, list[Epoch]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        features_path = Path(folder, "features.npy")
        places = dict(_places(features, device, features_path))
        places = {name: places[name] for name in arms or places}
        epoch = functools.partial(_epoch, data, sampler, device)
        for number in range(REPETITIONS + 1):
            for name in list(places) if number % 2 else list(reversed(places)):
                for each, found in _epochs_of(places[name], epoch, features_path):
                    epochs.setdefault(name + each, []).extend([found] if number else [])
    losses = {found.loss for each in epochs.values() for found in each}
    if len(losses) > 1 and device == "cpu":
        raise AssertionError(f"the arms' losses differ: {losses}")
    case = (
        f"GraphSAGE, {format_bytes(features.numel() * 4)} of features, {NUM_BATCHES} batches of "
        f"{BATCH_SIZE}"
    )
    num_bytes = 0  # of no use here: batches differ in their rows
    seconds = {name: [found.seconds for found in each] for name, each in epochs.items()}
    rows = rows_of(case, seconds, next(iter(places)), num_bytes, where)
    for row in rows:
        found = epochs[row.arm]
        row.extra["processor_seconds_median"] = statistics.median(
            each.processor_seconds for each in found
        )
        row.extra["loss"] = sorted(losses)
        row.extra["seconds"] = seconds[row.arm]
        row.extra["reads"] = found[-1].reads
        row.peak_bytes.update(found[-1].resident_bytes)
        second = SECOND if row.arm.endswith(SECOND) else ""
        if places[row.arm.removesuffix(SECOND)].is_file and MAPPED in places:
            row.extra["speedup_over_memmap"] = [
                theirs / ours
                for ours, theirs in zip(seconds[row.arm], seconds[MAPPED + second], strict=True)
            ]
    return rows


def tiled_graph(path: Path) -> tuple[Any, Any]:
    """Labels of copies of the graph, side by side, and a sampler of all of them."""
    from torch_geometric.data import Data

    from penstock.traversal import NeighborSampler

    file = np.load(path)
    edges = torch.from_numpy(file["edges"]).t().contiguous()
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    num_nodes = len(file["node_labels"])
    starts = torch.arange(NUM_COPIES) * num_nodes
    edges = torch.cat([edges + start for start in starts], dim=1)
    labels = torch.from_numpy(file["node_labels"]).float().repeat(NUM_COPIES)
    sampler = NeighborSampler.from_edges(edges, len(labels), fanouts=FANOUTS)
    return Data(y=labels, num_nodes=len(labels)), sampler


def _places(features: torch.Tensor, device: str, path: Path) -> Iterator[tuple[str, Place]]:
    """Where features are, by name; the first one is what the others are held against."""
    from penstock.unified import unify

    def in_memory(fetch: Fetch) -> Place:
        return Place(open=lambda: (fetch, None))

    if device != "cpu":
        unified = unify(features, device=device)
        num_bytes = features.numel() * features.element_size()
        cached = unify(unified, device=device, cache=int(CACHE_FRACTION * num_bytes))
        on_gpu = features.to(device)
        yield "CPU gather + copy", in_memory(lambda nodes: features[nodes].to(device))
        yield (
            "CPU gather, page-locked + copy",
            in_memory(lambda nodes: features[nodes].pin_memory().to(device)),
        )
        yield "unify", in_memory(lambda nodes: unified.gather_rows(nodes.to(device)))
        yield "unify, 20 % cached", in_memory(lambda nodes: cached.gather_rows(nodes.to(device)))
        yield "all on the GPU", in_memory(lambda nodes: on_gpu[nodes.to(device)])
        return
    table = unify(features)
    yield "plain tensor", in_memory(lambda nodes: features[nodes])
    yield "unify, in memory", in_memory(lambda nodes: table[nodes])
    np.save(path, features.numpy())

    def from_map() -> tuple[Fetch, Any]:
        mapped = np.load(path, mmap_mode="r")
        return lambda nodes: torch.from_numpy(mapped[nodes.numpy()]), None

    def from_table(cache: int | None) -> tuple[Fetch, Any]:
        table = unify(path, cache=cache)
        return lambda nodes: table[nodes], table

    yield MAPPED, Place(open=from_map, is_file=True, num_epochs=2)
    for name, cache in [
        ("unify, a cold file", None),
        ("unify, a cold file, cached", features.numel() * 4),  # as much as the memory map has
        ("unify, a cold file, nothing kept", 0),
    ]:
        yield (
            name,
            Place(
                open=functools.partial(from_table, cache),
                is_file=True,
                num_epochs=1 if cache == 0 else 2,
            ),
        )


def _epochs_of(
    place: Place, epoch: Callable[[Fetch], Epoch], path: Path
) -> Iterator[tuple[str, Epoch]]:
    """The epochs over a place that has just been opened, by what their arms' names end in."""
    if place.is_file:
        gc.collect()  # pages that are mapped stay in the page cache, and loaders are in cycles
        drop_cache(path)
        if left := page_cache_bytes(path):
            raise AssertionError(f"{format_bytes(left)} of the file are still in the page cache")
    fetch, table = place.open()
    for name in ("", SECOND)[: place.num_epochs]:
        found = epoch(fetch)
        if place.is_file:
            resident = {"page cache": page_cache_bytes(path), "host": 0}
            if table is not None:
                report = table.report()
                resident["host"] = report.copy_bytes + report.cache_bytes
                found = dataclasses.replace(found, reads=report.reads)
            found = dataclasses.replace(found, resident_bytes=resident)
        yield name, found


def _epoch(data: Any, sampler: Any, device: str, fetch: Fetch) -> Epoch:
    """Train a new model for an epoch."""
    from torch_geometric.nn import GraphSAGE

    from penstock.integrations.pyg import NeighborLoader

    def with_features(batch: Any) -> Any:
        batch.x = fetch(batch.n_id)
        return batch

    torch.manual_seed(0)
    model = GraphSAGE(WIDTH, HIDDEN, num_layers=len(FANOUTS), out_channels=1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = NeighborLoader(
        data,
        neighbor_sampler=sampler,
        input_nodes=torch.randperm(data.num_nodes)[: NUM_BATCHES * BATCH_SIZE],
        batch_size=BATCH_SIZE,
        transform=with_features,
        generator=torch.Generator().manual_seed(0),
    )
    sum_loss = 0.0
    start, processor_start = time.perf_counter(), time.process_time()
    for batch in loader:
        batch = batch.to(device)
        logits = model(batch.x, batch.edge_index)[: batch.batch_size, 0]
        loss = binary_cross_entropy_with_logits(logits, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sum_loss += loss.item()
    spent = time.perf_counter() - start
    return Epoch(
        seconds=spent,
        processor_seconds=time.process_time() - processor_start,
        loss=sum_loss / NUM_BATCHES,
        reads="",
        resident_bytes={},
    )
