"""Axes of storages, and of operators, that may be split.

Views of one storage have different shapes: the result of a product has rows, attention sees the
same rows as samples and positions. The strides of all views cut a storage into *axes*, each a
range of strides; where letters of the axis table join dimensions of two storages, each has the
cuts of the other. So an axis of an operator is one axis of every operand that has it, whatever
views lie between.

    cuts of a storage:  1 = c_0 < c_1 < ... < c_m = its elements,   each divides the next
    axis j:             c_{j+1} / c_j indices at stride c_j
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from penstock.graph import TENSOR_ALIGNMENT_BYTES
from penstock.graph.encoding import dtype_from_name
from penstock.graph.step_graph import Operator, StepGraph, TensorView, views_in
from penstock.partitioner.axes._rules import AxisRule, LabelledView, find_rule
from penstock.partitioner.axes._table import WHOLE
from penstock.partitioner.axes._writes import mark_writes

_MAX_PASSES = 6  # over all operators; cuts spread along whole chains in one or two


@dataclass(frozen=True, slots=True)
class Use:
    """A view that an operator reads or makes, by the axes of its storage.

    Attributes:
        storage: Index of the storage.
        num_bytes: Bytes that the view shows, each once.
        axis_of_loop: For each axis of the operator the storage's axis; None if it has none.
        blocked: Axes of the storage of which the view shows only a part.
        sums: Axes of the operator over which results are added up.
        halo: For each axis of the operator the share of the view that a rank needs beyond its
            piece.
        offset: Where a view that shows a part begins in the storage: it tells parts apart.
    """

    storage: int
    num_bytes: int
    axis_of_loop: tuple[int | None, ...]
    blocked: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    halo: tuple[float, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class OperatorAxes:
    """Axes along which an operator may be split.

    Attributes:
        names: Letters of the axes, with a number where a letter has several.
        sizes: Extents of the axes.
        inputs: Views that it reads.
        outputs: Views that it makes.
        is_linear: Whether it may run on partial sums.
        is_known: Whether the axis table has the operator.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: tuple[Use, ...]
    outputs: tuple[Use, ...]
    is_linear: bool = False
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class GraphAxes:
    """Axes of all storages and operators of a step.

    Attributes:
        cuts: For each storage its cuts; `(1,)` of those that cannot be split.
        operators: For each operator its axes.
        num_bytes: For each storage its bytes, not rounded up as captures do.
    """

    cuts: tuple[tuple[int, ...], ...]
    operators: tuple[OperatorAxes, ...]
    num_bytes: tuple[int, ...]

    def sizes(self, storage: int) -> tuple[int, ...]:
        """Return the extents of a storage's axes, the innermost first."""
        return tuple(high // low for low, high in pairwise(self.cuts[storage]))


_known: dict[int, tuple[weakref.ref[StepGraph], GraphAxes]] = {}


def find_axes(graph: StepGraph) -> GraphAxes:
    """Return the axes of a step's storages and operators; kept for as long as the graph lives."""
    key = id(graph)
    known = _known.get(key)
    if known is None or known[0]() is not graph:
        known = weakref.ref(graph, lambda _: _known.pop(key, None)), _find_axes(graph)
        _known[key] = known
    return known[1]


def _find_axes(graph: StepGraph) -> GraphAxes:
    rules = [find_rule(operator) for operator in graph.operators]
    cuts = _StorageCuts(graph, rules)
    cuts.spread([rule for rule in rules if rule is not None])
    operators = tuple(
        _find_operator_axes(operator, rule, cuts)
        for operator, rule in zip(graph.operators, rules, strict=True)
    )
    return GraphAxes(tuple(map(tuple, cuts.cuts)), operators, tuple(_without_rounding(graph, cuts)))


def _without_rounding(graph: StepGraph, cuts: _StorageCuts) -> Iterator[int]:
    unit = TENSOR_ALIGNMENT_BYTES[graph.device]
    for each, own, item_bytes in zip(graph.storages, cuts.cuts, cuts.item_bytes, strict=True):
        exact = own[-1] * item_bytes
        yield exact if 0 <= each.num_bytes - exact < unit else each.num_bytes


class _StorageCuts:
    """Cuts of all storages while they are found."""

    def __init__(self, graph: StepGraph, rules: Sequence[AxisRule | None]) -> None:
        self.graph = graph
        self.cuts: list[list[int]] = [[1] for _ in graph.storages]
        self.item_bytes = [0] * len(graph.storages)
        dtypes: list[set[str]] = [set() for _ in graph.storages]
        views = [*_views_by_size(graph)]
        for view in views:
            dtypes[self.storage(view)].add(view.dtype)
        for view in views:
            storage = self.storage(view)
            if len(dtypes[storage]) == 1 and self.graph.storages[storage].num_bytes:
                self._add_view(storage, view)
        for view in views:
            if view.end > self.cuts[self.storage(view)][-1]:
                self.cuts[self.storage(view)] = [1]  # it shows elements that no axis has
        for storage, (cuts, names) in enumerate(zip(self.cuts, dtypes, strict=True)):
            num_bytes = graph.storages[storage].num_bytes // max(1, cuts[-1])
            known = [dtype_from_name(name).itemsize for name in names]
            self.item_bytes[storage] = known[0] if len(known) == 1 else max(1, num_bytes)

    def storage(self, view: TensorView) -> int:
        return self.graph.storage_of_value[view.value]

    def _add_view(self, storage: int, view: TensorView) -> None:
        for dim, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True)):
            if size > 1 and stride > 0:
                self.add(storage, stride)
                if _spans_axes(view, dim):
                    self.add(storage, stride * size)

    def add(self, storage: int, cut: int) -> bool:
        """Add a cut if each still divides the next; return whether it is new."""
        cuts = self.cuts[storage]
        place = bisect_left(cuts, cut)
        if place < len(cuts) and cuts[place] == cut:
            return False
        if cut % cuts[place - 1] or (place < len(cuts) and cuts[place] % cut):
            return False
        insort(cuts, cut)
        return True

    def relative(self, operand: LabelledView, dim: int, extent: int) -> tuple[int, int, int]:
        """Return storage, stride of the letter's unit, and stride behind its end; or zeros."""
        view = operand.view
        size, stride = view.shape[dim], view.stride[dim]
        if stride <= 0 or size % extent or not _spans_axes(view, dim):
            return (0, 0, 0)
        return self.storage(view), stride * (size // extent), stride * size

    def spread(self, rules: list[AxisRule]) -> None:
        """Give all dimensions of a letter the cuts of each, until nothing changes."""
        grouped = [_by_letter(rule) for rule in rules]
        for number in range(_MAX_PASSES):
            order = grouped if number % 2 == 0 else reversed(grouped)
            changed = [self._join(letters) for letters in order]
            if not any(changed):
                return

    def _join(self, letters: dict[str, list[tuple[LabelledView, int]]]) -> bool:
        changed = False
        for dims in letters.values():
            extent = min(operand.view.shape[dim] for operand, dim in dims)
            places = [self.relative(operand, dim, extent) for operand, dim in dims]
            found: set[int] = set()
            for storage, unit, end in places:
                if unit:
                    cuts = self.cuts[storage]
                    found.update(c // unit for c in cuts if unit <= c <= end and not c % unit)
            for storage, unit, end in places:
                if unit and (len(self.cuts[storage]) > 1):
                    for each in sorted(found):
                        changed |= each * unit <= end and self.add(storage, each * unit)
        return changed

    def factors(self, dims: list[tuple[LabelledView, int]]) -> tuple[int, ...]:
        """Return the cuts of a letter, in its units; empty if its operands disagree."""
        extent = min(operand.view.shape[dim] for operand, dim in dims)
        agreed: set[tuple[int, ...]] = set()
        for operand, dim in dims:
            storage, unit, end = self.relative(operand, dim, extent)
            if operand.view.stride[dim] == 0:
                continue  # broadcast: every rank has it
            cuts = self.cuts[storage] if unit else []
            found = tuple(c // unit for c in cuts if unit <= c <= end and not c % unit)
            if not found or found[0] != 1 or found[-1] != extent:
                return ()
            agreed.add(found)
        return agreed.pop() if len(agreed) == 1 else ()


def _views_by_size(graph: StepGraph) -> list[TensorView]:
    """Return all views, those of the most elements first: they show how a storage is laid out."""
    views: dict[TensorView, None] = dict.fromkeys(graph.tensors.values())
    for operator in graph.operators:
        views.update(dict.fromkeys(view for view in operator.outputs if view is not None))
        views.update(dict.fromkeys(views_in([operator.args, dict(operator.kwargs)])))
    return sorted(views, key=lambda view: (-prod(view.shape), view.offset))


def _by_letter(rule: AxisRule) -> dict[str, list[tuple[LabelledView, int]]]:
    found: dict[str, list[tuple[LabelledView, int]]] = {}
    for operand in (*rule.inputs, *rule.outputs):
        for dim, letter in enumerate(operand.labels):
            if letter != WHOLE:
                found.setdefault(letter, []).append((operand, dim))
    return found


def _find_operator_axes(
    operator: Operator, rule: AxisRule | None, cuts: _StorageCuts
) -> OperatorAxes:
    if rule is None:
        rule = _whole_rule(operator)
        found = _number_axes(rule, cuts, {})
        return dataclasses.replace(found, is_known=False)
    whole = _letters_kept_whole(operator, rule)
    factors = {
        letter: cuts.factors(dims)
        for letter, dims in _by_letter(rule).items()
        if letter not in whole
    }
    return _number_axes(rule, cuts, {key: each for key, each in factors.items() if len(each) > 1})


def _letters_kept_whole(operator: Operator, rule: AxisRule) -> set[str]:
    """Return letters along which ranks' results would not be pieces of the result, nor add up."""
    operands = (*rule.inputs, *rule.outputs)
    found = {e for each in operands for e in each.labels if e and each.labels.count(e) > 1}
    if operator.target == "aten.embedding_dense_backward.default" and operator.args[4]:
        # Gradients are scaled by how often a word is among all places.
        found |= {"v"}.union(*(each.sums for each in rule.outputs))
    return found


def _whole_rule(operator: Operator) -> AxisRule:
    def whole(view: TensorView) -> LabelledView:
        return LabelledView(view, (WHOLE,) * len(view.shape))

    marked = mark_writes(operator)
    written = {view.value: view for view, is_written in reversed(marked) if is_written}
    made = [view for view in operator.outputs if view is not None]
    for old, new in operator.mutates:  # lists of a foreach optimizer are no results
        if old in written and new not in {view.value for view in made}:
            made.append(written[old]._replace(value=new))
    views = (view for view, _ in marked)
    return AxisRule(inputs=tuple(map(whole, views)), outputs=tuple(map(whole, made)))


def _number_axes(
    rule: AxisRule, cuts: _StorageCuts, factors: dict[str, tuple[int, ...]]
) -> OperatorAxes:
    loops = [
        (letter, low, high)
        for letter, found in factors.items()
        for low, high in reversed([*pairwise(found)])
    ]
    many = {letter for letter, found in factors.items() if len(found) > 2}
    numbers: dict[str, int] = {}
    names = []
    for letter, _, _ in loops:
        numbers[letter] = numbers.get(letter, 0) + 1
        names.append(f"{letter}{numbers[letter]}" if letter in many else letter)
    extents = {letter: found[-1] for letter, found in factors.items()}

    def uses(operands: tuple[LabelledView, ...]) -> tuple[Use, ...]:
        return tuple(_use(each, cuts, loops, extents) for each in operands)

    return OperatorAxes(
        names=tuple(names),
        sizes=tuple(high // low for _, low, high in loops),
        inputs=uses(rule.inputs),
        outputs=uses(rule.outputs),
        is_linear=rule.is_linear,
    )


def _use(
    operand: LabelledView,
    cuts: _StorageCuts,
    loops: list[tuple[str, int, int]],
    extents: dict[str, int],
) -> Use:
    view = operand.view
    storage = cuts.storage(view)
    own = cuts.cuts[storage]
    place = {cut: index for index, cut in enumerate(own)}
    axes: list[int | None] = []
    halo = []
    for letter, low, _ in loops:
        dim = operand.labels.index(letter) if letter in operand.labels else None
        if dim is None or view.stride[dim] == 0:
            axes.append(None)
            halo.append(0.0)
            continue
        _, unit, _ = cuts.relative(operand, dim, extents[letter])
        axes.append(place[unit * low])
        halo.append(dict(operand.halo).get(letter, 0) / view.shape[dim])
    shown, covered = _find_shown(view, place)
    blocked = frozenset(range(len(own) - 1)) - covered
    return Use(
        storage=storage,
        num_bytes=min(
            prod(size for size, _ in shown) * cuts.item_bytes[storage],
            cuts.graph.storages[storage].num_bytes,
        ),
        axis_of_loop=tuple(axes),
        blocked=blocked,
        sums=frozenset(i for i, (letter, _, _) in enumerate(loops) if letter in operand.sums),
        halo=tuple(halo),
        offset=view.offset if blocked else 0,
    )


def _find_shown(view: TensorView, place: dict[int, int]) -> tuple[list[tuple[int, int]], set[int]]:
    """Return the sizes and strides that a view shows, and the axes that it shows whole."""
    dims = [
        (dim, size, stride)
        for dim, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True))
        if size > 1 and stride > 0
    ]
    covered = {
        axis
        for dim, size, stride in dims
        if stride in place and stride * size in place and _spans_axes(view, dim)
        for axis in range(place[stride], place[stride * size])
    }
    return [(size, stride) for _, size, stride in dims], covered


def _spans_axes(view: TensorView, dim: int) -> bool:
    """Return whether a dimension has each index of the axes from its stride to its end once.

    A slice begins within an axis unless the offset's index there is zero; windows overlap, and
    dimensions of smaller strides may carry into this one.
    """
    size, stride = view.shape[dim], view.stride[dim]
    others = [
        (other, step)
        for index, (other, step) in enumerate(zip(view.shape, view.stride, strict=True))
        if index != dim and other > 1 and step > 0
    ]
    reach = view.offset % stride + sum((n - 1) * step for n, step in others if step < stride)
    overlaps = any(stride <= step < stride * size for _, step in others)
    return view.offset // stride % size == 0 and reach < stride and not overlaps
