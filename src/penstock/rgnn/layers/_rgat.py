"""Relational graph attention of Busbridge et al. 2019 (arXiv 1904.05811), additive attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.rgnn._compile import compile
from penstock.rgnn._functions import combine, edge_softmax, leaky_relu
from penstock.rgnn._graph import Graph
from penstock.rgnn.layers._graph_argument import LastGraph, as_graph, glorot_


@compile
def rgat(
    g: Any,
    x: Any,
    weight: Any,
    att: Any,
    q: Any,
    k: Any,
    bias: Any,
    heads: int,
    concat: bool,
    slope: float,
    within: str,
) -> Any:
    """The layer as a program; `att` (the bases' coefficients) and `bias` may be None."""
    e = g.edges
    weight = weight if att is None else combine(att, weight)
    z = e.src(x) @ weight[e.type]
    scores = leaky_relu((e.dst(x) @ weight[e.type]) @ q + z @ k, slope)
    h = g.sum_to_dst(edge_softmax(scores, within=within) * z.heads(heads))
    h = h.merge_heads() if concat else h.mean_heads()
    return h if bias is None else h + bias


class RGATConv(nn.Module):
    """PyG's `RGATConv` with additive self-attention; its state dict can be loaded.

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
        attention_mechanism: Attention weights sum to 1 over all edges into a node
            ("across-relation") or over those of each relation ("within-relation").
        heads: Number of heads.
        concat: Whether heads are put one after another; else their mean is taken.
        negative_slope: Slope of the scores' leaky ReLU.
        bias: Whether to add a bias.

    Raises:
        ValueError: `attention_mechanism` is none of the two.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        *,
        attention_mechanism: str = "across-relation",
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if attention_mechanism not in ("across-relation", "within-relation"):
            raise ValueError(
                f"attention_mechanism must be 'across-relation' or 'within-relation'; "
                f"got {attention_mechanism!r}"
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations, self.num_bases = num_relations, num_bases
        self.attention_mechanism = attention_mechanism
        self.heads, self.concat, self.negative_slope = heads, concat, negative_slope
        width = heads * out_channels
        self.q = nn.Parameter(torch.empty(width, heads))
        self.k = nn.Parameter(torch.empty(width, heads))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(width if concat else out_channels))
        if num_bases is None:
            self.weight = nn.Parameter(torch.empty(num_relations, in_channels, width))
        else:
            self.att = nn.Parameter(torch.empty(num_relations, num_bases))
            self.basis = nn.Parameter(torch.empty(num_bases, in_channels, width))
        # PyG has these for its modified attention even where it is not used: kept, so that state
        # dicts fit, but not trained.
        for name in ("w", "l1", "b1", "l2", "b2"):
            axes = {"w": (), "l2": (out_channels,)}.get(name, (1,))
            self.register_buffer(name, torch.ones(*axes, out_channels))
        self._last_graph = LastGraph()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew as PyG does."""
        weights = [self.weight] if self.num_bases is None else [self.att, self.basis]
        for weight in (*weights, self.q, self.k):
            glorot_(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor | Graph,
        edge_type: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: Node features, (num_nodes, in_channels).
            edge_index: A `Graph`, or integers of shape (2, num_edges); a graph is then made and
                kept for the next call with the same tensors.
            edge_type: Integers, (num_edges,), with `edge_index` as a tensor.

        Returns:
            (num_nodes, heads * out_channels), or (num_nodes, out_channels) without `concat`.
        """
        graph = as_graph(
            self._last_graph,
            edge_index,
            edge_type,
            num_nodes=x.shape[0],
            num_relations=self.num_relations,
        )
        weight, att = (self.weight, None) if self.num_bases is None else (self.basis, self.att)
        within = {"across-relation": "destination", "within-relation": "relation"}
        return rgat(
            graph,
            x,
            weight,
            att,
            self.q,
            self.k,
            self.bias,
            self.heads,
            self.concat,
            self.negative_slope,
            within[self.attention_mechanism],
        )

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        return (
            f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}, "
            f"heads={self.heads}"
        )
