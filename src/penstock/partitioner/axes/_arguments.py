"""Arguments of operators by their schemas: keywords have places too, and what is not given a value.

So the axis table knows the dimension of `aten.sort.stable(x, stable=True, dim=0)` where it knows
that of `aten.sort.default(x, 0)`. Tensors that `out=` names are results, and no arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from penstock.graph.encoding import resolve
from penstock.graph.step_graph import Operator


@functools.cache
def find_places(target: str) -> Mapping[str, int]:
    """Return the place of each argument in an operator's schema, by name; none without a schema."""
    return {each.name: place for place, each in enumerate(_arguments(target))}


@functools.cache
def find_out_results(target: str) -> Mapping[str, int]:
    """Return for each argument of `out=` the index of the result that is written into it."""
    names = [each.name for each in _arguments(target) if each.is_out]
    return {name: index for index, name in enumerate(names)}


def bind_arguments(operator: Operator) -> Operator:
    """Return an operator whose positional arguments are all of its schema, in order.

    Those that it is not given have the schema's values; those of `out=` are None.
    """
    places = find_places(operator.target)
    if not places:
        return operator
    bound = [*_defaults(operator.target)]
    bound[: len(operator.args)] = operator.args
    out = find_out_results(operator.target)
    for name, value in operator.kwargs.items():
        if name in places and name not in out:
            bound[places[name]] = value
    return dataclasses.replace(operator, args=tuple(bound), kwargs={})


def find_argument(bound: Operator, *names: str) -> Any:
    """Return the first argument that has one of some names; None if there is none."""
    places = find_places(bound.target)
    return next((bound.args[places[name]] for name in names if name in places), None)


def _arguments(target: str) -> list[Any]:
    return [*resolve(target)._schema.arguments] if target.startswith("aten.") else []


@functools.cache
def _defaults(target: str) -> tuple[Any, ...]:
    values = [each.default_value for each in _arguments(target)]
    return tuple(tuple(each) if isinstance(each, list) else each for each in values)
