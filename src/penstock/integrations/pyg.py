"""PyTorch Geometric: tables as a feature store, and mini-batches without compiled samplers.

`data.x = penstock.unify(data.x)` needs nothing of this: PyG's own loaders gather rows of the table,
in this process and in workers. This module has tables as a `FeatureStore`, and the loader for which
PyG needs compiled extensions. PyG's own loader joins the nodes with their features, so the batches
have its fields. The sampler is Penstock's, and the next batch is sampled and gathered in another
thread while this one is used.
"""

# ruff: noqa: E402  # its absence is reported first

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NoReturn, TypeVar, cast

from penstock.compat.packages import import_package

import_package("torch_geometric", "penstock.integrations.pyg")

import torch
from torch_geometric.data import Data, FeatureStore, HeteroData, TensorAttr
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from penstock.memory import WorkerThreads
from penstock.tables import Report
from penstock.traversal import NeighborSampler
from penstock.unified import UnifiedTensor, unify

__all__ = ["LoaderReport", "NeighborLoader", "UnifiedFeatureStore", "UnifiedSampler"]

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


class UnifiedFeatureStore(FeatureStore):
    """Features in tables, in memory or in files, for PyG's loaders and for your own.

    Example:
        >>> store = UnifiedFeatureStore({("paper", "x"): torch.rand(100, 8)})
        >>> store["paper", "x", torch.tensor([3, 1])].shape
        torch.Size([2, 8])

    Args:
        features: Features by (group, name), such as `("paper", "x")`; the group is a node type, an
            edge type or None. Each is a table, or another source of `penstock.unify`: a tensor, an
            array, the path of a file.

    Raises:
        TypeError: A key is no pair.
    """

    def __init__(self, features: Mapping[tuple[Any, str], Any] | None = None) -> None:
        super().__init__()
        self._tables: dict[tuple[Any, str], UnifiedTensor] = {}
        for key, source in (features or {}).items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise TypeError(f"features: expected keys (group, name), got {key!r}")
            self._tables[key] = _as_table(source)

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """Put a new table, or write rows of the one that is there; return False if none is."""
        if attr.index is None:
            self._tables[_key(attr)] = _as_table(tensor)
            return True
        table = self._tables.get(_key(attr))
        if table is None:
            return False
        rows = torch.as_tensor(tensor, dtype=table.dtype, device=getattr(tensor, "device", "cpu"))
        index = attr.index
        if isinstance(index, slice):  # a table in a file is written by row numbers
            index = torch.arange(*index.indices(len(table)), device="cpu")
        elif isinstance(index, int):
            index, rows = torch.tensor([index], device="cpu"), rows[None]
        with torch.no_grad():
            table[index] = rows
        return True

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Write rows of a table, or replace a table; returns whether it was there.

        Args:
            tensor: Rows, or a whole table.
            *args: Arguments of `TensorAttr`: the group, the name and the index.
            **kwargs: Arguments of `TensorAttr` by name.
        """
        # PyG's own would drop the whole table.
        attr: Any = self._tensor_attr_cls.cast(*args, **kwargs)
        return _key(attr) in self._tables and self.put_tensor(tensor, attr)

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        table = self._tables.get(_key(attr))
        if table is None:
            known = ", ".join(map(repr, self._tables)) or "nothing"
            raise KeyError(f"no features {_key(attr)!r} in the store; it has {known}")
        index = attr.index
        if index is None or (isinstance(index, slice) and index == slice(None)):
            return table
        return table[index]

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._tables.pop(_key(attr), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        if _key(attr) not in self._tables:
            return None
        return tuple(self._get_tensor(attr).shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return group and name of each table; a loader fills in the index."""
        return [TensorAttr(group, name) for group, name in self._tables]

    def __repr__(self) -> str:
        parts = ", ".join(f"{key!r}: {tuple(t.shape)}" for key, t in self._tables.items())
        return f"{type(self).__name__}({{{parts}}})"


def _key(attr: TensorAttr) -> tuple[Any, str]:
    return attr.group_name, cast("str", attr.attr_name)


def _as_table(source: Any) -> UnifiedTensor:
    return source if isinstance(source, UnifiedTensor) else unify(source)


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
            data.edge_index = torch.empty(2, 0, dtype=torch.int64, device="cpu")
        self.prefetch = prefetch
        self._seconds = {"sample": 0.0, "gather": 0.0, "wait": 0.0}
        self._num_batches = 0
        super().__init__(data, neighbor_sampler, input_nodes, generator=generator, **kwargs)

    def __iter__(self) -> Any:
        if self.num_workers:
            return super().__iter__()
        # Drawn here, so that no other thread advances the generator of the training.
        seed = (
            torch.empty((), dtype=torch.int64, device="cpu")
            .random_(generator=self.generator)
            .item()
        )
        jobs = self._jobs(int(seed))
        return run_ahead(jobs, ahead=self.prefetch, count_wait=self._count_wait)

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
            each = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=seeds))
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


def run_ahead(
    jobs: Iterator[Callable[[], Item]], *, ahead: int, count_wait: Callable[[float], None]
) -> Iterator[Item]:
    """Yield the results of jobs, in their order, while the next ones are computed.

    Jobs are drawn by the thread that iterates, and run by one other thread, one after the other.
    The error of a job is raised in place of its result, and ends the iteration. If the iteration is
    abandoned, at most the job that is running is completed.

    Args:
        jobs: Functions that compute the results.
        ahead: Number of jobs that may run, or wait, ahead of the next result; at 0 the thread that
            iterates runs them.
        count_wait: Function that takes the seconds that each result was waited for.
    """
    pending: deque[Callable[[], Item]] = deque()
    threads = WorkerThreads(1, thread_name_prefix="penstock-loader")

    def refill() -> None:
        for job in islice(jobs, ahead - len(pending)):
            pending.append(threads.submit(job).result)

    try:
        refill()
        while pending or (pending := deque(islice(jobs, 1))):
            start = time.perf_counter()
            result = pending.popleft()()
            count_wait(time.perf_counter() - start)
            refill()
            yield result
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


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
