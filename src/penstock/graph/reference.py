"""Execution of a step graph on given tensors, operator by operator, without a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock.compat.autograd import below_autograd
from penstock.errors import PenstockError
from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    GET_RNG_STATE,
    SCALAR,
    SET_RNG_STATE,
    decode_arguments,
    dtype_name,
    evaluate,
    flat_results,
    make,
    random_state,
    resolve,
    set_random_state,
    view_memory,
)
from penstock.graph.executable import find_last_uses, is_on_host
from penstock.graph.fsdp import collectives  # noqa: F401 (operators of graphs)
from penstock.graph.splitting.input_pieces import part_of_input
from penstock.graph.step_graph import Operator, Phase, StepGraph, TensorView
from penstock.memory import Ledger, Tier


class ReferenceRun:
    """One execution, with the memory of each storage that has some now.

    Args:
        graph: The step.
        tensors: By their names in it.
        numbers: Hyper-parameters, by value.
        ledger: Account of the bytes of storages while they have memory, and of the workspace that
            the graph says operators have.
    """

    def __init__(
        self,
        graph: StepGraph,
        tensors: Mapping[str, torch.Tensor],
        numbers: dict[int, float],
        ledger: Ledger | None = None,
    ) -> None:
        self._graph = graph
        self._ledger = ledger or Ledger()
        self._numbers: dict[int, float] = dict(numbers)
        self._memory: dict[int, torch.UntypedStorage] = {}
        for name, tensor in _tensors_of_storages(graph, tensors):
            storage = graph.storage_of_value[graph.tensors[name].value]
            self._hold(storage, tensor.untyped_storage())
        devices = {each.device for name, each in tensors.items() if name.startswith("model.")}
        self._device = devices.pop() if devices else torch.device(graph.device)
        self._dying = find_last_uses(graph, graph.operators)

    def run(self) -> torch.Tensor:
        """Run all operators; return the loss."""
        try:
            with below_autograd(), torch.autocast(self._graph.device, enabled=False):
                return self._run()
        finally:
            for storage in [*self._memory]:
                self._release(storage)

    def _run(self) -> torch.Tensor:
        for index, operator in enumerate(self._graph.operators):
            # As eager runs them: some kernels ask whether gradients are wanted, though they run
            # below autograd (recurrent layers keep a workspace then).
            with torch.set_grad_enabled(operator.phase is Phase.FORWARD):
                self._ledger.add(Tier.DEVICE, operator.workspace_bytes)
                self._run_operator(operator)
                self._ledger.add(Tier.DEVICE, -operator.workspace_bytes)
            for storage in self._dying.get(index, ()):
                if self._graph.storages[storage].final is None:
                    self._release(storage)
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
            device = torch.device("cpu") if is_on_host(self._graph, view) else self._device
            return make(operator.target, args, view, device)
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
            num_bytes = result.untyped_storage().nbytes()  # both are there for a moment
            self._ledger.add(Tier.DEVICE, num_bytes)
            self._hold(storage, laid_out.copy_(result).untyped_storage())
            self._ledger.add(Tier.DEVICE, -num_bytes)
            return
        self._hold(storage, result.untyped_storage())

    def _hold(self, storage: int, memory: torch.UntypedStorage) -> None:
        self._release(storage)
        self._memory[storage] = memory
        self._ledger.add(Tier.DEVICE, memory.nbytes())

    def _release(self, storage: int) -> None:
        memory = self._memory.pop(storage, None)
        if memory is not None:
            self._ledger.add(Tier.DEVICE, -memory.nbytes())

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
