"""The heterogeneous graph transformer of Hu et al. 2020 (arXiv 2003.01332, section 3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock.rgnn._compile import compile
from penstock.rgnn.frontend.functions import dot, edge_softmax
from penstock.rgnn.graph import (
    EdgeType,
    Graph,
    GraphTensors,
    build_once,
    find_graph,
    join_types,
    remember_graph,
)
from penstock.rgnn.layers._arguments import check_message_passing, glorot_, parse_channels
from penstock.rgnn.spaces import SRC_PAIR_SRC, SRC_PAIR_TYPE
from penstock.units import parse_count


@compile
def hgt(g: Any, k: Any, q: Any, v: Any, k_rel: Any, v_rel: Any, p_rel: Any, heads: int) -> Any:
    """Compute attention and messages; keys, queries and values are node tensors."""
    # In the paper's symbols, for each head, an edge e from s to t and d features of a head:
    #   ATT(s, e, t) = (K(s) W_ATT^phi(e) Q(t)^T) * mu / sqrt(d), `p_rel` being mu / sqrt(d)
    #   H[t] = sum over s of softmax over N(t) of ATT(s, e, t) * (M(s) W_MSG^phi(e))
    e, n = g.edges, g.nodes
    keys, queries, values = (n(tensor).heads(heads) for tensor in (k, q, v))
    s = dot(e.src(keys) @ k_rel[e.type], e.dst(queries)) * p_rel[e.type]
    return g.sum_to_dst(edge_softmax(s) * (e.src(values) @ v_rel[e.type])).merge_heads()


@compile
def hgt_of_features(
    g: Any, x: Any, q: Any, key: Any, k_bias: Any, value: Any, v_bias: Any, p_rel: Any, heads: int
) -> Any:
    """Compute them of features: a relation's matrices make keys and values in one step."""
    e, n = g.edges, g.nodes
    keys = (e.src(x) @ key[e.type] + k_bias[e.type]).heads(heads)
    values = (e.src(x) @ value[e.type] + v_bias[e.type]).heads(heads)
    s = dot(keys, e.dst(n(q).heads(heads))) * p_rel[e.type]
    return g.sum_to_dst(edge_softmax(s) * values).merge_heads()


