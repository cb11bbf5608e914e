"""The graphs of `rgnn.py`: real ones from $PENSTOCK_DATA, and random ones of known relation sizes.

AM and BGS are too large to carry along, but how many edges their relations have is known. Their
graphs here are drawn: each relation joins two node types, its subjects are drawn alike and its
objects by a power law, and the relation that follows it is its reverse, as in the original. They
have 0.50 (BGS) and 0.64 (AM) unique (source, relation) per edge; AIFB has 0.45 and MUTAG 0.51.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from penstock.rgnn import Graph

ONE_WAY = "fb15k-237 one-way"
GRAPHS = ("aifb", "mutag", "fb15k-237", "wn18rr", "mag-tiny", "bgs-sizes", "am-sizes", ONE_WAY)

_ZIPF_EXPONENT = 1.1
_MAG_RELATIONS = ("citing", "cited", "has", "is-about", "writing", "written-by")
_MAG_TYPES = {"citing": (0, 0), "has": (1, 0), "writing": (2, 0)}  # paper, field, author


def data_directory() -> Path | None:
    """Return the directory of the data sets; None where $PENSTOCK_DATA has none."""
    path = Path(os.environ.get("PENSTOCK_DATA", ""), "rgnn")
    return path if path.is_dir() else None


def load(name: str, *, typed: bool = False) -> Graph:
    """Load a graph by its name, all but the one-way one with a reverse edge for each edge.

    Args:
        name: One of `GRAPHS`.
        typed: Whether papers, authors and fields of `mag-tiny` are different nodes; otherwise a
            number is one node. The graphs of AM's and BGS's sizes always have node types, the
            others never.
    """
    directory = data_directory()
    if directory is None:
        raise FileNotFoundError("no rgnn/ in $PENSTOCK_DATA")
    makers: dict[str, Callable[[], Graph]] = {
        "aifb": lambda: _triples(directory / "aifb" / "aifb_stripped.nt.gz"),
        "mutag": lambda: _triples(directory / "mutag" / "mutag_stripped.nt.gz"),
        "fb15k-237": lambda: _triples(directory / "fb15k-237" / "train2id.txt"),
        "wn18rr": lambda: _triples(directory / "wn18rr" / "train2id.txt"),
        "mag-tiny": lambda: _mag(directory / "mag-tiny", typed),
        "am-sizes": lambda: _of_sizes(directory / "segment-sizes" / "AM.csv", 881_680, 7),
        "bgs-sizes": lambda: _of_sizes(directory / "segment-sizes" / "BGS.csv", 94_806, 27),
        ONE_WAY: lambda: Graph.from_triples(directory / "fb15k-237" / "train2id.txt"),
    }
    return makers[name]()


def relation_types(graph: Graph) -> list[tuple[int, int]]:
    """Return the node types that each relation joins; types 0 for a relation without edges."""
    edge_index, relation = graph.edge_index.cpu(), graph.edge_type.cpu()
    found = torch.zeros(graph.num_relations, 2, dtype=torch.int64)
    found[relation] = node_types(graph)[edge_index].T
    return [(source, target) for source, target in found.tolist()]


def node_types(graph: Graph) -> torch.Tensor:
    """Return the type of each node, int64, (num_nodes,), on the CPU."""
    from penstock.rgnn.spaces import NODE_TYPE_OF

    return graph.index(NODE_TYPE_OF).cpu().long()


def _triples(path: Path) -> Graph:
    return Graph.from_triples(path).with_reverse_edges()


def _mag(directory: Path, typed: bool) -> Graph:
    files = [np.load(directory / f"{name}_coo_2.npy") for name in _MAG_RELATIONS]
    edges = [torch.from_numpy(file.astype(np.int64)) for file in files]
    relation = [torch.full((found.shape[1],), number) for number, found in enumerate(edges)]
    if not typed:
        return Graph(torch.cat(edges, dim=1), torch.cat(relation))
    pairs = [pair for forward in _MAG_TYPES.values() for pair in (forward, forward[::-1])]
    sizes = [0, 0, 0]
    for found, ends in zip(edges, pairs, strict=True):
        for row, kind in zip(found, ends, strict=True):
            sizes[kind] = max(sizes[kind], int(row.max()) + 1)
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    shifted = [
        found + torch.tensor([[starts[source]], [starts[target]]])
        for found, (source, target) in zip(edges, pairs, strict=True)
    ]
    return Graph(
        torch.cat(shifted, dim=1),
        torch.cat(relation),
        num_nodes=sum(sizes),
        node_type=torch.repeat_interleave(torch.tensor(sizes)),
    )


def _of_sizes(path: Path, num_nodes: int, num_types: int) -> Graph:
    """Return a random graph with relations of the sizes in a file, in pairs of reverses."""
    bounds = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64)
    sizes = (bounds[:, 1] - bounds[:, 0])[::2]
    generator = np.random.default_rng(0)
    share = 1 / np.arange(1, num_types + 1)  # of a node type among the nodes
    share /= share.sum()
    length = (share * num_nodes).astype(np.int64)
    length[0] += num_nodes - length.sum()
    start = np.cumsum(length) - length
    edges, relation = [], []
    for number, size in enumerate(sizes):
        has_room = share * (length >= min(size, length[0]))
        source = generator.choice(num_types, p=has_room / has_room.sum())
        target = generator.choice(num_types, p=share)
        subjects = start[source] + generator.integers(0, length[source], size)
        ranks = generator.zipf(_ZIPF_EXPONENT, size) % length[target]
        objects = start[target] + ranks * 2654435761 % length[target]  # popular ones lie anywhere
        edges += [np.stack([subjects, objects]), np.stack([objects, subjects])]
        relation += [np.full(size, 2 * number), np.full(size, 2 * number + 1)]
    return Graph(
        torch.from_numpy(np.concatenate(edges, axis=1)),
        torch.from_numpy(np.concatenate(relation)),
        num_nodes=num_nodes,
        num_relations=2 * len(sizes),
        node_type=torch.repeat_interleave(torch.from_numpy(length)),
        num_node_types=num_types,
    )
