"""Everything autograd can do with a saved tensor, it can do with one that has left.

Each `@case` runs without Penstock and under `policy="all", min_bytes="0B"`, and must give the same
values, bit for bit, or the same error. The cases cover the ground of PyTorch's own autograd tests.
They run twice: "at once", where a backward pass mostly finds the bytes still in memory, and
"written", where every save waits for its write, so that the bytes are read from the file.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch

import penstock
from _cases import CASES, assert_same, outcome_of
from _waiting import wait_until_written

FAMILIES = ("functions", "hooks", "views", "tensors", "passes", "modes", "checkpoints")

for _family in FAMILIES:
    importlib.import_module(f"_cases_of_{_family}")  # puts its cases into the table

NOT_WRITTEN = {
    "other_hooks_inside": "the innermost hooks have what is saved",
    "save_on_cpu_inside": "the innermost hooks have what is saved",
    "mutation_of_saved_tensors_is_allowed": "the innermost hooks have what is saved",
    "in_place_change_of_a_tensor_without_history": "leaves some saves later",
    "function_that_computes_its_gradients_in_forward": "leaves some saves later",
    "tensor_saved_before_and_after_a_change_that_no_counter_sees": "leaves some saves later",
}
"""The cases whose bytes stay in memory."""


@pytest.fixture(params=["at once", "written"])
def timing(request, everything, monkeypatch):
    """When bytes leave: alongside, or before the computation goes on."""
    engine = everything._engine
    save = engine.save

    def save_and_wait(*args: Any, **kwargs: Any) -> Any:
        handle = save(*args, **kwargs)
        wait_until_written(everything)
        return handle

    if request.param == "written":
        monkeypatch.setattr(engine, "save", save_and_wait)
    return request.param


@functools.cache
def stock_outcome_of(name: str) -> Any:
    """What a case gives without Penstock."""
    torch.manual_seed(0)
    return outcome_of(CASES[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_as_in_stock(name, everything, timing):
    expected = stock_outcome_of(name)
    before = everything.report()
    torch.manual_seed(0)
    with everything:
        found = outcome_of(CASES[name])
    assert_same(found, expected)
    after = everything.report()
    if name not in NOT_WRITTEN:
        assert after.num_saved > before.num_saved
        assert timing == "at once" or after.bytes_written > before.bytes_written


@pytest.fixture(scope="module", params=[None, "256B"], ids=["small stays", "small is packed"])
def of_small(request, language, real_disk):
    """An Offload whose `min_bytes` is above all that is saved here."""
    offload = penstock.offload(real_disk, device_memory=request.param)
    assert offload.report().hooks == language
    yield offload
    offload.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_as_in_stock_below_min_bytes(name, of_small):
    expected = stock_outcome_of(name)
    torch.manual_seed(0)
    with of_small:
        found = outcome_of(CASES[name])
    assert_same(found, expected)
