"""Results that are made from known forms are those of the fake kernels."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from _traps import CASES as TRAPS
from _zoo import CASES as ZOO
from penstock.compat.fake_tensors import make_fake, new_mode
from penstock.graph import capture
from penstock.graph.capturing import _fake_results, recorder

CASES = ZOO | TRAPS
aten = torch.ops.aten


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def looks(result: Any, operands: list[torch.Tensor]) -> list[Any]:
    """Return the forms of results, and the operands whose bytes they view."""
    return [
        (
            *(each.shape, each.stride(), each.storage_offset(), each.dtype, each.device),
            *(each.untyped_storage().nbytes(), type(result), each.is_contiguous()),
            [
                number
                for number, operand in enumerate(operands)
                if operand.untyped_storage()._cdata == each.untyped_storage()._cdata
            ],
        )
        for each in tensors_in(result)
    ]


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Names of operators whose results were made, each time after a comparison."""
    names: list[str] = []
    make, run_fake = _fake_results._make_results, _fake_results.run_fake
    is_made: list[bool] = []

    def noted(*args: Any) -> Any:
        is_made.append(True)
        return make(*args)

    def compared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_made.clear()
        result, known = run_fake(func, args, kwargs)
        if is_made:
            names.append(func._opname)
            args = tuple(map(_fake_results._untrace, args))
            kwargs = {name: _fake_results._untrace(value) for name, value in kwargs.items()}
            operands = tensors_in((args, kwargs))
            anew = _fake_results._run_kernel(func, args, kwargs)
            assert looks(result, operands) == looks(anew, operands), func
        return result, known

    monkeypatch.setattr(_fake_results, "_make_results", noted)
    monkeypatch.setattr(recorder, "run_fake", compared)
    monkeypatch.setattr(_fake_results, "_cache", {})
    # Kernels are called again for each result: those of torch's cache, which captures leave out.
    monkeypatch.setattr("penstock.graph.capturing.capture.new_mode", lambda _: FakeTensorMode())
    return names


@pytest.mark.parametrize("name", CASES)
def test_they_are_as_those_of_the_kernels(name, made):
    case = CASES[name]
    model = case.make()
    capture(model, torch.optim.AdamW(model.parameters()), case.batch, loss=case.loss)
    assert len(made) > len(set(made)) > 3


def test_what_is_no_matter_of_forms_is_not_kept(made):
    """Numbers of other types, views of other operands, results that are operands."""

    def run(*call: Any) -> Any:
        return recorder.run_fake(*call)[0]

    with FakeTensorMode():
        x = torch.zeros(4, 6, dtype=torch.int64)
        for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)) * 2:
            assert run(aten.add.Tensor, (x, number), {}).dtype is dtype
        for operand in (x, x.clone()):
            view = run(aten.t.default, (operand,), {})
            assert view.untyped_storage()._cdata == operand.untyped_storage()._cdata
        for operand in (x[:2], x[2:]):
            view = run(aten.t.default, (operand,), {})
            assert view.storage_offset() == operand.storage_offset()
        for _ in range(2):
            assert run(aten.relu_.default, (x,), {}) is x
        for operand in (x, x.clone()):
            changed = run(aten._unsafe_view.default, (operand, [6, 4]), {})
            assert isinstance(changed, FakeTensor)
            assert changed.untyped_storage()._cdata == operand.untyped_storage()._cdata
    assert set(made) == {"add", "t", "relu_", "_unsafe_view"}


COMPOUND = {
    "a sampled grid": (aten.grid_sampler_2d.default, lambda x: (x, x[..., :2], 0, 0, False)),
    "a bicubic grid": (aten.grid_sampler_2d.default, lambda x: (x, x[..., :2], 2, 1, True)),
    "a cubic image": (aten.upsample_bicubic2d.default, lambda x: (x, [7, 5], False, None, None)),
    "a linear image": (aten.upsample_bilinear2d.default, lambda x: (x, [7, 5], True, None, None)),
    "a product and a sum": (aten.addmm.default, lambda x: (x[0, 0, 0], x[0, 0], x[0, :, 0])),
    "a loss": (
        aten.binary_cross_entropy_with_logits.default,
        lambda x: (x, x, x[0, 0], None, 1),
    ),
}


@pytest.mark.parametrize("name", COMPOUND)
def test_kernels_that_are_made_of_others_know_these(name, monkeypatch):
    """With the results of the inner operators made the first time, and known the second."""
    func, arguments = COMPOUND[name]
    monkeypatch.setattr(_fake_results, "_nested_cache", cache := {})
    num_known = []
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 1, 0)):
        found = []
        for mode in (FakeTensorMode(), *(new_mode(_fake_results.run_nested) for _ in range(2))):
            with mode:
                args = arguments(torch.empty_permuted((2, 4, 3, 4), order))
                found.append(looks(func(*args), tensors_in(args)))
            num_known.append(len(cache))
        assert found[0] == found[1] == found[2]
    assert num_known[1] > 3
    assert num_known[1::3] == num_known[2::3]  # the second time all are known


def test_new_ones_are_as_torchs_own_and_let_their_mode_die():
    mode, cpu = FakeTensorMode(), torch.device("cpu")
    first, second = (make_fake(mode, torch.empty(2, device="meta"), cpu) for _ in range(2))
    own = FakeTensor(mode, torch.empty(2, device="meta"), cpu)
    assert vars(first) == vars(second) == vars(own)
    assert second.device == own.device == cpu
    assert second._has_symbolic_sizes_strides == own._has_symbolic_sizes_strides
    held = weakref.ref(mode)
    del mode, first, second, own
    gc.collect()
    assert held() is None
