"""The axis table: for each operator, the dimensions of operands and results that go together.

As in an einsum, dimensions that carry the same letter are one axis of the operator's loop nest:

    mm: "mk,kn->mn"      m and n are axes of the result, k is one that is summed over.

Split by a letter of the result, each rank makes a piece of the result; split by a letter that a
result sums over, each rank makes a partial sum of all of it. An operand without the letter is read
whole by every rank. So a table of letters says all that a partition needs to know of an operator
(Wang, Huang, Li, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning",
EuroSys 2019, section 4; operators there are written in a tensor description language).

A dimension may be a multiple of its letter's extent: a query's heads are groups of as many heads as
share a key's, a strided convolution reads two rows for one of its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.graph.encoding import dtype_from_name
from penstock.graph.step_graph import Operator, TensorView, views_in
from penstock.partitioner.axes._arguments import bind_arguments, find_out_results, find_places
from penstock.partitioner.axes._table import WHOLE, Labels, LetterDraft, find_entry


class LabelledView(NamedTuple):
    """An operand or result with the letters of its dimensions.

    Attributes:
        view: The whole of it.
        labels: A letter for each dimension.
        sums: Of a result: letters over which ranks' results are added up.
        halo: Letters of dimensions of which a rank needs elements beyond its piece, or adds to
            them, and how many along the dimension.
    """

    view: TensorView
    labels: Labels
    sums: frozenset[str] = frozenset()
    halo: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AxisRule:
    """An operator's operands and results by letters.

    Attributes:
        inputs: The views among its arguments, in order.
        outputs: The views that it makes; those of values that it overwrites among them.
        is_linear: Whether the result of partial sums is a partial sum of the result.
        first_only: Indices of inputs that one rank alone counts, where the others make partial sums
            (the bias of a product).
        averages: Whether ranks' results are averaged rather than added up.
    """

    inputs: tuple[LabelledView, ...]
    outputs: tuple[LabelledView, ...]
    is_linear: bool = False
    first_only: frozenset[int] = frozenset()
    averages: bool = False


def find_rule(operator: Operator) -> AxisRule | None:
    """Return the letters of an operator; None if the table has none for it.

    Example:
        >>> a, b, c = (TensorView(i, "float32", (4, 4), (4, 1)) for i in range(3))
        >>> product = Operator(name="mm", target="aten.mm.default", args=(a, b), outputs=(c,))
        >>> [operand.labels for operand in find_rule(product).inputs]
        [('m', 'k'), ('k', 'n')]
    """
    name, make = find_entry(operator.target)
    if make is None:
        return None
    draft = make(name, bind_arguments(operator))
    draft = None if draft is None else _label_keywords(operator, draft)
    return None if draft is None else _fill_in(operator, draft)


def _label_keywords(operator: Operator, draft: LetterDraft) -> LetterDraft | None:
    """Return letters of an operator with those of `out=`; None if a keyword's are not known."""
    places, out = find_places(operator.target), find_out_results(operator.target)
    inputs = dict(draft.inputs)
    written: set[str] = set()
    for name, value in operator.kwargs.items():
        if name in out and isinstance(value, TensorView):
            index = out[name]
            result = operator.outputs[index] if index < len(operator.outputs) else None
            if result is None or result.shape != value.shape:
                return None
            inputs[places[name]] = draft.outputs.get(index, (WHOLE,) * len(value.shape))
            written.update(draft.sums.get(index, ""))
        elif any(view.shape for view in views_in(value)) and places.get(name) not in inputs:
            return None
    # Ranks cannot add up what they write into a tensor that is there already.
    return _without_letters(draft._replace(inputs=inputs), written)


def _without_letters(draft: LetterDraft, letters: set[str]) -> LetterDraft:
    """Return a draft in which the dimensions of some letters are whole."""

    def whole(labels: Mapping[int, Labels]) -> dict[int, Labels]:
        return {i: tuple(WHOLE if x in letters else x for x in each) for i, each in labels.items()}

    sums = {i: "".join(x for x in each if x not in letters) for i, each in draft.sums.items()}
    return draft._replace(inputs=whole(draft.inputs), outputs=whole(draft.outputs), sums=sums)


def _fill_in(operator: Operator, draft: LetterDraft) -> AxisRule:
    inputs, first_only = [], set()
    places = find_places(operator.target)
    keywords = ((places.get(name, -1), each) for name, each in operator.kwargs.items())
    for index, argument in (*enumerate(operator.args), *keywords):
        for view in views_in(argument):
            labels = draft.inputs.get(index, (WHOLE,) * len(view.shape))
            if view.shape == (0,) and len(labels) > 1:
                labels = (WHOLE,)  # `cat` takes such beside tensors of more dimensions
            if index in draft.first_only:
                first_only.add(len(inputs))
            inputs.append(_operand(view, labels, halo=draft.halo.get(index, ())))
    outputs = []
    for index, view in enumerate(_results(operator)):
        if view is not None:
            labels = draft.outputs.get(index, (WHOLE,) * len(view.shape))
            sums = frozenset(draft.sums.get(index, ""))
            halo = draft.output_halo if index == 0 else ()
            outputs.append(_operand(view, labels, sums, halo))
    return AxisRule(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        is_linear=draft.is_linear and all(map(_is_float, (*inputs, *outputs))),
        first_only=frozenset(first_only),
        averages=draft.averages,
    )


def _is_float(operand: LabelledView) -> bool:
    """Return whether sums may be split into terms that are no whole numbers."""
    dtype = dtype_from_name(operand.view.dtype)
    return dtype.is_floating_point or dtype.is_complex


def _operand(
    view: TensorView,
    labels: Labels,
    sums: frozenset[str] = frozenset(),
    halo: tuple[tuple[str, int], ...] = (),
) -> LabelledView:
    kept = zip(labels, view.shape, strict=True)
    return LabelledView(view, tuple(each if size > 1 else WHOLE for each, size in kept), sums, halo)


def _results(operator: Operator) -> list[TensorView | None]:
    """Return the results, and after them the views that are overwritten without being one."""
    results = [*operator.outputs]
    made = {view.value for view in results if view is not None}
    old_views = {view.value: view for view in views_in([operator.args, dict(operator.kwargs)])}
    for old, new in operator.mutates:
        if new not in made and old in old_views:
            results.append(old_views[old]._replace(value=new))
    return results
