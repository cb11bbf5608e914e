"""Quick functions run the very operators of the plan."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from _planned import CASES, bound, trainee
from penstock.executor.program import _entry_points, operators
from penstock.executor.program._entry_points import find_entry_point
from penstock.graph.encoding import resolve

pytestmark = pytest.mark.usefixtures("one_thread")


class Ran(TorchDispatchMode):
    """Notes what runs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


def what_runs(case, store):
    model, stepper = trainee(CASES[case], "adamw")
    options = {"share": 1 / 3, "tier": "host", "store": store, "shadow": 0}
    with bound(case, "adamw", model, stepper, **options) as step:
        step(CASES[case].batch)
        with Ran() as ran:
            step(CASES[case].batch)
    return ran.calls


# Each model of Transformers adds to a registry, which its forward pass reads.
@pytest.mark.filterwarnings("ignore:len.*changed since the step was captured:UserWarning")
@pytest.mark.parametrize("case", ["gpt2", "resnet", "lstm"])
def test_the_same_operators_run_as_by_their_names(case, store, monkeypatch):
    quick = what_runs(case, store)
    monkeypatch.setattr(operators, "find_entry_point", lambda target, *_: resolve(target)._op)
    by_name = what_runs(case, store)
    assert [func for func, *_ in quick] == [func for func, *_ in by_name]
    assert len(quick) > 50


def quickest(target, *args, **kwargs):
    return find_entry_point(target, list(args), kwargs), kwargs


def test_most_operators_have_a_function_of_torch():
    x, out = torch.ones(2, 2), torch.zeros(2, 2)
    function, kwargs = quickest("aten.mul.out", x, x, out=out)
    assert function is torch._C._VariableFunctions.mul
    function, _ = quickest("aten.lerp_.Scalar", x, x, 0.5)
    assert function is torch._C.TensorBase.lerp_
    assert out.count_nonzero() == 0, "nothing has run"
    values, indices = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    function, kwargs = quickest("aten.max.dim_max", x, 1, max=values, max_values=indices)
    assert kwargs == {"out": (values, indices)}
    function(x, 1, **kwargs)
    assert values.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("target", "kwargs"),
    [
        ("aten.add_.Tensor", {"alpha": 0.25}),
        ("aten.addcmul_.default", {"value": 0.5}),
        ("aten.sum.default", {"dtype": torch.float64}),
    ],
)
def test_arguments_with_names_are_kept(target, kwargs):
    x = torch.full((2, 2), 3.0)
    operands = {"aten.addcmul_.default": [x, x, x], "aten.sum.default": [x]}.get(target, [x, x])
    expected = resolve(target)(*map(torch.clone, operands), **kwargs)
    function, kept = quickest(target, *operands, **kwargs)
    assert function is not resolve(target)._op
    assert kept == kwargs
    result = function(*map(torch.clone, operands), **kept)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def test_a_function_that_would_run_another_operator_is_not_taken():
    x = torch.ones(2, 2)
    for target, args in (
        ("aten.div.Scalar", (x, 2.0)),  # torch.div makes a tensor of the number: div.Tensor
        ("aten._to_copy.default", (x,)),
        ("penstock.nothing", ()),
    ):
        if target.startswith("aten"):
            function, _ = quickest(target, *args)
            assert function is resolve(target)._op or function.__name__ == "_to_copy"


def test_defaults_that_are_not_the_schemas_are_noticed():
    x = torch.ones(2, 2)
    function, _ = quickest("aten.sum.dim_IntList", x, [0], True)
    assert function is torch._C._VariableFunctions.sum
    assert function(x, [0], True).shape == (1, 2)


def test_the_same_forms_of_arguments_are_tried_once(monkeypatch):
    forms, tried = [torch.ones(3, 7), torch.ones(3, 7, dtype=torch.float64), torch.ones(7, 3)], []
    monkeypatch.setattr(_entry_points, "_known", {})
    real = _entry_points._catch_call
    monkeypatch.setattr(
        _entry_points, "_catch_call", lambda call: [tried.append(call), real(call)][1]
    )
    for tensor in forms:
        first = quickest("aten.mul.out", tensor, 2, out=torch.empty_like(tensor))
        num_tried = len(tried)
        place = torch.empty_like(tensor)
        again, kwargs = quickest("aten.mul.out", torch.zeros_like(tensor), 2, out=place)
        assert len(tried) == num_tried and again is first[0] and kwargs["out"] is place
    assert len(tried) == 2 * len(forms)


def test_operators_of_the_registry_are_looked_up_each_time(monkeypatch):
    """Somebody may have registered another one under the name since."""
    monkeypatch.setattr(_entry_points, "_known", {})
    target, x = "aten.lift_fresh_copy.default", torch.ones(2)
    monkeypatch.setattr(_entry_points, "_find_candidates", lambda *_: iter(()))
    assert quickest(target, x)[0] is resolve(target)._op
    another = resolve("aten.clone.default")
    monkeypatch.setattr(_entry_points, "resolve", lambda _: another)
    assert quickest(target, x)[0] is another._op
