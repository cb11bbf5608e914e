"""A table behaves as the tensor that it was made from, apart from its overrides."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.compat.fake_tensors import FakeTensorMode
from penstock.errors import CapacityError, WholeTableError
from penstock.unified import UnifiedTensor, empty, unify
from penstock.unified.host import memory as host_memory
from penstock.unified.overrides.registry import OVERRIDES


@pytest.fixture
def source() -> torch.Tensor:
    return torch.randn(50, 6)


@pytest.fixture
def gathered(monkeypatch) -> list[int]:
    """How many rows each gather of Penstock's copied."""
    from penstock.unified.host.table import HostTable

    counts, read_rows = [], HostTable.read_rows

    def count(self, index, out, *, negative):
        counts.append(index.numel())
        read_rows(self, index, out, negative=negative)

    monkeypatch.setattr(HostTable, "read_rows", count)
    return counts


def index_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape)


READS = {
    "u[index]": (lambda u: u[index_of(20)], 20),
    "u[2d index]": (lambda u: u[index_of(4, 5)], 20),
    "u[negative]": (lambda u: u[torch.tensor([-1, -50, 3])], 3),
    "u[int32]": (lambda u: u[index_of(9).int()], 9),
    "u[list]": (lambda u: u[[4, 0, -2]], 3),
    "u[array]": (lambda u: u[np.array([4, 0, -2])], 3),
    "u[mask]": (lambda u: u[torch.arange(50) % 5 == 0], 10),
    "u[empty]": (lambda u: u[torch.empty(0, dtype=torch.int64)], 0),
    "index_select": (lambda u: u.index_select(0, index_of(20)), 20),
    "torch.index_select": (lambda u: torch.index_select(u, 0, index_of(20)), 20),
    "index_select(-2)": (lambda u: u.index_select(-2, index_of(20)), 20),
    "F.embedding": (lambda u: functional.embedding(index_of(4, 5), u), 20),
    "nn.Embedding": (lambda u: nn.Embedding.from_pretrained(u)(index_of(4, 5)), 20),
    "u[5]": (lambda u: u[5], None),
    "u[2:7]": (lambda u: u[2:7], None),
    "u[index, 2]": (lambda u: u[index_of(20), 2], None),
    "u[None]": (lambda u: u[None], None),
    "u[..., 1]": (lambda u: u[..., 1], None),
    "u[2d mask]": (lambda u: u[u > 0], None),
    "index_select(1)": (lambda u: u.index_select(1, torch.tensor([0, 2])), None),
    "take_along_dim": (lambda u: torch.take_along_dim(u, index_of(3, 6), 0), None),
    "gather": (lambda u: u.gather(0, index_of(3, 6)), None),
    "arithmetic": (lambda u: 2 * u + u / 3 - torch.ones(6), None),
    "matmul": (lambda u: u @ torch.ones(6, 2), None),
    "linear": (lambda u: functional.linear(u, torch.ones(2, 6)), None),
    "sum": (lambda u: u.sum(0), None),
    "cat": (lambda u: torch.cat([u, torch.ones(1, 6)]), None),
    "cpu": (lambda u: u.cpu(), None),
    "numpy": (lambda u: torch.from_numpy(u.numpy()), None),
    "tolist": (lambda u: torch.tensor(u.tolist()), None),
}


@pytest.mark.parametrize("name", READS)
def test_reads_as_of_the_source(name, source, gathered):
    read, num_rows = READS[name]
    torch.manual_seed(1)
    expected = read(source)
    torch.manual_seed(1)
    found = read(unify(source))
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype and found.stride() == expected.stride()
    assert gathered == ([] if num_rows is None else [num_rows])


