"""Sparse optimizers do to the rows with a gradient what torch's dense ones do."""

from __future__ import annotations

import errno
import gc
import io

import numpy as np
import pytest
import torch

from penstock.errors import StoreError, StoreFullError, StoreWriteError
from penstock.memory import NewFile
from penstock.unified import empty, unify
from penstock.unified.file import writer as file_writer
from penstock.unified.optim import SGD, Adagrad, Adam, _updates

pytestmark = pytest.mark.usefixtures("one_thread")  # but where a test sets the number

CASES = {  # the options are those of torch.optim, by the same names
    "SGD": (SGD, {"lr": 0.1}),
    "SGD decay": (SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    "SGD momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "Adagrad other": (
        Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "weight_decay": 0.1},
    ),
    "Adam": (Adam, {"lr": 0.1}),
    "Adam other": (Adam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.1}),
    "Adam amsgrad": (Adam, {"lr": 0.1, "betas": (0.2, 0.5), "amsgrad": True, "maximize": True}),
}
TOUCHED = torch.tensor([3, 17, 39, 0])


@pytest.fixture(params=["cpp", "torch"])
def backend(request, monkeypatch):
    """With and without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(_updates, "_library", lambda: None)
    return request.param


def table_of(content: torch.Tensor, kind: str, folder):
    """A table in memory or in a file."""
    if kind == "memory":
        return unify(content, requires_grad=True)
    np.save(folder / "x.npy", content.numpy())
    return unify(folder / "x.npy", requires_grad=True)


def steps_alike(
    parameters, optimizers, num_steps: int = 6, touched: torch.Tensor = TOUCHED
) -> None:
    """The same steps with each; every row of `touched` is used, some of them more than once."""
    row = parameters[0].shape[1:]
    for step in range(num_steps):
        index = torch.cat([touched, touched[step % 4 :]])
        first, second = torch.randn(len(index), *row), torch.randn(len(touched), *row)
        for each, optimizer in zip(parameters, optimizers, strict=True):
            optimizer.zero_grad()
            # Used twice, so that autograd adds two sparse gradients.
            loss = (each[index] * first).square().sum() + (each[touched] * second).sum()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_touched_rows_go_the_way_of_the_dense_optimizer(name, kind, backend, tmp_path):
    ours, options = CASES[name]
    start = torch.randn(40, 3, 2)
    table, weight = table_of(start, kind, tmp_path), start.clone().requires_grad_()
    dense = getattr(torch.optim, ours.__name__)
    steps_alike((table, weight), (ours([table], **options), dense([weight], **options)))
    found = table.detach()[torch.arange(40)]
    assert torch.allclose(found[TOUCHED], weight.detach()[TOUCHED], rtol=1e-6, atol=1e-6)
    assert not torch.equal(found[TOUCHED], start[TOUCHED])
    untouched = [row for row in range(40) if row not in TOUCHED.tolist()]
    assert torch.equal(found[untouched], start[untouched])


def test_rows_without_a_gradient_rest_with_their_state():
    """As in torch.optim.SparseAdam, to the numbers; a row returns after steps without it."""
    start = torch.randn(6, 5)
    table, weight = unify(start, requires_grad=True), torch.nn.Parameter(start.clone())
    optimizers = Adam([table], lr=0.1), torch.optim.SparseAdam([weight], lr=0.1)
    for rows in ([0, 1], [1, 2, 1], [1], [0, 0, 5]):
        index = torch.tensor(rows)
        gradients = torch.randn(len(rows), 5)
        for each, optimizer in zip((table, weight), optimizers, strict=True):
            shape = (6, 5)
            each.grad = torch.sparse_coo_tensor(
                index[None], gradients, shape, check_invariants=True
            )
            optimizer.step()
    # SparseAdam adds eps before the bias correction: the same to eps.
    assert torch.allclose(table.detach().cpu(), weight.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(table.detach().cpu()[[3, 4]], start[[3, 4]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_tables_follow_the_float_optimizer(dtype, backend):
    """One step from the same row: that of float32, rounded; the state is that of float32."""
    start = torch.randn(40, 8).to(dtype)
    table, weight = unify(start, requires_grad=True), start.float().requires_grad_()
    optimizers = Adam([table], lr=0.01), torch.optim.Adam([weight], lr=0.01)
    gradients = torch.randn(len(TOUCHED), 8).to(dtype)
    table.grad = torch.sparse_coo_tensor(TOUCHED[None], gradients, (40, 8), check_invariants=True)
    weight.grad = torch.zeros(40, 8).index_copy_(0, TOUCHED, gradients.float())
    for optimizer in optimizers:
        optimizer.step()
    rounded = weight.detach().to(dtype)[TOUCHED]
    assert torch.equal(table.detach()[TOUCHED], rounded)
    state = optimizers[0].state[table]["exp_avg_sq"]
    assert state.dtype == torch.float32
    assert torch.equal(state[TOUCHED], optimizers[1].state[weight]["exp_avg_sq"][TOUCHED])


def test_complex_tables():
    start = torch.randn(10, 3, dtype=torch.complex64)
    table, weight = unify(start, requires_grad=True), start.clone().requires_grad_()
    optimizers = Adam([table], lr=0.1), torch.optim.Adam([weight], lr=0.1)
    index = torch.tensor([2, 9, 2])
    for _ in range(3):
        for each, optimizer in zip((table, weight), optimizers, strict=True):
            optimizer.zero_grad()
            each[index].abs().pow(3).sum().backward()
            optimizer.step()
    found, expected = table.detach()[index], weight.detach()[index]
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_the_same_bits_whatever_the_number_of_threads():
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            torch.manual_seed(0)
            table = unify(torch.randn(200, 64), requires_grad=True)
            optimizer = Adam([table], lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                index = torch.randint(0, 200, (5000,))
                (table[index] * torch.randn(5000, 64)).sum().backward()
                optimizer.step()
            results.append(table.detach().cpu().clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


# -------------------------------------------------------------------------- state


def through_a_file(content: object) -> object:
    """As torch.save and torch.load leave it."""
    stream = io.BytesIO()
    torch.save(content, stream)
    stream.seek(0)
    return torch.load(stream)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_is_saved_and_restored(name, dtype):
    """What was saved goes on as if nothing had happened."""
    kind, options = CASES[name]
    table = unify(torch.randn(40, 2).to(dtype), requires_grad=True)
    optimizer = kind([table], **options)
    steps_alike([table], [optimizer], 3)
    loaded = through_a_file({"table": table.detach(), "optimizer": optimizer.state_dict()})
    twin = unify(loaded["table"], requires_grad=True)
    other = kind([twin], lr=77.0)
    other.load_state_dict(loaded["optimizer"])
    steps_alike([table, twin], [optimizer, other], 3)
    assert torch.equal(table.detach().cpu(), twin.detach().cpu())
    assert other.param_groups[0]["lr"] == options["lr"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_batch_of_no_rows_changes_nothing_in_a_file(name, dtype, tmp_path):
    kind, options = CASES[name]
    table = empty((40, 2), dtype, path=tmp_path / "table")
    before = torch.randn(40, 2).to(dtype)
    everything, none = torch.arange(40), torch.zeros(0, dtype=torch.int64)
    table[everything] = before
    table[none] = before[none]
    table.index_copy_(0, none, before[none])
    table.index_add_(0, none, before[none])
    table.requires_grad_()
    optimizer = kind([table], **options)
    table[none].sum().backward()
    optimizer.step()
    assert torch.equal(table.detach()[everything], before)


def test_the_state_of_the_dense_optimizer_can_be_loaded():
    start = torch.randn(40, 2)
    weight = start.clone().requires_grad_()
    dense = torch.optim.Adam([weight], lr=0.1)
    steps_alike([weight], [dense], 3)
    table = unify(weight.detach(), requires_grad=True)
    optimizer = Adam([table])
    optimizer.load_state_dict(dense.state_dict())
    steps_alike([table, weight], [optimizer, dense], 3)
    assert torch.allclose(table.detach()[TOUCHED], weight.detach()[TOUCHED], rtol=1e-6, atol=1e-6)


def test_state_of_another_table_is_refused():
    table, other = (unify(torch.zeros(n, 2), requires_grad=True) for n in (4, 5))
    optimizers = [Adam([each]) for each in (table, other)]
    table.grad = torch.eye(4)[:, :2].to_sparse(1)
    optimizers[0].step()
    with pytest.raises(ValueError, match=r"state 'exp_avg' has shape \(4, 2\) and .* \(5, 2\)"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())


@pytest.mark.parametrize("name", CASES)
def test_state_of_a_file_lies_beside_it_and_is_found_again(name, tmp_path):
    """A run that is interrupted and goes on ends like one that is not; the step count, too."""
    kind, options = CASES[name]
    start = torch.randn(40, 4)
    table = table_of(start, "file", tmp_path)
    whole = unify(start, requires_grad=True)
    continuous = kind([whole], **options)
    for _ in range(3):
        steps_alike([table, whole], [kind([table], **options), continuous], 2)
        table = unify(tmp_path / "x.npy", requires_grad=True)
    everything = torch.arange(40)
    assert torch.equal(table.detach()[everything], whole.detach()[everything])
    if continuous.state:
        assert unify(tmp_path / "x.npy.step")[0].item() == 6
    names = [each for each in continuous.state[whole] if each != "step"]
    for each in names:
        found = unify(tmp_path / f"x.npy.{each}")[everything]
        assert torch.equal(found, continuous.state[whole][each][everything])


def test_the_states_of_two_tensors_of_one_file_are_kept_apart(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, tmp_path / "x.safetensors")
    for key in ("a", "b"):
        table = unify(f"{tmp_path}/x.safetensors#{key}", requires_grad=True)
        table[torch.tensor([1])].sum().backward()
        Adagrad([table], lr=1.0 if key == "a" else 2.0).step()
        del table
        assert (tmp_path / f"x.safetensors.{key}.sum").exists()
    assert unify(f"{tmp_path}/x.safetensors#a")[1].tolist() == [0.0, 0.0]
    assert unify(f"{tmp_path}/x.safetensors#b")[1].tolist() == [-1.0, -1.0]


def test_a_part_of_the_state_is_lost(tmp_path):
    table = empty((5, 4), path=tmp_path / "table", requires_grad=True)
    table[torch.tensor([1])].sum().backward()
    Adam([table]).step()
    (tmp_path / "table.exp_avg").unlink()
    with pytest.raises(StoreError, match=r"table\.step is there, but .*table\.exp_avg is not"):
        Adam([table]).step()


def test_what_lies_beside_a_file_is_no_state_of_it(tmp_path):
    empty((5, 3), path=tmp_path / "table.sum")
    table = empty((5, 4), path=tmp_path / "table", requires_grad=True)
    table[torch.tensor([1])].sum().backward()
    with pytest.raises(ValueError, match=r"the state 'sum' has shape \(5, 3\)"):
        Adagrad([table]).step()


def test_a_first_value_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.unified.file.table._BLOCK_BYTES", 64)
    table = empty((50, 4), path=tmp_path / "table", requires_grad=True)
    table[torch.tensor([7])].sum().backward()
    optimizer = Adagrad([table], initial_accumulator_value=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "finish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert not (tmp_path / "table.sum").exists()
    optimizer.step()
    found = unify(tmp_path / "table.sum")[torch.arange(50)]
    expected = torch.full((50, 4), 0.5)
    expected[7] = 1.5
    assert torch.equal(found, expected)
    assert {each.name for each in tmp_path.iterdir()} == {"table", "table.sum", "table.step"}


# ------------------------------------------------------------- as any other optimizer


def test_what_is_no_table_or_has_a_dense_gradient_is_refused():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"expected tables made by penstock\.unify, got Parameter"):
        Adam([weight])
    table = unify(torch.ones(2, 2), requires_grad=True)
    optimizer = Adam([{"params": table, "lr": 0.5}])
    with pytest.raises(TypeError, match="got Parameter"):
        optimizer.add_param_group({"params": [weight]})
    with pytest.raises(TypeError, match="got Parameter"):
        Adam([("weight", weight)])
    table.sum().backward()
    with pytest.raises(TypeError, match="has a dense gradient, because it was used as a whole"):
        optimizer.step()
    table.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(TypeError, match="a gradient with 2 sparse dimensions; expected one"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: SGD(p, lr=-1), "lr=-1: expected a number that is not negative"),
        (lambda p: SGD(p, momentum=-0.1), "momentum=-0.1"),
        (lambda p: SGD(p, nesterov=True), "nesterov needs a momentum above 0"),
        (lambda p: SGD(p, momentum=0.9, dampening=0.1, nesterov=True), "and no dampening"),
        (lambda p: Adagrad(p, eps=float("nan")), "eps=nan"),
        (lambda p: Adagrad(p, initial_accumulator_value=-1), "initial_accumulator_value=-1"),
        (lambda p: Adam(p, weight_decay=-1), "weight_decay=-1"),
        (lambda p: Adam(p, betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\): expected two numbers"),
        (lambda p: Adam(p, betas=0.9), "betas=0.9: expected two numbers"),
        (lambda p: SGD(p, lr=None), "lr=None: expected a number that is not negative"),
    ],
)
def test_options_that_make_no_sense(make, says):
    with pytest.raises(ValueError, match=says):
        make([unify(torch.ones(2, 2), requires_grad=True)])


def test_a_table_without_a_gradient_is_left_alone():
    table = unify(torch.ones(2, 2), requires_grad=True)
    optimizer = Adam([table])
    assert optimizer.step(lambda: 5) == 5
    assert not optimizer.state and torch.equal(table.detach().cpu(), torch.ones(2, 2))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_gradient_without_rows_counts_as_a_step(kind, tmp_path):
    table = table_of(torch.ones(3, 2), kind, tmp_path)
    optimizer = Adam([table])
    table[torch.tensor([], dtype=torch.int64)].sum().backward()
    optimizer.step()
    count = optimizer.state[table]["step"]
    assert (count[0] if kind == "file" else count).item() == 1
    assert torch.equal(table.detach()[torch.arange(3)], torch.ones(3, 2))


def test_groups_have_options_of_their_own():
    tables = [unify(torch.zeros(3, 1), requires_grad=True) for _ in range(2)]
    optimizer = SGD([{"params": [tables[0]], "lr": 1.0}, {"params": tables[1:]}], lr=0.5)
    for table in tables:
        table[torch.tensor([0])].sum().backward()
    optimizer.step()
    assert [table.detach()[0].item() for table in tables] == [-1.0, -0.5]


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_learning_rate_schedules_apply(lr):
    table = unify(torch.zeros(3, 1), requires_grad=True)
    optimizer = SGD([table], lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        table[torch.tensor([0])].sum().backward()
        optimizer.step()
        schedule.step()
    assert table.detach()[0].item() == pytest.approx(-1.1)


def test_autograd_notices_that_rows_have_changed():
    table = unify(torch.ones(3, 1), requires_grad=True)
    rows = table.view(3)[:2]  # a view, saved by the product
    loss = (rows * rows).sum()
    table.grad = torch.ones(3, 1).to_sparse(1)
    SGD([table]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_whose_rows_are_in_the_journal_is_made_once(tmp_path, monkeypatch):
    """The disk fails behind the journal: `step` raises, and whoever opens it ends the step."""

    def fail(*_):
        raise OSError(errno.EIO, "")

    def two_steps():
        table = empty((5, 4), path=tmp_path / "table", requires_grad=True)
        optimizer = Adam([table], lr=0.5)
        table[[1, 3]].sum().backward()
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(file_writer, "write_places", fail)
            with pytest.raises(StoreWriteError, match="Input/output error"):
                optimizer.step()

    two_steps()
    gc.collect()  # what the error's traceback holds is closed
    table = unify(tmp_path / "table", requires_grad=True)
    optimizer = Adam([table], lr=0.5)
    assert unify(tmp_path / "table.step")[0].item() == 2
    torch.testing.assert_close(table.detach()[[1, 0]][:, 0], torch.tensor([-1.0, 0.0]))
    table[[1, 3]].sum().backward()
    optimizer.step()
    torch.testing.assert_close(table.detach()[[1, 0]][:, 0], torch.tensor([-1.5, 0.0]))


def test_an_error_says_how_many_tables_had_made_the_step(tmp_path, monkeypatch):
    """Or an attempt when there is room again would make the step of the first one twice."""
    tables = [empty((5, 4), path=tmp_path / name, requires_grad=True) for name in "ab"]
    optimizer = SGD(tables, lr=1.0)
    for table in tables:
        table[[1, 3]].sum().backward()
    write_journal, paths = file_writer.write_journal, []

    def write_one(path, *arguments):
        paths.append(path)
        if len(paths) > 1:
            raise OSError(errno.ENOSPC, "")
        write_journal(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(file_writer, "write_journal", write_one)
        with pytest.raises(StoreFullError, match="b could not be written") as caught:
            optimizer.step()
    assert "first 1 of 2 tables" in "".join(caught.value.__notes__)
    tables[0].grad = None
    optimizer.step()
    for table in tables:
        assert table.detach()[[0, 1, 3]][:, 0].tolist() == [0.0, -1.0, -1.0]


def test_options_of_a_group_are_checked():
    table = unify(torch.zeros(5, 4), requires_grad=True)
    with pytest.raises(ValueError, match="lr=-1: expected a number that is not negative"):
        SGD([{"params": [table], "lr": -1}])
    with pytest.raises(ValueError, match=r"betas=\(1.0, 0.9\): expected two numbers"):
        Adam([{"params": [table], "betas": (1.0, 0.9)}])
    with pytest.raises(ValueError, match="nesterov needs a momentum above 0"):
        SGD([table]).add_param_group(
            {"params": [unify(torch.zeros(5, 4), requires_grad=True)], "nesterov": True}
        )
    with pytest.raises(ValueError, match="initial_accumulator_value=-1: expected"):
        Adagrad([{"params": [table], "initial_accumulator_value": -1}])


def test_a_gradient_that_is_refused_stops_the_step_of_all_tables():
    tables = [unify(torch.ones(3, 2), requires_grad=True) for _ in range(2)]
    (tables[0][[1]].sum() + tables[1].sum()).backward()
    with pytest.raises(TypeError, match="has a dense gradient"):
        SGD(tables, lr=0.5).step()
    assert all(torch.equal(each.detach().cpu(), torch.ones(3, 2)) for each in tables)


def test_tables_of_numbers_that_no_step_is_made_of_are_refused():
    table = unify(torch.zeros(3, 2).to(torch.float8_e4m3fn), requires_grad=True)
    with pytest.raises(TypeError, match=r"float8_e4m3fn, of which no step is made; expected"):
        Adam([table])


@pytest.mark.parametrize("kind", ["x.npy", "x"])
def test_the_state_of_a_table_that_was_made_anew_is_refused(tmp_path, kind):
    """Its rows are none of those that the last step wrote; what is handed over is believed."""

    def make() -> torch.Tensor:
        (tmp_path / kind).unlink(missing_ok=True)
        return unify(empty((50, 4), path=tmp_path / kind), requires_grad=True)

    def train(table: torch.Tensor) -> Adam:
        optimizer = Adam([table], lr=0.1)
        table[torch.arange(20)].sum().backward()
        optimizer.step()
        return optimizer

    table = make()
    train(table)
    train(unify(tmp_path / kind, requires_grad=True))  # it goes on
    assert unify(tmp_path / f"{kind}.step")[0].item() == 2
    table = make()
    with pytest.raises(StoreError, match=r"of the rows that its last step wrote none is\. If the"):
        train(table)
    assert not table.detach()[torch.arange(20)].any()
    with pytest.raises(StoreError, match="if its rows were changed by other means"):
        train(table)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        (tmp_path / f"{kind}.{name}").unlink()
    train(table)
    assert unify(tmp_path / f"{kind}.step")[0].item() == 1


def test_the_state_of_a_table_of_which_some_rows_were_written_goes_on(tmp_path):
    table = unify(empty((50, 4), path=tmp_path / "x"), requires_grad=True)
    for _ in range(2):
        optimizer = Adam([table], lr=0.1)
        optimizer.zero_grad()
        table[torch.arange(20)].sum().backward()
        optimizer.step()
        with torch.no_grad():
            table[torch.arange(10)] = torch.zeros(10, 4)
    assert unify(tmp_path / "x.step")[0].item() == 2
