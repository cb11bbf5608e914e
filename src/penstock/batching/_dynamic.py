"""Run irregular computations in few kernels: one call of a cell for all nodes that are ready.

A graph's nodes are scheduled, their outputs laid out, and what every batch reads is found, all
before anything runs and once per shape. Then each batch is one call of an ordinary module.
"""

from __future__ import annotations

import hashlib
import inspect
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.batching._costs import Integers
from penstock.batching._execution_plan import BatchPlan, ExecutionPlan, Operands, plan_execution
from penstock.batching._native import merged
from penstock.batching._node_graph import NodeGraph
from penstock.batching._pieces import Budget, Piece
from penstock.batching._pools import Pools, ReadOperands, WriteOutputs
from penstock.batching._typed_graph import Signature, TypedGraph
from penstock.tables import report_table
from penstock.units import parse_bytes

_MAX_CACHED_PLANS = 512
Order = Callable[[NodeGraph], tuple[Integers, Integers, Integers]]


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """What running graphs took."""

    num_graphs: int
    num_nodes: int
    num_batches: int
    """Calls of cells."""
    lower_bound: int
    """Calls that no schedule can do without."""
    num_pieces: int
    """Calls, where `max_bytes` has split batches."""
    num_recomputed: int
    """Of these, those that keep nothing for backward and run again there."""
    gathered_bytes: int
    """Operands that had to be gathered."""
    sliced_bytes: int
    """Operands that lay contiguous and were not."""
    output_bytes: int
    """What all nodes returned."""
    scheduling_seconds: float
    """From graphs to the plan of their execution."""
    was_planned: bool
    """Whether graphs of these shapes had been run together before."""
    planned_by: str
    """"C++", or "NumPy" where there is no compiler."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return report_table(self, title="dynamic batches")


@dataclass(frozen=True)
class _KnownGraph:
    """A graph in the numbers of a batcher."""

    nodes: NodeGraph
    codes: list[int]
    """The batcher's number of each of the graph's signatures."""


class BatchedOutputs:
    """What the cells returned for every node; a node has its number in the graphs side by side."""

    def __init__(
        self,
        plan: ExecutionPlan | None,
        pools: Pools | None,
        tokens: list[Tensor],
        is_tuple: dict[int, bool],
        first_nodes: Integers,
        kinds: list[Hashable],
        types: Integers,
        report: BatchReport,
        kept: set[Hashable] | None,
    ) -> None:
        self._plan, self._pools, self._tokens, self._is_tuple = plan, pools, tokens, is_tuple
        self._kinds, self._types, self._kept = kinds, types, kept
        self.first_nodes: Integers = first_nodes
        """The first node of each graph, `[num_graphs + 1]`."""
        self.report: BatchReport = report
        """What it took to run them."""

    def select(self, nodes: Sequence[int] | Integers | Tensor) -> Any:
        """Return the outputs of nodes, in the order given.

        Args:
            nodes: Numbers of nodes in the graphs side by side, at least one (see `first_nodes`).

        Returns:
            What their cells return, with one row per node: `[num_nodes, ...]`.

        Raises:
            ValueError: there is no such node, or their cells return different things.
        """
        chosen = np.asarray(nodes, dtype=np.int64)
        if chosen.ndim != 1 or len(chosen) == 0:
            raise ValueError(f"nodes must be one or more numbers; got shape {chosen.shape}")
        if chosen.min() < 0 or chosen.max() >= self.first_nodes[-1]:
            raise ValueError(f"nodes must be between 0 and {self.first_nodes[-1] - 1}")
        if self._kept is not None:
            lost = {self._kinds[t] for t in np.unique(self._types[chosen]).tolist()} - self._kept
            if lost:
                raise ValueError(
                    f"nodes have the types {sorted(lost, key=repr)}, whose outputs were not kept: "
                    f"keep was {sorted(self._kept, key=repr)}"
                )
        assert self._plan is not None
        pool_of = self._plan.pool_of_node[chosen]
        pools = np.unique(pool_of).tolist()
        if len(pools) == 1:
            return self._from_pool(pools[0], chosen)
        parts = [self._from_pool(pool, chosen[pool_of == pool]) for pool in pools]
        layouts = {
            tuple((tuple(each.shape[1:]), each.dtype) for each in part)
            if isinstance(part, tuple)
            else (tuple(part.shape[1:]), part.dtype)
            for part in parts
        }
        if len(layouts) > 1:
            raise ValueError(
                "nodes must be of types whose cells return alike; select those of "
                f"{sorted({repr(self._kinds[t]) for t in self._types[chosen].tolist()})} apart"
            )
        order = np.argsort(np.argsort(pool_of, kind="stable"), kind="stable")
        index = torch.from_numpy(order)
        if isinstance(parts[0], tuple):
            return tuple(
                torch.cat(each).index_select(0, index.to(each[0].device))
                for each in zip(*parts, strict=True)
            )
        return torch.cat(parts).index_select(0, index.to(parts[0].device))

    def _from_pool(self, pool: int, chosen: Integers) -> Any:
        assert self._plan is not None and self._pools is not None
        rows = self._plan.row_of_node[chosen]
        in_order = bool((np.diff(rows) == 1).all())
        place = slice(0, len(rows)) if in_order else self._pools.extend_index(rows)
        sources = tuple(np.unique(self._plan.batch_of_node[chosen]).tolist())
        operands = Operands((0,), pool, int(rows[0]) if in_order else None, place, sources)
        tokens = [self._tokens[batch] for batch in sources]
        found = ReadOperands.apply(self._pools, operands, len(rows), *tokens)
        assert isinstance(found, tuple)
        return found if self._is_tuple[pool] else found[0]

    def of(self, kind: Hashable) -> Any:
        """Return the outputs of all nodes of a type, graph by graph.

        Args:
            kind: The type.

        Returns:
            What its cell returns, `[num_nodes, ...]`.
        """
        wanted = [code for code, each in enumerate(self._kinds) if each == kind]
        nodes = np.flatnonzero(np.isin(self._types, wanted))
        if len(nodes) == 0:
            raise ValueError(f"no node has the type {kind!r}")
        return self.select(nodes)

    def last(self) -> Any:
        """Return the outputs of the last node of each graph: `[num_graphs, ...]`."""
        if (np.diff(self.first_nodes) == 0).any():
            raise ValueError("a graph without nodes has no last one")
        return self.select(self.first_nodes[1:] - 1)


class DynamicBatcher(nn.Module):
    """Runs typed graphs, all nodes of a type that are ready in one call of the type's cell.

    A cell is an ordinary module. It is called with one operand per argument, what the cells of the
    argument nodes returned (a tensor, or a tuple of tensors), and then with the inputs of its
    nodes; everything has the nodes as its first axis, and so has what it returns. Cells may be
    compiled (`torch.compile(cell, dynamic=True)`), shared between types, and used elsewhere.

    Example:
        >>> class Add(torch.nn.Module):
        ...     def forward(self, left, right):
        ...         return left + right
        >>> batcher = DynamicBatcher({"leaf": torch.nn.Embedding(10, 4), "add": Add()})
        >>> tree = TypedGraph()
        >>> leaves = [tree.add("leaf", inputs=[word]) for word in (3, 1, 4)]
        >>> root = tree.add("add", tree.add("add", *leaves[:2]), leaves[2])
        >>> outputs = batcher([tree, tree])
        >>> outputs.last().shape, outputs.report.num_batches
        (torch.Size([2, 4]), 3)

    Args:
        cells: The module of each operator type.
        max_bytes: What running graphs may take at the peak, beyond parameters, their gradients and
            the inputs, as bytes or text such as "2GiB". Batches are split, and where what
            backward needs does not fit, it is recomputed there.

    Raises:
        TypeError: a cell is no module.
        ValueError: there are no cells.
    """

    def __init__(
        self, cells: Mapping[Any, nn.Module], *, max_bytes: int | str | None = None
    ) -> None:
        super().__init__()
        if not cells:
            raise ValueError("cells is empty; give a module for each operator type")
        for kind, cell in cells.items():
            if not isinstance(cell, nn.Module):
                raise TypeError(f"cells[{kind!r}] must be a torch.nn.Module; got {type(cell)}")
        self._cells = nn.ModuleList(cells.values())
        self._cell_of = {kind: place for place, kind in enumerate(cells)}
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
        self._codes: dict[Signature, int] = {}
        self._graphs: weakref.WeakKeyDictionary[TypedGraph, _KnownGraph] = (
            weakref.WeakKeyDictionary()
        )
        self._plans: OrderedDict[bytes, tuple[ExecutionPlan, Integers]] = OrderedDict()
        self._budget = None if self.max_bytes is None else Budget(self.max_bytes)

    def forward(
        self, graphs: TypedGraph | Sequence[TypedGraph], *, keep: Sequence[Hashable] | None = None
    ) -> BatchedOutputs:
        """Run graphs together.

        Args:
            graphs: One or more; graphs that are run again are planned faster.
            keep: The types whose outputs are wanted. Where nothing is recorded for backward, those
                of all other types make room as soon as nobody has to read them. None keeps all.

        Returns:
            The outputs of all nodes, or of those of the types in `keep`, differentiable.

        Raises:
            ValueError: a type has no cell, a cell cannot take as many arguments, or cells whose
                outputs are read alike return different shapes.
            CapacityError: `max_bytes` is less than the outputs and the smallest piece need.
        """
        return self.run(graphs, keep=keep)

    def run(
        self,
        graphs: TypedGraph | Sequence[TypedGraph],
        *,
        keep: Sequence[Hashable] | None = None,
        order: Order | None = None,
    ) -> BatchedOutputs:
        """Do what `forward` does, in an order of one's own: a schedule to compare with."""
        begin = time.perf_counter()
        graphs = [graphs] if isinstance(graphs, TypedGraph) else list(graphs)
        if not graphs:
            raise ValueError("graphs is empty; give at least one")
        if keep is not None and not set(keep) <= set(self._cell_of):
            raise ValueError(f"keep must name types of {list(self._cell_of)}; got {list(keep)}")
        frees = keep is not None and not torch.is_grad_enabled()
        plan, types, was_planned = self._plan(
            graphs, order, tuple(keep) if keep and frees else None
        )
        first_nodes = np.cumsum([0, *map(len, graphs)])
        seconds = time.perf_counter() - begin
        inputs, device = self._inputs(graphs)
        index = torch.from_numpy(np.concatenate([plan.index, plan.input_index])).to(device)
        pools = Pools(plan.pool_rows, index)
        execution = _Execution(self, plan, pools, inputs, index[len(plan.index) :])
        tokens = execution.run()
        report = BatchReport(
            num_graphs=len(graphs),
            num_nodes=int(first_nodes[-1]),
            num_batches=len(plan.batches),
            lower_bound=plan.lower_bound,
            num_pieces=execution.num_pieces,
            num_recomputed=execution.num_recomputed,
            gathered_bytes=pools.gathered_bytes,
            sliced_bytes=pools.sliced_bytes,
            output_bytes=pools.nbytes(),
            scheduling_seconds=seconds,
            was_planned=was_planned,
            planned_by=plan.planned_by,
        )
        kinds = [kind for kind, _, _ in self._codes]
        outputs = (plan, pools, tokens, execution.is_tuple, first_nodes, kinds, types, report)
        return BatchedOutputs(*outputs, None if keep is None else set(keep))

    def forget_plans(self) -> None:
        """Plan graphs anew that have been run together; what is known of each graph stays."""
        self._plans.clear()

    def cell(self, code: int) -> tuple[Hashable, nn.Module]:
        """The type and the module of a signature, by its number."""
        kind = list(self._codes)[code][0]
        return kind, self._cells[self._cell_of[kind]]

    def _plan(
        self, graphs: list[TypedGraph], order: Order | None, keep: tuple[Hashable, ...] | None
    ) -> tuple[ExecutionPlan, Integers, bool]:
        digest = hashlib.blake2b(b"".join(graph.key for graph in graphs), digest_size=16)
        digest.update(repr((order, keep)).encode())
        key = digest.digest()
        if key in self._plans:
            self._plans.move_to_end(key)
            return *self._plans[key], True
        known = self._known(graphs)
        graph = merged([each.nodes for each in known], len(self._codes))
        kept = None
        if keep is not None:
            kept = [code for (kind, _, _), code in self._codes.items() if kind in keep]
        plan = plan_execution(graph, None if order is None else order(graph), kept)
        self._plans[key] = plan, graph.types
        if len(self._plans) > _MAX_CACHED_PLANS:
            self._plans.popitem(last=False)
        return plan, graph.types, False

    def _known(self, graphs: Sequence[TypedGraph]) -> list[_KnownGraph]:
        """Return graphs with this batcher's numbers of signatures; new signatures get one."""
        known = [self._graphs.get(graph) for graph in graphs]
        for graph, each in zip(graphs, known, strict=True):
            if each is not None:
                continue
            for signature in graph.signatures:
                if signature not in self._codes:
                    self._check(signature)
                    self._codes[signature] = len(self._codes)
        num_types = len(self._codes)
        return [
            each if each is not None and each.nodes.num_types == num_types else self._recode(graph)
            for graph, each in zip(graphs, known, strict=True)
        ]

    def _recode(self, graph: TypedGraph) -> _KnownGraph:
        codes = np.array([self._codes[each] for each in graph.signatures], dtype=np.int64)
        known = _KnownGraph(graph.nodes.recoded(codes, len(self._codes)), codes.tolist())
        self._graphs[graph] = known
        return known

    def _check(self, signature: Signature) -> None:
        kind, num_arguments, num_inputs = signature
        if kind not in self._cell_of:
            raise ValueError(f"no cell for nodes of type {kind!r}; cells has {list(self._cell_of)}")
        if num_arguments + num_inputs == 0:
            raise ValueError(
                f"a node of type {kind!r} has neither arguments nor inputs, so that its cell could "
                "not know for how many nodes it runs; give it an input"
            )
        forward = inspect.signature(self._cells[self._cell_of[kind]].forward)
        try:
            forward.bind(*[None] * (num_arguments + num_inputs))
        except TypeError as error:
            raise ValueError(
                f"a node of type {kind!r} has {num_arguments} arguments and {num_inputs} inputs, "
                f"but its cell takes {forward}: {error}"
            ) from None

    def _inputs(
        self, graphs: list[TypedGraph]
    ) -> tuple[dict[int, tuple[Tensor, ...]], torch.device]:
        """Lay the inputs of all graphs end to end, by signature, where the cells are."""
        found: dict[int, list[tuple[Tensor, ...]]] = {}
        for graph, known in zip(graphs, self._known(graphs), strict=True):
            for local, tensors in graph.inputs.items():
                if tensors:
                    found.setdefault(known.codes[local], []).append(tensors)
        device = next((parameter.device for parameter in self.parameters()), None)
        if device is None:  # cells without parameters work where their inputs are
            inputs = (tensor for parts in found.values() for part in parts for tensor in part)
            device = next((tensor.device for tensor in inputs), torch.device("cpu"))
        laid = {
            code: tuple(
                (each[0] if len(each) == 1 else torch.cat(each)).to(device)
                for each in zip(*parts, strict=True)
            )
            for code, parts in found.items()
        }
        return laid, device


