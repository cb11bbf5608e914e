"""The arms of `rgnn.py`: one layer's parameters and inputs, and the ways of computing it.

Ours, the edgewise baseline and every ablation are the same module; only the program inside it
changes. PyG's layers have the same parameters, loaded from ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import _rgnn_edgewise
from _rgnn_edgewise import SortedEdges
from _rgnn_graphs import node_types, relation_types
from penstock import rgnn
from penstock.rgnn import CompiledFunction, Explanation, Graph
from penstock.rgnn.backends.cpp._graph_arrays import find_arrays
from penstock.rgnn.layers import _hgt, _rgat, _rgcn

MODELS = ("RGCN", "RGAT", "HGT")
_PROGRAMS: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "RGCN": (_rgcn, ("rgcn",)),
    "RGAT": (_rgat, ("rgat",)),
    "HGT": (_hgt, ("hgt", "hgt_of_features")),
}
"""The functions in the modules of our layers, one of which a layer calls; the first one is what the
edgewise arms take the place of."""
EDGEWISE = "segment-mm"
EDGEWISE_CSR = "segment-mm, CSR sums"
PYG, PYG_FAST, PYG_LIB = "PyG", "PyG FastRGCNConv", "PyG with pyg-lib"
PYG_COMPILED = "PyG, torch.compile"
DGL = "DGL"
OURS = "penstock"

Forward = Callable[[], tuple[torch.Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of computing a layer."""

    forward: Forward
    """The layer's results: one for all nodes, or one for each node type that has edges."""
    inputs: list[torch.Tensor]
    """The features."""
    parameters: list[torch.Tensor]
    release: Callable[[], None] = lambda: None
    """Lets go of memory that is kept from one step to the next."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that get a gradient."""
        return [*self.inputs, *self.parameters]


def ours(backend: str, without: Collection[str] = ()) -> str:
    """Return the name of an arm of ours: "penstock (cpp) without compaction"."""
    left_out = "all rewrites" if set(without) == set(rgnn.REWRITES) else ", ".join(without)
    return f"{OURS} ({backend})" + (f" without {left_out}" if left_out else "")


def backends(device: str) -> list[str]:
    """Return our back ends for a device, the fastest last."""
    elsewhere = "triton" if device == "cpu" else "cpp"
    return [name for name in rgnn.BACKENDS if name not in ("auto", elsewhere)]


