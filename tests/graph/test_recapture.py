"""A program that does something else when it is called again is refused, by what has changed."""

import collections
import dis
import functools
import inspect
import itertools
import random
import re
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import CaptureError, GraphFileError
from penstock.graph import capture, run
from penstock.graph.capturing import python_numbers
from penstock.graph.capturing.python_numbers import find_again, find_numbers

X = torch.linspace(-1, 1, 32).reshape(4, 8)
NUMBERS = {"scale": 1.0}
OWN_RANDOM, OWN_NUMPY = random.Random(3), np.random.default_rng(0)


class Step(nn.Module):
    """A layer, and what makes the loss of its output."""

    def __init__(self, loss_of):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.history = []
        self.weights = iter(itertools.count(1))
        self._loss_of = loss_of

    def forward(self, x):
        return self._loss_of(self, self.layer(x).square().mean())


def grows(model, value):
    model.history.append(1)
    return value * len(model.history)


def shrinks(model, value):
    NUMBERS["scale"] *= 0.5
    return value * NUMBERS["scale"]


def keeps_a_tensor(model, value):
    last, model.history[:] = model.history[-1:], [value.detach()]
    return value + sum(last)


PROGRAMS = {
    "a list that grows": (grows, "argument 1 of aten.mul.Tensor .* is 2 and was 1"),
    "a number in a dictionary": (shrinks, "is 0.25 and was 0.5"),
    "an iterator": (lambda model, value: value * next(model.weights), "is 2 and was 1"),
    "a tensor from a list": (
        lambda model, value: value * torch.tensor([next(model.weights), 1.0]).sum(),
        "a tensor that is made from Python numbers has other numbers",
    ),
    "another operator": (
        lambda model, value: value.sin() if next(model.weights) % 2 else value.cos(),
        "aten.cos.default .* runs where aten.sin.default",
    ),
    "an operator more": (
        lambda model, value: value if next(model.weights) % 2 else value.exp(),
        "aten.exp.default",
    ),
    "a tensor of the last call": (keeps_a_tensor, "runs where|earlier call"),
    "Python's generator of its own": (
        lambda model, value: value * OWN_RANDOM.random(),
        r"a generator of its own \(random.Random\)",
    ),
    "NumPy's generator of its own": (
        lambda model, value: value * float(OWN_NUMPY.random()),
        r"a generator of its own \(numpy.Generator\)",
    ),
}


@pytest.fixture(autouse=True)
def _generators_of_this_test(monkeypatch):
    """Those of the import are frozen (`conftest.py`), so that a capture does not find them."""
    monkeypatch.setitem(globals(), "OWN_RANDOM", random.Random(3))
    monkeypatch.setitem(globals(), "OWN_NUMPY", np.random.default_rng(0))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_changes_from_call_to_call_is_refused(name):
    loss_of, message = PROGRAMS[name]
    NUMBERS["scale"] = 1.0
    model = Step(loss_of)
    states = OWN_RANDOM.getstate(), OWN_NUMPY.bit_generator.state
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.optim.SGD(model.parameters()), X)
    assert (OWN_RANDOM.getstate(), OWN_NUMPY.bit_generator.state) == states


def test_the_line_is_named():
    model = Step(grows)
    with pytest.raises(CaptureError, match="in grows: return value"):
        capture(model, torch.optim.SGD(model.parameters()), X)


def test_a_hook_that_counts_is_refused():
    model, calls = Step(lambda model, value: value), []

    def scale(module, args, output):
        calls.append(1)
        return output * len(calls)

    model.layer.register_forward_hook(scale)
    with pytest.raises(CaptureError, match="in scale"):
        capture(model, torch.optim.SGD(model.parameters()), X)


def test_what_runs_before_the_update_is_called_again_too():
    model, factors = Step(lambda model, value: value), iter([0.5, 0.25, 0.125])

    def scale():
        factor = next(factors)
        for parameter in model.parameters():
            parameter.grad.mul_(factor)

    with pytest.raises(CaptureError, match=r"is 0.25 and was 0.5"):
        capture(model, torch.optim.SGD(model.parameters()), X, before_step=scale)


def test_positions_that_the_first_call_makes_are_no_matter():
    def with_positions(model, value):
        if not model.history:
            model.history.append(torch.arange(3.0))
        return value + model.history[0].sum()

    model = Step(with_positions)
    capture(model, torch.optim.SGD(model.parameters()), X)
    assert not model.history


CACHE = {}


@functools.cache
def cached_mask(size):
    return torch.full((size, size), -1e9).triu(1)


@functools.lru_cache(4)
def cached_pair(size):
    return torch.arange(float(size)).cos(), torch.arange(float(size)).sin()


class Table:
    made = None

    @classmethod
    def get(cls):
        if cls.made is None:
            cls.made = torch.linspace(0, 1, 8)
        return cls.made


