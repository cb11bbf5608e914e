"""The batcher: irregular computations in one call of a cell for all nodes that are ready.

A graph's nodes are scheduled, their outputs laid out, and the operands of every batch found, all
before anything runs and once per shape. Then each batch is one call of an ordinary module.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.batching._arrays import Integers
from penstock.batching.dynamic._layout import BatchPlan, ExecutionPlan, plan_execution
from penstock.batching.dynamic._outputs import (
    BatchedOutputs,
    BatchReport,
    OutputPools,
    ReadOperands,
    WriteOutputs,
)
from penstock.batching.dynamic._splitting import BatchSplitter, InputTensors, Piece
from penstock.batching.dynamic._typed_graph import NodeGraph, Signature, TypedGraph, note_inputs_of
from penstock.compat.autograd import is_transformed
from penstock.compat.dynamo import run_uncompiled
from penstock.compat.modules import read_version
from penstock.units import parse_bytes

_MAX_CACHED_PLANS = 512
_REMEDY_IN_PLACE = "other nodes may read it: have the cell clone() it, or use inplace=False"
Order = Callable[[NodeGraph], tuple[Integers, Integers, Integers]]


@dataclass(frozen=True)
class _NumberedGraph:
    """A graph with its signatures numbered by a batcher."""

    nodes: NodeGraph
    codes: list[int]
    """The batcher's number of each of the graph's signatures."""
    key: bytes
    """A digest, equal for graphs that have the same plan."""


class DynamicBatcher(nn.Module):
    """A module that runs typed graphs: all ready nodes of a type in one call of the type's cell.

    A cell is an ordinary module. Its arguments are the outputs of the argument nodes (a tensor, or
    a tuple of tensors, each), and then the inputs of its nodes; the first axis of arguments and
    outputs is that of the nodes. Cells may be compiled (`torch.compile(cell, dynamic=True)`),
    shared between types, and used elsewhere.

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
        max_bytes: The cap on memory at the peak, beyond parameters, their gradients and the
            caller's own tensors, as bytes or text such as "2GiB". Batches are split, and values
            for backward that do not fit are recomputed there. Before a type runs on new
            shapes or dtypes (or in another mode), its cell runs three times on copies of one node
            to be measured; its buffers and the random numbers are put back, its hooks and other
            side effects happen.

    Raises:
        TypeError: A cell is no module.
        ValueError: There are no cells.
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
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[TypedGraph, _NumberedGraph] = (
            weakref.WeakKeyDictionary()
        )
        self._plans: OrderedDict[Hashable, tuple[ExecutionPlan, Integers]] = OrderedDict()
        self._splitter = None if self.max_bytes is None else BatchSplitter(self.max_bytes)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without caches, which refer to objects of this process."""
        caches = ("_graphs", "_plans", "_splitter")
        return {name: each for name, each in self.__dict__.items() if name not in caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, with empty caches."""
        super().__setstate__(state)
        self._clear_caches()

    @run_uncompiled(reason="what runs in a batch depends on the graphs")
    def forward(
        self, graphs: TypedGraph | Sequence[TypedGraph], *, keep: Sequence[Hashable] | None = None
    ) -> BatchedOutputs:
        """Run graphs together.

        Args:
            graphs: One or more; graphs that are run again are planned faster.
            keep: The types to keep the outputs of. Without gradients, rows of all other types are
                reused as soon as no batch has to read them. None keeps all.

        Returns:
            The outputs of all nodes, or of those of the types in `keep`, differentiable.

        Raises:
            ValueError: A type has no cell, a cell cannot take as many arguments, or cells with
                outputs for the same argument return different shapes.
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
        """Run graphs as `forward` does, in the order of another scheduler to compare with."""
        begin = time.perf_counter()
        if is_transformed():
            raise RuntimeError(
                "a transformation of torch.func (grad, vmap, jvp) or a forward-mode derivative is "
                "on, and does not reach into a DynamicBatcher: use torch.autograd.grad, or call "
                "the cells one by one"
            )
        graphs = self._check_arguments(graphs, keep)
        numbered = self._number(graphs)
        kept = None if torch.is_grad_enabled() else tuple(keep or ()) or None
        plan, types, was_planned = self._plan(numbered, order, kept)
        first_nodes = np.cumsum([0, *map(len, graphs)])
        seconds = time.perf_counter() - begin
        inputs = self._concatenate_inputs(graphs, numbered)
        index = torch.from_numpy(np.concatenate([plan.index, plan.input_index])).to(inputs.device)
        is_mixed = torch.is_autocast_enabled(inputs.device.type)
        pools = OutputPools(plan.pool_rows, index, plan.shared_pools if is_mixed else ())
        kinds = [kind for kind, _, _ in self._codes]
        codes = {batch.kind for batch in plan.batches}
        cells = {code: (kinds[code], self._cells[self._cell_of[kinds[code]]]) for code in codes}
        splitter = copy.copy(self._splitter)  # with what was measured; its bytes are of this run
        run = _BatchRun(plan, cells, pools, inputs, index[len(plan.index) :], splitter)
        tokens = run.run()
        report = BatchReport(
            num_graphs=len(graphs),
            num_nodes=int(first_nodes[-1]),
            num_batches=len(plan.batches),
            lower_bound=plan.lower_bound,
            num_pieces=run.num_pieces,
            num_recomputed=run.num_recomputed,
            gathered_bytes=pools.gathered_bytes,
            sliced_bytes=pools.sliced_bytes,
            output_bytes=pools.nbytes(),
            scheduling_seconds=seconds,
            was_planned=was_planned,
            planned_by=plan.planned_by,
        )
        outputs = (plan, pools, tokens, run.is_tuple, first_nodes, kinds, types, report)
        return BatchedOutputs(*outputs, None if keep is None else set(keep))

    def _check_arguments(
        self, graphs: TypedGraph | Sequence[TypedGraph], keep: Sequence[Hashable] | None
    ) -> list[TypedGraph]:
        graphs = [graphs] if isinstance(graphs, TypedGraph) else list(graphs)
        if not graphs:
            raise ValueError("graphs is empty; give at least one")
        for place, graph in enumerate(graphs):
            if not isinstance(graph, TypedGraph):
                raise TypeError(f"graphs[{place}] must be a TypedGraph; got {graph!r}")
        if keep is not None and not set(keep) <= set(self._cell_of):
            raise ValueError(f"keep must name types of {list(self._cell_of)}; got {list(keep)}")
        return graphs

    def forget_plans(self) -> None:
        """Forget the plans of graphs that were run together; the numbers of each graph stay."""
        self._plans.clear()

    def _plan(
        self, graphs: list[_NumberedGraph], order: Order | None, keep: tuple[Hashable, ...] | None
    ) -> tuple[ExecutionPlan, Integers, bool]:
        digest = hashlib.blake2b(b"".join(each.key for each in graphs), digest_size=16)
        key = (digest.digest(), order, keep)
        if key in self._plans:
            self._plans.move_to_end(key)
            return *self._plans[key], True
        graph = NodeGraph.merge([each.nodes for each in graphs], len(self._codes))
        kept = None
        if keep is not None:
            kept = [code for (kind, _, _), code in self._codes.items() if kind in keep]
        plan = plan_execution(graph, None if order is None else order(graph), kept)
        self._plans[key] = plan, graph.types
        if len(self._plans) > _MAX_CACHED_PLANS:
            self._plans.popitem(last=False)
        return plan, graph.types, False

    def _number(self, graphs: Sequence[TypedGraph]) -> list[_NumberedGraph]:
        """Number the signatures of graphs; a signature keeps its number."""
        cached = [self._graphs.get(graph) for graph in graphs]
        for graph, each in zip(graphs, cached, strict=True):
            if each is not None:
                continue
            for signature in graph.signatures:
                if signature not in self._codes:
                    self._check_signature(signature)
                    self._codes[signature] = len(self._codes)
        num_types = len(self._codes)
        return [
            each if each is not None and each.nodes.num_types == num_types else self._recode(graph)
            for graph, each in zip(graphs, cached, strict=True)
        ]

    def _recode(self, graph: TypedGraph) -> _NumberedGraph:
        codes = np.array([self._codes[each] for each in graph.signatures], dtype=np.int64)
        # By the numbers, which differ where types do: different types may have the same text.
        key = hashlib.blake2b(graph.key + codes.tobytes(), digest_size=16).digest()
        own = graph.nodes
        nodes = NodeGraph(codes[own.types], own.starts, own.flat, len(self._codes))
        numbered = _NumberedGraph(nodes, codes.tolist(), key)
        self._graphs[graph] = numbered
        return numbered

    def _check_signature(self, signature: Signature) -> None:
        kind, num_arguments, num_inputs = signature
        if kind not in self._cell_of:
            raise ValueError(f"no cell for nodes of type {kind!r}; cells has {list(self._cell_of)}")
        if num_arguments + num_inputs == 0:
            raise ValueError(
                f"a node of type {kind!r} has neither arguments nor inputs, so that its cell "
                "cannot see the number of its nodes; give it an input"
            )
        forward = inspect.signature(self._cells[self._cell_of[kind]].forward)
        try:
            forward.bind(*[None] * (num_arguments + num_inputs))
        except TypeError as error:
            raise ValueError(
                f"a node of type {kind!r} has {num_arguments} arguments and {num_inputs} inputs, "
                f"but its cell takes {forward}: {error}"
            ) from None

    def _concatenate_inputs(
        self, graphs: list[TypedGraph], numbered: list[_NumberedGraph]
    ) -> InputTensors:
        """Concatenate the inputs of all graphs, by signature, on the device of the cells."""
        found: dict[int, list[tuple[Tensor, ...]]] = {}
        copied: dict[int, bool] = {}
        for graph, each in zip(graphs, numbered, strict=True):
            for local, tensors in graph.inputs.items():
                if tensors:
                    code = each.codes[local]
                    found.setdefault(code, []).append(tensors)
                    copied[code] = copied.get(code, False) or not graph.has_whole_inputs
        device = next((parameter.device for parameter in self.parameters()), None)
        if device is None:  # cells without parameters run on the device of their inputs
            inputs = (tensor for parts in found.values() for part in parts for tensor in part)
            device = next((tensor.device for tensor in inputs), torch.device("cpu"))
        laid: dict[int, tuple[Tensor, ...]] = {}
        kinds = [kind for kind, _, _ in self._codes]
        for code, parts in found.items():
            with note_inputs_of(kinds[code]):
                laid[code] = tuple(
                    (each[0] if len(each) == 1 else torch.cat(each)).to(device)
                    for each in zip(*parts, strict=True)
                )
        # Every copy counts; until the concatenation is done there may be one of each graph, too.
        kept_bytes = peak_bytes = 0
        for code, tensors in laid.items():
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            is_new = tensors[0] is not found[code][0][0]
            kept_bytes += num_bytes if is_new or copied[code] else 0
            peak_bytes += num_bytes if is_new and copied[code] else 0
        return InputTensors(laid, device, kept_bytes, kept_bytes + peak_bytes)


def _contexts_of_checkpoint() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a piece's first run and of the next, which a backward pass begins."""
    return nullcontext(), torch.inference_mode(False)


