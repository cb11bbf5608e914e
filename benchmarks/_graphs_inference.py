"""Outputs of a trained GNN for all nodes: arms of `graphs.py`.

Two layers of GraphSAGE, 64 wide, over random features. "layer by layer" is `infer_layers`, from
memory and with lists, features and rows in files. "closures" computes the same outputs mini-batch
by mini-batch from everything within two hops of its seeds, which is what layer by layer replaces.
"whole graph" is one call of each layer, with all messages at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from _graphs_ranks import read_edges
from _rows import BenchmarkRow, Environment

TOPIC, CASE = "graphs", "inference: gowalla, GraphSAGE of 2 layers"
WIDTH, CLASSES, BATCH = 64, 16, 512
MAX_BYTES = "64MiB"
ARMS = ("layer by layer", "layer by layer, files", "closures", "whole graph")


def announce_rows(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Pairs of a case and an arm."""
    if options.match in CASE:
        yield from ((CASE, arm) for arm in ARMS)


def measure_rows(options: argparse.Namespace, where: Environment) -> Iterator[BenchmarkRow]:
    """Rows of all arms, which take turns."""
    if options.match not in CASE:
        return
    edges, num_nodes = read_edges("gowalla")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        calls = make_arms(edges, num_nodes, Path(folder).resolve())
        seconds: dict[str, list[float]] = {arm: [] for arm in calls}
        worst: dict[str, float] = {}
        for _ in range(options.rounds):
            outputs: dict[str, Tensor] = {}
            for arm, call in calls.items():
                start = time.perf_counter()
                outputs[arm] = call()
                seconds[arm].append(time.perf_counter() - start)
            reference = outputs["whole graph"]
            worst = {arm: float((out - reference).abs().max()) for arm, out in outputs.items()}
            assert max(worst.values()) < 1e-4, worst
        for arm, times in seconds.items():
            extra = {"largest_difference": worst[arm], "max_bytes": MAX_BYTES}
            yield BenchmarkRow.of(times, topic=TOPIC, case=CASE, arm=arm, extra=extra, **where)


def make_arms(edges: Tensor, num_nodes: int, folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Each arm's call, which returns the outputs of all nodes."""
    from torch_geometric.nn import SAGEConv

    from penstock.traversal import CSRGraph, infer_layers, khop
    from penstock.unified import unify

    torch.manual_seed(0)
    first, last = SAGEConv(WIDTH, WIDTH).eval(), SAGEConv(WIDTH, CLASSES).eval()
    layers = [lambda x, e: first(x, e).relu(), last]
    features = torch.randn(num_nodes, WIDTH)
    graph = CSRGraph.from_edges(edges, num_nodes)
    in_files = graph.save(folder / "lists")
    unify(features, device="cpu").save_rows(folder / "features.npy")

    @torch.no_grad()
    def run_whole() -> Tensor:
        return last(first(features, edges).relu(), edges)

    @torch.no_grad()
    def run_closures() -> Tensor:
        out = torch.empty(num_nodes, CLASSES)
        for seeds in torch.arange(num_nodes).split(BATCH):
            closure = khop(graph, seeds, 2)
            rows = features[closure.nodes]
            rows = last(first(rows, closure.edge_index).relu(), closure.edge_index)
            out[seeds] = rows[closure.seed_positions]
        return out

    def run_files() -> Tensor:
        with tempfile.TemporaryDirectory(dir=folder) as store:
            path = folder / "features.npy"
            out = infer_layers(in_files, path, layers, max_bytes=MAX_BYTES, store=store)
            return out.gather_rows(torch.arange(num_nodes))  # type: ignore[attr-defined]

    calls = (
        lambda: infer_layers(graph, features, layers, max_bytes=MAX_BYTES),
        run_files,
        run_closures,
        run_whole,
    )
    return dict(zip(ARMS, calls, strict=True))
