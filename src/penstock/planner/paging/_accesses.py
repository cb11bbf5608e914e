"""Accesses to memory along an order of operators: uses, next uses and in-place reuse.

An order lists operators by position and may repeat some (recomputation). Position p of the next
step is p + N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.graph import StepGraph, Storage, alignment_bytes

NEVER = 1 << 60  # the next use of a value that is not used again


@dataclass(frozen=True, slots=True)
class Accesses:
    """Accesses of the operator at one position; values without bytes are left out."""

    needs: tuple[int, ...]  # values that must be on the device, those that it writes over included
    creates: tuple[int, ...]  # values that take memory of their own
    # Pairs (old, new): the new value takes the place of the old one.
    reuses: tuple[tuple[int, int], ...]
    # For each of `needs` the position of its next use; `NEVER` if there is none.
    next_needs: tuple[int, ...]
    next_makes: tuple[int, ...]  # for each of `makes` the position of its first use

    @property
    def makes(self) -> tuple[int, ...]:
        """Values that it makes: those of `creates`, then the new ones of `reuses`."""
        return (*self.creates, *(new for _, new in self.reuses))


@dataclass(frozen=True)
class OrderedStep:
    """A graph in an order, and the accesses to memory along it."""

    graph: StepGraph
    order: tuple[int, ...]  # operators by position
    accesses: tuple[Accesses, ...]  # one for each position
    next_initial: dict[int, int]  # by value that the step begins with the position of its first use
    # By `final` value of a persistent storage its `initial` one, where they differ.
    renamed: dict[int, int]
    results: frozenset[int]  # values that stay to the end of the step
    inputs: tuple[int, ...]  # values that the caller puts in place when the step begins
    unused: tuple[int, ...]  # values of persistent storages that no operator uses
    num_bytes: tuple[int, ...]  # bytes of every value, in multiples of the alignment
    alignment: int  # bytes of which addresses are multiples

    @property
    def num_positions(self) -> int:
        """Operators in the order, repeated ones included."""
        return len(self.order)


def order_step(
    graph: StepGraph, order: Sequence[int] | None = None, *, in_place: bool = True
) -> OrderedStep:
    """Return a graph in an order, with the accesses to memory along it.

    With `in_place` results reuse the place of operands whose live range ends there
    (`Operator.may_overwrite`). Without `order` it is the program's own.
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
    results = frozenset(
        s.final for s in graph.storages if s.final is not None and not s.persistent and s.num_bytes
    )
    runs = _runs(graph, order, num_bytes, in_place=in_place)
    accesses, next_initial = _scan_step(graph, runs, num_bytes, renamed, results)
    return OrderedStep(
        graph=graph,
        order=order,
        accesses=accesses,
        next_initial=next_initial,
        renamed=renamed,
        results=results,
        inputs=tuple(_initials(s for s in graph.storages if not s.persistent)),
        unused=tuple(value for value in _initials(persistent) if value not in next_initial),
        num_bytes=num_bytes,
        alignment=unit,
    )


def _initials(storages: Iterable[Storage]) -> Iterator[int]:
    return (s.initial for s in storages if s.initial is not None and s.num_bytes)


def _scan_step(
    graph: StepGraph,
    runs: Sequence[_Run],
    num_bytes: Sequence[int],
    renamed: Mapping[int, int],
    results: frozenset[int],
) -> tuple[tuple[Accesses, ...], dict[int, int]]:
    """Scan the step from its end; return its accesses and `next_initial`."""
    first_use = _first_uses(runs)
    initials = {s.initial for s in graph.storages}
    next_initial = {value: at for value, at in first_use.items() if value in initials}
    # The next step uses persistent storages, whose final values are called by their initial names.
    lasting = {s.initial for s in graph.storages if s.persistent}
    next_use = {v: at + len(runs) for v, at in first_use.items() if v in lasting}
    for final, initial in renamed.items():
        if initial in next_use:
            next_use[final] = next_use.pop(initial)
    accesses = [
        _scan_run(runs[position], next_use, position, num_bytes, results)
        for position in range(len(runs) - 1, -1, -1)
    ]
    return tuple(reversed(accesses)), next_initial


