"""Closures of seeds: arms of `graphs.py`.

Cases `closure` give all nodes within some hops of seeds and all edges among them: ours from memory,
with the reversed lists too, and from files; PyG's `k_hop_subgraph`; SciPy's `dijkstra` from many
sources with the submatrix of what it reaches; networkx likewise, on the smallest graph. "penstock
sampler" is `NeighborSampler` with all neighbours, without the edges among nodes of the last hop.
Cases `bytes` count what torch allocates at once (`measured_peak`), held against the prediction.
Cases `budget` split the seeds under a part of the bytes of all. Cases `direction` search nodes
alone from the node of the largest degree, and count the edges that were looked at. Cases `costs`
count the closures of many seeds, each by itself.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _ops_arms import time_arms
from _ops_spgemm import read_graph
from _rows import BenchmarkRow, Environment, Limit
from penstock.batching import BalancedBatchSampler, measured_peak
from penstock.traversal import (
    CSRGraph,
    NeighborSampler,
    count_khop,
    khop,
    khop_costs,
    khop_nodes,
    split_khop,
)

TOPIC = "graphs"
OURS, REVERSED, FILES, SAMPLER = (
    "penstock",
    "penstock, reverse",
    "penstock, files",
    "penstock sampler",
)
PYG, SCIPY, NETWORKX = "PyG k_hop_subgraph", "scipy.sparse", "networkx"
CLOSURES = (("gowalla", 3, 64), ("gowalla", 2, 64), ("gowalla", 1, 64), ("soc-Epinions1", 3, 64),
            ("tolokers", 2, 64))  # fmt: skip
BAR = 5.0
SHARES = (2, 8)
PARTS_OF_ALL, LEVELS, NUM_COSTS = ("gowalla", 3, 64), 8, 2000


class Case:
    """A graph with seeds, as each arm takes it."""

    def __init__(self, name: str, hops: int, num_seeds: int) -> None:
        self.hops = hops
        self.edges, self.num_nodes = read_edges(name)
        start = time.perf_counter()
        self.graph = CSRGraph.from_edges(self.edges, self.num_nodes)
        self.build_seconds = time.perf_counter() - start
        generator = torch.Generator().manual_seed(0)
        self.seeds = torch.randperm(self.num_nodes, generator=generator)[:num_seeds]

    def arms(self, folder: Path, *, is_small: bool) -> dict[str, Callable[[], Any]]:
        """Return functions that find the closure."""
        graph, seeds, hops = self.graph, self.seeds, self.hops
        reverse, in_files = graph.reverse(), graph.save(folder)
        sampler = NeighborSampler.from_graph(graph, fanouts=[-1] * max(hops, 1))
        arms: dict[str, Callable[[], Any]] = {
            OURS: lambda: khop(graph, seeds, hops),
            REVERSED: lambda: khop(graph, seeds, hops, reverse=reverse),
            FILES: lambda: khop(in_files, seeds, hops),
            SAMPLER: lambda: sampler.sample(seeds),
            PYG: self.call_pyg,
            SCIPY: self.make_scipy(),
        }
        if is_small:
            arms[NETWORKX] = self.make_networkx()
        return arms

    def call_pyg(self) -> Any:
        from torch_geometric.utils import k_hop_subgraph

        return k_hop_subgraph(
            self.seeds, self.hops, self.edges, num_nodes=self.num_nodes, relabel_nodes=True
        )

    def make_scipy(self) -> Callable[[], Any]:
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        lists = (
            np.ones(self.graph.num_edges),
            self.graph.indices.numpy(),
            self.graph.indptr.numpy(),
        )
        matrix = csr_array(lists, shape=(self.num_nodes, self.num_nodes))
        sources = self.seeds.numpy()

        def find() -> Any:
            levels = dijkstra(
                matrix, indices=sources, unweighted=True, limit=self.hops, min_only=True
            )
            nodes = np.flatnonzero(np.isfinite(levels))
            return matrix[nodes][:, nodes].tocoo()

        return find

    def make_networkx(self) -> Callable[[], Any]:
        import networkx

        source, target = self.edges.tolist()
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(self.num_nodes))
        graph.add_edges_from(zip(target, source, strict=True))
        sources = self.seeds.tolist()

        def find() -> Any:
            found = networkx.multi_source_dijkstra_path_length(
                graph, sources, cutoff=self.hops, weight=None
            )
            return list(graph.subgraph(found).edges)

        return find


@functools.cache
def read_edges(name: str) -> tuple[Tensor, int]:
    """Return the edges of a graph, and its nodes."""
    matrix = read_graph(name).to_sparse_coo().coalesce()
    return matrix.indices(), matrix.shape[0]


def closure_name(name: str, hops: int, num_seeds: int) -> str:
    """Return the name of a case."""
    return f"closure: {name}, {hops} hops, {num_seeds} seeds"


def announce_rows(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the case and the arm of every row."""
    whole = ", ".join(closure_name(*PARTS_OF_ALL).split(", ")).removeprefix("closure: ")
    rows = [
        (closure_name(*each), arm)
        for each in CLOSURES
        for arm in (OURS, REVERSED, FILES, SAMPLER, PYG, SCIPY)
    ]
    rows += [(closure_name(*each), NETWORKX) for each in CLOSURES if is_small(each[0])]
    rows += [(f"bytes: {whole}", arm) for arm in (OURS, PYG)]
    rows += [(f"budget: {whole}, 1/{share}", OURS) for share in SHARES]
    for name in dict.fromkeys(each[0] for each in CLOSURES):
        rows += [(f"direction: {name}, {LEVELS} hops", arm) for arm in (OURS, REVERSED)]
    rows += [(f"costs: gowalla, 2 hops, {NUM_COSTS} seeds", OURS)]
    return ((case, arm) for case, arm in rows if options.match in case)


