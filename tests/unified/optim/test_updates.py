"""Steps on rows by C++ and by torch: the same results, whatever the number of threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.unified.optim import _updates
from penstock.unified.optim._updates import (
    AdagradStep,
    AdamStep,
    RowGroups,
    RowStep,
    SgdStep,
    group_rows,
    state_dtype,
    update_rows,
)

pytestmark = pytest.mark.usefixtures("one_thread")  # but where a test sets the number

SHARED = {"lr": 0.1, "count": 1}
STEPS: dict[str, tuple[RowStep, int]] = {  # and the number of states
    "sgd": (
        SgdStep(**SHARED, weight_decay=0, maximize=False, momentum=0, dampening=0, nesterov=False),
        0,
    ),
    "sgd, damped": (
        SgdStep(
            **SHARED, weight_decay=0.1, maximize=True, momentum=0.9, dampening=0.3, nesterov=False
        ),
        1,
    ),
    "sgd, nesterov": (
        SgdStep(**SHARED, weight_decay=0, maximize=False, momentum=0.8, dampening=0, nesterov=True),
        1,
    ),
    "adagrad": (AdagradStep(**SHARED, weight_decay=0, maximize=False, lr_decay=0.1, eps=1e-10), 1),
    "adagrad, decay": (
        AdagradStep(**SHARED, weight_decay=0.1, maximize=True, lr_decay=0, eps=1e-3),
        1,
    ),
    "adam": (
        AdamStep(
            **SHARED, weight_decay=0, maximize=False, betas=(0.9, 0.999), eps=1e-8, amsgrad=False
        ),
        2,
    ),
    "adam, amsgrad": (
        AdamStep(
            **SHARED, weight_decay=0.1, maximize=True, betas=(0.3, 0.9), eps=1e-6, amsgrad=True
        ),
        3,
    ),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.fixture(params=["cpp", "torch"])
def backend(request, monkeypatch):
    """Both ways; the first one skips nothing, because the tests need a compiler anyway."""
    if request.param == "torch":
        monkeypatch.setattr(_updates, "_library", lambda: None)
    assert _updates.backend() == request.param
    return request.param


@pytest.fixture(params=[1, 2, 5])
def num_threads(request):
    """So many threads of torch, during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def several_steps(
    step: RowStep, num_states: int, *, dtype: torch.dtype, width: int, num_indices: int = 900
) -> list[torch.Tensor]:
    """The table and its states after five steps with random gradients."""
    random = torch.Generator().manual_seed(1)
    table = torch.randn(300, width, generator=random).to(dtype)
    states = [torch.zeros(300, width, dtype=state_dtype(dtype)) for _ in range(num_states)]
    for count in range(1, 6):
        index = torch.randint(0, 300, (num_indices,), generator=random)
        gradients = torch.randn(num_indices, width, generator=random).to(dtype)
        groups = group_rows(index, 300)
        update_rows(dataclasses.replace(step, count=count), groups, gradients, table, states)
    return [table, *states]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 37, 130])
@pytest.mark.parametrize("name", STEPS)
def test_cpp_and_torch_agree(name, dtype, width, monkeypatch):
    step, num_states = STEPS[name]
    ours = several_steps(step, num_states, dtype=dtype, width=width)
    monkeypatch.setattr(_updates, "_library", lambda: None)
    theirs = several_steps(step, num_states, dtype=dtype, width=width)
    # Not bit by bit with a square root: torch's, from MKL, is not always rounded right. A row may
    # then round to the neighbouring number of its dtype.
    eps = torch.finfo(dtype).eps
    exact = name.startswith("sgd") and not dtype.is_complex and torch_fuses()
    for mine, other in zip(ours, theirs, strict=True):
        if exact:
            assert torch.equal(mine, other)
        else:
            assert torch.allclose(mine, other, rtol=4 * eps, atol=4 * eps)


