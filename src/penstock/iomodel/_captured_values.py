"""Values that functions of a chain read by name: a backward pass that runs them again reads anew.

Of a function these are the variables of the functions and the module around it, of a partial
function its arguments, and of a module the tensors that it has as attributes, beside its parameters
and buffers.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType
from typing import Any

from torch import Tensor, nn

from penstock.compat.dispatch import tree_leaves

_COMPARED = Tensor, bool, int, float, complex, str


class CapturedValues:
    """Numbers and tensors that functions have captured by the time of a forward pass."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._functions = [each for each in modules if not isinstance(each, nn.Module)]
        self._values = self._find()

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors among them."""
        return [each for of in self._values for each in of.values() if isinstance(each, Tensor)]

    def check(self) -> None:
        """Raise `RuntimeError` if a function would read others by now."""
        for function, before, now in zip(self._functions, self._values, self._find(), strict=True):
            for name, value in before.items():
                found = now.get(name)
                if found is value or (not isinstance(value, Tensor) and found == value):
                    continue
                raise RuntimeError(
                    f"{getattr(function, '__name__', function)} of the chain reads {name}, which "
                    "has another value than in the forward pass; call backward() first, or make "
                    "it an argument that a functools.partial keeps"
                )

    def _find(self) -> list[dict[str, Any]]:
        found = map(_find_values, self._functions)
        return [
            {name: each for name, each in of.items() if isinstance(each, _COMPARED)} for of in found
        ]


def list_attributes(modules: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that modules have as attributes."""
    owners = [one for each in modules if isinstance(each, nn.Module) for one in each.modules()]
    return [each for one in owners for each in vars(one).values() if isinstance(each, Tensor)]


def list_kept_results(modules: Sequence[Any]) -> list[Tensor]:
    """Return the tensors with a graph that modules have as attributes, or in these."""
    owners = [one for each in modules if isinstance(each, nn.Module) for one in each.modules()]
    leaves = [leaf for one in owners for leaf in tree_leaves(list(vars(one).values()))]
    return [each for each in leaves if isinstance(each, Tensor) and each.grad_fn is not None]


def _find_values(function: Any) -> dict[str, Any]:
    """Return what a function reads by name and does not write."""
    if isinstance(function, functools.partial):
        args = {str(number): each for number, each in enumerate(function.args)}
        return {**_find_values(function.func), **args, **function.keywords}
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return {}
    loaded, free = _list_names(code)
    values = {name: function.__globals__[name] for name in loaded if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            values |= {name: cell.cell_contents} if name in free else {}
        except ValueError:  # it has no value yet
            continue
    return values


@functools.lru_cache(maxsize=256)
def _list_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return names that a function reads of its module, and of the functions around it."""
    steps = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    written = {name for step, name in steps if step in ("STORE_GLOBAL", "STORE_DEREF")}
    loaded = {name for step, name in steps if step == "LOAD_GLOBAL"}
    return frozenset(loaded - written), frozenset(set(code.co_freevars) - written)
