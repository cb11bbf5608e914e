"""What a function reads besides its arguments is what it is at each call, not at the first one."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import threading
import types
import weakref

import pytest
import torch

from _relational import random_graph, random_tensor
from penstock import rgnn
from penstock.rgnn import _custom_ops
from penstock.rgnn.frontend.traces import Traces, read_free_values

GRAPH = random_graph()
X = random_tensor(GRAPH.num_nodes, 3).detach()
SCALE = 2.0
SETTINGS = types.ModuleType("settings")


@dataclasses.dataclass
class Settings:
    scale: float = 2.0

    def doubled(self) -> float:
        return 2 * self.scale


class Base:
    scale = 2.0


def by_global(x):
    return x * SCALE


def with_default(x, *, scale=(2.0,)):
    return x * scale[0]


def assert_follows(function, change, *, value=5.0):
    """The function multiplies by 2 before the change, and by `value` after it."""
    for backend in ("torch", "cpp"):
        change(2.0)
        compiled = rgnn.compile(function, backend=backend)
        torch.testing.assert_close(compiled(GRAPH, X), 2 * X)
        change(value)
        torch.testing.assert_close(compiled(GRAPH, X), value * X)
        torch.testing.assert_close(compiled.to_torch()(GRAPH, X), value * X)
        assert f"{value!r}" in str(compiled.explain(GRAPH, X))
        change(2.0)
        torch.testing.assert_close(compiled(GRAPH, X), 2 * X)


def test_numbers_in_containers():
    scales = {"one": [(2.0, 1)], 7: {3}}

    def change(value):
        scales["one"][0] = (value, 1)

    assert_follows(lambda g, x: g.nodes(x) * scales["one"][0][0], change)


def test_a_variable_of_the_enclosing_function():
    scale = 2.0

    def change(value):
        nonlocal scale
        scale = value

    assert_follows(lambda g, x: g.nodes(x) * scale, change)


def test_a_global_of_a_function_that_is_called(monkeypatch):
    def change(value):
        monkeypatch.setitem(globals(), "SCALE", value)

    assert_follows(lambda g, x: by_global(g.nodes(x)), change)


def test_a_function_that_is_put_in_anothers_place():
    helpers = [by_global]
    other = lambda x: x * 5.0  # noqa: E731
    assert_follows(
        lambda g, x: helpers[0](g.nodes(x)),
        lambda value: helpers.__setitem__(0, by_global if value == 2.0 else other),
    )


def test_a_default_of_a_function_that_is_called():
    def change(value):
        with_default.__kwdefaults__["scale"] = (value,)

    assert_follows(lambda g, x: with_default(g.nodes(x)), change)


def test_an_attribute_of_a_function():
    def change(value):
        vars(with_default)["scale"] = value

    def function(g, x):
        return g.nodes(x) * with_default.scale  # pyright: ignore[reportFunctionMemberAccess]

    assert_follows(function, change)


def test_a_number_of_a_module():
    def change(value):
        SETTINGS.scale = value

    assert_follows(lambda g, x: g.nodes(x) * SETTINGS.scale, change)


@pytest.mark.parametrize("settings", [Settings(), types.SimpleNamespace(scale=2.0), Base()])
def test_an_attribute_of_an_object(settings):
    assert_follows(
        lambda g, x: g.nodes(x) * settings.scale,
        lambda value: setattr(settings, "scale", value),
    )


def test_what_a_method_computes():
    settings = Settings()
    assert_follows(
        lambda g, x: g.nodes(x) * (settings.doubled() / 2),
        lambda value: setattr(settings, "scale", value),
    )


def test_a_number_in_a_tensor():
    scale = torch.tensor(2.0)
    assert_follows(lambda g, x: g.nodes(x) * float(scale), scale.fill_)


def test_a_flag_that_is_branched_on():
    flags = [False]

    def function(g, x):
        return g.nodes(x) * (5.0 if flags[0] else 2.0)

    assert_follows(function, lambda value: flags.__setitem__(0, value == 5.0))


def test_zero_has_a_sign():
    scale = [0.0]
    compiled = rgnn.compile(lambda g, x: g.nodes(x) * scale[0])
    ones = torch.ones(GRAPH.num_nodes, 1)
    assert math.copysign(1, compiled(GRAPH, ones)[0].item()) == 1
    scale[0] = -0.0
    assert math.copysign(1, compiled(GRAPH, ones)[0].item()) == -1


def test_numbers_that_a_generator_draws_are_drawn_at_each_call():
    numbers = iter([2.0, 3.0, 4.0])
    compiled = rgnn.compile(lambda g, x: g.nodes(x) * next(numbers), backend="torch")
    for factor in (2, 3, 4):
        torch.testing.assert_close(compiled(GRAPH, X), factor * X)


def test_what_cannot_be_compared_is_told_from_what_can():
    scale, settings = [2.0, (1, None)], Settings()

    def comparable(g, x):
        return rgnn.relu(by_global(g.nodes(x))) * scale[0] * math.pi + len(scale)

    def opaque(g, x):
        return g.nodes(x) * settings.scale

    def importing(g, x):
        from math import pi

        return g.nodes(x) * pi

    def reaching(g, x):
        return g.nodes(x) * globals()["SCALE"]

    assert read_free_values(comparable)[0] is not None
    assert read_free_values(comparable)[0] == read_free_values(comparable)[0]
    for function in (opaque, importing, reaching, Settings().doubled):
        assert read_free_values(function)[0] is None
    endless: list = []
    endless.append(endless)
    assert read_free_values(lambda g, x: g.nodes(x) * len(endless))[0] is None
    assert read_free_values(rgnn.layers.rgcn.__wrapped__)[0] == ()


def test_equal_programs_are_planned_once():
    settings = Settings()
    compiled = rgnn.compile(lambda g, x: g.nodes(x) * settings.scale, backend="torch")
    for _ in range(3):
        compiled(GRAPH, X)
    assert compiled.num_plans == 1


def test_a_number_that_changes_all_the_time_is_named_once(caplog):
    scale = [0.0]
    compiled = rgnn.compile(lambda g, x, y: g.nodes(x) * scale[0] + y, backend="torch")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        for step in range(40):
            scale[0] = float(step)
            compiled(GRAPH, X, X[0])
    (record,) = caplog.records
    assert "32 different values of its numbers (scale)" in record.getMessage()
    assert "pass a number that changes as a tensor" in record.getMessage()


@pytest.mark.parametrize("settings", [[2.0], Settings()], ids=["comparable", "opaque"])
def test_compiled_code_refuses_a_number_that_changed(settings):
    def read():
        return settings[0] if isinstance(settings, list) else settings.scale

    function = rgnn.compile(lambda g, x: g.nodes(x) * read(), backend="torch")
    compiled = torch.compile(lambda x: function(GRAPH, x), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(X), 2 * X)
    if isinstance(settings, list):
        settings[0] = 5.0
    else:
        settings.scale = 5.0
    with pytest.raises(
        RuntimeError, match=r"reads values .*\(settings\), which changed since torch.compile"
    ):
        compiled(X)


def test_programs_of_compiled_code_go_with_their_functions():
    torch.compiler.reset()
    gc.collect()
    before = len(_custom_ops._programs)

    def use() -> weakref.ref:
        function = rgnn.compile(lambda g, x: g.nodes(x) * 0.123, backend="torch")
        again = rgnn.compile(lambda g, x: g.nodes(x) * 0.123, backend="torch")
        for each in (function, again):
            compiled = torch.compile(lambda x: each(GRAPH, x), backend="aot_eager")  # noqa: B023
            torch.testing.assert_close(compiled(X), X * 0.123)
        assert len(_custom_ops._programs) == before + 1
        watched = weakref.ref(function)
        del function
        torch.testing.assert_close(compiled(X), X * 0.123)
        return watched

    watched = use()
    torch.compiler.reset()
    gc.collect()
    assert watched() is None
    assert len(_custom_ops._programs) <= before


def test_threads_that_call_at_once_share_a_trace(monkeypatch):
    traced, trace = [], Traces._trace
    monkeypatch.setattr(Traces, "_trace", lambda *args: traced.append(args[0]) or trace(*args))
    settings = Settings()
    compiled = rgnn.compile(lambda g, x: g.nodes(x) * settings.scale, backend="torch")
    settled = rgnn.compile(lambda g, x: g.nodes(x) * 2, backend="torch")
    start, found = threading.Barrier(8), []

    def call(width: int) -> None:
        start.wait()
        for each in (compiled, settled):
            found.append(each(GRAPH, torch.ones(GRAPH.num_nodes, width)).sum().item())

    threads = [threading.Thread(target=call, args=(width,)) for width in (1, 2) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [24.0] * 8 + [48.0] * 8
    assert traced.count(settled._traces) == 2
    assert traced.count(compiled._traces) == 8