def _first_uses(runs: Sequence[_Run]) -> dict[int, int]:
    """Return the position of the first use of each value that the step does not make before."""
    first: dict[int, int] = {}
    made: set[int] = set()
    for position, run in enumerate(runs):
        for value in run.needs:
            if value not in made:
                first.setdefault(value, position)
        made.update(run.creates)
        made.update(new for _, new in run.mutates)
    return first


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of an operator; values without bytes are left out."""

    needs: tuple[int, ...]
    creates: tuple[int, ...]
    mutates: tuple[tuple[int, int], ...]
    may_overwrite: tuple[tuple[int, int], ...]


def _runs(
    graph: StepGraph, order: Sequence[int], num_bytes: Sequence[int], *, in_place: bool
) -> list[_Run]:
    """Return the run at each position; a second one with `recompute_args` only creates again."""
    seen: set[int] = set()
    runs = []
    for index in order:
        operator = graph.operators[index]
        again = index in seen and operator.recompute_args is not None
        seen.add(index)
        needs = operator.reads if again else operator.needs
        runs.append(
            _Run(
                tuple(v for v in dict.fromkeys(needs) if num_bytes[v]),
                tuple(v for v in operator.creates if num_bytes[v]),
                () if again else tuple(pair for pair in operator.mutates if num_bytes[pair[0]]),
                operator.may_overwrite if in_place else (),
            )
        )
    return runs


def _scan_run(
    run: _Run,
    next_use: dict[int, int],
    at: int,
    num_bytes: Sequence[int],
    results: frozenset[int],
) -> Accesses:
    """Return the accesses of a run, in a scan from the end of the step; updates `next_use`."""
    mutated = {old for old, _ in run.mutates}
    next_needs = [NEVER if v in mutated else next_use.get(v, NEVER) for v in run.needs]
    lasting = {v for v, after in zip(run.needs, next_needs, strict=True) if after != NEVER}
    reuses = list(run.mutates)
    for old, new in run.may_overwrite:
        is_free = old not in lasting and old not in results
        fits = 0 < num_bytes[old] == num_bytes[new]
        if is_free and fits and all(old != a and new != b for a, b in reuses):
            reuses.append((old, new))
    reused = {new for _, new in reuses}
    creates = tuple(v for v in run.creates if v not in reused)
    next_makes = tuple(next_use.pop(v, NEVER) for v in (*creates, *(new for _, new in reuses)))
    for old in mutated:
        next_use.pop(old, None)
    for value in run.needs:
        next_use[value] = at
    return Accesses(run.needs, creates, tuple(reuses), tuple(next_needs), next_makes)


def peak_of_program_order(graph: StepGraph, *, in_place: bool = False) -> int:
    """Return the bytes that the step needs on the device as the program runs it, nothing moved.

    Persistent storages are there throughout, activations and gradients from the operator that
    makes them to the last one that needs them; the largest workspace is added.

    Args:
        graph: A captured step.
        in_place: Whether results reuse the place of operands whose live range ends there.
    """
    step = order_step(graph, in_place=in_place)
    initials = {s.initial for s in graph.storages if s.persistent and s.initial is not None}
    live = sum(step.num_bytes[value] for value in (*initials, *step.inputs))
    peak = live
    for accesses in step.accesses:
        live += sum(step.num_bytes[value] for value in accesses.creates)
        peak = max(peak, live)
        reused = {old for old, _ in accesses.reuses}
        uses = (*accesses.needs, *accesses.makes)
        live -= sum(
            step.num_bytes[value]
            for value, after in zip(uses, (*accesses.next_needs, *accesses.next_makes), strict=True)
            if after == NEVER and value not in reused and value not in step.results
            if not graph.storages[graph.storage_of_value[value]].persistent
        )
    return peak + graph.workspace_bytes
