"""Which operators are taken by rows, which storages become pieces, and how many pieces.

A storage that only operators by rows look at becomes a storage for each piece of rows, with a
residency of its own; other storages stay whole, and parts look at their rows. So an operator by
rows needs its whole storages and one piece of each other. Where that is still too much, whoever
else looks at its whole storages is taken by rows too, if that makes pieces of them.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass, field

from penstock.graph._alignment import TENSOR_ALIGNMENT_BYTES
from penstock.graph.splitting._forms import ByRows, RowForm, row_form, views_in
from penstock.graph.step_graph import Kind, Operator, StepGraph

_MAX_PIECES = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """What is taken by rows.

    Attributes:
        forms: For each such operator its form.
        pieces: Storages that become pieces.
        num_pieces: For each number of rows how many pieces there are of so many.
    """

    forms: dict[int, RowForm] = field(default_factory=dict)
    pieces: frozenset[int] = frozenset()
    num_pieces: dict[int, int] = field(default_factory=dict)


def needed_bytes(graph: StepGraph) -> list[int]:
    """For each operator the bytes with which it can run, one over another where that may be."""
    return [
        working_set_bytes(graph, operator) - handed_bytes(graph, index)
        for index, operator in enumerate(graph.operators)
    ]


def working_set_bytes(graph: StepGraph, operator: Operator) -> int:
    """Return the bytes of what an operator needs and makes, and its workspace."""
    values = {*operator.needs, *operator.creates}  # what it mutates stays where it is
    storages = {graph.storage_of_value[value] for value in values}
    held = sum(graph.storages[storage].num_bytes for storage in storages)
    return held + operator.workspace_bytes


def handed_bytes(graph: StepGraph, index: int, among: Container[int] | None = None) -> int:
    """Bytes of results that may have the place of an operand of equal bytes, counted once.

    Args:
        graph: The step.
        index: The operator.
        among: Storages that count; None: all.
    """
    taken: set[int] = set()
    num_bytes = 0
    for read, created in graph.operators[index].may_overwrite:
        places = {graph.storage_of_value[read], graph.storage_of_value[created]}
        alike = graph.num_bytes(read) == graph.num_bytes(created) and not places & taken
        counts = among is None or all(place in among for place in places)
        if alike and counts and dies_at(graph, read, index):
            taken |= places
            num_bytes += graph.num_bytes(read)
    return num_bytes


def dies_at(graph: StepGraph, value: int, index: int) -> bool:
    """Whether nobody needs a value after an operator, in the program's order."""
    storage = graph.storages[graph.storage_of_value[value]]
    given = storage.persistent or storage.kind is Kind.INPUT
    return not given and storage.final != value and graph.consumers[value][-1:] == (index,)


def fills_storage(graph: StepGraph, rows: ByRows) -> bool:
    """Return whether rows take all bytes of their storage, but for those that align its end."""
    unit = TENSOR_ALIGNMENT_BYTES[graph.device]
    return 0 < rows.num_bytes <= graph.num_bytes(rows.view.value) < rows.num_bytes + unit


def choose_rows(graph: StepGraph, max_bytes: int) -> Choice:
    """Choose what is taken by rows so that operators need no more than so many bytes.

    What cannot be taken by rows is the least that anything can be brought down to.

    Args:
        graph: The step.
        max_bytes: What an operator may need at once.

    Returns:
        The choice; without forms if there is nothing to gain.
    """
    needed = needed_bytes(graph)
    if max(needed, default=0) <= max_bytes:
        return Choice()
    return _Search(graph, max_bytes, needed).run()


