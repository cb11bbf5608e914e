"""Choice of operators that run in slices, of storages that become pieces, and of their number.

A storage that only operators in slices view becomes a storage for each slice, a piece, with a
residency of its own. Other storages stay whole, and slices view them. So an operator in slices
needs its whole storages and one piece of each other. Where that is still too much, the other
operators that view its whole storages run in slices too, if that makes pieces of them.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass, field

from penstock._lazy import cached_property
from penstock.graph._alignment import TENSOR_ALIGNMENT_BYTES
from penstock.graph.splitting._forms import SlicedView, SliceForm, find_slice_form
from penstock.graph.step_graph import Kind, Operator, StepGraph

_MAX_PIECES = 64


@dataclass(frozen=True, slots=True)
class SliceChoice:
    """The operators that run in slices.

    Attributes:
        forms: For each such operator its form.
        pieces: Storages that become pieces.
        num_slices: For each number of vectors how many slices they are divided into.
    """

    forms: dict[int, SliceForm] = field(default_factory=dict)
    pieces: frozenset[int] = frozenset()
    num_slices: dict[int, int] = field(default_factory=dict)


def needed_bytes(graph: StepGraph) -> list[int]:
    """Return for each operator the bytes with which it can run, with in-place reuse."""
    return [
        working_set_bytes(graph, operator) - reused_bytes(graph, index)
        for index, operator in enumerate(graph.operators)
    ]


def working_set_bytes(graph: StepGraph, operator: Operator) -> int:
    """Return the bytes of an operator's operands and results, and its workspace."""
    values = {*operator.needs, *operator.creates}  # a mutated value stays where it is
    storages = {graph.storage_of_value[value] for value in values}
    held = sum(graph.storages[storage].num_bytes for storage in storages)
    return held + operator.workspace_bytes


def reused_bytes(graph: StepGraph, index: int, among: Container[int] | None = None) -> int:
    """Return the bytes of results that may take the places of operands (both `among` storages)."""
    taken: set[int] = set()
    num_bytes = 0
    for read, created in graph.operators[index].may_overwrite:
        places = {graph.storage_of_value[read], graph.storage_of_value[created]}
        fits = graph.num_bytes(read) == graph.num_bytes(created) and not places & taken
        counts = among is None or all(place in among for place in places)
        if fits and counts and ends_at(graph, read, index):
            taken |= places
            num_bytes += graph.num_bytes(read)
    return num_bytes


def ends_at(graph: StepGraph, value: int, index: int) -> bool:
    """Return whether a value's live range ends at an operator, in the program's order."""
    storage = graph.storage(value)
    given = storage.persistent or storage.kind is Kind.INPUT
    return not given and storage.final != value and graph.consumers[value][-1:] == (index,)


def fills_storage(graph: StepGraph, vectors: SlicedView) -> bool:
    """Return whether vectors take all bytes of their storage, but for those that align its end."""
    unit = TENSOR_ALIGNMENT_BYTES[graph.device]
    rest = graph.num_bytes(vectors.view.value) - vectors.num_bytes
    return vectors.is_dense and vectors.num_bytes > 0 and 0 <= rest < unit


def choose_slices(graph: StepGraph, max_bytes: int, *, products: bool = False) -> SliceChoice:
    """Choose operators that run in slices, so that operators need no more than so many bytes.

    No operator is brought below the largest one that cannot run in slices. Slices are as few as
    fit, since each one of a product reads all its weights.
    """
    needed = needed_bytes(graph)
    if max(needed, default=0) <= max_bytes:
        return SliceChoice()
    return SliceSearch(graph, max_bytes, needed, products=products).run()


