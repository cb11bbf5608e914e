"""Mini-batches of a graph as of PyG's `NeighborLoader`, without a compiled sampler.

PyG's own loader joins the nodes with their features, so the batches have its fields. The sampler is
Penstock's, and the next batch is sampled and gathered in another thread while this one is used.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch_geometric.data import Data, FeatureStore, HeteroData
from torch_geometric.loader import NodeLoader

from penstock.integrations.pyg._feature_store import UnifiedFeatureStore
from penstock.integrations.pyg._sampler import UnifiedSampler
from penstock.tables import Report
from penstock.traversal import NeighborSampler
from penstock.unified import UnifiedTensor

Item = TypeVar("Item")

# Options of PyG's loader, with the one value that this loader supports.
_ONLY_VALUES = {
    "input_time": None,
    "time_attr": None,
    "temporal_strategy": "uniform",
    "weight_attr": None,
    "disjoint": False,
    "directed": True,
    "subgraph_type": "directional",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderReport(Report, title="penstock.integrations.pyg"):
    """The time of a loader's batches, over all iterations in this process.

    Batches that worker processes have made (`num_workers`) are not in it.
    """

    num_batches: int
    """Batches that were made."""
    sample_seconds: float
    """Time of sampling neighbours."""
    gather_seconds: float
    """Time of gathering the features of the sampled nodes and edges."""
    wait_seconds: float
    """Time in which the consumer waited for both. Without prefetch, their sum."""


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
        data: Graph and its features; or a pair of a `FeatureStore` and a `GraphStore`, where
            `neighbor_sampler` has the graph.
        num_neighbors: Neighbours per node at each hop; -1 takes all of them.
        input_nodes: Seeds: node numbers, or a mask; by default all nodes.
        replace: Whether a neighbour may be taken more than once.
        neighbor_sampler: Sampler in place of one that is made of `data.edge_index`; so that several
            loaders share one, or the graph is in files.
        prefetch: Number of batches that are made ahead; 0 makes each when it is next. Without
            effect where there are `num_workers`, which have a `prefetch_factor`.
        generator: Generator of the order of the seeds and of the samples.
        **kwargs: Options of PyG's `NodeLoader` and PyTorch's `DataLoader`: `batch_size`, `shuffle`,
            `drop_last`, `transform`, `num_workers`, ...

    Raises:
        TypeError: `data` is heterogeneous, or something else.
        ValueError: There is no graph; an option of PyG's is not supported; or `prefetch` would
            gather rows of a table that requires gradients before the step that changes them.
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
        kwargs = _drop_fixed_options(kwargs)
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: expected 0 or more batches")
        trained = _list_trained_features(data)
        if trained and prefetch:
            raise ValueError(
                f"prefetch={prefetch}: {trained[0]!r} requires gradients, so the rows of the next "
                "batch are not known before this step has ended; give prefetch=0, or gather them "
                "from the table in the training step"
            )
        if neighbor_sampler is None:
            neighbor_sampler = _make_sampler(data, num_neighbors, replace)
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
        # Drawn here, so that no other thread advances the generator of the training.
        seed = torch.empty((), dtype=torch.int64).random_(generator=self.generator).item()
        jobs = self._jobs(int(seed))
        if self.prefetch:
            return PrefetchIterator(jobs, ahead=self.prefetch, count_wait=self._count_wait)
        return self._run_in_turn(jobs)

    @property
    def graph(self) -> NeighborSampler:
        """Sampler of the graph; another loader can share it (`neighbor_sampler=`)."""
        assert isinstance(self.node_sampler, UnifiedSampler)
        return self.node_sampler.graph

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes without generators, which cannot be spawned."""
        return {**self.__dict__, "generator": None, "sampler": None, "batch_sampler": None}

    def report(self) -> LoaderReport:
        """Return the time of the batches so far."""
        return LoaderReport(
            num_batches=self._num_batches,
            **{f"{name}_seconds": seconds for name, seconds in self._seconds.items()},
        )

    def _jobs(self, seed: int) -> Iterator[Callable[[], Any]]:
        """Yield the job of each batch, with random numbers of its own."""
        if self.batch_sampler is None:
            raise ValueError("batch_size=None: expected a number of seeds per batch")
        seeds = torch.Generator().manual_seed(seed)
        for index in self.batch_sampler:
            each = int(torch.empty((), dtype=torch.int64).random_(generator=seeds))
            # Streams and gradient modes belong to a thread.
            stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
            yield functools.partial(self._make_batch, index, each, torch.is_grad_enabled(), stream)

    def _make_batch(
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

    def _count_wait(self, seconds: float) -> None:
        self._seconds["wait"] += seconds

    def _run_in_turn(self, jobs: Iterator[Callable[[], Any]]) -> Iterator[Any]:
        for job in jobs:
            start = time.perf_counter()
            batch = job()
            self._count_wait(time.perf_counter() - start)
            yield batch


class PrefetchIterator(Iterator[Item], Generic[Item]):
    """An iterator over the results of jobs, in their order, which computes the next ones ahead.

    Jobs are drawn by the thread that iterates, and run by one other thread, one after the other.
    The error of a job is raised in place of its result, and ends the iteration. If the iteration is
    abandoned, at most the job that is running is completed.

    Args:
        jobs: Functions that compute the results.
        ahead: Number of jobs that may run, or wait, ahead of the next result.
        count_wait: Function that takes the seconds that each result was waited for.
    """

    def __init__(
        self, jobs: Iterator[Callable[[], Item]], *, ahead: int, count_wait: Callable[[float], None]
    ) -> None:
        self._jobs, self._ahead, self._count_wait = jobs, ahead, count_wait
        self._pending: deque[Future[Item]] = deque()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="penstock-loader")
        self._stop = weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        self._refill()

    def __next__(self) -> Item:
        self._refill()
        if not self._pending:
            self._stop()
            raise StopIteration
        try:
            start = time.perf_counter()
            result = self._pending.popleft().result()
            self._count_wait(time.perf_counter() - start)
            self._refill()
        except BaseException:
            self._pending.clear()
            self._jobs = iter(())
            self._stop()
            raise
        return result

    def _refill(self) -> None:
        """Submit jobs until `ahead` of them are under way."""
        while len(self._pending) < self._ahead and (job := next(self._jobs, None)) is not None:
            self._pending.append(self._threads.submit(job))