def torch_fuses() -> bool:
    """Whether torch's kernels multiply and add with one rounding on this processor."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_the_number_of_threads_changes_no_bit(name, dtype, num_threads):
    step, num_states = STEPS[name]
    found = several_steps(step, num_states, dtype=dtype, width=130, num_indices=1500)
    torch.set_num_threads(1)
    expected = several_steps(step, num_states, dtype=dtype, width=130, num_indices=1500)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_row_with_most_of_the_gradients(backend, num_threads):
    """Shares of the threads are empty then; the order of the sum is that of the positions."""
    index = torch.full((5000,), 7)
    index[[10, 400, 4999]] = torch.tensor([3, 99, 0])
    gradients = torch.randn(5000, 40)
    table = torch.zeros(100, 40)
    step = dataclasses.replace(STEPS["sgd"][0], lr=1.0)
    update_rows(step, group_rows(index, 100), gradients, table, [])
    for row, positions in [(7, (index == 7).nonzero().flatten()), (3, [10]), (0, [4999])]:
        total = gradients[int(positions[0])].clone()
        for position in positions[1:]:
            total += gradients[int(position)]
        assert torch.equal(table[row], -total)
    assert table.count_nonzero(dim=1).bool().sum() == 4


# ------------------------------------------------------------------------ groups


@given(
    rows=st.lists(st.integers(0, 30), max_size=80),
    spread=st.sampled_from([1, 100, 2**11, 2**22, 2**40, 2**57]),
)
def test_groups_are_the_positions_of_each_row(rows, spread):
    index = torch.tensor(rows, dtype=torch.int64) * spread
    groups = group_rows(index, 30 * spread + 1)
    assert groups.rows.tolist() == sorted({row * spread for row in rows})
    assert groups.starts[0] == 0 and groups.starts[-1] == len(rows)
    for number, row in enumerate(groups.rows.tolist()):
        mine = groups.order[groups.starts[number] : groups.starts[number + 1]].tolist()
        assert mine == [at for at, each in enumerate(rows) if each * spread == row]


def test_groups_by_cpp_and_by_torch(monkeypatch):
    index = torch.randint(0, 5000, (20_000,))
    found = group_rows(index, 5000)
    monkeypatch.setattr(_updates, "_library", lambda: None)
    expected = group_rows(index, 5000)
    for field in dataclasses.fields(RowGroups):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name))


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_an_index_out_of_range_is_named(backend, wrong):
    with pytest.raises(IndexError, match=rf"index\[2\] is {wrong}, but the table has 5 rows"):
        group_rows(torch.tensor([0, 4, wrong, 9]), 5)


# ----------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers_are_widened_and_rounded_as_torch_does(dtype):
    """All of them, times a factor that makes every kind of rounding happen."""
    numbers = torch.arange(2**16).to(torch.uint16).view(dtype).view(-1, 64)
    table = torch.zeros_like(numbers)
    step = dataclasses.replace(STEPS["sgd"][0], lr=-0.7)
    rows = torch.arange(len(table))
    update_rows(step, group_rows(rows, len(table)), numbers, table, [])
    expected = torch.zeros_like(numbers, dtype=torch.float32)
    expected = expected.add(numbers.float(), alpha=0.7).to(dtype)
    assert torch.equal(table.isnan(), expected.isnan())
    assert torch.equal(table.nan_to_num(), expected.nan_to_num())
    assert torch.equal(table.isinf(), expected.isinf()) and table.isinf().any()


def test_the_state_of_narrow_tables_counts_what_is_less_than_a_digit():
    """A mean with beta2 = 0.999 in bfloat16 would never move."""
    table, states = torch.zeros(1, 4, dtype=torch.bfloat16), [torch.ones(1, 4), torch.ones(1, 4)]
    groups = group_rows(torch.tensor([0]), 1)
    update_rows(STEPS["adam"][0], groups, torch.zeros_like(table), table, states)
    assert torch.allclose(states[1], torch.full((1, 4), 0.999))


@pytest.mark.parametrize("name", STEPS)
def test_what_is_not_finite_spreads_as_in_torch(name, monkeypatch):
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, 1e-45])
    step, num_states = STEPS[name]
    results = []
    for library in (_updates._library, lambda: None):
        monkeypatch.setattr(_updates, "_library", library)
        table = special.repeat(7, 1)
        states = [torch.zeros(7, 7) for _ in range(num_states)]
        for count in (1, 2):
            gradients = special[:, None].repeat(1, 7)
            groups = group_rows(torch.arange(7), 7)
            step = dataclasses.replace(step, count=count)
            update_rows(step, groups, gradients, table, states)
        results.append([table, *states])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.allclose(found.nan_to_num(), expected.nan_to_num(), rtol=1e-6)


# ------------------------------------------------------------------------ shapes


def test_gradients_at_any_distance(backend):
    table, groups = torch.zeros(4, 3), group_rows(torch.tensor([2, 0, 2]), 4)
    step = dataclasses.replace(STEPS["sgd"][0], lr=-1.0)
    expected = torch.tensor([[1.0] * 3, [0.0] * 3, [2.0] * 3, [0.0] * 3])
    wide = torch.ones(3, 9)
    for gradients in (
        torch.ones(1, 1).expand(3, 3),
        wide[:, 2:5],
        wide[:, ::4],
        torch._neg_view(-wide[:, :3]),
    ):
        update_rows(step, groups, gradients, table.zero_(), [])
        assert torch.equal(table, expected)


def test_rows_that_were_gathered(backend):
    """Row k of what is given is row `rows[k]` of the table."""
    step, _ = STEPS["adam"]
    index, gradients = torch.tensor([5, 2, 5]), torch.randn(3, 6)
    table, states = torch.randn(8, 6), [torch.rand(8, 6), torch.rand(8, 6)]
    groups = group_rows(index, 8)
    gathered = [each[groups.rows].clone() for each in (table, *states)]
    update_rows(step, groups, gradients, gathered[0], gathered[1:], gathered=True)
    update_rows(step, groups, gradients, table, states)
    assert all(
        torch.equal(part, each[groups.rows])
        for part, each in zip(gathered, (table, *states), strict=True)
    )


@pytest.mark.parametrize("shape", [(3, 0), (3, 2, 0), (0, 2), (3,), (3, 2, 4)])
def test_rows_of_any_shape_and_none(backend, shape):
    table = torch.zeros(shape)
    index = torch.arange(shape[0]).repeat(2)
    step = dataclasses.replace(STEPS["sgd"][0], lr=-1.0)
    update_rows(step, group_rows(index, shape[0]), torch.ones(len(index), *shape[1:]), table, [])
    assert torch.equal(table, torch.full(shape, 2.0))
    update_rows(step, group_rows(index[:0], shape[0]), torch.ones(0, *shape[1:]), table, [])
    assert torch.equal(table, torch.full(shape, 2.0))


def test_without_a_compiler_it_is_torch_and_said_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    _updates._library.cache_clear()
    with caplog.at_level("INFO", logger="penstock"):
        assert [_updates.backend(), _updates.backend()] == ["torch", "torch"]
    _updates._library.cache_clear()
    assert len([each for each in caplog.records if "updated by torch" in each.message]) == 1
