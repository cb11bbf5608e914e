"""Values that no data can change: positions, masks of fixed shape, and what follows from them.

Programs branch on them (`if (position_ids.diff() != 1).any()`), and the answer is the same at every
step, so a capture can give it. Such values are calculated beside the fake ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    decode,
    dtype_named,
    flat_results,
    make,
    resolve,
)
from penstock.graph.step_graph import TensorView

_MAX_BYTES = 2**20  # of a value that is worth calculating during a capture


class KnownValues:
    """Real memory of the values that are known; small ones only."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._sources: dict[int, frozenset[str]] = {}

    def knows(self, view: TensorView) -> bool:
        """Whether the value is known."""
        return view.value in self._memory

    def tensor(self, view: TensorView) -> torch.Tensor:
        """Return what a view of a known value shows; without dispatch modes."""
        memory = self._memory[view.value]
        tensor = torch.empty(0, dtype=dtype_named(view.dtype))
        return tensor.set_(memory, view.offset, view.shape, view.stride)  # pyright: ignore

    def set(self, value: int, tensor: torch.Tensor) -> None:
        """Let a value be known; the tensor is contiguous and keeps its numbers."""
        self._memory[value] = tensor.untyped_storage()

    def note_source(self, values: list[int], name: str) -> None:
        """Note that values are copies of a tensor from outside of the step, by its name."""
        self._sources.update(dict.fromkeys(values, frozenset([name])))

    def sources(self, view: TensorView) -> frozenset[str]:
        """Return the names of such tensors that a known value comes from."""
        return self._sources.get(view.value, frozenset())

    def follow(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        reads: list[int],
        mutates: list[tuple[int, int]],
        outputs: tuple[TensorView | None, ...],
        creates: list[tuple[int, int]],
    ) -> None:
        """Calculate an operator's results, if all that it reads is known.

        Args:
            target: The operator.
            args: Its encoded arguments.
            kwargs: Its encoded keyword arguments.
            reads: Values that it reads.
            mutates: Pairs of values, before and after.
            outputs: Views of its results.
            creates: The values that it makes, with their bytes.
        """
        needed = [*reads, *(old for old, _ in mutates)]
        if target == EMPTY or any(value not in self._memory for value in needed):
            return
        if sum(num_bytes for _, num_bytes in creates) > _MAX_BYTES:
            return
        sources = frozenset[str]().union(*(self._sources.get(each, ()) for each in needed))
        if sources:
            made = [value for value, _ in creates] + [new for _, new in mutates]
            self._sources.update(dict.fromkeys(made, sources))
        with no_dispatch(), torch.no_grad():
            for old, new in mutates:  # a known value stays what it is: write into a copy
                self._memory[new] = self._memory[old].clone()
            current = dict(mutates)
            result = self._call(target, args, kwargs, outputs, current)
            for view, tensor in zip(outputs, flat_results(result), strict=True):
                if view is not None and any(view.value == value for value, _ in creates):
                    made = torch.empty_strided(view.shape, view.stride, dtype=tensor.dtype)
                    self._memory[view.value] = made.copy_(tensor).untyped_storage()

    def _call(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: tuple[TensorView | None, ...],
        current: Mapping[int, int],
    ) -> Any:
        def tensor(view: TensorView) -> torch.Tensor:
            return self.tensor(view._replace(value=current.get(view.value, view.value)))

        cpu = torch.device("cpu")
        plain = [decode(value, cpu, tensor, _no_number) for value in args]
        if target in (FULL, CONSTANT):
            (view,) = outputs
            assert view is not None
            return make(target, plain, view, cpu)
        named = {name: decode(value, cpu, tensor, _no_number) for name, value in kwargs.items()}
        if isinstance(named.get("device"), torch.device):
            named["device"] = cpu
        return resolve(target)(*plain, **named)


def _no_number(expression: object) -> float:
    raise AssertionError("a number of the optimizer in the forward pass")
