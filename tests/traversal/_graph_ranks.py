"""Ranks of graphs: what each process does, and what starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from fork_servers import find_python
from penstock.errors import PenstockError
from penstock.traversal import (
    CSRGraph,
    RankGraph,
    bfs,
    connected_components,
    infer_layers,
    khop,
    pagerank,
)
from penstock.unified import unify

TIMEOUT_SECONDS = 60
SPLITS = ("random", "contiguous", "cluster")


def make_graphs() -> dict[str, CSRGraph]:
    """Graphs with loops, edges that are there twice, lone nodes, and fewer nodes than ranks."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(0, 300, (2, 1500), generator=generator)
    sparse = torch.randint(0, 300, (2, 200), generator=generator)
    side = torch.arange(400).view(20, 20)
    grid = torch.cat(
        [
            torch.stack([side[:, 1:].flatten(), side[:, :-1].flatten()]),
            torch.stack([side[1:].flatten(), side[:-1].flatten()]),
        ],
        dim=1,
    )
    return {
        "dense": CSRGraph.from_edges(edges, 320),
        "parts": CSRGraph.from_edges(sparse, 320, flow="target_to_source"),
        "grid": CSRGraph.from_edges(torch.cat([grid, grid.flip(0)], dim=1), 400),
        "tiny": CSRGraph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3),
    }


def make_cases(num_ranks: int) -> list[tuple[str, str, Any]]:
    """Names of graphs and splits, with the values of these."""
    table = torch.arange(320) * 7 % num_ranks
    return [
        *((name, split, split) for name in ("dense", "grid") for split in SPLITS),
        *(("dense", "table", table), ("parts", "random", "random")),
        *(("tiny", "random", "random"), ("tiny", "cluster", "cluster")),
    ]


def seeds_of(graph: CSRGraph, rank: int) -> Tensor:
    return torch.tensor([2, 0, 2, 1]) if rank == 0 else torch.arange(rank - 1)


def make_features(graph: CSRGraph) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(graph.num_nodes, 6, generator=generator, dtype=torch.float64)