class HGTConv(nn.Module):
    """PyG's `HGTConv`, compiled to the graph at hand; its state dict can be loaded.

    A key is made by two linear maps, one of the node's type and one of the relation, and so is a
    value. Where that takes fewer multiplications, the two matrices are multiplied with each other
    first; then no keys and values of nodes are ever in memory.

    Example:
        >>> layer = HGTConv(16, 32, (["a", "b"], [("a", "to", "b")]), heads=4)
        >>> x = {"a": torch.randn(3, 16), "b": torch.randn(2, 16)}
        >>> layer(x, {("a", "to", "b"): torch.tensor([[0, 2], [1, 1]])})["b"].shape
        torch.Size([2, 32])

    Args:
        in_channels: Features of each node, for all node types or by node type.
        out_channels: Features of each node of the result.
        metadata: Node types and edge types, as `HeteroData.metadata()` gives them.
        heads: Number of heads.
        kwargs: Those of PyG's `MessagePassing`, of which only the defaults are supported.

    Raises:
        ValueError: `out_channels` is no multiple of `heads`.
    """

    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        metadata: tuple[list[str], list[EdgeType]],
        heads: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_message_passing("HGTConv", kwargs)
        out_channels = parse_count(out_channels, name="out_channels")
        heads = parse_count(heads, name="heads", least=1)
        if out_channels % heads:
            raise ValueError(f"out_channels {out_channels} must be a multiple of heads {heads}")
        self.node_types, self.edge_types = metadata
        if not isinstance(in_channels, Mapping):
            in_channels = dict.fromkeys(self.node_types, parse_channels("HGTConv", in_channels))
        self.in_channels = dict(in_channels)
        self.out_channels, self.heads = out_channels, heads
        self.kqv_lin = _Linears(self.in_channels, 3 * out_channels)
        self.out_lin = _Linears(dict.fromkeys(self.node_types, out_channels), out_channels)
        width = out_channels // heads
        self.k_rel = _RelationWeights(heads, len(self.edge_types), width)
        self.v_rel = _RelationWeights(heads, len(self.edge_types), width)
        self.skip = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.ones(1)) for name in self.node_types}
        )
        # PyG's order, by which optimizers know parameters: of a dict they are sorted, as above.
        self.p_rel = nn.ParameterDict()
        for edge_type in self.edge_types:
            self.p_rel[_key("__".join(edge_type))] = nn.Parameter(torch.ones(1, heads))

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        for part in (*self.kqv_lin.lins.values(), *self.out_lin.lins.values()):
            assert isinstance(part, nn.Linear)
            part.reset_parameters()
        glorot_(self.k_rel.weight)
        glorot_(self.v_rel.weight)
        for weight in (*self.skip.values(), *self.p_rel.values()):
            nn.init.ones_(weight)

    def forward(
        self,
        x_dict: Mapping[str, torch.Tensor],
        edge_index_dict: Mapping[EdgeType, torch.Tensor] | Graph,
    ) -> dict[str, torch.Tensor]:
        """Apply the layer.

        Args:
            x_dict: Features by node type, each (nodes of the type, in_channels of it).
            edge_index_dict: Edges by edge type, each (2, edges) with numbers within the types of
                the ends; or `Graph.from_pyg(data)`. A graph that is made here is kept for the next
                call with the same tensors.

        Returns:
            (nodes of the type, out_channels) for each node type that an edge type ends in.

        Raises:
            ValueError: The graph has other relations, or another number of nodes; `x_dict` has no
                features of a node type; or an edge's end is no node of its type.
        """
        if missing := [name for name in self.node_types if name not in x_dict]:
            raise ValueError(f"x_dict has no {missing}, which metadata has")
        sizes = {name: x_dict[name].shape[0] for name in self.node_types}
        graph = self._find_graph(edge_index_dict, sizes)
        if not self.edge_types:
            return {}
        scale = self._find_priors(edge_index_dict) / math.sqrt(self.out_channels // self.heads)
        if self._should_multiply_weights_first(graph, sizes):
            attended = self._attend_features(graph, x_dict, scale)
        else:
            attended = self._attend_projections(graph, x_dict, scale)
        is_target = {target for _, _, target in self.edge_types}
        results = {}
        for name, h in zip(self.node_types, attended.split(list(sizes.values())), strict=True):
            if name in is_target:
                results[name] = self._project_output(name, h, x_dict[name])
        return results

    def _find_priors(self, edges: Mapping[EdgeType, torch.Tensor] | Graph) -> torch.Tensor:
        """Return `p_rel`, (relations, heads); what edges leave out has no gradient, as in PyG."""
        priors = [self.p_rel[_key("__".join(each))] for each in self.edge_types]
        if not isinstance(edges, Graph):
            named = zip(self.edge_types, priors, strict=True)
            priors = [prior if each in edges else prior.detach() for each, prior in named]
        return torch.cat(priors)

    def _should_multiply_weights_first(self, graph: Graph, sizes: dict[str, int]) -> bool:
        """Return whether that takes fewer multiplications than projecting nodes, and is legal."""
        if len(set(self.in_channels.values())) > 1:
            return False  # features of different lengths have no common rows
        if torch.compiler.is_dynamo_compiling():
            return False  # one code serves graphs of all counts
        num_pairs = graph.counts.num_src_pairs
        length = self.in_channels[self.node_types[0]]
        width = self.out_channels // self.heads
        weights_first = (len(self.edge_types) * width + num_pairs) * length * self.out_channels
        nodes_first = (graph.num_nodes * length + num_pairs * width) * self.out_channels
        if weights_first >= nodes_first:
            return False
        sources = tuple(self.node_types.index(source) for source, _, _ in self.edge_types)
        return _has_sources_of_types(graph, tuple(sizes.values()), sources)

    def _attend_features(
        self, graph: Graph, x_dict: Mapping[str, torch.Tensor], scale: torch.Tensor
    ) -> torch.Tensor:
        names = self.node_types
        linears = [self.kqv_lin.lins[_key(name)] for name in names]
        weight, bias = (
            torch.stack([getattr(linear, name).unflatten(0, (3, -1)) for linear in linears])
            for name in ("weight", "bias")
        )
        q = [
            functional.linear(x_dict[name], matrix, row)
            for name, matrix, row in zip(names, weight[:, 1], bias[:, 1], strict=True)
        ]
        sources = [names.index(source) for source, _, _ in self.edge_types]
        of_source = torch.tensor(sources, device=scale.device)
        weights = []
        for place, then in ((0, self.k_rel), (2, self.v_rel)):
            by_head = torch.cat([weight[:, place], bias[:, place].unsqueeze(2)], dim=2)
            by_head = by_head[of_source].unflatten(1, (self.heads, -1))
            first = torch.einsum("rhwi,rhwv->rihv", by_head, then.by_relation()).flatten(2)
            weights += [first[:, :-1], first[:, -1]]
        x = _concatenate([x_dict[name] for name in names])
        return hgt_of_features(graph, x, _concatenate(q), *weights, scale, self.heads)

    def _attend_projections(
        self, graph: Graph, x_dict: Mapping[str, torch.Tensor], scale: torch.Tensor
    ) -> torch.Tensor:
        projected = _concatenate([self.kqv_lin(name, x_dict[name]) for name in self.node_types])
        k, q, v = projected.unflatten(1, (3, -1)).unbind(1)  # the backward is a single stack
        weights = (self.k_rel.by_relation(), self.v_rel.by_relation(), scale)
        return hgt(graph, k, q, v, *weights, self.heads)

    def _project_output(self, name: str, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Apply the type's output projection, and its gated skip connection where sizes fit."""
        out = self.out_lin(name, functional.gelu(h))
        if out.shape[-1] != x.shape[-1]:
            return out
        gate = self.skip[_key(name)].sigmoid()
        dtypes = (out.dtype, x.dtype, gate.dtype)  # under autocast they differ
        dtype = functools.reduce(torch.promote_types, dtypes)
        mix = torch.lerp if torch.compiler.is_dynamo_compiling() else _Lerp.apply
        return mix(x.to(dtype), out.to(dtype), gate.to(dtype))

    def _find_graph(
        self, edges: Mapping[EdgeType, torch.Tensor] | Graph, sizes: dict[str, int]
    ) -> Graph:
        num_nodes, num_relations = sum(sizes.values()), len(self.edge_types)
        if isinstance(edges, Graph):
            if (edges.num_nodes, edges.num_relations) != (num_nodes, num_relations):
                raise ValueError(
                    f"the graph has {edges.num_nodes} nodes and {edges.num_relations} relations, "
                    f"x_dict {num_nodes} nodes and the layer {num_relations} relations"
                )
            return edges
        present = [edge_type for edge_type in self.edge_types if edge_type in edges]
        if unknown := [edge_type for edge_type in edges if edge_type not in self.edge_types]:
            raise ValueError(f"edge_index_dict has {unknown}, which metadata has not")

        def join_edges() -> Graph:
            device = next(self.parameters()).device
            joined = join_types(edges, self.edge_types, sizes, "edge_index_dict[{!r}]", device)
            return find_graph(GraphTensors(*joined, None, num_nodes, num_relations, 1))

        if torch.compiler.is_dynamo_compiling():
            return join_edges()
        numbers = (tuple(self.edge_types), tuple(present), tuple(sizes.items()))
        return remember_graph([edges[t] for t in present], numbers, join_edges)

    def extra_repr(self) -> str:
        """Return the options that `print(layer)` shows."""
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


@build_once
def _has_sources_of_types(graph: Graph, sizes: tuple[int, ...], sources: tuple[int, ...]) -> bool:
    """Return whether the edges of each relation begin in its source; nodes are type by type."""
    end = torch.tensor(sizes, device="cpu").cumsum(0)
    first, last = ((end - torch.tensor(sizes, device="cpu"))[[*sources]], end[[*sources]])
    source, relation = (graph.index(m).cpu().long() for m in (SRC_PAIR_SRC, SRC_PAIR_TYPE))
    return bool(((first[relation] <= source) & (source < last[relation])).all())


class _Lerp(torch.autograd.Function):
    """`torch.lerp(x, out, gate)` with one gate for all, and half of the backward's memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, out, gate)
        return torch.lerp(x, out, gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        x, out, gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            of_gate = ((out - x) * gradient).sum().reshape_as(gate)
            return gradient * (1 - gate), gradient * gate, of_gate
        buffer = out - x
        of_gate = buffer.mul_(gradient).sum().reshape_as(gate)
        return gradient * (1 - gate), torch.mul(gradient, gate, out=buffer), of_gate


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate parts; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Linears(nn.Module):
    """One linear map for each node type."""

    def __init__(self, in_channels: Mapping[str, int], out_channels: int) -> None:
        super().__init__()
        self.lins = nn.ModuleDict(
            {_key(name): nn.Linear(length, out_channels) for name, length in in_channels.items()}
        )

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.lins[_key(name)](x)


class _RelationWeights(nn.Module):
    """A square matrix for each head and relation, stored head after head."""

    def __init__(self, heads: int, num_relations: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * num_relations, width, width))
        glorot_(self.weight)

    def by_relation(self) -> torch.Tensor:
        """Return the matrices as (relations, heads, width, width)."""
        return self.weight.unflatten(0, (self.heads, -1)).transpose(0, 1)


def _key(name: str) -> str:
    """Return a name as a key of a module: modules do not allow dots."""
    return name.replace(".", "#")
