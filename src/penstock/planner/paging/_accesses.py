"""What every reference planner asks of an order: who needs what when, and when again.

An order lists operators by position and may repeat some (recomputation). Times here are positions
of steps that repeat: position p of the next step is p + N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.graph import StepGraph, alignment_bytes

NEVER = 1 << 60  # the next use of what nobody uses again


@dataclass(frozen=True, slots=True)
class Visit:
    """What an operator does with memory at one position; values without bytes are left out.

    Attributes:
        needs: Values that must be there, those that it writes over included.
        creates: Values that take room of their own.
        handovers: Pairs (old, new): the new value takes the room of the old one.
        next_needs: For each of `needs` the position at which it is needed again; `NEVER` if not.
        next_makes: For each of `creates`, then of `handovers`, where it is needed first.
    """

    needs: tuple[int, ...]
    creates: tuple[int, ...]
    handovers: tuple[tuple[int, int], ...]
    next_needs: tuple[int, ...]
    next_makes: tuple[int, ...]


@dataclass(frozen=True)
class OrderedStep:
    """A graph in an order, seen from memory.

    Attributes:
        graph: The graph.
        order: Operators by position.
        visits: One for each position.
        next_initial: Where in the step a value that the step begins with is needed first.
        renamed: The `initial` of a persistent storage for its `final`, where they differ.
        pinned: Values that stay to the end of the step: results.
        inputs: Values that the caller puts in place when the step begins.
        idle: Values of persistent storages that no operator uses.
        num_bytes: Room that every value takes, in multiples of the alignment.
        alignment: Bytes of which addresses are multiples.
    """

    graph: StepGraph
    order: tuple[int, ...]
    visits: tuple[Visit, ...]
    next_initial: dict[int, int]
    renamed: dict[int, int]
    pinned: frozenset[int]
    inputs: tuple[int, ...]
    idle: tuple[int, ...]
    num_bytes: tuple[int, ...]
    alignment: int

    @property
    def num_positions(self) -> int:
        """Operators in the order, repeated ones included."""
        return len(self.order)

    @property
    def workspace_bytes(self) -> int:
        """The largest scratch of an operator."""
        return max((operator.workspace_bytes for operator in self.graph.operators), default=0)


def ordered_step(
    graph: StepGraph, order: Sequence[int] | None = None, *, in_place: bool = True
) -> OrderedStep:
    """Look at a graph in an order.

    Args:
        graph: The graph.
        order: Operators by position; the program's own if None.
        in_place: Whether results take the place of operands that nobody needs again
            (`Operator.may_overwrite`).
    """
    order = tuple(range(len(graph.operators)) if order is None else order)
    unit = alignment_bytes(graph)
    num_bytes = tuple(
        -(-graph.storages[storage].num_bytes // unit) * unit for storage in graph.storage_of_value
    )
    persistent = [storage for storage in graph.storages if storage.persistent]
    renamed = {
        s.final: s.initial
        for s in persistent
        if s.final is not None and s.initial is not None and s.final != s.initial
    }
    pinned = frozenset(
        s.final for s in graph.storages if s.final is not None and not s.persistent and s.num_bytes
    )
    visits, next_initial = _visits(
        graph, _touches(graph, order, num_bytes), num_bytes, renamed, pinned, in_place
    )
    return OrderedStep(
        graph=graph,
        order=order,
        visits=visits,
        next_initial=next_initial,
        renamed=renamed,
        pinned=pinned,
        inputs=tuple(
            s.initial
            for s in graph.storages
            if s.initial is not None and not s.persistent and s.num_bytes
        ),
        idle=tuple(
            s.initial
            for s in persistent
            if s.initial is not None and s.num_bytes and s.initial not in next_initial
        ),
        num_bytes=num_bytes,
        alignment=unit,
    )


def _visits(
    graph: StepGraph,
    touches: Sequence[_Touch],
    num_bytes: Sequence[int],
    renamed: Mapping[int, int],
    pinned: frozenset[int],
    in_place: bool,
) -> tuple[tuple[Visit, ...], dict[int, int]]:
    """Scan the step from its end: its visits, and `next_initial`."""
    first_use = _first_uses(touches)
    initials = {s.initial for s in graph.storages}
    next_initial = {value: at for value, at in first_use.items() if value in initials}
    # The step after needs what persistent storages hold, by this one's names.
    lasting = {s.initial for s in graph.storages if s.persistent}
    num_positions = len(touches)
    next_use = {v: at + num_positions for v, at in first_use.items() if v in lasting}
    for final, initial in renamed.items():
        if initial in next_use:
            next_use[final] = next_use.pop(initial)
    visits = [
        _visit(touches[position], next_use, position, num_bytes, pinned, in_place)
        for position in range(num_positions - 1, -1, -1)
    ]
    visits.reverse()
    return tuple(visits), next_initial


def _first_uses(touches: Sequence[_Touch]) -> dict[int, int]:
    """The position of the first use of each value that is there before the step makes any."""
    first: dict[int, int] = {}
    made: set[int] = set()
    for position, touch in enumerate(touches):
        for value in touch.needs:
            if value not in made:
                first.setdefault(value, position)
        made.update(touch.creates)
        made.update(new for _, new in touch.mutates)
    return first


@dataclass(frozen=True, slots=True)
class _Touch:
    needs: tuple[int, ...]
    creates: tuple[int, ...]
    mutates: tuple[tuple[int, int], ...]
    may_overwrite: tuple[tuple[int, int], ...]


def _touches(graph: StepGraph, order: Sequence[int], num_bytes: Sequence[int]) -> list[_Touch]:
    """What runs at each position; an operator that has `recompute_args` only creates again."""
    seen: set[int] = set()
    touches = []
    for index in order:
        operator = graph.operators[index]
        again = index in seen and operator.recompute_args is not None
        seen.add(index)
        needs = operator.reads if again else operator.needs
        touches.append(
            _Touch(
                tuple(v for v in dict.fromkeys(needs) if num_bytes[v]),
                tuple(v for v in operator.creates if num_bytes[v]),
                () if again else tuple(pair for pair in operator.mutates if num_bytes[pair[0]]),
                operator.may_overwrite,
            )
        )
    return touches


def _visit(
    touch: _Touch,
    next_use: dict[int, int],
    at: int,
    num_bytes: Sequence[int],
    pinned: frozenset[int],
    in_place: bool,
) -> Visit:
    """One position of a scan from the end of the step to its beginning; updates `next_use`."""
    mutated = {old for old, _ in touch.mutates}
    next_needs = [NEVER if v in mutated else next_use.get(v, NEVER) for v in touch.needs]
    lasting = {v for v, after in zip(touch.needs, next_needs, strict=True) if after != NEVER}
    handovers = list(touch.mutates)
    taken = {old for old, _ in handovers}
    if in_place:
        for old, new in touch.may_overwrite:
            free = old not in lasting and old not in taken and old not in pinned
            fits = 0 < num_bytes[old] == num_bytes[new]
            if free and fits and all(new != other for _, other in handovers):
                handovers.append((old, new))
                taken.add(old)
    handed = {new for _, new in handovers}
    creates = tuple(v for v in touch.creates if v not in handed)
    makes = [*creates, *(new for _, new in handovers)]
    next_makes = tuple(next_use.pop(v, NEVER) for v in makes)
    for old in mutated:
        next_use.pop(old, None)
    for value in touch.needs:
        next_use[value] = at
    return Visit(touch.needs, creates, tuple(handovers), tuple(next_needs), next_makes)


def peak_of_program_order(graph: StepGraph, *, in_place: bool = False) -> int:
    """Return the bytes that the step needs on the device as the program runs it, nothing moved.

    Persistent storages are there throughout, activations and gradients from the operator that
    makes them to the last one that needs them; the largest workspace is added.

    Example:
        >>> peak_of_program_order(graph)  # doctest: +SKIP
        16106127360

    Args:
        graph: A captured step.
        in_place: Whether results take the place of operands that nobody needs again.
    """
    step = ordered_step(graph, in_place=in_place)
    initials = {s.initial for s in graph.storages if s.persistent and s.initial is not None}
    live = sum(step.num_bytes[value] for value in initials)
    live += sum(step.num_bytes[value] for value in step.inputs)
    peak = live
    for visit in step.visits:
        live += sum(step.num_bytes[value] for value in visit.creates)
        peak = max(peak, live)
        handed = {old for old, _ in visit.handovers}
        made = [*visit.creates, *(new for _, new in visit.handovers)]
        touched = zip([*visit.needs, *made], [*visit.next_needs, *visit.next_makes], strict=True)
        live -= sum(
            step.num_bytes[value]
            for value, after in touched
            if after == NEVER and value not in handed and value not in step.pinned
            if not graph.storages[graph.storage_of_value[value]].persistent
        )
    return peak + step.workspace_bytes