class SliceSearch:
    """The search for a choice.

    Attributes:
        form: Returns the form of an operator in slices; None if it has none.
        limit: Bytes that operators are brought down to.
        chosen: Operators that need more, and those that have to run in slices with them.
    """

    def __init__(
        self, graph: StepGraph, max_bytes: int, needed: list[int], *, products: bool = False
    ) -> None:
        self.graph = graph
        self.form = functools.cache(
            lambda index: find_slice_form(graph, graph.operators[index], products=products)
        )
        self._is_divisible = functools.cache(self._find_divisible)
        large = [index for index, count in enumerate(needed) if count > max_bytes]
        fixed = (needed[index] for index in large if self.form(index) is None)
        self.limit = max(max_bytes, *fixed, 0)
        self.chosen = {i for i in large if needed[i] > self.limit}

    @cached_property
    def _touching(self) -> dict[int, list[int]]:
        """The operators that need or make a value of each storage."""
        found: dict[int, list[int]] = {}
        for index in range(len(self.graph.operators)):
            for storage in self._touched(index):
                found.setdefault(storage, []).append(index)
        return found

    def _touched(self, index: int) -> set[int]:
        operator = self.graph.operators[index]
        return {self.graph.storage_of_value[value] for value in operator.needs + operator.makes}

    def run(self) -> SliceChoice:
        """Extend the chosen operators until they fit, and return the choice."""
        has_grown = True
        while has_grown:
            has_grown = False
            for index in sorted(self.chosen):
                if self._whole_bytes(index) <= self.limit:
                    continue
                neighbours = {
                    other
                    for storage in self._touched(index)
                    if self._is_divisible(storage)
                    for other in self._touching[storage]
                }
                has_grown = has_grown or not neighbours <= self.chosen
                self.chosen |= neighbours
        pieces = frozenset(
            storage
            for index in self.chosen
            for storage in self._touched(index)
            if self._is_divided(storage)
        )
        forms = {
            index: form
            for index in sorted(self.chosen)
            if (form := self.form(index)) is not None and self._touched(index) & pieces
        }
        return SliceChoice(forms, pieces, self._count_slices(forms, pieces))

    def _is_divided(self, storage: int) -> bool:
        """Return whether a storage becomes pieces with the operators chosen so far."""
        return self._is_divisible(storage) and self.chosen.issuperset(self._touching[storage])

    def _whole_bytes(self, index: int) -> int:
        """Return the bytes of the whole storages that a slice of an operator needs."""
        whole = {storage for storage in self._touched(index) if not self._is_divided(storage)}
        held = sum(self.graph.storages[storage].num_bytes for storage in whole)
        return held - reused_bytes(self.graph, index, whole)

    def _find_divisible(self, index: int) -> bool:
        """Return whether all views of a storage are of the same vectors, which fill it."""
        storage = self.graph.storages[index]
        if storage.kind not in (Kind.ACTIVATION, Kind.GRADIENT) or storage.final is not None:
            return False
        forms = [form for each in self._touching[index] if (form := self.form(each)) is not None]
        if len(forms) < len(self._touching[index]):
            return False
        of = self.graph.storage_of_value
        if any(of[view.value] == index for form in forms for view in form.whole_views()):
            return False
        views = [[v for v in form.sliced_views() if of[v.view.value] == index] for form in forms]
        flat = [view for found in views for view in found]
        return (
            all(views)
            and len({form.num_vectors for form in forms}) == 1
            and len({view.num_bytes for view in flat}) == 1
            and all(fills_storage(self.graph, view) for view in flat)
        )

    def _count_slices(self, forms: dict[int, SliceForm], pieces: frozenset[int]) -> dict[int, int]:
        """Count slices such that one fits beside the whole storages; a power of two."""
        counts: dict[int, int] = {}
        for index, form in forms.items():
            divided = sum(
                self.graph.storages[s].num_bytes for s in self._touched(index) if s in pieces
            )
            free = self.limit - self._whole_bytes(index)
            wanted = -(-divided // free) if free > 0 else _MAX_PIECES
            most = min(_MAX_PIECES, form.num_vectors // 2)  # one alone is summed in another way
            count = min(most, 1 << max(1, (wanted - 1).bit_length()))
            counts[form.num_vectors] = max(counts.get(form.num_vectors, 1), count)
        return counts
