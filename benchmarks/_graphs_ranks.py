"""Graphs over ranks: arms of `graphs.py`.

Each arm is a number of gloo ranks on this machine and a split of the nodes. Every rank reads its
part of the lists from files and runs all algorithms by one thread; the times are the slowest
rank's. On few cores more ranks are not faster: what is shown is what they hold and send. Cases
`memory` hold the growth of the largest rank's resident set, at its peak while it reads its part and
runs them, against (1/ranks + 15 %) of that of one process, which has all lists in memory.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from _ops_spgemm import read_graph
from _rows import BenchmarkRow, Environment, Limit

TOPIC = "graphs"
ONE = "1 process"
RANKS = (2, 4)
SPLITS = ("random", "contiguous", "cluster")
ALGORITHMS = ("bfs", "connected_components", "pagerank", "khop")
MESSAGES = {
    "bfs": ("bfs",),
    "connected_components": ("component ids", "components to owners", "components from owners"),
    "pagerank": ("pagerank",),
    "khop": ("halo ids again", "khop nodes", "khop lengths", "khop entries"),
}
# Of the graph of cases `memory`: nodes of a side, edges of each; so many that holes in the heap,
# some 5 MB in each process, are few beside them.
NUM_SIDE, NUM_LINKS = 2000, 12
PAGERANK_TOLERANCE, SEEDS, HOPS = 1e-6, 16, 2


def announce_rows(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Pairs of a case and an arm."""
    for name in ("gowalla", "lattice"):
        if options.match not in name:
            continue
        for arm in arms():
            for algorithm in ALGORITHMS:
                yield f"ranks: {name}, {algorithm}", arm
            yield f"memory: {name}", arm


def arms() -> dict[str, tuple[int, str]]:
    """Ranks and split of each arm, the one process first."""
    many = {f"{count} ranks, {split}": (count, split) for count in RANKS for split in SPLITS}
    return {ONE: (1, "contiguous"), **many}


def make_lattice() -> tuple[Tensor, int]:
    """Edges of a square whose nodes are joined to those near them: 12 for each of four million."""
    generator = torch.Generator().manual_seed(0)
    num_nodes = NUM_SIDE**2
    source = torch.arange(num_nodes).repeat_interleave(NUM_LINKS)
    steps = torch.randint(-3, 4, (2, len(source)), generator=generator)
    target = (source + steps[0] * NUM_SIDE + steps[1]) % num_nodes
    return torch.stack([source, target]), num_nodes


def measure_rows(options: argparse.Namespace, where: Environment) -> Iterator[BenchmarkRow]:
    """Rows of all arms, one after the other."""
    from penstock.traversal import CSRGraph

    for name in ("gowalla", "lattice"):
        if options.match not in name:
            continue
        edges, num_nodes = make_lattice() if name == "lattice" else read_edges(name)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            CSRGraph.from_edges(edges, num_nodes).save(folder)
            del edges
            one: list[dict[str, Any]] = []
            for arm, (num_ranks, split) in arms().items():
                found = run_ranks(Path(folder).resolve(), num_ranks, split)
                one = one or found
                yield from _rows_of(name, arm, found, one[0], where)


def read_edges(name: str) -> tuple[Tensor, int]:
    """Edges of a graph of $PENSTOCK_DATA."""
    matrix = read_graph(name)
    return matrix.to_sparse_coo().indices(), matrix.shape[0]


def _rows_of(
    name: str, arm: str, found: list[dict[str, Any]], one: dict[str, Any], where: Environment
) -> Iterator[BenchmarkRow]:
    cut = sum(each["num_halo"] for each in found)
    for algorithm in ALGORITHMS:
        messages = sum(
            each["num_messages"].get(m, 0) for each in found for m in MESSAGES[algorithm]
        )
        sent = sum(each["sent_bytes"].get(m, 0) for each in found for m in MESSAGES[algorithm])
        if algorithm != "khop":  # sums of what the nodes have: the same on any number of ranks
            total = sum(each["sums"][algorithm] for each in found)
            assert abs(total - one["sums"][algorithm]) <= 1e-9 * abs(total), (arm, algorithm)
        yield BenchmarkRow.of(
            [max(each["seconds"][algorithm] for each in found)],
            topic=TOPIC,
            case=f"ranks: {name}, {algorithm}",
            arm=arm,
            moved_bytes={"rank->rank": sent},
            extra={"cut_nodes": cut, "messages": messages},
            **where,
        )
    peak = max(each["peak_bytes"] for each in found)
    share = 1 if arm == ONE else 1 / len(found) + 0.15
    yield BenchmarkRow.of(
        [max(each["seconds"]["build"] for each in found)],
        topic=TOPIC,
        case=f"memory: {name}",
        arm=arm,
        peak_bytes={"host": peak},
        limit=Limit(
            name="(1/ranks + 15 %) of one process", value=share * one["peak_bytes"], unit="B"
        ),
        measured=peak,
        extra={
            "graph_bytes": max(each["graph_bytes"] for each in found),
            "edges": [each["num_edges"] for each in found],
            "share_of_one_process": peak / one["peak_bytes"],
        },
        **where,
    )


def run_ranks(folder: Path, num_ranks: int, split: str) -> list[dict[str, Any]]:
    """Run all algorithms on ranks; return what each has written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = num_ranks, split, str(folder), port
    spawn(run_rank, args=arguments, nprocs=num_ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def run_rank(rank: int, num_ranks: int, split: str, folder: str, port: int) -> None:
    """What the process of a rank does."""
    from penstock.traversal import (
        CSRGraph,
        RankGraph,
        bfs,
        connected_components,
        khop,
        pagerank,
    )

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),
    )
    ring = torch.arange(1000)  # what is built and mapped at first is there
    near = torch.stack([ring.repeat(2), torch.cat([ring.roll(1), ring.roll(31)])])
    small = RankGraph(CSRGraph.from_edges(near, 1000))  # no node is more than 62 steps away
    for call in (connected_components, pagerank, lambda part: bfs(part, ring[:1])):
        call(small)
    khop(small, ring[:8], 3)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    seconds, sums = {}, {}
    start = time.perf_counter()
    paths = [Path(folder, f"{name}.npy") for name in ("indptr", "indices")]
    graph = CSRGraph(*(_load(path) for path in paths)) if num_ranks == 1 else CSRGraph(*paths)
    part = RankGraph(graph, split=split)  # type: ignore[arg-type]
    seconds["build"] = time.perf_counter() - start
    seeds = torch.arange(SEEDS) * 997 % graph.num_nodes
    calls = {
        "bfs": lambda: bfs(part, torch.tensor([0])),
        "connected_components": lambda: connected_components(part),
        "pagerank": lambda: pagerank(part, tol=PAGERANK_TOLERANCE),
        "khop": lambda: khop(part, seeds, HOPS).nodes,
    }
    for name, call in calls.items():
        distributed.barrier()
        start = time.perf_counter()
        values = call()
        seconds[name] = time.perf_counter() - start
        sums[name] = float(values.double().sum())
        del values
    peak = _status("VmHWM") - before
    report = part.report().to_dict()
    found = {**report, "seconds": seconds, "sums": sums, "peak_bytes": peak}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def _load(path: Path) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.load(path))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