def is_small(name: str) -> bool:
    """Return whether networkx takes less than a minute for the graph."""
    return name == "soc-Epinions1"


def measure_rows(options: argparse.Namespace, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the rows of all cases."""
    cases = {case for case, _ in announce_rows(options)}
    for each in CLOSURES:
        if closure_name(*each) in cases:
            yield from measure_closures(each, options, where)
    for case in sorted(cases):
        kind, _, rest = case.partition(": ")
        if kind == "bytes":
            yield from measure_bytes(case, where)
        elif kind == "budget":
            yield measure_budget(case, int(rest.rpartition("/")[2]), options, where)
        elif kind == "direction":
            yield from measure_direction(case, rest.partition(",")[0], options, where)
        elif kind == "costs":
            yield measure_costs(case, where)


def measure_closures(
    each: tuple[str, int, int], options: argparse.Namespace, where: Environment
) -> Iterator[BenchmarkRow]:
    """Yield a row of each arm that finds a closure."""
    case = Case(*each)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        arms = case.arms(Path(folder) / "lists", is_small=is_small(each[0]))
        times = time_arms(arms, options.rounds, options.device)
    size = khop(case.graph, case.seeds, case.hops).size
    is_barred = each == PARTS_OF_ALL
    for arm, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, times[OURS], strict=True))
        has_bar = is_barred and arm == PYG
        yield BenchmarkRow.of(
            seconds,
            topic=TOPIC,
            case=closure_name(*each),
            arm=arm,
            limit=Limit(name=f"{BAR:g} x {OURS}", value=BAR, unit="1") if has_bar else None,
            measured=ratios[len(ratios) // 2] if has_bar else None,
            extra={
                "times_of_ours": ratios[len(ratios) // 2],
                "least_and_most_times_of_ours": [ratios[0], ratios[-1]],
                "num_nodes": size.num_nodes[-1],
                "num_edges": size.num_edges,
                "graph_edges": case.graph.num_edges,
                "build_seconds": case.build_seconds,
                "num_threads": torch.get_num_threads(),
            },
            **where,
        )


def measure_bytes(case: str, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield what torch's operators allocate at once, ours held against its prediction."""
    each = Case(*PARTS_OF_ALL)
    size = count_khop(each.graph, each.seeds, each.hops)
    # All nodes and all edges of the graph, as is reserved where sizes are not known.
    worst = 8 * each.num_nodes + 16 * each.graph.num_edges + 4 * each.num_nodes
    arms = {OURS: lambda: khop(each.graph, each.seeds, each.hops), PYG: each.call_pyg}
    for arm, find in arms.items():
        start = time.perf_counter()
        peak, left = measured_peak(find)
        yield BenchmarkRow.of(
            [time.perf_counter() - start],
            topic=TOPIC,
            case=case,
            arm=arm,
            peak_bytes={"device": peak},
            limit=Limit(name="predicted peak", value=size.peak_bytes, unit="B"),
            measured=peak,
            extra={
                "left_bytes": left,
                "predicted_bytes": size.predicted_bytes,
                "workspace_bytes": size.peak_bytes - size.predicted_bytes,
                "worst_case_bytes": worst,
            },
            **where,
        )


def measure_budget(
    case: str, share: int, options: argparse.Namespace, where: Environment
) -> BenchmarkRow:
    """Return a row of closures of parts of the seeds under a share of the bytes of all."""
    each = Case(*PARTS_OF_ALL)
    budget = count_khop(each.graph, each.seeds, each.hops).peak_bytes // share
    alone = max(count_khop(each.graph, seed[None], each.hops).peak_bytes for seed in each.seeds)
    budget = max(budget, alone)

    def find() -> int:
        num_parts = 0
        for part in split_khop(each.graph, each.seeds, each.hops, max_bytes=budget):
            num_parts += part.size.num_edges >= 0
            del part
        return num_parts

    times = time_arms({OURS: find}, options.rounds, options.device)[OURS]
    return BenchmarkRow.of(
        times,
        topic=TOPIC,
        case=case,
        arm=OURS,
        peak_bytes={"device": measured_peak(find)[0]},
        limit=Limit(name="max_bytes", value=budget, unit="B"),
        measured=measured_peak(find)[0],
        extra={"num_parts": find(), "largest_seed_bytes": alone},
        **where,
    )


def measure_direction(
    case: str, name: str, options: argparse.Namespace, where: Environment
) -> Iterator[BenchmarkRow]:
    """Yield rows of searches for nodes that push, and that may pull."""
    edges, num_nodes = read_edges(name)
    graph = CSRGraph.from_edges(edges, num_nodes, flow="target_to_source")
    reverse, seeds = graph.reverse(), graph.indptr.diff().argmax()[None]
    arms = {
        OURS: lambda: khop_nodes(graph, seeds, LEVELS),
        REVERSED: lambda: khop_nodes(graph, seeds, LEVELS, reverse=reverse),
    }
    times = time_arms(arms, options.rounds, options.device)
    pushed = sum(arms[OURS]().touched_edges)
    for arm, find in arms.items():
        found = find()
        new = torch.tensor(found.num_nodes).diff()
        yield BenchmarkRow.of(
            times[arm],
            topic=TOPIC,
            case=case,
            arm=arm,
            peak_bytes={"device": found.peak_bytes},
            limit=Limit(name="edges that a push looks at", value=pushed, unit="1"),
            measured=sum(found.touched_edges),
            extra={
                "touched_edges": found.touched_edges,
                "frontier_edges": found.frontier_edges,
                "pulled": found.pulled,
                "num_nodes": found.num_nodes,
                "largest_frontier": int(new.max()),
                "graph_edges": graph.num_edges,
            },
            **where,
        )


def measure_costs(case: str, where: Environment) -> BenchmarkRow:
    """Return a row of the costs of many seeds, and how full batches are that keep to a cap."""
    each = Case("gowalla", 2, NUM_COSTS)
    start = time.perf_counter()
    costs = khop_costs(each.graph, each.seeds, each.hops)
    seconds = time.perf_counter() - start
    cap = int(costs.batch_costs.of_each().max())
    batches = list(BalancedBatchSampler(costs.batch_costs, max_bytes=cap))
    peaks = [count_khop(each.graph, each.seeds[batch], 2).peak_bytes for batch in batches]
    return BenchmarkRow.of(
        [seconds],
        topic=TOPIC,
        case=case,
        arm=OURS,
        peak_bytes={"device": max(peaks)},
        limit=Limit(name="cap of a batch", value=cap, unit="B"),
        measured=max(peaks),
        extra={
            "num_batches": len(batches),
            "mean_share_of_cap": sum(peaks) / len(peaks) / cap,
            "num_threads": torch.get_num_threads(),
        },
        **where,
    )
