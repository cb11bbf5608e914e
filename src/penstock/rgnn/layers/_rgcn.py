"""The relational graph convolution of Schlichtkrull et al. 2018 (arXiv 1703.06103, equation 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding

from penstock.rgnn._compile import compile
from penstock.rgnn.frontend.functions import combine, edge_mean
from penstock.rgnn.graph import Graph
from penstock.rgnn.layers._graph_argument import (
    as_graph,
    check_entities,
    check_num_nodes,
    glorot_,
    num_rows,
)
from penstock.rgnn.layers._options import OTHERWISE, check_channels, check_message_passing


@compile
def rgcn(
    g: Any, x: Any, weight: Any, comp: Any, root: Any, bias: Any, num_blocks: Any, mean: bool
) -> Any:
    """The layer as a program; `comp`, `root`, `bias` and `num_blocks` may be None."""
    e, n = g.edges, g.nodes
    weight = weight if comp is None else combine(comp, weight)
    source = e.src(x) if num_blocks is None else e.src(n(x).heads(num_blocks))
    z = source @ weight[e.type]
    h = g.sum_to_dst(edge_mean(z) if mean else z)
    h = h if num_blocks is None else h.merge_heads()
    h = h if root is None else h + n(x) @ root
    return h if bias is None else h + bias


@compile
def rgcn_of_embeddings(g: Any, bases: Any, comp: Any, root: Any, bias: Any, mean: bool) -> Any:
    """The layer where nodes have no features: `x` is the identity, and weights are embeddings.

    `bases` has rows (num_bases, out_channels), one embedding of the node in each basis.
    """
    e, n = g.edges, g.nodes
    z = (comp[e.type] * e.src(bases)).sum_heads()
    h = g.sum_to_dst(edge_mean(z) if mean else z)
    h = h if root is None else h + n(root)
    return h if bias is None else h + bias


@compile
def rgcn_of_messages(g: Any, messages: Any, root: Any, bias: Any, mean: bool) -> Any:
    """The layer where each edge comes with its message: an embedding of (relation, source)."""
    e, n = g.edges, g.nodes
    h = g.sum_to_dst(edge_mean(e(messages)) if mean else e(messages))
    h = h if root is None else h + n(root)
    return h if bias is None else h + bias


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
        check_channels("RGCNConv", in_channels)
        if aggr not in ("mean", "add", "sum"):
            raise ValueError(f"aggr must be 'mean', 'add' or 'sum'; got {aggr!r}. {OTHERWISE}")
        if num_bases is not None and num_blocks is not None:
            raise ValueError("num_bases and num_blocks exclude each other; give one of them")
        if num_blocks is not None and (in_channels % num_blocks or out_channels % num_blocks):
            raise ValueError(
                f"in_channels {in_channels} and out_channels {out_channels} must be multiples of "
                f"num_blocks {num_blocks}"
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations = num_relations
        self.num_bases, self.num_blocks, self.aggr = num_bases, num_blocks, aggr
        if num_bases is not None:
            shape = (num_bases, in_channels, out_channels)
        elif num_blocks is not None:
            block = (in_channels // num_blocks, out_channels // num_blocks)
            shape = (num_relations, num_blocks, *block)
        else:
            shape = (num_relations, in_channels, out_channels)
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
            return self._of_entities(x, graph)
        weights = (self.weight, self.comp, self.root, self.bias)
        return rgcn(graph, x, *weights, self.num_blocks, self.aggr == "mean")

    def _of_entities(self, entities: torch.Tensor | None, graph: Graph) -> torch.Tensor:
        if self.num_blocks is not None:
            raise ValueError(
                "x must be node features where weights are block-diagonal; give num_bases instead "
                "of num_blocks to nodes without features"
            )
        if entities is None:
            check_num_nodes(graph.num_nodes, self.in_channels)
        else:
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
        """What `print(layer)` shows."""
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}"