def _check_data(data: Any) -> None:
    if isinstance(data, HeteroData):
        raise TypeError(
            "data: expected a graph with one type of node, got HeteroData; use PyG's loader with "
            "pyg-lib, whose feature fetch works with tables too"
        )
    if not isinstance(data, Data) and not _is_store_pair(data):
        raise TypeError(
            "data: expected torch_geometric.data.Data, or a pair of a FeatureStore and a "
            f"GraphStore, got {type(data).__name__}"
        )


def _is_store_pair(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], FeatureStore)


def _drop_fixed_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that change nothing; raise for unsupported values."""
    kept = {}
    for name, value in options.items():
        if name == "is_sorted":  # the edges are sorted here in any case
            continue
        if name not in _ONLY_VALUES:
            kept[name] = value
        elif getattr(value, "value", value) != _ONLY_VALUES[name]:
            raise ValueError(
                f"{name}={value!r}: Penstock's loader does {name}={_ONLY_VALUES[name]!r} only; "
                "leave it out, or use PyG's own with pyg-lib"
            )
    return kept


def _list_trained_features(data: Any) -> list[str]:
    """Return the names of the tables in the data that require gradients."""
    if _is_store_pair(data):
        attrs = data[0].get_all_tensor_attrs() if isinstance(data[0], UnifiedFeatureStore) else []
        items = [(attr.attr_name, data[0][attr.group_name, attr.attr_name, None]) for attr in attrs]
    else:
        items = data.items()
    return [
        str(name)
        for name, value in items
        if isinstance(value, UnifiedTensor) and value.requires_grad
    ]


def _make_sampler(data: Any, num_neighbors: Sequence[int] | None, replace: bool) -> UnifiedSampler:
    if _is_store_pair(data):
        raise ValueError("neighbor_sampler: needed where data is a pair of stores")
    if num_neighbors is None:
        raise ValueError("num_neighbors: expected neighbours per node at each hop, such as [10, 5]")
    if data.edge_index is None or data.num_nodes is None:
        raise ValueError("data: expected an edge_index, or a neighbor_sampler that has the graph")
    graph = NeighborSampler.from_edges(
        data.edge_index, data.num_nodes, fanouts=list(num_neighbors), replace=replace
    )
    return UnifiedSampler(graph)