class Layer:
    """A layer of ours on a graph, with its inputs, and its counterparts elsewhere.

    Args:
        model: One of `MODELS`.
        graph: On the device to measure on.
        width: Features of each node, before and after.
    """

    def __init__(self, model: str, graph: Graph, width: int) -> None:
        torch.manual_seed(0)
        self.model, self.graph, self.width = model, graph, width
        self.x: Any
        if model == "HGT":
            self._name_types()
            self.module = rgnn.HGTConv(width, width, (self._node_types, self._edge_types))
            sizes = torch.bincount(node_types(graph)).tolist()
            x = torch.randn(graph.num_nodes, width).split(sizes)
            self.x = {
                name: rows.to(graph.device).requires_grad_()
                for name, rows in zip(self._node_types, x, strict=True)
            }
        else:
            layer = {"RGCN": rgnn.RGCNConv, "RGAT": rgnn.RGATConv}[model]
            self.module = layer(width, width, graph.num_relations)
            self.x = torch.randn(graph.num_nodes, width, device=graph.device, requires_grad=True)
        self.module.to(graph.device)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Return the feature tensors."""
        return list(self.x.values()) if self.model == "HGT" else [self.x]

    def edgewise(self, *, csr: bool, among: torch.Tensor | None = None) -> Arm:
        """Return the arm in torch operators, edge by edge.

        Args:
            csr: Whether sums are products with sparse matrices.
            among: bool, (num_nodes,): nodes whose results are wanted, those of others are wrong;
                None for all. Only edges into these nodes are then looked at.
        """
        graph = self.graph
        if among is not None:
            into = among[graph.edge_index[1]]
            graph = Graph(
                graph.edge_index[:, into],
                graph.edge_type[into],
                num_nodes=graph.num_nodes,
                num_relations=graph.num_relations,
            )
        program = _rgnn_edgewise.PROGRAMS[self.model](SortedEdges.of(graph, csr=csr))
        return self.arm({_PROGRAMS[self.model][1][0]: program}, self.graph)

    def pyg(self, name: str) -> Arm:
        """Return an arm of PyG: stock, `FastRGCNConv`, with pyg-lib's products, or compiled."""
        import torch_geometric.backend
        from torch_geometric import nn

        layers = {"RGCN": nn.RGCNConv, "RGAT": nn.RGATConv}
        if name == PYG_FAST:
            layers["RGCN"] = nn.FastRGCNConv
        if self.model == "HGT":
            metadata = (self._node_types, self._edge_types)
            module = nn.HGTConv(self.width, self.width, metadata)
        else:
            module = layers[self.model](self.width, self.width, self.graph.num_relations)
        module.load_state_dict(self.module.state_dict())
        module.to(self.graph.device)
        call = torch.compile(module) if name == PYG_COMPILED else module
        edges: tuple[Any, ...] = (self.graph.edge_index, self.graph.edge_type)
        if self.model == "HGT":
            edges = (self._edges_by_type(),)

        def forward() -> tuple[torch.Tensor, ...]:
            torch_geometric.backend.use_segment_matmul = name == PYG_LIB
            return self._results(call(self.x, *edges))

        return Arm(forward, self.inputs, list(module.parameters()))

    def dgl(self) -> Arm:
        """Return the arm of DGL's layer for graphs with typed edges, on edges sorted by type."""
        dgl: Any = importlib.import_module("dgl")
        order = torch.sort(self.graph.edge_type, stable=True)[1]
        source, target = self.graph.edge_index[:, order]
        relation = self.graph.edge_type[order]
        graph = dgl.graph((source, target), num_nodes=self.graph.num_nodes)
        counts = (len(self.inputs), self.graph.num_relations)
        if self.model == "HGT":
            module = dgl.nn.HGTConv(self.width, self.width, 1, *counts)
            types = (node_types(self.graph).to(self.graph.device), relation)
        else:
            module = dgl.nn.RelGraphConv(self.width, self.width, self.graph.num_relations)
            types = (relation, SortedEdges.of(self.graph, csr=False).factor)
        module.to(self.graph.device)

        def forward() -> tuple[torch.Tensor, ...]:
            return (module(graph, torch.cat(self.inputs), *types, presorted=True),)

        return Arm(forward, self.inputs, list(module.parameters()))

    def arm(self, programs: Mapping[str, Callable[..., Any]], graph: Graph) -> Arm:
        """Return the arm of our module on a graph, with other programs in place of its own.

        HGT's has features in place of projected nodes only if both of its programs are given.
        """

        def forward() -> tuple[torch.Tensor, ...]:
            with _in_place_of(self.model, programs):
                return self._results(self.module(self.x, graph))

        return Arm(forward, self.inputs, list(self.module.parameters()))

    def rows_of_results(self, nodes: torch.Tensor) -> list[torch.Tensor]:
        """Return a bool for each row of each result, from one for each node."""
        if self.model != "HGT":
            return [nodes]
        sizes = torch.bincount(node_types(self.graph)).tolist()
        is_target = {target for _, _, target in self._edge_types}
        parts = zip(self._node_types, nodes.split(sizes), strict=True)
        return [rows for name, rows in parts if name in is_target]

    def _results(self, out: Any) -> tuple[torch.Tensor, ...]:
        if self.model != "HGT":
            return (out,)
        return tuple(out[name] for name in self._node_types if out.get(name) is not None)

    def _name_types(self) -> None:
        self._node_types = [f"n{kind}" for kind in range(self.graph.num_node_types)]
        self._edge_types = [
            (f"n{source}", f"r{relation}", f"n{target}")
            for relation, (source, target) in enumerate(relation_types(self.graph))
        ]

    def _edges_by_type(self) -> dict[tuple[str, str, str], torch.Tensor]:
        """Return edges by relation as PyG has them, numbered within their node types."""
        sizes = torch.bincount(node_types(self.graph))
        starts = (sizes.cumsum(0) - sizes).tolist()
        start_of = dict(zip(self._node_types, starts, strict=True))
        relation = self.graph.edge_type
        order = torch.sort(relation, stable=True)[1]
        lengths = torch.bincount(relation, minlength=self.graph.num_relations).tolist()
        parts = self.graph.edge_index[:, order].split(lengths, dim=1)
        return {
            kind: torch.stack([part[0] - start_of[kind[0]], part[1] - start_of[kind[2]]])
            for kind, part in zip(self._edge_types, parts, strict=True)
        }


