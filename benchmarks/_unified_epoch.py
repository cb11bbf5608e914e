"""Training GraphSAGE for an epoch: the same batches, with features from different places.

The graph is Tolokers, copies of it side by side, with wide features. Every arm gets the same seeds,
so their losses have to be equal, and the benchmark fails where they are not. Batches are sampled,
and their features fetched, one batch ahead in another thread, whatever the arm.
"""

from __future__ import annotations

import functools
import os
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
from _unified_file import drop_cache
from penstock.units import format_bytes

NUM_COPIES, WIDTH, HIDDEN = 64, 256, 64
FANOUTS, BATCH_SIZE, NUM_BATCHES = (10, 5), 1024, 40
REPETITIONS = 3
CACHE_FRACTION = 0.2

Fetch = Callable[[torch.Tensor], torch.Tensor]
"""The features of some nodes, whose numbers are on the CPU."""


def epoch_rows(device: str, directory: str | None, where: Any) -> list[BenchmarkRow]:
    """A row for each place of the features; none where the graph is absent."""
    path = Path(os.environ.get("PENSTOCK_DATA", ""), "graphs", "tolokers.npz")
    if not path.exists():
        print("unified: no graphs/tolokers.npz in $PENSTOCK_DATA; no epoch", file=sys.stderr)
        return []
    data, sampler = tiled_graph(path)
    features = torch.empty(data.num_nodes, WIDTH)
    fill(features)
    features /= 1000
    seconds: dict[str, list[float]] = {}
    processor_seconds: dict[str, list[float]] = {}
    losses = set()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        features_path = Path(folder, "features.npy")
        arms = dict(_arms(features, device, features_path))
        epoch = functools.partial(_epoch, data, sampler, device, features_path)
        for number in range(REPETITIONS + 1):
            for name in list(arms) if number % 2 else list(reversed(arms)):
                spent, processor, loss = epoch(arms[name])
                losses.add(loss)
                if number:
                    seconds.setdefault(name, []).append(spent)
                    processor_seconds.setdefault(name, []).append(processor)
    if len(losses) > 1 and device == "cpu":
        raise AssertionError(f"the arms' losses differ: {losses}")
    case = (
        f"GraphSAGE, {format_bytes(features.numel() * 4)} of features, {NUM_BATCHES} batches of "
        f"{BATCH_SIZE}"
    )
    num_bytes = 0  # of no use here: batches differ in their rows
    rows = rows_of(case, seconds, next(iter(arms)), num_bytes, where)
    for row in rows:
        row.extra["processor_seconds_median"] = float(np.median(processor_seconds[row.arm]))
        row.extra["loss"] = sorted(losses)
    return rows


def tiled_graph(path: Path) -> tuple[Any, Any]:
    """Labels of copies of the graph, side by side, and a sampler of all of them."""
    from torch_geometric.data import Data

    from penstock.unified import NeighborSampler

    file = np.load(path)
    edges = torch.from_numpy(file["edges"]).t().contiguous()
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    num_nodes = len(file["node_labels"])
    starts = torch.arange(NUM_COPIES) * num_nodes
    edges = torch.cat([edges + start for start in starts], dim=1)
    labels = torch.from_numpy(file["node_labels"]).float().repeat(NUM_COPIES)
    sampler = NeighborSampler.from_edges(edges, len(labels), fanouts=FANOUTS)
    return Data(y=labels, num_nodes=len(labels)), sampler


def _arms(features: torch.Tensor, device: str, path: Path) -> Iterator[tuple[str, Fetch]]:
    """What fetches features, by its name; the first one is what the others are held against."""
    from penstock.unified import unify

    if device != "cpu":
        unified = unify(features, device=device)
        num_bytes = features.numel() * features.element_size()
        cached = unify(unified, device=device, cache=int(CACHE_FRACTION * num_bytes))
        on_gpu = features.to(device)
        yield "CPU gather + copy", lambda nodes: features[nodes].to(device)
        yield (
            "CPU gather, page-locked + copy",
            lambda nodes: features[nodes].pin_memory().to(device),
        )
        yield "unify", lambda nodes: unified.gather_rows(nodes.to(device))
        yield "unify, 20 % cached", lambda nodes: cached.gather_rows(nodes.to(device))
        yield "all on the GPU", lambda nodes: on_gpu[nodes.to(device)]
        return
    in_memory = unify(features)
    yield "plain tensor", lambda nodes: features[nodes]
    yield "unify, in memory", lambda nodes: in_memory[nodes]
    np.save(path, features.numpy())
    in_file, in_file_cached = unify(path), unify(path, cache=features.numel() * 4)
    mapped = np.load(path, mmap_mode="r")

    def from_map(nodes: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(mapped[nodes.numpy()])

    yield "numpy.memmap, a cold file", from_map
    yield "unify, a cold file", lambda nodes: in_file[nodes]
    # As much memory as the page cache gives the memory map.
    yield "unify, a cold file, cached", lambda nodes: in_file_cached[nodes]


def _epoch(
    data: Any, sampler: Any, device: str, features_path: Path, fetch: Fetch
) -> tuple[float, float, float]:
    """Seconds of an epoch, seconds of the processors' in it, and its mean loss."""
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
    if features_path.exists():
        drop_cache(features_path)
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
    return spent, time.process_time() - processor_start, sum_loss / NUM_BATCHES