def test_what_it_looks_like(source):
    u = unify(source)
    assert isinstance(u, UnifiedTensor) and isinstance(u, torch.Tensor)
    assert (len(u), u.shape, u.dtype, u.dim(), u.numel()) == (50, (50, 6), torch.float32, 2, 300)
    assert u.device.type == "cpu" and u.is_contiguous() and u.is_leaf
    assert u.data_ptr() % 4096 == 0
    assert repr(u) == "UnifiedTensor(shape=(50, 6), dtype=torch.float32, device='cpu')"
    assert u.contiguous() is u and u.pin_memory() is u
    assert u.to("cpu") is u and u.to(torch.float32) is u and u.float() is u
    assert u.cpu().data_ptr() == u.data_ptr()
    assert np.array_equal(np.asarray(u), source.numpy())


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.numpy(),
        lambda t: t.t().contiguous().t(),
        lambda t: t.numpy()[::-1][::-1],
        lambda t: np.asfortranarray(t.numpy()),
        lambda t: t.repeat(1, 2)[:, :6],
        lambda t: t.numpy().astype(">f4"),
        lambda t: unify(t),
    ],
)
def test_sources_of_any_strides_are_copied_and_left_untouched(source, make):
    given = make(source)
    u = unify(given)
    assert torch.equal(u.cpu(), source) and u.is_contiguous()
    if not isinstance(given, UnifiedTensor):
        u.zero_()
        assert np.array_equal(np.asarray(given), source.numpy())


def test_a_read_only_array_can_be_a_source():
    array = np.arange(6.0).reshape(3, 2)
    array.flags.writeable = False
    assert torch.equal(unify(array).cpu(), torch.arange(6.0, dtype=torch.float64).view(3, 2))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ([1, 2], TypeError, "expected a tensor, a NumPy array or a path, got list"),
        (torch.tensor(1.0), ValueError, "got a scalar"),
        (torch.eye(3).to_sparse(), TypeError, "to_dense"),
        (np.array(["a"]), TypeError, "source: can't convert"),
        (np.float32(1.0), TypeError, "got float32"),
        (np.array(1.0), ValueError, "got a scalar"),
        (torch.empty(3, 2, device="meta"), TypeError, "on meta"),
        (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), TypeError, "a masked array has no numbers"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            TypeError,
            r"got a nested one; call torch\.nested\.to_padded_tensor\(source, 0\.0\) first",
        ),
    ],
)
def test_other_sources_are_refused(wrong, error, says):
    with pytest.raises(error, match=says):
        unify(wrong)


def test_no_table_is_made_of_fake_tensors():
    with FakeTensorMode():
        fake = torch.ones(3, 2)
        with pytest.raises(RuntimeError, match="make it outside of a FakeTensorMode"):
            empty((3, 2))
    with pytest.raises(RuntimeError, match="fake tensors have neither"):
        unify(fake)


def test_empty_is_zeroes_and_checks_its_shape():
    u = empty((3, 2), torch.int16)
    assert u.dtype == torch.int16 and not u.cpu().any()
    assert empty((0, 4)).shape == (0, 4) and empty([7]).shape == (7,)
    for wrong in [(), (-1, 2)]:
        with pytest.raises(ValueError, match="expected"):
            empty(wrong)


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        (5, None, "shape=5"),
        (None, None, "shape=None"),
        ((2.5, 3), None, "expected integers"),
        ((2, 3), "float32", "dtype='fl"),
        ((2, 3), torch.qint8, r"dtype=torch\.qint8: numbers without their scales"),
    ],
)
def test_empty_wants_integers_and_a_dtype_of_torch(shape, dtype, says):
    with pytest.raises(TypeError, match=says):
        empty(shape, dtype)


def test_a_table_that_was_made_in_inference_mode_is_written_elsewhere():
    with torch.inference_mode():
        u = unify(torch.zeros(5, 2))
        u[[1]] = torch.ones(1, 2)
    u.requires_grad_()
    u[torch.tensor([1, 2])].sum().backward()
    with torch.no_grad():
        u.index_add_(0, torch.tensor([1]), torch.ones(1, 2))
    assert u.detach()[:, 0].tolist() == [0, 2, 0, 0, 0]


