"""Constant propagation: values that no data can change, and the values that follow from them.

Programs branch on positions and on masks of fixed shape (`if (position_ids.diff() != 1).any()`),
and the answer is the same at every step, so a capture can give it. Such values are computed beside
the fake ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from penstock.compat.dispatch import no_dispatch
from penstock.graph.capturing._drafts import Draft
from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    decode,
    flat_results,
    make,
    resolve,
    view_memory,
)
from penstock.graph.step_graph import TensorView

_MAX_BYTES = 2**20  # of a value that is worth computing during a capture


class ConstantValues:
    """Real memory of the small values that are constant."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._sources: dict[int, frozenset[str]] = {}

    def __contains__(self, value: int) -> bool:
        return value in self._memory

    def tensor(self, view: TensorView) -> torch.Tensor:
        """Return the tensor of a view; to be called without dispatch modes."""
        return view_memory(self._memory[view.value], view, "cpu")

    def set(self, value: int, tensor: torch.Tensor) -> None:
        """Make a value constant; the tensor is contiguous and keeps its numbers."""
        self._memory[value] = tensor.untyped_storage()

    def set_source(self, values: Iterable[int], name: str) -> None:
        """Note that values are copies of a tensor from outside of the step, by its name."""
        self._sources.update(dict.fromkeys(values, frozenset([name])))

    def sources(self, value: int) -> frozenset[str]:
        """Return the names of such tensors that a constant value is computed from."""
        return self._sources.get(value, frozenset())

    def propagate(self, draft: Draft, num_bytes: Callable[[int], int]) -> None:
        """Compute an operator's results, if all values that it needs are constant."""
        needed = draft.needs
        if draft.target == EMPTY or any(value not in self._memory for value in needed):
            return
        if sum(map(num_bytes, draft.creates)) > _MAX_BYTES:
            return
        sources = frozenset[str]().union(*(self._sources.get(each, ()) for each in needed))
        if sources:
            self._sources.update(dict.fromkeys(draft.makes, sources))
        with no_dispatch(), torch.no_grad():
            for old, new in draft.mutates:  # a value never changes: write into a copy
                self._memory[new] = self._memory[old].clone()
            results = flat_results(self._call(draft))
            for view, tensor in zip(draft.outputs, results, strict=True):
                if view is not None and view.value in draft.creates:
                    made = torch.empty_strided(view.shape, view.stride, dtype=tensor.dtype)
                    self._memory[view.value] = made.copy_(tensor).untyped_storage()

    def _call(self, draft: Draft) -> Any:
        current, cpu = dict(draft.mutates), torch.device("cpu")

        def tensor(view: TensorView) -> torch.Tensor:
            return self.tensor(view._replace(value=current.get(view.value, view.value)))

        args = [decode(value, cpu, tensor, _refuse_number) for value in draft.args]
        if draft.target in (FULL, CONSTANT):
            (view,) = draft.outputs
            assert view is not None
            return make(draft.target, args, view, cpu)
        items: Mapping[str, Any] = draft.kwargs
        kwargs = {name: decode(item, cpu, tensor, _refuse_number) for name, item in items.items()}
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = cpu
        return resolve(draft.target)(*args, **kwargs)


def _refuse_number(expression: object) -> float:
    raise AssertionError("a number of the optimizer in the forward pass")
