"""The three layers in torch operators, edge by edge: the strong baseline of `rgnn.py`.

Written for the data: edges are sorted by relation once, before anything is timed, the
mean's factors are made then too, messages of all relations go into one buffer by one matrix product
per relation, and sums into destinations are one operator. Every function takes the arguments of
the layer's compiled program, so that the layer around it is the same module.

Sums come in two kinds: `index_add_`, which is what most would write, and a product with a sparse
matrix in CSR form, which is faster and needs both orders of the edges beforehand.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from penstock.rgnn import Graph


@dataclasses.dataclass(frozen=True)
class SortedEdges:
    """The edges of a graph by relation, and the indices that can be made of them beforehand."""

    num_nodes: int
    source: torch.Tensor
    """int64, (num_edges,); `index_add_` is three times slower with int32."""
    target: torch.Tensor
    relation: torch.Tensor
    segments: tuple[tuple[int, int, int], ...]
    """(relation, begin, end) of each relation that has edges."""
    factor: torch.Tensor
    """Of the mean over the edges of a relation into a node; (num_edges, 1)."""
    by_source: torch.Tensor | None = None
    """The edges of each node, sparse CSR, (num_nodes, num_edges); None for `index_add_`."""
    by_target: torch.Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, *, csr: bool) -> SortedEdges:
        """Sort a graph's edges.

        Args:
            graph: The graph.
            csr: Whether sums are products with sparse matrices.
        """
        edge_index, edge_type = graph.edge_index, graph.edge_type
        relation, order = torch.sort(edge_type, stable=True)
        source, target = edge_index[:, order]
        sizes = torch.bincount(relation, minlength=graph.num_relations).tolist()
        starts = itertools.accumulate(sizes, initial=0)
        pairs = enumerate(itertools.pairwise(starts))
        key = relation * graph.num_nodes + target
        _, pair, count = torch.unique(key, return_inverse=True, return_counts=True)
        return cls(
            num_nodes=graph.num_nodes,
            source=source.contiguous(),
            target=target.contiguous(),
            relation=relation,
            segments=tuple((kind, begin, end) for kind, (begin, end) in pairs if begin < end),
            factor=(1 / count[pair].float()).unsqueeze(1),
            by_source=_edges_of_nodes(source, graph.num_nodes) if csr else None,
            by_target=_edges_of_nodes(target, graph.num_nodes) if csr else None,
        )

    def at_source(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the sources of all edges."""
        if self.by_source is None:
            return x.index_select(0, self.source)
        return _Gather.apply(x, self.source, self.by_source)

    def at_target(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the destinations of all edges."""
        if self.by_target is None:
            return x.index_select(0, self.target)
        return _Gather.apply(x, self.target, self.by_target)

    def sum_to_target(self, rows: torch.Tensor) -> torch.Tensor:
        """Return sums of the rows of all edges into each destination."""
        if self.by_target is None:
            out = rows.new_zeros(self.num_nodes, rows.shape[1])
            return out.index_add_(0, self.target, rows)
        return _Sum.apply(rows, self.target, self.by_target)


def rgcn(edges: SortedEdges) -> Callable[..., torch.Tensor]:
    """Compute the graph convolution, for `_rgcn.rgcn`."""

    def program(
        graph: Graph, x: Any, weight: Any, comp: None, root: Any, bias: Any, *options: Any
    ) -> torch.Tensor:
        messages = _SegmentProduct.apply(edges.at_source(x), weight, edges.segments)
        return edges.sum_to_target(messages.mul_(edges.factor)).addmm_(x, root).add_(bias)

    return program


def rgat(edges: SortedEdges) -> Callable[..., torch.Tensor]:
    """Compute graph attention with one head and additive scores, for `_rgat.rgat`."""

    def program(
        graph: Graph, x: Any, weight: Any, att: None, q: Any, k: Any, bias: Any, *options: Any
    ) -> torch.Tensor:
        source = _SegmentProduct.apply(edges.at_source(x), weight, edges.segments)
        target = _SegmentProduct.apply(edges.at_target(x), weight, edges.segments)
        scores = functional.leaky_relu(target @ q + source @ k, 0.2)
        attention = _EdgeSoftmax.apply(scores.squeeze(1), edges.target, edges.num_nodes)
        return edges.sum_to_target(source * attention.unsqueeze(1)).add_(bias)

    return program


def hgt(edges: SortedEdges) -> Callable[..., torch.Tensor]:
    """Compute the graph transformer's attention with one head, for `_hgt.hgt`."""

    def program(
        graph: Graph, k: Any, q: Any, v: Any, k_rel: Any, v_rel: Any, p_rel: Any, *options: Any
    ) -> torch.Tensor:
        keys = _SegmentProduct.apply(edges.at_source(k), k_rel[:, 0], edges.segments)
        scale = p_rel[:, 0].index_select(0, edges.relation)
        scores = (keys * edges.at_target(q)).sum(1) * scale
        attention = _EdgeSoftmax.apply(scores, edges.target, edges.num_nodes)
        values = _SegmentProduct.apply(edges.at_source(v), v_rel[:, 0], edges.segments)
        return edges.sum_to_target(values * attention.unsqueeze(1))

    return program


PROGRAMS = {"RGCN": rgcn, "RGAT": rgat, "HGT": hgt}


class _SegmentProduct(torch.autograd.Function):
    """The rows of each segment times the matrix of its relation, into one buffer."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, segments: tuple[tuple[int, int, int]]
    ) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for kind, begin, end in segments:
            torch.mm(rows[begin:end], weight[kind], out=out[begin:end])
        ctx.save_for_backward(rows, weight)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = gradients
        rows, weight = ctx.saved_tensors
        grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        for kind, begin, end in ctx.segments:
            part = grad[begin:end]
            torch.mm(part, weight[kind].T, out=grad_rows[begin:end])
            torch.mm(rows[begin:end].T, part, out=grad_weight[kind])
        return grad_rows, grad_weight, None


class _EdgeSoftmax(torch.autograd.Function):
    """The softmax of one score per edge over the edges of each destination."""

    @staticmethod
    def forward(
        ctx: Any, scores: torch.Tensor, target: torch.Tensor, num_nodes: int
    ) -> torch.Tensor:
        top = scores.new_full((num_nodes,), -torch.inf).scatter_reduce_(0, target, scores, "amax")
        weights = (scores - top.index_select(0, target)).exp_()
        total = scores.new_zeros(num_nodes).index_add_(0, target, weights)
        weights.div_(total.index_select(0, target))
        ctx.save_for_backward(weights, target)
        ctx.num_nodes = num_nodes
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        weights, target = ctx.saved_tensors
        weighted = weights * gradients[0]
        total = weights.new_zeros(ctx.num_nodes).index_add_(0, target, weighted)
        return weighted.addcmul_(weights, total.index_select(0, target), value=-1), None, None


class _Gather(torch.autograd.Function):
    """Rows at one end of the edges; backward by a sparse matrix."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, edges_of: torch.Tensor
    ) -> torch.Tensor:
        ctx.edges_of = edges_of
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return ctx.edges_of @ gradients[0], None, None


class _Sum(torch.autograd.Function):
    """Sums of edges' rows at one end, by a sparse matrix; backward is a gather."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, edges_of: torch.Tensor
    ) -> torch.Tensor:
        ctx.index = index
        return edges_of @ rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return gradients[0].index_select(0, ctx.index), None, None


def _edges_of_nodes(ends: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Return a sparse matrix of ones that sums the rows of edges into one of their ends."""
    order = torch.sort(ends, stable=True)[1]
    starts = ends.new_zeros(num_nodes + 1)
    torch.cumsum(torch.bincount(ends, minlength=num_nodes), 0, out=starts[1:])
    ones = torch.ones(len(ends), device=ends.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        # MKL's products with int32 indices are the faster ones.
        return torch.sparse_csr_tensor(
            starts.int(), order.int(), ones, (num_nodes, len(ends)), check_invariants=True
        )