def test_a_table_that_does_not_fit_says_what_to_do(monkeypatch):
    monkeypatch.setattr(host_memory, "advise", lambda *_: 12)
    with pytest.raises(CapacityError, match="does not fit into memory: Cannot allocate memory"):
        empty((1024, 1024))
    monkeypatch.undo()
    with pytest.raises(CapacityError, match=r"table of 4\.00 TiB does not fit .* are available"):
        empty((1 << 20, 1 << 20))


def test_gather_rows(source):
    u = unify(source)
    index = index_of(4, 5)
    assert torch.equal(u.gather_rows(index), source[index])
    out = torch.empty(4, 5, 6)
    assert u.gather_rows(index, out=out) is out and torch.equal(out, source[index])
    strided = torch.empty(4, 5, 12)[..., ::2]
    assert u.gather_rows(index, out=strided) is strided and torch.equal(strided, source[index])
    with pytest.raises(ValueError, match=r"out: expected shape \(4, 5, 6\), got \(20, 6\)"):
        u.gather_rows(index, out=torch.empty(20, 6))
    with pytest.raises(TypeError, match=r"out: expected torch.float32"):
        u.gather_rows(index, out=out.double())
    with pytest.raises(TypeError, match=r"expected a tensor of integers, got torch.float32"):
        u.gather_rows(torch.ones(3))
    with pytest.raises(IndexError, match=r"index\[1\] is -1, but the table has 50 rows"):
        u.gather_rows(torch.tensor([0, -1]))
    with pytest.raises(IndexError, match=r"index\[1\]\[0\] is 50, but the table has 50 rows"):
        u.gather_rows(torch.tensor([[0, 1], [50, 3]]))


@pytest.mark.parametrize(
    "read",
    [
        lambda u, i: u[i],
        lambda u, i: u.index_select(0, i),
        lambda u, i: functional.embedding(i, u),
        lambda u, i: u.gather_rows(i) if isinstance(u, UnifiedTensor) else u[i],
    ],
)
def test_gradients_are_sparse_and_right(source, read):
    u, dense = unify(source, requires_grad=True), source.clone().requires_grad_()
    index, weight = torch.tensor([3, 7, 3, 49]), torch.randn(4, 6)
    for table in (u, dense):
        ((read(table, index) * weight).sum() + read(table, index[:2]).square().sum()).backward()
    assert u.grad.layout == torch.sparse_coo and u.grad._nnz() <= 6
    assert torch.allclose(u.grad.to_dense(), dense.grad)


def test_padding_and_negative_indices_in_gradients(source):
    u, dense = unify(source, requires_grad=True), source.clone().requires_grad_()
    index = torch.tensor([3, 48, 3, 49])
    for table in (u, dense):
        functional.embedding(index, table, padding_idx=-1, sparse=True).sum().backward()
        table[torch.tensor([-50, -1])].sum().backward()
    assert torch.equal(u.grad.to_dense(), dense.grad.to_dense())


def test_second_order(source):
    u = unify(source.double(), requires_grad=True)
    index = torch.tensor([1, 2, 1])
    rows = u[index]
    (first,) = torch.autograd.grad(rows.pow(3).sum(), rows, create_graph=True)
    first.sum().backward()
    expected = torch.zeros_like(source.double())
    expected.index_add_(0, index, 6 * source.double()[index])
    assert torch.allclose(u.grad.to_dense(), expected)


def test_out_where_gradients_are_recorded_is_refused(source):
    u = unify(source, requires_grad=True)
    with pytest.raises(RuntimeError, match="records no gradient"):
        u.gather_rows(torch.tensor([1]), out=torch.empty(1, 6))
    with torch.no_grad():
        assert torch.equal(u.gather_rows(torch.tensor([1]), out=torch.empty(1, 6)), source[1:2])


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_autograd_sees_that_memory_for_rows_was_written(source, kind, tmp_path):
    u = unify(source) if kind == "memory" else unify(source).save_rows(tmp_path / "table")
    index, factor = torch.tensor([3, 1]), torch.ones(2, 6, requires_grad=True)
    for gather in (
        lambda out: u.gather_rows(index, out=out),
        lambda out: torch.index_select(u, 0, index, out=out),
    ):
        out = torch.empty(2, 6)
        loss = (gather(out) * factor).sum()
        gather(out)  # what the product has saved is not there any more
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"out: it requires a gradient.*out\.detach\(\)"):
            gather(out.requires_grad_())
        assert torch.equal(torch.index_select(u, 0, index, out=torch.empty(0)), source[index])
    with torch.inference_mode():
        out = torch.empty(2, 6)
        assert torch.equal(u.gather_rows(index, out=out), source[index])