def _call(cell: nn.Module, arguments: list[Any]) -> Any:
    """Return what a cell computes of operands, which it may not change in place."""
    versions = _list_versions(arguments)
    outputs = cell(*arguments)
    if _list_versions(arguments) != versions:
        raise RuntimeError("an operand has been modified by an inplace operation")
    return outputs


def _list_versions(arguments: list[Any]) -> list[int]:
    """Return how often the tensors of a cell's arguments were changed in place."""
    tensors = (each if isinstance(each, tuple) else (each,) for each in arguments)
    return [read_version(each) for of in tensors for each in of]


@dataclass(eq=False)
class _BatchRun:
    """A run of a plan, batch by batch and piece by piece."""

    plan: ExecutionPlan
    cells: dict[int, tuple[Hashable, nn.Module]]
    pools: OutputPools
    inputs: InputTensors
    input_index: Tensor
    splitter: BatchSplitter | None
    tokens: list[Tensor] = field(default_factory=list)
    is_tuple: dict[int, bool] = field(default_factory=dict)
    num_pieces: int = 0
    num_recomputed: int = 0

    def run(self) -> list[Tensor]:
        """Run all batches and return the token of each."""
        if self.splitter is not None:
            self.splitter.begin(self.plan, self.cells, self.pools, self.inputs)
        for batch in self.plan.batches:
            kind, cell = self.cells[batch.kind]
            done = 0
            tokens = []
            while done < batch.num_nodes:
                piece = Piece(done, batch.num_nodes)
                if self.splitter is not None:
                    piece = self.splitter.next_piece(batch, done, kind)
                tokens.append(self._run_piece(batch, piece, kind, cell))
                done = piece.stop
                self.num_pieces += 1
                self.num_recomputed += piece.recompute
            self.tokens.append(tokens[0] if len(tokens) == 1 else torch.cat(tokens))
        return self.tokens

    def _run_piece(self, batch: BatchPlan, piece: Piece, kind: Hashable, cell: nn.Module) -> Tensor:
        num_nodes = piece.stop - piece.start

        def compute(*_: Tensor) -> Any:
            arguments = self._gather_arguments(batch, piece)
            try:
                return _call(cell, arguments)
            except Exception as error:
                error.add_note(f"raised by the cell of {kind!r} for {num_nodes} of its nodes")
                if "inplace" in str(error):
                    error.add_note(_REMEDY_IN_PLACE)
                raise

        if piece.recompute and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint

            outputs = checkpoint(compute, use_reentrant=False, context_fn=_contexts_of_checkpoint)
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
                "with outputs for the same argument do not"
            )
        place = batch.pool, batch.start + piece.start
        token = WriteOutputs.apply(self.pools, *place, kind, *components)
        assert isinstance(token, Tensor)
        return token

    def _gather_arguments(self, batch: BatchPlan, piece: Piece) -> list[Any]:
        """Return operands, argument by argument, and then inputs, of the nodes of a piece."""
        num_nodes = piece.stop - piece.start
        operands: dict[int, Any] = {}
        for whole in batch.operands:
            for part in piece.cut(whole, batch.num_nodes):
                tokens = [self.tokens[source] for source in part.sources]
                found = ReadOperands.apply(self.pools, part, num_nodes, *tokens)
                assert isinstance(found, tuple)
                width = len(found) // len(part.slots)
                for place, slot in enumerate(part.slots):
                    components_of_slot = found[place * width : (place + 1) * width]
                    operands[slot] = (
                        components_of_slot if self.is_tuple[part.pool] else components_of_slot[0]
                    )
        arguments = [operands[slot] for slot in range(len(operands))]
        for tensor in self.inputs.tensors.get(batch.kind, ()):
            if batch.inputs_in_order is not None:
                first = batch.inputs_in_order + piece.start
                arguments.append(tensor[first : first + num_nodes])
            else:
                rows = self.input_index[batch.input_rows][piece.start : piece.stop]
                arguments.append(tensor.index_select(0, rows.to(tensor.device)))
        return arguments