class _Execution:
    """One run of a plan, batch by batch and piece by piece."""

    def __init__(
        self,
        batcher: DynamicBatcher,
        plan: ExecutionPlan,
        pools: Pools,
        inputs: dict[int, tuple[Tensor, ...]],
        input_index: Tensor,
    ) -> None:
        self._batcher, self._plan, self._pools = batcher, plan, pools
        self._inputs, self._input_index = inputs, input_index
        self._tokens: list[Tensor] = []
        self.is_tuple: dict[int, bool] = {}
        self.num_pieces = self.num_recomputed = 0

    def run(self) -> list[Tensor]:
        budget = self._batcher._budget
        if budget is not None:
            budget.begin(self._plan)
        cells = {batch.kind: self._batcher.cell(batch.kind) for batch in self._plan.batches}
        for batch in self._plan.batches:
            kind, cell = cells[batch.kind]
            done = 0
            tokens = []
            while done < batch.num_nodes:
                piece = Piece(done, batch.num_nodes)
                if budget is not None:
                    rest = batch.num_nodes - done
                    first = self._arguments(batch, Piece(done, done + min(rest, 1)))
                    piece = budget.next_piece(batch, done, (kind, cell), first)
                tokens.append(self._run_piece(batch, piece, kind, cell))
                done = piece.stop
                self.num_pieces += 1
                self.num_recomputed += piece.recompute
            self._tokens.append(tokens[0] if len(tokens) == 1 else torch.cat(tokens))
        return self._tokens

    def _run_piece(self, batch: BatchPlan, piece: Piece, kind: Hashable, cell: nn.Module) -> Tensor:
        def compute(*_: Tensor) -> Any:
            return cell(*self._arguments(batch, piece))

        num_nodes = piece.stop - piece.start
        if piece.recompute and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint

            outputs = checkpoint(compute, use_reentrant=False)
        else:
            outputs = compute()
        components = outputs if isinstance(outputs, tuple) else (outputs,)
        for each in components:
            if not isinstance(each, Tensor) or each.shape[:1] != (num_nodes,):
                got = tuple(each.shape) if isinstance(each, Tensor) else type(each)
                raise ValueError(
                    f"the cell of {kind!r} must return a tensor or a tuple of tensors with one row "
                    f"for each of its {num_nodes} nodes; got {got}"
                )
        is_tuple = isinstance(outputs, tuple)
        if self.is_tuple.setdefault(batch.pool, is_tuple) != is_tuple:
            raise ValueError(
                f"the cell of {kind!r} returns {'a tuple' if is_tuple else 'a tensor'}, but cells "
                "whose outputs are read as the same argument do not"
            )
        start = batch.start + piece.start
        token = WriteOutputs.apply(self._pools, batch.pool, start, kind, *components)
        assert isinstance(token, Tensor)
        return token

    def _arguments(self, batch: BatchPlan, piece: Piece) -> list[Any]:
        """Operands, argument by argument, and then inputs, of the nodes of a piece."""
        num_nodes = piece.stop - piece.start
        operands: dict[int, Any] = {}
        for whole in batch.operands:
            for part in piece.of(whole, batch.num_nodes):
                tokens = [self._tokens[source] for source in part.sources]
                found = ReadOperands.apply(self._pools, part, num_nodes, *tokens)
                assert isinstance(found, tuple)
                width = len(found) // len(part.slots)
                for place, slot in enumerate(part.slots):
                    mine = found[place * width : (place + 1) * width]
                    operands[slot] = mine if self.is_tuple[part.pool] else mine[0]
        arguments = [operands[slot] for slot in range(len(operands))]
        for tensor in self._inputs.get(batch.kind, ()):
            if batch.inputs_in_order is not None:
                first = batch.inputs_in_order + piece.start
                arguments.append(tensor[first : first + num_nodes])
            else:
                rows = self._input_index[batch.input_rows][piece.start : piece.stop]
                arguments.append(tensor.index_select(0, rows.to(tensor.device)))
        return arguments
