"""Penstock's neighbour sampler as one of PyG's, for PyG's loaders."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from penstock.traversal import NeighborSampler


class UnifiedSampler(BaseSampler):
    """A sampler for PyG's `NodeLoader` of a graph in tables, without pyg-lib and torch-sparse.

    Example:
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.loader import NodeLoader
        >>> edges = torch.tensor([[1, 2, 0], [0, 0, 1]])
        >>> data = Data(x=torch.eye(3), edge_index=edges)
        >>> graph = NeighborSampler.from_edges(edges, 3, fanouts=[2])
        >>> next(iter(NodeLoader(data, UnifiedSampler(graph), batch_size=1))).n_id
        tensor([0, 1, 2])

    Args:
        graph: Sampler whose edge ids are those of the data's edge attributes.
    """

    def __init__(self, graph: NeighborSampler) -> None:
        if not isinstance(graph, NeighborSampler):
            raise TypeError(
                f"graph: expected a penstock.traversal.NeighborSampler, got {type(graph).__name__}"
            )
        self.graph = graph

    def sample_from_nodes(
        self,
        index: NodeSamplerInput,
        *,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> SamplerOutput:
        """Sample the neighbourhood of some seeds for PyG's loaders.

        Args:
            index: Seeds.
            generator: Generator of the random numbers; by default PyTorch's.
            **kwargs: None.

        Raises:
            ValueError: `index` has times or a node type.
        """
        if kwargs:
            raise TypeError(f"sample_from_nodes: unexpected arguments {sorted(kwargs)}")
        if index.time is not None or index.input_type is not None:
            raise ValueError(
                "index: expected seeds without times and without a node type; temporal and "
                "heterogeneous graphs are not supported"
            )
        found = self.graph.sample(index.node, generator=generator)
        return SamplerOutput(
            node=found.node_ids,
            row=found.edge_index[0],
            col=found.edge_index[1],
            edge=found.edge_ids,
            num_sampled_nodes=[found.num_nodes[0], *(b - a for a, b in pairwise(found.num_nodes))],
            num_sampled_edges=[b - a for a, b in pairwise(found.num_edges)],
            metadata=(index.input_id, None),
        )

    def sample_from_edges(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: give the nodes at both ends of the edges instead."""
        raise NotImplementedError(
            "UnifiedSampler samples from nodes only; give the nodes at both ends of the edges"
        )
