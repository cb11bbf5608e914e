"""Uses of tables that are refused, or that mean less than they seem to; the error says which."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.compat.fake_tensors import FakeTensorMode
from penstock.errors import StoreUnavailableError
from penstock.unified import unify


def test_data_is_not_replaced_and_does_not_replace(tmp_path):
    """A tensor that took the memory of a table in a file would read from address zero."""
    table = unify(torch.rand(10, 4)).save_rows(tmp_path / "x.npy")
    module = torch.nn.Embedding(10, 4)
    for target in (module.weight, torch.zeros(10, 4)):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            target.data = table
    for each in (table, unify(torch.rand(10, 4))):
        with pytest.raises(TypeError, match=r"u\.data = x: a table keeps its memory or its file"):
            each.data = torch.zeros(10, 4)
    assert module(torch.tensor([1])).shape == (1, 4)
    assert table.device.type == "cpu" and not table.is_meta and table.is_cpu
    assert table.layout == torch.strided


def test_new_tensors_beside_a_table_are_plain_ones(tmp_path):
    """Loaders of batches make them in memory that processes share."""
    for table in (unify(torch.rand(10, 4)), unify(torch.rand(10, 4)).save_rows(tmp_path / "x.npy")):
        shared = table.new(table.untyped_storage()._new_shared(32)).view(2, 4)
        assert shared.is_shared() and shared.device.type == "cpu"
        made = (table.new_zeros(3), table.new_ones(3) - 1, table.new_full((3,), 0.0))
        made += (table.new_tensor([0.0, 0.0, 0.0]), table.new_empty(3).zero_())
        for each in made:
            assert type(each) is torch.Tensor and torch.equal(each, torch.zeros(3))


def test_saving_a_table_in_a_file_says_that_its_rows_are_not_saved(tmp_path):
    table = unify(torch.rand(10, 4)).save_rows(tmp_path / "x.npy")
    with pytest.warns(UserWarning, match=r"not its rows; .* table\.save_rows\(path\) saves them"):
        torch.save({"u": table}, tmp_path / "u.pt")
    best = table.save_rows(tmp_path / "best")
    kept = best[torch.arange(10)]
    table[[3]] = 7.0
    assert (torch.load(tmp_path / "u.pt")["u"][3] == 7).all()
    assert torch.equal(unify(tmp_path / "best")[torch.arange(9)], kept[:9])
    with pytest.raises(StoreUnavailableError, match="exists"):
        table.save_rows(tmp_path / "best")


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 1.0},
        {"scale_grad_by_freq": True},
        {"max_norm": 2.0, "norm_type": 1.0, "scale_grad_by_freq": True, "padding_idx": 3},
    ],
)
def test_embeddings_with_a_norm_or_frequencies_are_as_in_torch(tmp_path, where, options):
    start = 3 * torch.randn(20, 6)
    table = unify(start)
    if where == "file":
        table = table.save_rows(tmp_path / "x.npy")
    table.requires_grad_()
    plain = start.clone().requires_grad_()
    index = torch.tensor([[1, 2, 2], [3, 9, 1]])
    rows, expected = (functional.embedding(index, each, **options) for each in (table, plain))
    assert torch.equal(rows, expected)
    gradient = torch.randn_like(rows)
    rows.backward(gradient)
    expected.backward(gradient)
    assert table.grad.layout == torch.sparse_coo
    torch.testing.assert_close(table.grad.to_dense(), plain.grad)
    assert torch.equal(table.detach()[torch.arange(19)], plain.detach()[:19])
    if "scale_grad_by_freq" not in options:
        bags = [functional.embedding_bag(index, each, **options) for each in (table, plain)]
        torch.testing.assert_close(*bags)


def test_keys_that_choose_no_rows_are_named(tmp_path):
    table = unify(torch.rand(10, 4)).save_rows(tmp_path / "x.npy")
    numbers = torch.tensor([1, 2])
    for key in ([[1, 2], [3, 4]], (numbers, numbers), torch.tensor([1.0])):
        with pytest.raises(IndexError, match="rows of a table in a file are chosen first"):
            table[key]
        with pytest.raises(IndexError, match="rows of a table in a file are chosen first"):
            table[key] = 1.0
    assert torch.equal(table[numbers.to(torch.uint16)], table[numbers])


def test_rows_without_bytes_count_from_the_end():
    table = unify(torch.empty(5, 0))
    assert table[torch.tensor([-1])].shape == (1, 0)
    with pytest.raises(IndexError, match="is -1, but the table has 5 rows"):
        table.gather_rows(torch.tensor([-1]))


def _gather_within_functions(table: torch.Tensor) -> None:
    functional.embedding(torch.tensor([1]), table)


def _gather_by_numbers_of_before(table: torch.Tensor) -> None:
    table.gather_rows(_NUMBERS)  # type: ignore[attr-defined]


def _gather_beside_other_work(table: torch.Tensor) -> None:
    table.gather_rows_async(torch.tensor([1])).wait()  # type: ignore[attr-defined]


def _write(table: torch.Tensor) -> None:
    table[torch.tensor([1])] = torch.zeros(1, 4)


def _add(table: torch.Tensor) -> None:
    table.index_add_(0, _NUMBERS, torch.zeros(2, 4))


_NUMBERS = torch.tensor([1, 2])


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize(
    "use",
    [
        _gather_within_functions,
        _gather_by_numbers_of_before,
        _gather_beside_other_work,
        _write,
        _add,
    ],
)
def test_captured_steps_are_refused_before_an_address_is_followed(tmp_path, where, use):
    """Fake tensors have no memory: their address is zero."""
    table = unify(torch.rand(10, 4))
    if where == "file":
        table = table.save_rows(tmp_path / "x.npy")
    with FakeTensorMode(), pytest.raises(RuntimeError, match="gather them before the step"):
        use(table)