def make_layers(flow: str) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Mean of the neighbours and the node itself, then a product, as GraphSAGE has it."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(12, 5, generator=generator), torch.randn(10, 3, generator=generator)]

    def layer(weight: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index if flow == "source_to_target" else edge_index.flip(0)
        sums = torch.zeros_like(x).index_add_(0, target, x[source])
        degrees = torch.bincount(target, minlength=len(x)).clamp(min=1)
        return torch.cat([x, sums / degrees[:, None]], dim=1) @ weight.double()

    first, last = weights
    return [lambda x, e: layer(first, x, e).relu(), lambda x, e: layer(last, x, e)]


def divide_by_degrees(x: Tensor, edge_index: Tensor) -> Tensor:
    """Divide by the degrees of neighbours, as GCN does."""
    scaled = x / torch.bincount(edge_index[1], minlength=len(x)).clamp(min=1)[:, None].add(1)
    return x.index_add(0, edge_index[1], scaled[edge_index[0]])


def add_up(x: Tensor, edge_index: Tensor) -> Tensor:
    """Add the rows of neighbours, or anything else that a node's own list suffices for."""
    return x.index_add(0, edge_index[1], x[edge_index[0]])


def compare_budgets(graph: CSRGraph, max_bytes: int) -> None:
    """Raise unless ranks of different budgets compute the rows that one process does."""
    features, part = torch.arange(800.0).view(400, 2), RankGraph(graph)
    found = infer_layers(part, features, [add_up, add_up], max_bytes=max_bytes)
    if not torch.equal(found, infer_layers(graph, features, [add_up, add_up])[part.nodes]):
        raise ValueError("budgets: other rows than in one process")


def run_algorithms(graph: CSRGraph | RankGraph, rank: int, whole: CSRGraph) -> dict[str, Any]:
    """Everything that there is, for one graph."""
    closure = khop(graph, seeds_of(whole, rank), 2)
    features = make_features(whole)
    found = {
        "bfs": bfs(graph, torch.tensor([0, 2])),
        "components": connected_components(graph),
        "pagerank": pagerank(graph, tol=1e-4),
        "khop": (closure.nodes, closure.edge_index, closure.seed_positions),
        "khop size": closure.size.num_nodes,
        "layers": infer_layers(graph, features, make_layers(whole.flow), max_bytes=60_000),
    }
    if isinstance(graph, RankGraph):
        found["layers of own rows"] = infer_layers(
            graph, features[graph.nodes], make_layers(whole.flow), max_bytes=60_000
        )
    return found


def run_all(folder: Path) -> dict[Any, Any]:
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    results: dict[Any, Any] = {}
    graphs = make_graphs()
    for name, split, value in make_cases(num_ranks):
        graph = graphs[name]
        part = RankGraph(graph, split=value, seed=4)
        found = run_algorithms(part, rank, graph)
        found["report"] = part.report().to_dict()
        found["nodes"] = part.nodes
        found["gathered"] = part.gather(found["components"])
        results[name, split] = found
    graph = graphs["grid"].save(folder / f"graph-{rank}")
    part = RankGraph(graph)
    features = unify(make_features(graph))
    store = folder / f"store-{rank}"
    store.mkdir()
    table = infer_layers(part, features, make_layers(graph.flow), max_bytes=60_000, store=store)
    results["files"] = {
        "nodes": part.nodes,
        "layers": table[torch.arange(part.num_own)],
        "left": sorted(each.name for each in store.iterdir()),
    }
    return results


def run_errors(folder: Path) -> dict[str, str]:
    """Messages of calls that the ranks do not agree about."""
    rank = distributed.get_rank()
    graphs = make_graphs()
    part = RankGraph(graphs["dense"])
    pairs = torch.stack([torch.arange(8), 8 + torch.arange(8)])  # no neighbour on the same rank
    sides = CSRGraph.from_edges(torch.cat([pairs, pairs.flip(0)], dim=1), 16)
    halves = RankGraph(sides, split="contiguous")
    calls: dict[str, Callable[[], object]] = {
        "graphs": lambda: RankGraph(graphs["dense" if rank else "grid"]),
        "splits": lambda: RankGraph(graphs["grid"], split="random" if rank else "contiguous"),
        "hops": lambda: khop(part, torch.tensor([0]), 1 + rank),
        "room": lambda: khop(part, torch.tensor([0]), 2, max_bytes=2000 if rank else None),
        "ids": lambda: khop(part, torch.tensor([0]), 1, edge_ids=True),
        "layers": lambda: infer_layers(halves, torch.rand(16, 2), [divide_by_degrees]),
        "lists": lambda: RankGraph(CSRGraph.from_edges(pairs.flip(0) if rank else pairs, 16)),
        "numbers": lambda: pagerank(part, damping=0.8 + 0.1 * rank),
        "values": lambda: part.gather(part.nodes.double() if rank else part.nodes),
        "values of rows": lambda: part.gather(torch.zeros(part.num_own, 2 + rank)),
        "counts of layers": lambda: infer_layers(halves, torch.rand(16, 2), [add_up] * (1 + rank)),
        "features": lambda: infer_layers(halves, torch.rand(16, 2 + rank), [add_up]),
        "own features": lambda: infer_layers(halves, torch.rand(8 + 8 * rank, 2), [add_up]),
        "outputs": lambda: infer_layers(
            halves, torch.rand(16, 2), [lambda x, _: x.double() if rank else x, add_up]
        ),
        "budgets": lambda: compare_budgets(graphs["grid"], 4000 + 30_000 * rank),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "nothing"
        except (PenstockError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def run_death(folder: Path) -> str:
    """The message that others see after rank 1 has died in the middle of the work."""
    part = RankGraph(make_graphs()["grid"])
    if distributed.get_rank() == 1:
        os._exit(7)
    start = time.monotonic()
    try:
        pagerank(part)
    except PenstockError as error:
        assert time.monotonic() - start < TIMEOUT_SECONDS + 5
        return f"{type(error).__name__}: {error}"
    return "nothing"


CASES = {"all": run_all, "errors": run_errors, "death": run_death}


def run_ranks(case: str, num_ranks: int, folder: Path, *, ended: int = 0) -> list[Any]:
    """Run a case on ranks; return the result of each. The last `ended` ranks may fail."""
    program = [find_python("torch"), __file__, case, str(num_ranks), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*program, str(rank)], env=environment) for rank in range(num_ranks)
    ]
    try:
        codes = [each.wait(timeout=200) for each in processes]
    finally:
        for each in processes:
            each.kill()
    good = num_ranks - ended
    assert codes[:good] == [0] * good
    return [torch.load(folder / f"{rank}.pt") for rank in range(good)]


def main() -> None:
    case, num_ranks, folder, rank = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(rank),
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    torch.save(CASES[case](folder), folder / f"{rank}.pt")
    if case != "death":
        distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that finalises Python


if __name__ == "__main__":
    main()