class _Search:
    def __init__(self, graph: StepGraph, max_bytes: int, needed: list[int]) -> None:
        self.graph = graph
        self._forms: dict[int, RowForm | None] = {}
        self._pieceable: dict[int, bool] = {}
        large = [index for index, count in enumerate(needed) if count > max_bytes]
        fixed = (needed[index] for index in large if self.form(index) is None)
        self.limit = max(max_bytes, *fixed, 0)
        self.chosen = {i for i in large if needed[i] > self.limit}

    @functools.cached_property
    def touching(self) -> dict[int, list[int]]:
        """For each storage the operators that need or make a value of it."""
        found: dict[int, list[int]] = {}
        for index in range(len(self.graph.operators)):
            for storage in self.touched(index):
                found.setdefault(storage, []).append(index)
        return found

    def form(self, index: int) -> RowForm | None:
        if index not in self._forms:
            self._forms[index] = row_form(self.graph, self.graph.operators[index])
        return self._forms[index]

    def touched(self, index: int) -> set[int]:
        operator = self.graph.operators[index]
        return {self.graph.storage_of_value[value] for value in operator.needs + operator.makes}

    def run(self) -> Choice:
        grown = True
        while grown:
            grown = False
            for index in sorted(self.chosen):
                if self.whole_bytes(index) <= self.limit:
                    continue
                near = {
                    other
                    for storage in self.touched(index)
                    if self.pieceable(storage)
                    for other in self.touching[storage]
                }
                grown = grown or not near <= self.chosen
                self.chosen |= near
        pieces = frozenset(s for index in self.chosen for s in self.touched(index) if self.split(s))
        forms = {}
        for index in sorted(self.chosen):
            form = self.form(index)
            if form is not None and self.touched(index) & pieces:
                forms[index] = form
        return Choice(forms, pieces, self._num_pieces(forms, pieces))

    def split(self, storage: int) -> bool:
        """Whether a storage becomes pieces with what is chosen by now."""
        return self.pieceable(storage) and self.chosen.issuperset(self.touching[storage])

    def whole_bytes(self, index: int) -> int:
        """Bytes of the whole storages that a part of an operator needs."""
        whole = {storage for storage in self.touched(index) if not self.split(storage)}
        held = sum(self.graph.storages[storage].num_bytes for storage in whole)
        return held - handed_bytes(self.graph, index, whole)

    def pieceable(self, storage: int) -> bool:
        if storage not in self._pieceable:
            self._pieceable[storage] = self._can_be_pieces(storage)
        return self._pieceable[storage]

    def _can_be_pieces(self, index: int) -> bool:
        """Whether all that look at a storage do so by the same rows, which fill it."""
        storage = self.graph.storages[index]
        if storage.kind not in (Kind.ACTIVATION, Kind.GRADIENT) or storage.final is not None:
            return False
        if not all(self.form(toucher) for toucher in self.touching[index]):
            return False
        forms = [form for each in self.touching[index] if (form := self.form(each)) is not None]
        looks = [self._looks(form, index) for form in forms]
        if None in looks or not all(looks):
            return False
        rows = [each for found in looks for each in found or ()]
        return (
            len({form.num_rows for form in forms}) == 1
            and len({each.num_bytes for each in rows}) == 1
            and all(fills_storage(self.graph, each) for each in rows)
        )

    def _looks(self, form: RowForm, storage: int) -> list[ByRows] | None:
        """Return the operands and results in a storage; None if one is not taken by rows."""
        of = self.graph.storage_of_value
        plain = [item for item in (*form.args, *form.kwargs.values()) if type(item) is not ByRows]
        if any(of[view.value] == storage for view in views_in(tuple(plain))):
            return None
        return [each for each in form.by_rows() if of[each.view.value] == storage]

    def _num_pieces(self, forms: dict[int, RowForm], pieces: frozenset[int]) -> dict[int, int]:
        """So many that a part fits beside what stays whole; a power of two."""
        least: dict[int, int] = {}
        for index, form in forms.items():
            small = sum(
                self.graph.storages[s].num_bytes for s in self.touched(index) if s in pieces
            )
            room = self.limit - self.whole_bytes(index)
            wanted = -(-small // room) if room > 0 else _MAX_PIECES
            most = min(_MAX_PIECES, form.num_rows // 2)  # one row alone is summed in another way
            count = min(most, 1 << max(1, (wanted - 1).bit_length()))
            least[form.num_rows] = max(least.get(form.num_rows, 1), count)
        return least