def test_gather_rows_async(source):
    u = unify(source, requires_grad=True)
    batches = [index_of(4, 5) for _ in range(20)]
    pending = [u.gather_rows_async(index) for index in batches]
    for index, rows in zip(batches, pending, strict=True):
        assert torch.equal(rows.wait(), source[index])
        assert rows.done()
    u.gather_rows_async(torch.tensor([3, 3])).wait().sum().backward()
    assert u.grad.to_dense()[3].eq(2).all() and u.grad.to_dense().sum() == 12
    with torch.no_grad():
        assert not u.gather_rows_async(batches[0]).wait().requires_grad
    with pytest.raises(IndexError, match=r"index\[0\] is 50"):
        u.gather_rows_async(torch.tensor([50])).wait()
    with pytest.raises(TypeError, match="expected a tensor of integers"):
        u.gather_rows_async(torch.tensor([0.5]))


WRITES = {
    "u[index] = rows": lambda u, i, rows: u.__setitem__(i, rows),
    "u[index] = row": lambda u, i, rows: u.__setitem__(i, rows[0]),
    "u[index] = number": lambda u, i, rows: u.__setitem__(i, 3.5),
    "u[2:4] = rows": lambda u, i, rows: u.__setitem__(slice(2, 4), rows[:2]),
    "index_copy_": lambda u, i, rows: u.index_copy_(0, i, rows),
    "index_add_": lambda u, i, rows: u.index_add_(0, i, rows, alpha=0.5),
    "index_add_(dim 1)": lambda u, i, rows: u.index_add_(1, i[:2], torch.ones(50, 2)),
    "scatter_": lambda u, i, rows: u.scatter_(0, i[:, None].expand(-1, 6), rows),
    "mul_": lambda u, i, rows: u.mul_(2),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_as_into_the_source(name, source):
    index, rows = torch.tensor([4, 0, 5]), torch.randn(3, 6)
    u, version = unify(source), 0
    version = u._version
    WRITES[name](u, index, rows)
    WRITES[name](source, index, rows)
    assert torch.equal(u.cpu(), source)
    assert u._version > version


def test_conjugated_rows_are_written_and_gathered_as_what_they_are():
    source = torch.randn(6, 3, dtype=torch.complex64)
    u, index, rows = unify(source), torch.tensor([4, 0]), torch.randn(2, 3, dtype=torch.complex64)
    for table in (u, source):
        table[index] = rows.conj()
        table.index_add_(0, index, rows.conj())
    assert torch.equal(u.cpu(), source)
    out = torch.empty(2, 3, dtype=torch.complex64).conj()
    assert torch.equal(u.gather_rows(index, out=out), source[index])


def test_rows_of_the_table_itself_can_be_written_to_it(source):
    u, index = unify(source), torch.tensor([1, 2, 3])
    u[index] = u.cpu()[:3]
    assert torch.equal(u.cpu()[1:4], source[:3])
    with pytest.raises(ValueError, match="out: it lies in the table itself"):
        u.gather_rows(index, out=u.cpu()[:3])


def test_other_devices_are_refused(source):
    u, elsewhere = unify(source), torch.empty(3, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="index: expected a tensor on the CPU or a GPU, got"):
        u[elsewhere]
    with pytest.raises(ValueError, match="index: expected a tensor on the CPU or a GPU"):
        u[elsewhere] = torch.ones(3, 6)
    with pytest.raises(ValueError, match="out: expected a tensor on the CPU or a GPU, got"):
        u.gather_rows(torch.tensor([0]), out=torch.empty(1, 6, device="meta"))
    assert torch.equal(u.cpu(), source)


def test_a_write_is_seen_by_autograd(source):
    u = unify(source)
    weight = torch.ones(6, requires_grad=True)
    loss = (u * weight).sum()
    u.index_add_(0, torch.tensor([1]), torch.ones(1, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_is_written_as_torch_allows(source):
    u = unify(source, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        u.index_add_(0, torch.tensor([1]), torch.ones(1, 6))
    with torch.no_grad():
        u.index_add_(0, torch.tensor([1]), torch.ones(1, 6))
    assert torch.equal(u.detach().cpu()[1], source[1] + 1)


@pytest.mark.parametrize(
    "copy_all",
    [
        lambda u: u.clone(),
        lambda u: torch.clone(u),
        lambda u: copy.deepcopy(u),
        lambda u: u.half(),
        lambda u: u.long(),
        lambda u: u.type(torch.float64),
        lambda u: u.type_as(torch.ones(1, dtype=torch.float64)),
        lambda u: u.to(torch.float64),
        lambda u: u.to("meta"),
        lambda u: u.to("cpu", copy=True),
        lambda u: u.cuda(),
        lambda u: nn.Embedding.from_pretrained(u).double(),
    ],
)
def test_what_would_copy_everything_raises(source, copy_all):
    with pytest.raises(WholeTableError, match=r"would copy the whole table of 1\.17 KiB"):
        copy_all(unify(source))


def test_it_can_be_a_parameter(source):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(unify(source))
            self.head = nn.Linear(6, 1)

    model = Model().to("cpu")
    assert isinstance(model.table, UnifiedTensor) and isinstance(model.table, nn.Parameter)
    before = source.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    index = torch.tensor([1, 8, 1])
    model.head(model.table[index]).sum().backward()
    optimizer.step()
    changed = (model.table.detach().cpu() != before).any(1).nonzero().flatten()
    assert changed.tolist() == [1, 8]
    restored = Model()
    restored.load_state_dict(model.state_dict())
    assert torch.equal(restored.table.detach().cpu(), model.table.detach().cpu())


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # PyTorch's
def test_a_compiled_function_gathers(source):
    index, head = torch.tensor([3, -1, 3]), nn.Linear(6, 1)
    u, dense = unify(source, requires_grad=True), source.clone().requires_grad_()

    def loss(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return head(table[index] * 2).sum() + functional.embedding(index.abs(), table).sin().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    for table, function in ((u, compiled), (dense, loss)):
        function(table, index).backward()
    assert u.grad.layout == torch.sparse_coo
    torch.testing.assert_close(u.grad.to_dense(), dense.grad)
    gathered = torch.compile(lambda u, i: u.gather_rows(i) + 1, backend="aot_eager")
    assert torch.equal(gathered(u, index.abs()), source[index.abs()] + 1)
    for fresh in (torch.tensor([0, 1]), torch.tensor([5, 6, 7, 8])):  # of other lengths
        torch.testing.assert_close(compiled(u, fresh), loss(dense, fresh))


def test_save_and_load(source):
    stream = io.BytesIO()
    torch.save({"table": unify(source, requires_grad=True)}, stream)
    stream.seek(0)
    loaded = torch.load(stream)["table"]
    assert isinstance(loaded, UnifiedTensor) and loaded.requires_grad
    assert torch.equal(loaded.detach().cpu(), source)


def test_every_handler_is_of_something_that_torch_can_override():
    overridable = {f for fs in torch.overrides.get_overridable_functions().values() for f in fs}
    # PyTorch Geometric, if a test has imported it, has put a function of its own over this one.
    overridable.add(torch._C._VariableFunctions.index_select)
    # Torch asks for these, too, and does not list them.
    new = ("new", "new_tensor", "new_empty", "new_empty_strided", "new_full", "new_ones")
    overridable |= {getattr(torch.Tensor, name) for name in (*new, "new_zeros")}
    overridable.add(torch.Tensor.data.__set__)
    assert set(OVERRIDES) <= overridable