class OurProgram:
    """A layer's program, compiled for one backend.

    Args:
        layer: The layer that it is part of.
        backend: One of `penstock.rgnn.BACKENDS`.
        without: Rewrites to leave out.
    """

    def __init__(self, layer: Layer, backend: str, without: Collection[str] = ()) -> None:
        module, names = _PROGRAMS[layer.model]
        self._layer = layer
        self.compiled: dict[str, CompiledFunction] = {
            name: rgnn.compile(getattr(module, name).__wrapped__, backend=backend, without=without)
            for name in names
        }

    def arm(self, graph: Graph | None = None) -> Arm:
        """Return the arm of the layer with this program, on its graph or on another one like it."""
        graph = graph or self._layer.graph
        arm = self._layer.arm(self.compiled, graph)
        return dataclasses.replace(arm, release=lambda: find_arrays(graph).buffers.clear())

    def explain(self, *, training: bool) -> Explanation:
        """Explain the program on the layer's graph, with a backward or without."""
        found: list[Explanation] = []

        def record(compiled: CompiledFunction, graph: Graph, *args: Any) -> torch.Tensor:
            if not training:
                args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
            found.append(compiled.explain(graph, *args))
            return compiled(graph, *args)

        self.forward(record)
        return found[0]

    def forward(self, call: Callable[..., torch.Tensor]) -> None:
        """Run the layer's forward with `call(compiled, graph, *arguments)` for `compiled(...)`."""
        calls = {name: functools.partial(call, found) for name, found in self.compiled.items()}
        self._layer.arm(calls, self._layer.graph).forward()


def maker(layer: Layer, name: str) -> Callable[[], Arm]:
    """Return the function that makes an arm that is not ours."""
    if name in (EDGEWISE, EDGEWISE_CSR):
        return functools.partial(layer.edgewise, csr=name == EDGEWISE_CSR)
    return layer.dgl if name == DGL else functools.partial(layer.pyg, name)


def baselines(model: str, device: str) -> list[str]:
    """Return the arms that are not ours and exist for a model and on this machine."""
    names = [EDGEWISE, EDGEWISE_CSR, PYG]
    if model == "RGCN":
        names.append(PYG_FAST)
    if importlib.util.find_spec("pyg_lib") and model == "RGCN":
        names.append(PYG_LIB)
    names.append(PYG_COMPILED)
    if importlib.util.find_spec("dgl") and model != "RGAT" and device != "cpu":
        names.append(DGL)
    return names


@contextlib.contextmanager
def _in_place_of(model: str, programs: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let the layers of a model run other programs."""
    module, names = _PROGRAMS[model]
    with contextlib.ExitStack() as stack:
        for name, program in programs.items():
            stack.enter_context(mock.patch.object(module, name, program))
        if len(programs) < len(names):
            patch = mock.patch.object(_hgt.HGTConv, "_should_multiply_weights_first", _never)
            stack.enter_context(patch)
        yield


def _never(module: torch.nn.Module, graph: Graph, sizes: dict[str, int]) -> bool:
    return False
