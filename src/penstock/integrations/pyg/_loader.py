"""Mini-batches of a graph as PyG's `NeighborLoader` gives them, without a compiled sampler.

PyG's own loader joins the nodes with their features, so the batches have its fields. The sampler is
Penstock's, and the next batch is sampled and gathered in another thread while this one is used.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch_geometric.data import Data, FeatureStore, HeteroData
from torch_geometric.loader import NodeLoader

from penstock.integrations.pyg._feature_store import UnifiedFeatureStore
from penstock.integrations.pyg._prefetch import Prefetched
from penstock.integrations.pyg._sampler import UnifiedSampler
from penstock.tables import report_table
from penstock.traversal import NeighborSampler
from penstock.unified import UnifiedTensor

# Options of PyG's loader, with the one value that says what is done here anyway.
_ONLY = {
    "input_time": None,
    "time_attr": None,
    "temporal_strategy": "uniform",
    "weight_attr": None,
    "disjoint": False,
    "directed": True,
    "subgraph_type": "directional",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """Where the time of a loader's batches went, over all iterations in this process.

    Batches that worker processes have made (`num_workers`) are not in it.
    """

    num_batches: int
    """Batches that were made."""
    sample_seconds: float
    """Choosing neighbours."""
    gather_seconds: float
    """Fetching the features of the chosen nodes and edges."""
    wait_seconds: float
    """What the consumer waited for all that. Without prefetch, the sum of both."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return report_table(self, title="penstock.integrations.pyg")


class NeighborLoader(NodeLoader):
    """A drop-in for `torch_geometric.loader.NeighborLoader` on graphs with one type of node.

    Batches are `Data` objects with PyG's fields: the features of the sampled nodes and edges,
    `edge_index`, `n_id`, `e_id`, `input_id`, `batch_size`, `num_sampled_nodes`,
    `num_sampled_edges`. Features may be tables, of which only the rows of the batch are read.

    All random numbers come from `generator`, or from PyTorch's: the same state gives the same
    batches, with prefetch and without.

    Example:
        >>> data = Data(x=torch.rand(4, 2), edge_index=torch.tensor([[1, 2, 3], [0, 0, 2]]))
        >>> for batch in NeighborLoader(data, [-1, -1], input_nodes=[0], batch_size=1):
        ...     print(batch.n_id.tolist(), batch.num_sampled_nodes)
        [0, 1, 2, 3] [1, 2, 1]

    Args:
        data: the graph and its features; or a pair of a `FeatureStore` and a `GraphStore`, where
            `neighbor_sampler` has the graph.
        num_neighbors: neighbours per node at each hop; -1 takes all of them.
        input_nodes: the seeds: node numbers, or a mask; by default all nodes.
        replace: whether a neighbour may be taken more than once.
        neighbor_sampler: samples instead of one that is made of `data.edge_index`; so that several
            loaders share one, or the graph is in files.
        prefetch: how many batches are made ahead; 0 makes each when it is asked for. Without effect
            where there are `num_workers`, which have a `prefetch_factor`.
        generator: of the order of the seeds and of the samples.
        **kwargs: as for PyG's `NodeLoader` and PyTorch's `DataLoader`: `batch_size`, `shuffle`,
            `drop_last`, `transform`, `num_workers`, ...

    Raises:
        TypeError: `data` is heterogeneous, or something else.
        ValueError: there is no graph; an option of PyG's is not supported; or `prefetch` would
            fetch rows of a table that requires gradients before the step that changes them.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Sequence[int] | None = None,
        input_nodes: Any = None,
        *,
        replace: bool = False,
        neighbor_sampler: NeighborSampler | UnifiedSampler | None = None,
        prefetch: int = 1,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        _check_data(data)
        kwargs = _supported(kwargs)
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: expected 0 or more batches")
        trained = _trained_features(data)
        if trained and prefetch:
            raise ValueError(
                f"prefetch={prefetch}: {trained[0]!r} requires gradients, so the rows of the next "
                "batch are not known before this step has ended; give prefetch=0, or gather them "
                "from the table in the training step"
            )
        if neighbor_sampler is None:
            neighbor_sampler = _sampler_of(data, num_neighbors, replace)
        elif num_neighbors is not None or replace:
            raise ValueError("neighbor_sampler: it has its own fanouts; leave the others out")
        elif isinstance(neighbor_sampler, NeighborSampler):
            neighbor_sampler = UnifiedSampler(neighbor_sampler)
        if isinstance(data, Data) and data.edge_index is None:
            # The graph is elsewhere; PyG fills in what is sampled where it finds an edge index.
            data = copy.copy(data)
            data.edge_index = torch.empty(2, 0, dtype=torch.int64)
        self.prefetch = prefetch
        self._seconds = {"sample": 0.0, "gather": 0.0, "wait": 0.0}
        self._num_batches = 0
        super().__init__(data, neighbor_sampler, input_nodes, generator=generator, **kwargs)

    def __iter__(self) -> Any:
        if self.num_workers:
            return super().__iter__()
        # Drawn here, so that no other thread takes from the generator what the training draws.
        seed = torch.empty((), dtype=torch.int64).random_(generator=self.generator).item()
        jobs = self._jobs(int(seed))
        if self.prefetch:
            return Prefetched(jobs, ahead=self.prefetch, waited=self._waited)
        return self._one_by_one(jobs)

    @property
    def graph(self) -> NeighborSampler:
        """What neighbours are sampled from; another loader can share it (`neighbor_sampler=`)."""
        assert isinstance(self.node_sampler, UnifiedSampler)
        return self.node_sampler.graph

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes, which make batches and draw none: generators cannot be spawned."""
        return {**self.__dict__, "generator": None, "sampler": None, "batch_sampler": None}

    def report(self) -> LoaderReport:
        """Where the time of the batches so far went."""
        return LoaderReport(
            num_batches=self._num_batches,
            sample_seconds=self._seconds["sample"],
            gather_seconds=self._seconds["gather"],
            wait_seconds=self._seconds["wait"],
        )

    def _jobs(self, seed: int) -> Iterator[Callable[[], Any]]:
        """What makes each batch, with random numbers of its own."""
        if self.batch_sampler is None:
            raise ValueError("batch_size=None: expected a number of seeds per batch")
        seeds = torch.Generator().manual_seed(seed)
        for index in self.batch_sampler:
            each = int(torch.empty((), dtype=torch.int64).random_(generator=seeds))
            # Another thread does not know what holds in this one.
            stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
            yield functools.partial(self._batch, index, each, torch.is_grad_enabled(), stream)

    def _batch(
        self, index: list[int], seed: int, gradients: bool, stream: torch.cuda.Stream | None
    ) -> Any:
        on_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.set_grad_enabled(gradients), on_stream:
            generator = torch.Generator().manual_seed(seed)
            start = time.perf_counter()
            found = self.node_sampler.sample_from_nodes(self.input_data[index], generator=generator)
            sampled = time.perf_counter()
            batch = self.filter_fn(found)
            self._seconds["sample"] += sampled - start
            self._seconds["gather"] += time.perf_counter() - sampled
            self._num_batches += 1
            return batch

    def _waited(self, seconds: float) -> None:
        self._seconds["wait"] += seconds

    def _one_by_one(self, jobs: Iterator[Callable[[], Any]]) -> Iterator[Any]:
        for job in jobs:
            start = time.perf_counter()
            batch = job()
            self._waited(time.perf_counter() - start)
            yield batch


