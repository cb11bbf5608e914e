"""Relational graph attention of Busbridge et al. 2019 (arXiv 1904.05811)."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock.rgnn._compile import compile
from penstock.rgnn.frontend.functions import combine, edge_softmax, leaky_relu
from penstock.rgnn.graph import Graph
from penstock.rgnn.layers._arguments import (
    OTHERWISE,
    as_graph,
    check_message_passing,
    glorot_,
    num_rows,
    parse_channels,
    parse_optional,
    shape_weight,
)
from penstock.units import parse_count

_WITHIN = {"across-relation": "destination", "within-relation": "relation"}
_MODES = ("additive-self-attention", "multiplicative-self-attention")


@compile
def rgat_of_edges(
    g: Any,
    x: Any,
    weight: Any,
    att: Any,
    q: Any,
    k: Any,
    bias: Any,
    num_blocks: int | None,
    heads: int,
    concat: bool,
    slope: float | None,
    within: str,
    edge_attr: Any,
    edge_key: Any,
    dropped: Any,
) -> Any:
    """Compute the layer with all that it may have of edges, and its attention weights.

    `att` (the bases' coefficients) and `bias` may be None. Attention is additive with the slope of
    its leaky ReLU, multiplicative with None. `edge_key` makes scores of `edge_attr`; attention
    weights are multiplied with `dropped`, of which there is one for each edge and head. Each of
    these may be None.
    """
    # In the paper's symbols, with g_i^(r) = h_i W^(r):
    #   q_i = g_i Q, k_j = g_j K, E_ij = LeakyReLU(q_i + k_j) or q_i * k_j
    #   alpha_ij = softmax of E_ij over j (and r), h_i' = sum of alpha_ij g_j
    e = g.edges
    weight = weight if att is None else combine(att, weight)
    if num_blocks is None:
        source, target = (end(x) @ weight[e.type] for end in (e.src, e.dst))
    else:
        blocks = g.nodes(x).heads(num_blocks)
        source, target = ((end(blocks) @ weight[e.type]).merge_heads() for end in (e.src, e.dst))
    key = source @ k
    parts = [target @ q, key]
    if edge_attr is not None:
        parts.append(e(edge_attr) @ edge_key)
    scores = functools.reduce(operator.mul if slope is None else operator.add, parts)
    weights = edge_softmax(scores if slope is None else leaky_relu(scores, slope), within=within)
    kept = weights if dropped is None else weights * e(dropped)
    h = g.sum_to_dst(kept * source.heads(heads))
    h = h.merge_heads() if concat else h.mean_heads()
    return h if bias is None else h + bias, weights


@compile
def rgat(
    g: Any,
    x: Any,
    weight: Any,
    att: Any,
    q: Any,
    k: Any,
    bias: Any,
    num_blocks: int | None,
    heads: int,
    concat: bool,
    slope: float | None,
    within: str,
) -> Any:
    """Compute the layer alone; `rgat_of_edges` has the arguments."""
    options = (num_blocks, heads, concat, slope, within)
    h, _ = rgat_of_edges.__wrapped__(g, x, weight, att, q, k, bias, *options, None, None, None)
    return h


class RGATConv(nn.Module):
    """PyG's `RGATConv`, compiled to the graph at hand; its state dict can be loaded.

    Example:
        >>> layer = RGATConv(16, 8, num_relations=2, heads=4)
        >>> graph = Graph(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1]))
        >>> layer(torch.randn(3, 16), graph).shape
        torch.Size([3, 32])

    Args:
        in_channels: Features of each node.
        out_channels: Features of each head.
        num_relations: Number of relations.
        num_bases: Weights are sums of so many bases.
        num_blocks: Weights are block-diagonal, of so many blocks. Not together with `num_bases`.
        mod: Only None: attention is not modified.
        attention_mechanism: Attention weights sum to 1 over all edges into a node
            ("across-relation") or over those of each relation ("within-relation").
        attention_mode: "additive-self-attention" or "multiplicative-self-attention".
        heads: Number of heads.
        dim: Only 1: keys and queries are one number per head.
        concat: Whether heads are put one after another; else their mean is taken.
        negative_slope: Slope of the leaky ReLU of additive scores.
        dropout: Probability with which the weight of an edge and head is dropped in training.
        edge_dim: Features of each edge, if edges have any; they are part of the scores.
        bias: Whether to add a bias.
        kwargs: Those of PyG's `MessagePassing`, of which only the defaults are supported.

    Raises:
        ValueError: An option is unknown or not supported, or channels do not divide into blocks.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        mod: str | None = None,
        attention_mechanism: str = "across-relation",
        attention_mode: str = "additive-self-attention",
        heads: int = 1,
        dim: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_message_passing("RGATConv", kwargs)
        _check_options(attention_mechanism, attention_mode, mod, dim, dropout)
        in_channels = parse_channels("RGATConv", in_channels)
        out_channels = parse_count(out_channels, name="out_channels")
        num_relations = parse_count(num_relations, name="num_relations")
        num_bases = parse_optional(num_bases, "num_bases")
        num_blocks = parse_optional(num_blocks, "num_blocks", least=1)
        heads = parse_count(heads, name="heads", least=1)
        width = heads * out_channels
        sizes = {"in_channels": in_channels, "heads * out_channels": width}
        shape = shape_weight(sizes, num_relations, num_bases, num_blocks)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations, self.num_bases, self.num_blocks = num_relations, num_bases, num_blocks
        self.attention_mechanism, self.attention_mode = attention_mechanism, attention_mode
        self.heads, self.concat, self.negative_slope = heads, bool(concat), float(negative_slope)
        self.dropout, self.edge_dim = dropout, parse_optional(edge_dim, "edge_dim")
        self.q = nn.Parameter(torch.empty(width, heads))
        self.k = nn.Parameter(torch.empty(width, heads))
        self.lin_edge = self.e = self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(width if concat else out_channels))
        if edge_dim is not None:
            self.lin_edge = nn.Linear(edge_dim, width, bias=False)
            self.e = nn.Parameter(torch.empty(width, heads))
        if num_bases is None:
            self.weight = nn.Parameter(torch.empty(shape))
        else:
            self.att = nn.Parameter(torch.empty(num_relations, num_bases))
            self.basis = nn.Parameter(torch.empty(shape))
        # PyG has these for its modified attention even where it is not used: kept, so that state
        # dicts fit, but not trained.
        for name in ("w", "l1", "b1", "l2", "b2"):
            axes = {"w": (), "l2": (out_channels,)}.get(name, (1,))
            self.register_buffer(name, torch.ones(*axes, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew as PyG does."""
        weights = [self.weight] if self.num_bases is None else [self.att, self.basis]
        of_edges = None if self.lin_edge is None else self.lin_edge.weight
        for weight in (*weights, self.q, self.k, self.e, of_edges):
            glorot_(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor | Graph,
        edge_type: torch.Tensor | None = None,
        edge_attr: torch.Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x: Node features, (num_nodes, in_channels).
            edge_index: A `Graph`, or integers of shape (2, num_edges); a graph is then made and
                kept for the next call with the same tensors.
            edge_type: Integers, (num_edges,), with `edge_index` as a tensor.
            edge_attr: Features of edges, (num_edges, edge_dim); (num_edges,) if that is 1.
            size: Only (num_nodes, num_nodes), which is known without.
            return_attention_weights: Whether, if it is not None, to return them as well; as in PyG
                its value does not matter.

        Returns:
            (num_nodes, heads * out_channels), or (num_nodes, out_channels) without `concat`; with
            attention weights a pair of that and of (edge_index, weights), the weights
            (num_edges, heads), before any are dropped.

        Raises:
            ValueError: `edge_attr` is given to a layer without `edge_dim`, or does not have its
                shape; `size` is of two sets of nodes.
        """
        graph = as_graph(
            edge_index, edge_type, num_nodes=num_rows(x), num_relations=self.num_relations
        )
        if size is not None and tuple(size) != (graph.num_nodes, graph.num_nodes):
            raise ValueError(
                f"size is {tuple(size)}, and x and the graph are of one set of {graph.num_nodes} "
                f"nodes; put two sets of nodes one after another"
            )
        edge_attr, edge_key = self._read_edges(edge_attr, graph)
        dropped = None
        if self.training and self.dropout > 0:
            dropped = functional.dropout(x.new_ones(graph.num_edges, self.heads), self.dropout)
        weight, att = (self.weight, None) if self.num_bases is None else (self.basis, self.att)
        is_additive = self.attention_mode == "additive-self-attention"
        arguments = (
            *(graph, x, weight, att, self.q, self.k, self.bias),
            *(self.num_blocks, self.heads, self.concat),
            self.negative_slope if is_additive else None,
            _WITHIN[self.attention_mechanism],
        )
        if edge_attr is None and dropped is None and return_attention_weights is None:
            return rgat(*arguments)
        out, weights = rgat_of_edges(*arguments, edge_attr, edge_key, dropped)
        if return_attention_weights is None:
            return out
        edges = edge_index.edge_index if isinstance(edge_index, Graph) else edge_index
        return out, (edges, weights)

    def _read_edges(
        self, edge_attr: torch.Tensor | None, graph: Graph
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return features of edges, and the matrix that makes scores of them."""
        if edge_attr is None:
            return None, None
        if self.lin_edge is None or self.e is None:
            raise ValueError(
                "edge_attr is given and edge_dim is None; make the layer with edge_dim="
                f"{edge_attr.shape[-1] if edge_attr.dim() > 1 else 1}"
            )
        if edge_attr.dim() == 1:
            edge_attr = edge_attr.unsqueeze(-1)
        if edge_attr.shape != (graph.num_edges, self.edge_dim):
            raise ValueError(
                f"edge_attr must have shape ({graph.num_edges}, {self.edge_dim}), a row for each "
                f"edge; got {tuple(edge_attr.shape)}"
            )
        return edge_attr, self.lin_edge.weight.T @ self.e

    def extra_repr(self) -> str:
        """Return the options that `print(layer)` shows."""
        return (
            f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}, "
            f"heads={self.heads}"
        )


def _check_options(
    attention_mechanism: str, attention_mode: str, mod: str | None, dim: int, dropout: float
) -> None:
    for name, value, known in (
        ("attention_mechanism", attention_mechanism, tuple(_WITHIN)),
        ("attention_mode", attention_mode, _MODES),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}; got {value!r}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be a probability, between 0 and 1; got {dropout!r}")
    for name, value, supported in (("mod", mod, None), ("dim", dim, 1)):
        if value != supported:
            raise ValueError(f"{name}={value!r} is not supported, only {supported!r}. {OTHERWISE}")
