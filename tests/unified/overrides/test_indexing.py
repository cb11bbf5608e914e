"""What may stand between the brackets of a table: as PyTorch has it, in memory and in a file."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from torch.nn import functional

from penstock.errors import WholeTableError
from penstock.unified import empty, optim, unify
from penstock.unified.host import table as host_table

ROWS = torch.tensor([3, 1, 3, -1])
MASK = torch.arange(12) % 3 == 0

# What chooses whole rows, or a part of each.
KEYS = {
    "number": 5,
    "number below zero": -1,
    "number of NumPy's": np.int64(3),
    "scalar": torch.tensor(3),
    "scalar of NumPy's": np.array(3),
    "slice": slice(2, 7),
    "slice with steps": slice(-5, None, 2),
    "slice of nothing": slice(7, 2),
    "list": [1, 2, -1],
    "empty list": [],
    "range": range(3),
    "list of bool": MASK.tolist(),
    "array": np.array([1, 5, -2], dtype=np.int32),
    "unsigned array": np.array([1, 5], dtype=np.uint16),
    "mask of NumPy's": MASK.numpy(),
    "mask": MASK,
    "mask of old": MASK.byte(),
    "matrix": ROWS.view(2, 2),
    "one in a tuple": (ROWS,),
    "columns of rows": (ROWS, slice(1, 3)),
    "column of rows": (ROWS, 1),
    "column of a matrix of rows": (ROWS.view(2, 2), None, 2),
    "columns of a mask": (MASK, slice(1, 3)),
    "last column of rows": (ROWS, ..., -1),
    "one after a slice": (ROWS, slice(None), 1),
    "columns of a list": ([1, 2], slice(1, 3)),
    "element": (5, 2, 1),
    "columns of a slice": (slice(2, 5), 1),
    "element by numbers of other kinds": (5, np.int64(2), torch.tensor(1)),
    "column of rows by a number of NumPy's": (ROWS, np.int32(1)),
    "column of a slice by a scalar": (slice(2, 5), torch.tensor(1)),
}

# What PyTorch gives to those in memory, and what would need all of one in a file.
WHOLE = {
    "everything": slice(None),
    "dots": ...,
    "column": (..., 0),
    "elements": (ROWS, torch.tensor([0, 1, 2, 0])),
    "mask of elements": torch.ones(12, 4, 2) > 0,
    "new dimension": None,
    "mask of everything, of old": torch.tensor(2, dtype=torch.uint8),
    "elements of a slice": (slice(2, 5), torch.tensor([0, 1])),
    "rows in a nested tuple": ((0, 1),),
}


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    """A table with some content, and the content."""

    def made(*, requires_grad=False):
        content = torch.arange(12 * 4 * 2, dtype=torch.float32).view(12, 4, 2)
        if request.param == "memory":
            return unify(content, requires_grad=requires_grad), content
        np.save(tmp_path / "table.npy", content.numpy())
        return unify(tmp_path / "table.npy", requires_grad=requires_grad), content

    return made


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_rows_are_those_of_torch_with_sparse_gradients(key, make):
    table, content = make()
    assert torch.equal(table[key], content[key])
    table, content = make(requires_grad=True)
    content.requires_grad_()
    (table[key] * 2).sum().backward()
    (content[key] * 2).sum().backward()
    assert table.grad.layout == torch.sparse_coo
    assert torch.equal(table.grad.to_dense(), content.grad)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("key", WHOLE.values(), ids=WHOLE)
def test_what_does_not_choose_rows_is_for_torch(key, make):
    table, content = make()
    in_file = table.report().tier == "file"
    refused = pytest.raises((WholeTableError, IndexError), match=r"whole table|are chosen first")
    with refused if in_file else contextlib.nullcontext():
        assert torch.equal(table[key], content[key])
    with refused if in_file else contextlib.nullcontext():
        assert torch.equal(make(requires_grad=True)[0][key], content[key])


def test_parts_of_a_slice_that_are_not_read_are_not_said_to_be_the_whole_table(tmp_path):
    table = empty((12, 4), path=tmp_path / "table")
    for key in ((slice(2, 5), torch.tensor([0, 1])), ((0, 1),)):
        with pytest.raises(IndexError, match="are chosen first"):
            table[key]


@pytest.mark.parametrize("key", [12, [25], (ROWS, 4), MASK[:7]], ids=str)
def test_what_is_out_of_range_is_an_index_error(key, make):
    table, _ = make()
    with pytest.raises(IndexError):
        table[key]


@pytest.mark.parametrize("key", [KEYS[name] for name in KEYS if name != "mask of old"], ids=str)
def test_rows_are_written_as_torch_writes_them(key, make):
    for value in (7.0, "rows"):
        table, content = make()
        new = -torch.ones_like(content[key]) if value == "rows" else value
        table[key] = new
        content[key] = new
        assert torch.equal(table[torch.arange(12)], content)


def test_a_write_that_is_wrong_changes_nothing(make):
    table, content = make()
    for key, value in (([1, 2], torch.ones(3, 4, 2)), ([25], 0.0), ((ROWS, 9), 1.0)):
        with pytest.raises((RuntimeError, IndexError)):
            table[key] = value
    assert torch.equal(table[torch.arange(12)], content)


def test_a_write_that_would_lose_a_part_of_the_value_is_refused(make):
    table, content = make()
    for value in (torch.ones(2, 4, 2) + 2j, (torch.ones(2, 4, 2) + 2j).numpy()):
        if isinstance(value, torch.Tensor) or table.report().tier == "file":
            with pytest.raises(TypeError, match=r"float32, which does not hold torch\.complex64"):
                table[[1, 2]] = value
    whole = unify(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"convert it first: value\.to\(torch\.int64\)"):
        whole[[0]] = torch.full((1, 2), 2.7)
    assert torch.equal(table[torch.arange(12)], content) and not whole.any()
    table[[1, 2]] = torch.full((1, 1, 2, 4, 2), 2.5, dtype=torch.float64)
    content[[1, 2]] = 2.5
    assert torch.equal(table[torch.arange(12)], content)


def test_a_write_of_all_rows_of_a_file_at_once_says_what_to_do(tmp_path):
    table = empty((4, 2), path=tmp_path / "table")
    with pytest.raises(WholeTableError, match="write them in blocks"):
        table[:] = 1.0
    with pytest.raises(WholeTableError, match=r"fill_ would write.*penstock.unified.optim"):
        table.fill_(1.0)
    table.requires_grad_()
    with pytest.raises(RuntimeError, match="no_grad"):
        table[[1]] = 1.0


WRITES = {
    "zero": lambda u: u[2].zero_(),
    "fill": lambda u: u[1:4].fill_(7.0),
    "copy": lambda u: u[-1].copy_(torch.zeros(4, 2)),
    "element": lambda u: u[2].__setitem__(0, 9.0),
    "view": lambda u: u[1:4][0].view(-1).mul_(2),
    "data": lambda u: u[2].data.add_(1),
    "one of several": lambda u: u[1:4].unbind()[1].add_(1),
    "list": lambda u: torch._foreach_add_([u[2]], 1.0),
    "out": lambda u: torch.add(u[2], 1, out=u[3]),
    "initialisation": lambda u: torch.nn.init.uniform_(u[2:4], 5, 6),
    "padding": lambda u: torch.nn.Embedding(
        12, 4, padding_idx=1, _weight=u
    )._fill_padding_idx_with_zero(),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_views_of_rows_are_made_or_refused(write, mode, tmp_path):
    content = torch.arange(48.0).view(12, 4)
    content = content.view(12, 4, 1).expand(12, 4, 2).contiguous()
    if write is WRITES["padding"]:
        content = content[..., 0].contiguous()
    np.save(tmp_path / "table.npy", content.numpy())
    table = unify(content)
    with mode():
        write(table)
        assert not torch.equal(table[torch.arange(12)], content)
        with pytest.raises(RuntimeError, match=r"in place, but they are a copy.*write u\[key\]"):
            write(unify(tmp_path / "table.npy"))


@pytest.mark.parametrize("write", [WRITES[name] for name in ("zero", "fill", "view", "list")])
def test_writes_to_rows_of_a_table_with_gradients_are_refused_as_by_torch(write, make):
    table, content = make(requires_grad=True)
    with pytest.raises(RuntimeError, match="in-place"):
        write(content.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="in place, but they are a copy"):
        write(table)
    (table[2].view(-1).square().sum() + table[1:4].sum()).backward()
    expected = torch.zeros(12, 4, 2)
    expected[2], expected[1:4] = 2 * content[2], expected[1:4] + 1
    expected[2] += 2 * content[2]
    assert torch.equal(table.grad.to_dense(), expected)


@pytest.mark.parametrize(
    "read",
    [
        lambda u, i: torch.vmap(lambda row: u[row])(i),
        lambda u, i: torch.vmap(lambda rows: functional.embedding(rows, u))(i[:, None]),
        lambda u, i: torch.func.grad(lambda w: (u[i] * w).sum())(torch.ones(2)),
    ],
)
def test_transforms_do_not_see_gathers(read, make):
    for requires_grad in (False, True):
        table, _ = make(requires_grad=requires_grad)
        with pytest.raises(RuntimeError, match="gather them before the transform"):
            read(table, torch.tensor([1, 2]))


def test_rows_that_torch_has_as_views_are_read_as_others_are(make):
    table, content = make(requires_grad=True)
    with torch.no_grad():
        table[2] += 1
        table[3:5] *= 2
        content[2] += 1
        content[3:5] *= 2
    assert torch.equal(table.detach()[torch.arange(12)], content)
    row = table.detach()[2]
    assert type(row * 2) is type(row.clone()) is type(torch.stack([row, row])) is torch.Tensor
    assert repr(row) == repr(content[2])
    assert type(pickle.loads(pickle.dumps(row))) is type(copy.deepcopy(row)) is torch.Tensor
    row.requires_grad_()
    row.square().sum().backward()
    assert torch.equal(row.grad, 2 * content[2])


def test_a_shallow_copy_is_the_same_table(make):
    table, content = make(requires_grad=True)
    other = copy.copy(table)
    assert other.requires_grad
    with torch.no_grad():
        other[[2]] = 9.0
    content[2] = 9.0
    assert torch.equal(table.detach()[torch.arange(12)], content)


BAGS = {
    "matrix": {"input": torch.tensor([[1, 2], [3, 3], [2, 0]])},
    "offsets": {"input": torch.tensor([1, 2, 4, 3, 1]), "offsets": torch.tensor([0, 2, 2])},
    "last offset": {
        "input": torch.tensor([1, 2, 4]),
        "offsets": torch.tensor([0, 1, 3]),
        "include_last_offset": True,
    },
    "padding": {"input": torch.tensor([[1, 2], [3, 3]]), "padding_idx": 2},
    "padding that does not occur": {"input": torch.tensor([[1, 2], [3, 3]]), "padding_idx": -1},
}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", BAGS.values(), ids=BAGS)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_bags_are_those_of_torch_with_sparse_gradients(options, mode, kind, tmp_path):
    plain = torch.randn(12, 6, requires_grad=True)
    np.save(tmp_path / "table.npy", plain.detach().numpy())
    table = unify(plain if kind == "memory" else tmp_path / "table.npy", requires_grad=True)
    expected = functional.embedding_bag(weight=plain, mode=mode, **options)
    found = functional.embedding_bag(weight=table, mode=mode, **options)
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert table.grad.layout == torch.sparse_coo
    torch.testing.assert_close(table.grad.to_dense(), plain.grad)


@pytest.mark.parametrize("padding", [6, -7])
def test_padding_of_no_row_is_refused(padding):
    for requires_grad in (False, True):
        table = unify(torch.ones(6, 2), requires_grad=requires_grad)
        with pytest.raises(ValueError, match=f"padding_idx={padding}.*from -6 to 5"):
            functional.embedding(torch.tensor([1]), table, padding_idx=padding)
        with pytest.raises((ValueError, RuntimeError), match="padding_idx"):
            functional.embedding_bag(torch.tensor([[1]]), table, padding_idx=padding)


def test_maxima_whose_gradients_would_be_scaled_are_refused():
    table, bags = unify(torch.ones(6, 2), requires_grad=True), torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="max mode does not support scaling"):
        functional.embedding_bag(bags, table, mode="max", scale_grad_by_freq=True)


def test_bags_with_weights_train_a_table_in_a_file(tmp_path):
    table = empty((12, 3), path=tmp_path / "table", requires_grad=True)
    weights = torch.tensor([[1.0, 2.0]])
    bags = functional.embedding_bag(
        torch.tensor([[5, 7]]), table, mode="sum", per_sample_weights=weights
    )
    bags.sum().backward()
    optim.SGD([table], lr=1.0).step()
    assert torch.equal(table.detach()[[5, 7, 0]][:, 0], torch.tensor([-1.0, -2.0, 0.0]))


@pytest.mark.parametrize("index", [torch.tensor([3, 1]), [3, 1], torch.arange(10) < 2])
def test_an_index_passes_five_files_to_the_copy_loop(index, monkeypatch):
    """With the loop's own file, `host_rows.cpp`, the road that docs/unified.md shows."""
    library, road = host_table._library(), []
    if library is None:
        pytest.skip("there is no compiler")

    def read_rows(*arguments):
        frame = sys._getframe(1)
        while frame is not None:
            _, inside, path = frame.f_code.co_filename.partition("/penstock/unified/")
            road.extend([path] if inside and path not in road else [])
            frame = frame.f_back
        return library.penstock_read_rows(*arguments)

    monkeypatch.setattr(
        host_table, "_library", lambda: types.SimpleNamespace(penstock_read_rows=read_rows)
    )
    assert unify(torch.randn(10, 4))[index].shape == (2, 4)
    names = ("host/table", "overrides/gather", "overrides/_indexing", "overrides/registry")
    assert road == [f"{name}.py" for name in (*names, "_tensor")]