def _check_data(data: Any) -> None:
    if isinstance(data, HeteroData):
        raise TypeError(
            "data: expected a graph with one type of node, got HeteroData; use PyG's loader with "
            "pyg-lib, whose feature fetch works with tables too"
        )
    if not isinstance(data, Data) and not _is_stores(data):
        raise TypeError(
            "data: expected torch_geometric.data.Data, or a pair of a FeatureStore and a "
            f"GraphStore, got {type(data).__name__}"
        )


def _is_stores(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], FeatureStore)


def _supported(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those of PyG's that change nothing; raises for those that would."""
    kept = {}
    for name, value in options.items():
        if name == "is_sorted":  # the edges are sorted here in any case
            continue
        if name not in _ONLY:
            kept[name] = value
        elif getattr(value, "value", value) != _ONLY[name]:
            raise ValueError(
                f"{name}={value!r}: Penstock's loader does {name}={_ONLY[name]!r} only; leave it "
                "out, or use PyG's own with pyg-lib"
            )
    return kept


def _trained_features(data: Any) -> list[str]:
    """Names of the tables in the data that require gradients."""
    if _is_stores(data):
        attrs = data[0].get_all_tensor_attrs() if isinstance(data[0], UnifiedFeatureStore) else []
        items = [(attr.attr_name, data[0][attr.group_name, attr.attr_name, None]) for attr in attrs]
    else:
        items = data.items()
    return [
        str(name)
        for name, value in items
        if isinstance(value, UnifiedTensor) and value.requires_grad
    ]


def _sampler_of(data: Any, num_neighbors: Sequence[int] | None, replace: bool) -> UnifiedSampler:
    if _is_stores(data):
        raise ValueError("neighbor_sampler: needed where data is a pair of stores")
    if num_neighbors is None:
        raise ValueError("num_neighbors: expected neighbours per node at each hop, such as [10, 5]")
    if data.edge_index is None or data.num_nodes is None:
        raise ValueError("data: expected an edge_index, or a neighbor_sampler that has the graph")
    graph = NeighborSampler.from_edges(
        data.edge_index, data.num_nodes, fanouts=list(num_neighbors), replace=replace
    )
    return UnifiedSampler(graph)
