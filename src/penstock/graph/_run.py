"""Execution of a step graph operator by operator, without a plan: the reference for all others.

It reads nothing but the graph's data, so it also proves that the data is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.compat.autograd import below_autograd
from penstock.errors import GraphFileError, PenstockError
from penstock.graph.bindings import (
    StateEntry,
    bind_batch,
    bind_group_tensors,
    bind_numbers,
    find_entries,
    find_initial_fill,
)
from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    GET_RNG_STATE,
    SCALAR,
    SET_RNG_STATE,
    decode_arguments,
    dtype_from_name,
    dtype_name,
    evaluate,
    flat_results,
    make,
    random_state,
    resolve,
    set_random_state,
    view_memory,
)
from penstock.graph.executable import find_last_uses
from penstock.graph.fsdp import collectives  # noqa: F401 (operators of graphs)
from penstock.graph.fsdp.shards import ShardedModel
from penstock.graph.splitting.input_pieces import part_of_input
from penstock.graph.step_graph import Operator, Phase, StepGraph, TensorView


def run(
    graph: StepGraph,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    loss: object = None,
) -> torch.Tensor:
    """Run one captured training step with the real parameters, in program order.

    Parameters, buffers and the optimizer's state are updated in place, as
    `loss.backward(); optimizer.step()` would; gradients are not kept.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = (torch.ones(3, 4),)
        >>> from penstock.graph import capture
        >>> graph = capture(model, optimizer, batch, loss=lambda output, batch: output.sum())
        >>> run(graph, model, optimizer, batch) > run(graph, model, optimizer, batch)
        tensor(True)

    Args:
        graph: The step, captured or loaded.
        model: The model that it was captured of, or one of the same kind.
        optimizer: Its optimizer; state that does not exist yet is made.
        batch: A batch of the captured form.
        loss: The loss, if it is a module with parameters or buffers.

    Returns:
        The loss, detached.

    Raises:
        GraphFileError: The graph is of another model or optimizer.
        ValueError: The batch has another form.
    """
    if graph.captured is not None:
        graph.captured.check_outside()
    sharded = ShardedModel(model, loss)  # puts the shards into the model
    entries = find_entries(graph, model, loss, optimizer, sharded)
    tensors = bind_batch(graph, batch) | {each.name: _take(graph, each) for each in entries}
    tensors |= bind_group_tensors(graph, optimizer)
    step = _ReferenceRun(graph, tensors, bind_numbers(graph, optimizer))
    with below_autograd(), torch.autocast(graph.device, enabled=False):
        return step.run()


def _take(graph: StepGraph, entry: StateEntry) -> torch.Tensor:
    """Return a tensor of the user's, laid out as in the graph; make state that does not exist."""
    view, tensor = entry.view, entry.get()
    if tensor is None:
        assert entry.owner is not None
        device = entry.owner.device if graph.num_bytes(view.value) else torch.device("cpu")
        dtype = dtype_from_name(view.dtype)
        made = torch.empty_strided(view.shape, view.stride, dtype=dtype, device=device)
        return entry.set(made.fill_(find_initial_fill(graph, entry.name)))
    if (tensor.stride(), tensor.storage_offset()) != (view.stride, view.offset):
        raise GraphFileError(
            f"{entry.name} has strides {tensor.stride()} and offset {tensor.storage_offset()} and "
            f"was captured with {view.stride} and {view.offset}: this graph is of another model; "
            "capture this one"
        )
    return tensor


