"""The relational graph convolution of Schlichtkrull et al. 2018 (arXiv 1703.06103, equation 2)."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding

from penstock.rgnn._compile import compile
from penstock.rgnn.frontend.functions import combine, edge_mean
from penstock.rgnn.graph import Graph
from penstock.rgnn.layers._arguments import (
    OTHERWISE,
    as_graph,
    check_entities,
    check_message_passing,
    glorot_,
    num_rows,
    parse_channels,
    parse_optional,
    shape_weight,
)
from penstock.units import parse_count


@compile
def rgcn(
    g: Any, x: Any, weight: Any, comp: Any, root: Any, bias: Any, num_blocks: Any, mean: bool
) -> Any:
    """Compute the layer as a program; `comp`, `root`, `bias` and `num_blocks` may be None."""
    # h_i' = W_0 h_i + sum over r of sum over j in N_i^r of 1 / c_{i,r} W_r h_j    (equation 2)
    # with W_r = sum over b of a_{rb} V_b (equation 3), or block-diagonal (equation 4).
    e, n = g.edges, g.nodes
    weight = weight if comp is None else combine(comp, weight)
    source = e.src(x) if num_blocks is None else e.src(n(x).heads(num_blocks))
    h = _sum_messages(g, source @ weight[e.type], mean)
    h = h if num_blocks is None else h.merge_heads()
    return _add_terms(h, None if root is None else n(x) @ root, bias)


@compile
def rgcn_of_embeddings(g: Any, bases: Any, comp: Any, root: Any, bias: Any, mean: bool) -> Any:
    """Compute the layer without features: `x` is the identity, and weights are embeddings.

    `bases` has rows (num_bases, out_channels), one embedding of the node in each basis.
    """
    e, n = g.edges, g.nodes
    h = _sum_messages(g, (comp[e.type] * e.src(bases)).sum_heads(), mean)
    return _add_terms(h, None if root is None else n(root), bias)


@compile
def rgcn_of_messages(g: Any, messages: Any, root: Any, bias: Any, mean: bool) -> Any:
    """Compute the layer where each edge has its message: an embedding of (relation, source)."""
    e, n = g.edges, g.nodes
    h = _sum_messages(g, e(messages), mean)
    return _add_terms(h, None if root is None else n(root), bias)


def _sum_messages(g: Any, z: Any, mean: bool) -> Any:
    return g.sum_to_dst(edge_mean(z) if mean else z)


def _add_terms(h: Any, *terms: Any) -> Any:
    return functools.reduce(operator.add, (term for term in terms if term is not None), h)


class RGCNConv(nn.Module):
    """PyG's `RGCNConv`, compiled to the graph at hand; its state dict can be loaded.

    Example:
        >>> layer = RGCNConv(16, 32, num_relations=2, num_bases=4)
        >>> graph = Graph(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1]))
        >>> layer(torch.randn(3, 16), graph).shape
        torch.Size([3, 32])

    Args:
        in_channels: Features of each node.
        out_channels: Features of each node of the result.
        num_relations: Number of relations.
        num_bases: Weights are sums of so many bases.
        num_blocks: Weights are block-diagonal, of so many blocks. Not together with `num_bases`.
        aggr: "mean" over the edges of each relation into a node, or "add" (also "sum").
        root_weight: Whether to add the node's own features times a weight.
        is_sorted: Accepted as PyG does; edges may have any order.
        bias: Whether to add a bias.
        kwargs: Those of PyG's `MessagePassing`, of which only the defaults are supported.

    Raises:
        ValueError: A channel count does not divide into blocks, or an option is not supported.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_message_passing("RGCNConv", kwargs)
        in_channels = parse_channels("RGCNConv", in_channels)
        out_channels = parse_count(out_channels, name="out_channels")
        num_relations = parse_count(num_relations, name="num_relations")
        num_bases = parse_optional(num_bases, "num_bases")
        num_blocks = parse_optional(num_blocks, "num_blocks", least=1)
        if aggr not in ("mean", "add", "sum"):
            raise ValueError(f"aggr must be 'mean', 'add' or 'sum'; got {aggr!r}. {OTHERWISE}")
        sizes = {"in_channels": in_channels, "out_channels": out_channels}
        shape = shape_weight(sizes, num_relations, num_bases, num_blocks)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations = num_relations
        self.num_bases, self.num_blocks, self.aggr = num_bases, num_blocks, aggr
        self.weight = nn.Parameter(torch.empty(shape))
        self.comp = self.root = self.bias = None
        if num_bases is not None:
            self.comp = nn.Parameter(torch.empty(num_relations, num_bases))
        if root_weight:
            self.root = nn.Parameter(torch.empty(in_channels, out_channels))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew as PyG does."""
        for weight in (self.weight, self.comp, self.root):
            glorot_(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: torch.Tensor | None,
        edge_index: torch.Tensor | Graph,
        edge_type: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: Node features, (num_nodes, in_channels). Integers, (num_nodes,), for nodes without
                features: each is one of `in_channels` entities, of which weights are embeddings.
                None is the same as `torch.arange(in_channels)`.
            edge_index: A `Graph`, or integers of shape (2, num_edges); a graph is then made and
                kept for the next call with the same tensors.
            edge_type: Integers, (num_edges,), with `edge_index` as a tensor.

        Returns:
            (num_nodes, out_channels).

        Raises:
            ValueError: The graph has other relations or another number of nodes, or an entity is
                out of range or the weights block-diagonal.
        """
        graph = as_graph(
            edge_index,
            edge_type,
            num_nodes=self.in_channels if x is None else num_rows(x),
            num_relations=self.num_relations,
        )
        if x is None or not x.is_floating_point():
            return self._run_on_entities(x, graph)
        weights = (self.weight, self.comp, self.root, self.bias)
        return rgcn(graph, x, *weights, self.num_blocks, self.aggr == "mean")

    def _run_on_entities(self, entities: torch.Tensor | None, graph: Graph) -> torch.Tensor:
        if self.num_blocks is not None:
            raise ValueError(
                "x must be node features where weights are block-diagonal; give num_bases instead "
                "of num_blocks to nodes without features"
            )
        if entities is None and graph.num_nodes != self.in_channels:
            raise ValueError(
                f"x is None and the graph has {graph.num_nodes} nodes, but the layer has weights "
                f"for in_channels={self.in_channels}; say with integers as x which of those the "
                f"nodes are"
            )
        if entities is not None:
            check_entities(entities, self.in_channels, graph.num_nodes)
            entities = entities.long()

        root = self.root
        if root is not None and entities is not None:
            root = embedding(entities, root)
        is_mean = self.aggr == "mean"
        if self.comp is not None:
            bases = self.weight.transpose(0, 1)  # (in_channels, num_bases, out_channels)
            if entities is not None:
                bases = embedding(entities, bases.flatten(1)).view(-1, *bases.shape[1:])
            return rgcn_of_embeddings(graph, bases, self.comp, root, self.bias, is_mean)
        sources = graph.edge_index[0].long()
        sources = sources if entities is None else entities[sources]
        of_edges = graph.edge_type.long() * self.in_channels + sources
        messages = embedding(of_edges, self.weight.flatten(0, 1))
        return rgcn_of_messages(graph, messages, root, self.bias, is_mean)

    def extra_repr(self) -> str:
        """Return the options that `print(layer)` shows."""
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}"
