"""Sparse optimizers do to the rows with a gradient what torch's dense ones do."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from penstock.unified import empty, unify
from penstock.unified.optim import SGD, Adagrad, Adam

PAIRS = {
    "SGD": (lambda p: SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD decay": (
        lambda p: SGD(p, lr=0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "Adagrad": (
        lambda p: Adagrad(p, lr=0.1, lr_decay=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    ),
    "Adam": (lambda p: Adam(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    "Adam other": (
        lambda p: Adam(p, lr=0.01, betas=(0.5, 0.9), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.9), eps=1e-6, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_touched_rows_go_the_way_of_the_dense_optimizer(name, kind, tmp_path):
    ours, dense = PAIRS[name]
    start = torch.randn(40, 3, 2)
    if kind == "file":
        np.save(tmp_path / "x.npy", start.numpy())
    table = unify(tmp_path / "x.npy" if kind == "file" else start, requires_grad=True)
    weight = start.clone().requires_grad_()
    optimizers = ours([table]), dense([weight])
    touched = torch.tensor([3, 17, 39, 0])
    for step in range(6):
        # Every row of `touched`, some of them more than once.
        index = torch.cat([touched, touched[step % 4 :]])
        factors = torch.randn(len(index), 3, 2)
        for each, optimizer in zip((table, weight), optimizers, strict=True):
            optimizer.zero_grad()
            (each[index] * factors).square().sum().backward()
            optimizer.step()
    found = table.detach()[torch.arange(40)]
    assert torch.allclose(found[touched], weight.detach()[touched], rtol=1e-6, atol=1e-6)
    untouched = [row for row in range(40) if row not in touched.tolist()]
    assert torch.equal(found[untouched], start[untouched])


def test_the_same_bits_whatever_the_number_of_threads():
    results = []
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
    torch.set_num_threads(2)
    assert torch.equal(*results)


def test_state_is_saved_and_restored():
    table = unify(torch.randn(10, 2), requires_grad=True)
    optimizer = Adam([table], lr=0.1)

    def step(table, optimizer) -> None:
        optimizer.zero_grad()
        table[torch.tensor([1, 2])].pow(3).sum().backward()
        optimizer.step()

    step(table, optimizer)
    stream = io.BytesIO()
    torch.save({"table": table.detach(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    loaded = torch.load(stream)
    twin = unify(loaded["table"], requires_grad=True)
    other = Adam([twin], lr=0.1)
    other.load_state_dict(loaded["optimizer"])
    for _ in range(2):
        step(table, optimizer)
        step(twin, other)
    assert torch.equal(table.detach().cpu(), twin.detach().cpu())


def test_state_of_a_file_lies_beside_it_and_is_found_again(tmp_path):
    table = empty((50, 4), path=tmp_path / "table", requires_grad=True)
    optimizer = Adagrad([table])
    table[torch.tensor([7])].sum().backward()
    optimizer.step()
    assert (tmp_path / "table.sum").exists()
    assert unify(tmp_path / "table.sum")[7].tolist() == [1.0] * 4
    del optimizer, table
    again = unify(tmp_path / "table", requires_grad=True)
    again[torch.tensor([7])].sum().backward()
    Adagrad([again]).step()
    assert unify(tmp_path / "table.sum")[7].tolist() == [2.0] * 4


def test_what_is_no_table_or_has_a_dense_gradient_is_refused():
    with pytest.raises(TypeError, match=r"expected tables made by penstock\.unify, got Parameter"):
        Adam([torch.nn.Parameter(torch.ones(2, 2))])
    table = unify(torch.ones(2, 2), requires_grad=True)
    table.sum().backward()
    with pytest.raises(TypeError, match="has a dense gradient, because it was used as a whole"):
        Adam([table]).step()


def test_a_table_without_a_gradient_is_left_alone():
    table = unify(torch.ones(2, 2), requires_grad=True)
    optimizer = Adam([table])
    assert optimizer.step(lambda: 5) == 5
    assert not optimizer.state and torch.equal(table.detach().cpu(), torch.ones(2, 2))


def test_learning_rate_schedules_apply():
    table = unify(torch.zeros(3, 1), requires_grad=True)
    optimizer = SGD([table], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        table[torch.tensor([0])].sum().backward()
        optimizer.step()
        schedule.step()
    assert table.detach()[0].item() == pytest.approx(-1.1)