CACHES = {
    "a function's": lambda model, value: value + (cached_mask(8) + value).softmax(1)[0, 0],
    "pairs": lambda model, value: value * cached_pair(8)[0].sum() + cached_pair(8)[1].sum(),
    "a dictionary": lambda model, value: (
        value * CACHE.setdefault("w", torch.hann_window(8) if "w" not in CACHE else None).sum()
    ),
    "a class's": lambda model, value: value * Table.get().sum(),
}


@pytest.mark.parametrize("name", CACHES)
def test_constants_that_the_first_call_keeps_in_caches_are_no_matter(name):
    for clear in (cached_mask.cache_clear, cached_pair.cache_clear, CACHE.clear):
        clear()
    Table.made = None
    model = Step(CACHES[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, optimizer, X)
    expected = model(X)  # with what the capture has left in the cache
    assert run(graph, model, optimizer, X) == expected


def test_constants_in_caches_have_numbers_after_a_refusal_too():
    cached_mask.cache_clear()
    model = Step(lambda model, value: value * cached_mask(4)[1, 0] * value.item())
    with pytest.raises(CaptureError, match="item"):
        capture(model, torch.optim.SGD(model.parameters()), X)
    assert model(X) == 0


def counted_by(name):
    """A loss that counts its calls, which is of no effect."""
    state, numbers = types.SimpleNamespace(calls=0), itertools.count()
    calls, number = [], 0

    def variable(model, value):
        nonlocal number
        number += 1
        return value

    def item(model, value):
        NUMBERS["calls"] = NUMBERS.get("calls", 0) + 1
        return value

    def attribute(model, value):
        state.calls += 1
        return value

    def module(model, value):
        NAMESPACE.calls += 1
        return value

    def own(model, value, *, calls=[0]):  # noqa: B006
        calls[0] += 1
        return value

    return {
        "number": variable,
        "len(calls)": lambda model, value: calls.append(1) or value,
        "state.calls": attribute,
        "NUMBERS['calls']": item,
        "NAMESPACE.calls": module,
        "counted_by.<locals>.own's defaults['calls'][0]": own,
        "numbers": lambda model, value: value if next(numbers) >= 0 else 0,
        "model.history": lambda model, value: model.history.append(value.shape) or value,
    }[name]


class NAMESPACE:
    calls = 0


@pytest.mark.parametrize(
    "name",
    [
        *("number", "len(calls)", "state.calls", "NUMBERS['calls']", "NAMESPACE.calls"),
        *("counted_by.<locals>.own's defaults['calls'][0]", "numbers", "model.history"),
    ],
)
def test_counting_is_refused_as_planned_steps_would_not(name):
    model = Step(counted_by(name))
    wanted = f"the step changes (len\\()?{re.escape(name)}"
    with pytest.raises(CaptureError, match=wanted):
        capture(model, torch.optim.SGD(model.parameters()), X)


def test_numbers_that_the_first_call_makes_are_no_matter():
    made = {}
    model = Step(lambda model, value: value * made.setdefault("scale", 2.0))
    capture(model, torch.optim.SGD(model.parameters()), X)


class Options:
    factor = 0.5

    def __init__(self):
        self.inner = 1.5

    @staticmethod
    def helper():
        return NUMBERS["scale"]


class Slotted:
    __slots__ = ("__hidden",)

    def __init__(self):
        self.__hidden = 3

    def __getattr__(self, name):
        raise RuntimeError("asked")


class Strange(dict):
    """A container that says nothing true of itself, and changes when it is asked."""

    def __getitem__(self, *_: Any) -> Any:
        raise RuntimeError("asked")

    __len__ = keys = items = values = __iter__ = __getitem__  # pyright: ignore[reportAssignmentType]


def test_numbers_that_a_program_can_read_are_found():
    deep = types.SimpleNamespace(list=[{"inner": 1.5}], array=np.ones(3))
    options, slotted, strange = Options(), Slotted(), Strange(key=2)

    def loss(factor, y):
        Options.helper()
        return factor * deep.list[0]["inner"] * y * options.inner, slotted, strange

    found = find_numbers({"loss": functools.partial(loss, 3)})
    names = {each.name for each in found if not each.is_identity}
    assert {"deep.list[0]['inner']", "loss[0]", "deep.array", "options.inner"} <= names
    assert {"Options.factor", "NUMBERS['scale']", "slotted._Slotted__hidden"} <= {
        name.replace("__hidden", "_Slotted__hidden") if "_Slotted" not in name else name
        for name in names
    }
    assert "strange['key']" in names
    module = nn.Sequential(nn.Linear(2, 2))
    module.alpha = 0.5
    names = {each.name for each in find_numbers({"model": module})}
    assert {"model.alpha", "model.0.in_features", "len(model._forward_hooks)"} <= names


alike = 1.0


def test_a_global_variable_named_like_an_attribute_is_none_that_is_read():
    def names_of(loss):
        return {each.name for each in find_numbers({"loss": loss})}

    assert "alike" not in names_of(lambda y, batch: y.alike)
    assert "alike" in names_of(lambda y, batch: y * alike)
    assert "alike" in names_of(lambda y, batch: [each * alike for each in y])


def test_looking_for_numbers_changes_nothing():
    class Recent(collections.OrderedDict):
        def __getitem__(self, key):
            self.move_to_end(key)
            return super().__getitem__(key)

    counts, recent = collections.defaultdict(float, a=1.0), Recent(a=1, b=2)
    numbers = find_numbers({"loss": lambda y, batch: (counts, recent)})
    del counts["a"]
    changed = {each.name for each in numbers if each.has_changed()}
    assert changed == {"len(counts)", "counts['a']"}
    assert not counts and list(recent) == ["a", "b"]


def test_numbers_that_have_not_changed_are_found_once():
    settings = {"scale": 1.0, "others": [1, 2]}
    program = {"model": lambda x: x * settings["scale"] * settings["others"][0]}
    numbers = find_numbers(program)
    assert find_again(numbers, program) is numbers
    settings["others"] = [1, 2]
    found = find_again(numbers, program)
    assert found is not numbers
    settings["others"][1] = 3
    assert [each.name for each in found if each.has_changed()] == ["settings['others'][1]"]


def test_a_global_variable_that_is_not_there_yet_is_found(monkeypatch):
    def scale(x):
        try:
            return x * late_scale  # pyright: ignore[reportUndefinedVariable]
        except NameError:
            return max(x, 0)

    program = {"model": scale}
    numbers = find_numbers(program)
    assert "max" not in {each.name for each in numbers}
    monkeypatch.setitem(globals(), "late_scale", [2.0])
    assert [each.name for each in numbers if each.has_changed()] == ["late_scale"]
    found = find_again(numbers, program)
    globals()["late_scale"][0] = 3.0
    assert [each.name for each in found if each.has_changed()] == ["late_scale[0]"]


@pytest.mark.parametrize("kind", ["deep", "wide"])
def test_the_search_for_numbers_ends(kind):
    layers = [nn.Linear(1, 1) for _ in range(2000 if kind == "deep" else 1)]
    for layer, after in itertools.pairwise(layers):
        layer.after = [after]
    data = [[[1, 2, 3] for _ in range(200)] for _ in range(200 if kind == "wide" else 1)]
    found = find_numbers({"loss": lambda y, batch: (layers[0], data)})
    assert len(found) < 40_000


def test_what_other_threads_count_is_no_matter():
    beats, is_done = [0], threading.Event()

    def beat():
        while not is_done.wait(0.0005):
            beats[0] += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        model = Step(lambda model, value: value if beats else 0)
        capture(model, torch.optim.SGD(model.parameters()), X)
    finally:
        is_done.set()
        thread.join()


def outside_step(loss_of):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, capture(model, optimizer, X, loss=loss_of)


def test_tensors_from_outside_are_read_anew():
    weights = torch.ones(8)
    loss_of = lambda output, batch: (output * weights).sum()  # noqa: E731
    model, optimizer, graph = outside_step(loss_of)
    first = run(graph, model, optimizer, X)
    weights.numpy()[:] = 0  # torch does not count this
    assert first != 0
    assert run(graph, model, optimizer, X) == 0


def test_a_branch_on_a_tensor_from_outside_is_watched():
    switch = torch.ones(())
    loss_of = lambda output, batch: output.sum() if switch > 0 else -output.sum()  # noqa: E731
    model, optimizer, graph = outside_step(loss_of)
    run(graph, model, optimizer, X)
    switch.data.neg_()
    with pytest.raises(GraphFileError, match="has looked at the numbers of a tensor"):
        run(graph, model, optimizer, X)


def test_a_tensor_from_outside_of_another_shape():
    weights = torch.ones(8)
    loss_of = lambda output, batch: (output * weights).sum()  # noqa: E731
    model, optimizer, graph = outside_step(loss_of)
    weights.data = torch.ones(1)
    with pytest.raises(GraphFileError, match=r"shape \(1,\) and was torch.float32 of shape \(8,\)"):
        run(graph, model, optimizer, X)


def test_global_names_are_those_that_dis_shows():
    """Also past 256 names, which an instruction has no byte for."""
    many = "\n".join(f"name_{number} = other_{number}" for number in range(300))
    many = f"def function():\n    {many.replace(chr(10), chr(10) + '    ')}\n{many}"
    codes = [compile(many, "<string>", "exec")]
    codes += [compile(inspect.getsource(each), "<string>", "exec") for each in (dis, inspect)]
    num_names = 0
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        names = [
            each.argval
            for each in dis.get_instructions(code)
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        ]
        assert list(python_numbers._globals_in(code)) == names
        num_names += len(names)
    assert num_names > 1000
