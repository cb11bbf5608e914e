"""Formats of graphs: PyG's HeteroData, arrays of triples, files of triples."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch

from penstock.compat.fake_tensors import FakeTensor

# A literal may have blanks and escaped quotes; nothing else ends a statement before its full stop.
_NODE = r"<[^<>]*>|_:[^\s<>\"]+"
_LITERAL = r'"(?:[^"\\]|\\.)*"(?:@[\w-]+|\^\^<[^<>]*>)?'
_N_TRIPLE = re.compile(rf"({_NODE})\s*(<[^<>]*>)\s*({_NODE}|{_LITERAL})\s*\.\s*(?:#.*)?")
_COMMENT = re.compile(r"#(?:\s|$)")
_ID = re.compile(r"-?[0-9]{1,18}")
EdgeType = tuple[str, str, str]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphNames:
    """Names of nodes, relations and node types, if the graph's source had names; else empty."""

    nodes: tuple[str, ...] = ()
    relations: tuple[str, ...] = ()
    node_types: tuple[str, ...] = ()


def check_integers(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a tensor of integers; got {type(value).__name__}. "
            f"Make one with torch.as_tensor"
        )
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name} must hold integers; got {value.dtype}. Convert with .long()")
    if isinstance(value, FakeTensor):
        raise ValueError(
            f"{name} is a fake tensor, without numbers to make a graph of, as penstock.capture, "
            "torch.export and make_fx give them to a model: make a penstock.rgnn.Graph of the "
            "edges outside of what they record, and give that to the layer"
        )
    if value.layout is not torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor; got the layout {value.layout}. Of a sparse matrix, "
            "pass coalesce().indices()"
        )


def read_pyg(data: Any) -> dict[str, Any]:
    """Return the arguments of `Graph` for PyG's `HeteroData`; see `Graph.from_pyg`."""
    if not hasattr(data, "metadata"):
        raise TypeError(
            f"data must be a torch_geometric.data.HeteroData; got {type(data).__name__}. Make a "
            f"Data one with to_heterogeneous(), or use Graph(data.edge_index, edge_type)"
        )
    node_types, edge_types = data.metadata()
    sizes, edges = {}, {}
    for name in node_types:
        sizes[name] = data[name].num_nodes
        if sizes[name] is None:
            raise ValueError(
                f"data[{name!r}] does not say how many nodes there are; set its x or num_nodes"
            )
    for edge_type in edge_types:
        edges[edge_type] = getattr(data[edge_type], "edge_index", None)
        if edges[edge_type] is None:
            raise ValueError(
                f"data[{edge_type!r}] has no edge_index; set it (the transform ToSparseTensor "
                f"drops it)"
            )
    device = getattr(next(iter(edges.values()), None), "device", None)
    edge_index, relations = join_types(edges, edge_types, sizes, "data[{!r}].edge_index", device)
    return {
        "edge_index": edge_index,
        "edge_type": relations,
        "num_nodes": sum(sizes.values()),
        "num_relations": len(edge_types),
        "node_type": torch.repeat_interleave(
            torch.tensor([*sizes.values()], dtype=torch.int64, device="cpu")
        ),
        "num_node_types": len(node_types),
        "names": GraphNames(
            node_types=tuple(node_types),
            relations=tuple(" ".join(edge_type) for edge_type in edge_types),
        ),
    }