class _ReferenceRun:
    """One execution, with the memory of each storage that has some now."""

    def __init__(
        self, graph: StepGraph, tensors: Mapping[str, torch.Tensor], numbers: dict[int, float]
    ) -> None:
        self._graph = graph
        self._numbers: dict[int, float] = dict(numbers)
        self._memory: dict[int, torch.UntypedStorage] = {}
        for name, tensor in _tensors_of_storages(graph, tensors):
            storage = graph.storage_of_value[graph.tensors[name].value]
            self._memory[storage] = tensor.untyped_storage()
        devices = {each.device for name, each in tensors.items() if name.startswith("model.")}
        self._device = devices.pop() if devices else torch.device(graph.device)
        self._dying = find_last_uses(graph, graph.operators)

    def run(self) -> torch.Tensor:
        for index, operator in enumerate(self._graph.operators):
            # As eager runs them: some kernels ask whether gradients are wanted, though they run
            # below autograd (recurrent layers keep a workspace then).
            with torch.set_grad_enabled(operator.phase is Phase.FORWARD):
                self._run_operator(operator)
            for storage in self._dying.get(index, ()):
                if self._graph.storages[storage].final is None:
                    self._memory.pop(storage, None)
        assert self._graph.loss is not None
        return self._tensor(self._graph.loss).clone()

    def _run_operator(self, operator: Operator) -> None:
        args, kwargs = decode_arguments(
            operator, self._device, self._tensor, lambda each: evaluate(each, self._read)
        )
        if operator.target == SCALAR:
            self._numbers[operator.creates[0]] = args[0].item()
            return
        results = flat_results(self._call(operator, args, kwargs))
        for view, result in zip(operator.outputs, results, strict=True):
            if view is not None and view.value in operator.creates:
                self._keep(operator, view, result)

    def _call(self, operator: Operator, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if operator.target == SET_RNG_STATE:
            set_random_state(*args)
            return []
        if operator.target == GET_RNG_STATE:
            return random_state(*args)
        if operator.target in (EMPTY, FULL, CONSTANT):
            view = operator.outputs[0]
            assert view is not None
            captured = self._graph.captured
            if captured is not None and operator.name in captured.outside:
                return captured.outside[operator.name].detach().clone()
            return make(operator.target, args, view, self._device)
        return resolve(operator.target)(*args, **kwargs)

    def _keep(self, operator: Operator, view: TensorView, result: torch.Tensor) -> None:
        """Keep a result, if it has the dtype and shape that the fake kernel has promised."""
        storage = self._graph.storage_of_value[view.value]
        given, promised = (dtype_name(result.dtype), tuple(result.shape)), (view.dtype, view.shape)
        if given != promised:
            raise PenstockError(
                f"{operator.target} ({operator.name}) gave dtype and shape {given}, and its fake "
                f"kernel had promised {promised}: this operator cannot be planned"
            )
        if (result.stride(), result.storage_offset()) != (view.stride, view.offset):
            laid_out = torch.empty_strided(
                view.shape, view.stride, dtype=result.dtype, device=result.device
            )
            result = laid_out.copy_(result)
        self._memory[storage] = result.untyped_storage()

    def _tensor(self, view: TensorView) -> torch.Tensor:
        memory = self._memory[self._graph.storage_of_value[view.value]]
        return view_memory(memory, view, memory.device)

    def _read(self, view: TensorView) -> float | int:
        number = self._numbers.get(view.value)
        return self._tensor(view).item() if number is None else number


def _tensors_of_storages(
    graph: StepGraph, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of each storage, whose memory is laid out as in the graph."""
    found: dict[int, list[str]] = {}
    for name in tensors:
        found.setdefault(graph.storage_of_value[graph.tensors[name].value], []).append(name)
    for storage, names in found.items():
        memories = {tensors[name].untyped_storage()._cdata for name in names}
        num_bytes = graph.storages[storage].num_bytes
        if not num_bytes or (len(memories) == 1 and not part_of_input(names[0])):
            yield names[0], tensors[names[0]]
            continue
        # Parts of a tensor, or views of one storage that are given apart this time.
        device = tensors[names[0]].device
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for name in names:
            view = graph.tensors[name]
            view_memory(memory.untyped_storage(), view, device).copy_(tensors[name].detach())
        yield names[0], memory
