"""Graphs from where they come: PyG's HeteroData, arrays of triples, files of triples."""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from penstock.rgnn._graph import Graph, GraphNames

# Subject and predicate have no blanks; a literal as the object may have them.
_N_TRIPLE = re.compile(r"(\S+)\s+(\S+)\s+(.+?)\s*\.\s*(?:#.*)?")


def from_pyg(data: Any) -> Graph:
    """See `Graph.from_pyg`."""
    node_types, edge_types = data.metadata()
    offsets, sizes, num_nodes = {}, [], 0
    for name in node_types:
        size = data[name].num_nodes
        if size is None:
            raise ValueError(
                f"data[{name!r}] does not say how many nodes there are; set its x or num_nodes"
            )
        offsets[name] = num_nodes
        sizes.append(size)
        num_nodes += size
    ends, relations = [], []
    for relation, (source, name, target) in enumerate(edge_types):
        edge_index = data[source, name, target].edge_index
        shift = torch.tensor([[offsets[source]], [offsets[target]]], device=edge_index.device)
        ends.append(edge_index + shift)
        relations.append(torch.full((edge_index.shape[1],), relation, device=edge_index.device))
    none = torch.empty(2, 0, dtype=torch.int64)
    return Graph(
        torch.cat(ends, dim=1) if ends else none,
        torch.cat(relations) if relations else none[0],
        num_nodes=num_nodes,
        num_relations=len(edge_types),
        node_type=torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)),
        num_node_types=len(node_types),
        names=GraphNames(
            node_types=tuple(node_types),
            relations=tuple(" ".join(edge_type) for edge_type in edge_types),
        ),
    )


def from_triples(
    triples: torch.Tensor | np.ndarray | str | os.PathLike[str], **kwargs: Any
) -> Graph:
    """See `Graph.from_triples`."""
    names = None
    if isinstance(triples, str | os.PathLike):
        triples, names = _read(Path(triples))
    array = torch.as_tensor(triples)
    if array.dim() != 2 or array.shape[1] != 3:
        raise ValueError(
            f"triples must have shape (num_triples, 3): head, relation, tail; "
            f"got {tuple(array.shape)}"
        )
    if names is not None:
        kwargs.setdefault("names", names)
        if names.nodes:
            kwargs.setdefault("num_nodes", len(names.nodes))
            kwargs.setdefault("num_relations", len(names.relations))
    return Graph(array[:, [0, 2]].T, array[:, 1], **kwargs)


def _read(path: Path) -> tuple[torch.Tensor, GraphNames | None]:
    stem = path.name.removesuffix(".gz")
    with ExitStack() as stack:
        if stem != path.name:
            lines = stack.enter_context(gzip.open(path, "rt", encoding="utf-8"))
        else:
            lines = stack.enter_context(path.open(encoding="utf-8"))
        if stem.endswith(".nt"):
            return _number(_n_triples(path, lines))
        first = lines.readline()
        if len(first.split()) == 1 and first.strip().isdigit():
            return _open_ke(path, lines, int(first)), None
        lines.seek(0)
        table = [fields for _, fields in _columns(path, lines, first_line=1)]
    if all(field.isdigit() for fields in table for field in fields):
        return torch.tensor(np.array(table or np.empty((0, 3)), dtype=np.int64)), None
    return _number(iter(table))


def _n_triples(path: Path, lines: IO[str]) -> Iterator[list[str]]:
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _N_TRIPLE.fullmatch(text)
        if match is None:
            raise ValueError(f"{path}:{number}: not an N-Triples statement: {text!r}")
        yield [match[1], match[2], match[3]]


def _columns(path: Path, lines: IO[str], first_line: int) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=first_line):
        # Names may have blanks where tabs keep the columns apart.
        fields = line.rstrip("\n").split("\t") if "\t" in line else line.split()
        if not fields:
            continue
        if len(fields) != 3:
            raise ValueError(f"{path}:{number}: expected 3 columns, found {len(fields)}: {line!r}")
        yield number, fields


def _open_ke(path: Path, lines: IO[str], count: int) -> torch.Tensor:
    rows = np.array([fields for _, fields in _columns(path, lines, 2)], dtype=np.int64)
    if len(rows) != count:
        raise ValueError(f"{path}:1: announces {count} triples, the file has {len(rows)}")
    return torch.from_numpy(rows.reshape(-1, 3)[:, [0, 2, 1]].copy())


def _number(triples: Iterator[list[str]]) -> tuple[torch.Tensor, GraphNames]:
    nodes: dict[str, int] = {}
    relations: dict[str, int] = {}
    rows = [
        (
            nodes.setdefault(head, len(nodes)),
            relations.setdefault(relation, len(relations)),
            nodes.setdefault(tail, len(nodes)),
        )
        for head, relation, tail in triples
    ]
    ids = torch.tensor(np.array(rows, dtype=np.int64).reshape(-1, 3))
    return ids, dataclasses.replace(GraphNames(), nodes=tuple(nodes), relations=tuple(relations))
