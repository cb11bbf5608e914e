"""Scalar expressions among the arguments of operators: calculated anew in each step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.executor.program.scalars import Scalars
from penstock.graph import TensorView

RATE = TensorView(0, "float64", (), (), 0)


def read_no_tensor(view: TensorView) -> Any:
    raise AssertionError(f"{view} is a number of the optimizer's groups")


def test_updates_with_the_same_constants_are_compiled_once():
    scalars = Scalars()
    scalars.slot_of(RATE.value)
    seen: list[float] = []
    calls = [
        scalars.compile_call(
            lambda number, factor: seen.append(number * factor),
            [scalars.compile_expression(("mul", RATE, constant), read_no_tensor), factor],
            {},
        )
        for constant, factor in ((2.0, 1), (2.0, 10), (3.0, 1))
    ]
    for rate in (0.5, 0.25):
        scalars.assign({RATE.value: rate})
        for call in calls:
            call()
    assert seen == [1.0, 10.0, 1.5, 0.5, 5.0, 0.75]
    codes = [call.__code__ for call in calls]  # pyright: ignore[reportFunctionMemberAccess]
    assert codes[0] is codes[1] is not codes[2]


@pytest.mark.parametrize("constant", [0.0, -0.0, 0, False, 1, True, 1.0, math.inf])
def test_constants_that_are_equal_and_not_the_same_are_told_apart(constant):
    scalars = Scalars()
    seen: list[Any] = []
    for each in (-0.0, 0.0, 0, False, 1, True, 1.0, math.inf):
        scalars.compile_expression(each, read_no_tensor)
    expression = scalars.compile_expression(("add", constant, constant), read_no_tensor)
    scalars.compile_call(seen.append, [expression], {})()
    assert repr(seen[0]) == repr(constant + constant)