def join_types(
    edges: Mapping[EdgeType, torch.Tensor],
    edge_types: Sequence[EdgeType],
    sizes: Mapping[str, int],
    name: str,
    device: torch.device | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return edges between nodes of one type after another, and their relations.

    Args:
        edges: Edges by edge type, with numbers within the node types of their ends.
        edge_types: Those that there may be, in the order of the relations.
        sizes: Number of nodes of each type.
        name: The name of edges in messages, with a place for their type.
        device: The device of the edges.
    """
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    ends = [torch.empty(2, 0, dtype=torch.int64, device=device)]
    relations = [ends[0][0]]
    for relation, edge_type in enumerate(edge_types):
        if edge_type not in edges:
            continue
        edge_index, (source, _, target) = edges[edge_type], edge_type
        if not torch.compiler.is_dynamo_compiling():  # tensors have no content yet
            check_ends(name.format(edge_type), edge_index, (source, target), sizes)
        first, last = edge_index.long()
        ends.append(torch.stack([first + starts[source], last + starts[target]]))
        relations.append(torch.full_like(first, relation))
    return torch.cat(ends, dim=1), torch.cat(relations)


def check_ends(
    name: str, edge_index: Any, types: tuple[str, str], sizes: Mapping[str, int]
) -> None:
    """Refuse edges with ends that are no nodes of the types that they should have.

    Once nodes of all types are in one range, such an end would be a node of the next type.
    """
    check_integers(name, edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"{name} must have shape (2, num_edges); got {tuple(edge_index.shape)}")
    for end, of_type in zip(edge_index, types, strict=True):
        if of_type not in sizes:
            raise ValueError(
                f"{name} ends in nodes of type {of_type!r}, of which nothing is known; the node "
                f"types are {list(sizes)}"
            )
        if end.numel():
            low, high = (int(bound) for bound in torch.aminmax(end))
            if low < 0 or high >= sizes[of_type]:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"{name} holds {wrong}, and there are {sizes[of_type]} nodes of type "
                    f"{of_type!r}; ids begin at 0 within each type"
                )


def read_triples(triples: torch.Tensor | np.ndarray | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of `Graph` for (head, relation, tail) triples."""
    names = None
    if isinstance(triples, str | os.PathLike):
        try:
            array, names = _parse_file(Path(triples))
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{triples}: cannot be read as text in UTF-8: {error}") from error
    elif isinstance(triples, torch.Tensor):
        array = triples
    else:
        array, names = _read_array(np.asarray(triples))
    if array.dim() != 2 or array.shape[1] != 3:
        raise ValueError(
            f"triples must have shape (num_triples, 3): head, relation, tail; "
            f"got {tuple(array.shape)}"
        )
    check_integers("triples", array)
    parts: dict[str, Any] = {"edge_index": array[:, [0, 2]].T, "edge_type": array[:, 1]}
    if names is not None:
        parts["names"] = names
        if names.nodes:
            parts |= {"num_nodes": len(names.nodes), "num_relations": len(names.relations)}
    return parts


def _read_array(array: np.ndarray) -> tuple[torch.Tensor, GraphNames | None]:
    """Return numbers as they are, and names as numbers."""
    has_names = array.dtype.kind in "UO" and all(isinstance(each, str) for each in array.flat)
    if has_names and array.ndim == 2 and array.shape[1] == 3:
        return _number_names(iter(array.tolist()))
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"triples must hold integers, or names as strings; got {array.dtype}. Convert with "
            f".astype('int64') or .astype(str)"
        )
    # torch warns of memory that is read-only, and has no negative strides.
    return torch.from_numpy(array.astype(np.int64)), None


def _parse_file(path: Path) -> tuple[torch.Tensor, GraphNames | None]:
    stem = path.name.removesuffix(".gz")
    open_file: Any = open if stem == path.name else gzip.open
    # A byte order mark is no part of the first name.
    with open_file(path, "rt", encoding="utf-8-sig") as lines:
        if stem.endswith(".nt"):
            return _number_names(_parse_n_triples(path, lines))
        first = lines.readline().strip()
        if _ID.fullmatch(first):
            rows = _parse_ids(path, list(_split_columns(path, lines, first_line=2)))
            if len(rows) != int(first):
                raise ValueError(f"{path}:1: announces {first} triples, the file has {len(rows)}")
            return rows[:, [0, 2, 1]], None
        lines.seek(0)
        table = list(_split_columns(path, lines, first_line=1))
    are_ids = [all(_ID.fullmatch(field) for field in fields) for _, fields in table]
    if all(are_ids):
        return _parse_ids(path, table), None
    if not are_ids[0] and all(are_ids[1:]) and len(table) > 1:
        _refuse(path, table[0][0], "the only line without ids; if it is a header, begin it with #")
    return _number_names(fields for _, fields in table)


def _parse_n_triples(path: Path, lines: IO[str]) -> Iterator[list[str]]:
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _N_TRIPLE.fullmatch(text)
        if match is None:
            _refuse(path, number, f"not an N-Triples statement: {text!r}")
        yield [match[1], match[2], match[3]]


def _split_columns(path: Path, lines: IO[str], first_line: int) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=first_line):
        if not line.strip() or _COMMENT.match(line):
            continue
        # Names may have blanks where tabs keep the columns apart.
        fields = line.rstrip("\n").split("\t") if "\t" in line else line.split()
        fields = [field.strip() for field in fields]
        if len(fields) != 3:
            _refuse(path, number, f"expected 3 columns, found {len(fields)}: {line!r}")
        if "" in fields:
            _refuse(path, number, f"a column is empty: {line!r}")
        yield number, fields


def _parse_ids(path: Path, table: list[tuple[int, list[str]]]) -> torch.Tensor:
    """Return the numbers of a table, (lines, 3)."""
    try:
        ids = np.array([fields for _, fields in table], dtype=np.int64).reshape(-1, 3)
    except (ValueError, OverflowError):
        ids = None
    if ids is not None and not (ids < 0).any():
        return torch.from_numpy(ids)
    cells = ((number, field) for number, fields in table for field in fields)
    number, wrong = next(cell for cell in cells if not _ID.fullmatch(cell[1]) or cell[1][0] == "-")
    _refuse(path, number, f"expected ids from 0 on, found {wrong!r}")


def _refuse(path: Path, number: int, reason: str) -> NoReturn:
    raise ValueError(f"{path}:{number}: {reason}")


def _number_names(triples: Iterator[list[str]]) -> tuple[torch.Tensor, GraphNames]:
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
    ids = torch.tensor(np.array(rows, dtype=np.int64).reshape(-1, 3), device="cpu")
    return ids, dataclasses.replace(GraphNames(), nodes=tuple(nodes), relations=tuple(relations))
