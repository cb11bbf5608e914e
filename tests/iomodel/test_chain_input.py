"""Input of chains: what they cannot run on is refused by name, and what is rare runs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from penstock.iomodel import _plan_chain, plan_chain, run_chain
from test_chain import processor


class Table(nn.Module):
    """An embedding; under a dispatch mode that of torch imports its compiler, for seconds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4))

    def forward(self, x):
        return self.weight[x]


@pytest.fixture(autouse=True)
def _no_times(monkeypatch):
    monkeypatch.setattr(_plan_chain, "_time", lambda call: call() or 0.0)
    monkeypatch.setattr(_plan_chain, "_find_new_rate", lambda **_: 1e9)
    monkeypatch.setattr(_plan_chain, "this_machine", processor)


@pytest.mark.parametrize("run", [run_chain, plan_chain])
def test_inputs_are_refused_by_name(run):
    x, modules = torch.randn(6, 4), [nn.Linear(4, 4), nn.GELU()]
    with pytest.raises(ValueError, match="rows is 0"):
        run(modules, x[:0])
    with pytest.raises(ValueError, match="modules is 0"):
        run([], x)
    with pytest.raises(ValueError, match="x is a number"):
        run(modules, x[0, 0])
    with pytest.raises(ValueError, match="device meta"):
        run(modules, x.to("meta"))
    with pytest.raises(TypeError, match="x is a ndarray"):
        run(modules, x.numpy())
    for wrong, name in ((2.0, "float"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"row_args\[1\] is a {name}"):
            run([torch.add], x, x, wrong)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast is on"):
        run(modules, x)


def test_options_are_refused_by_name():
    x, layers = torch.randn(6, 4), [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    with pytest.raises(TypeError, match="plan is 'all'"):
        run_chain(layers, x, plan="all")  # type: ignore[arg-type]
    layers[0].weight, layers[2].weight = (
        nn.Parameter(torch.zeros(0, 4)),
        nn.Parameter(torch.zeros(4, 0)),
    )
    with pytest.raises(ValueError, match="with features and functions"):
        run_chain(layers, x, feature_blocks=2)


def test_rows_without_features_run():
    found = run_chain([lambda x: x + 1], torch.zeros(2, 3, 0), chunk_rows=2)
    assert found.shape == (2, 3, 0)


def test_numbers_of_tokens_run_as_planned():
    table, x = Table(), torch.randint(0, 10, (17, 6))
    for modules in ([table, nn.ReLU()], [table, lambda x: x.argmax(-1), table, nn.Tanh()]):
        assert plan_chain(modules, x).names[0] == "Table"
        found, expected = run_chain(modules, x), x
        for module in modules:
            expected = module(expected)
        torch.testing.assert_close(found, expected)
        ours, theirs = (torch.autograd.grad(y.sum(), table.weight) for y in (found, expected))
        torch.testing.assert_close(ours, theirs)


def test_plans_are_plain_data():
    plan = plan_chain([nn.Linear(4, 4), nn.GELU()], torch.randn(9, 4))
    edges = {f"{of},{by}": kind for (of, by), kind in plan.edges.items()}
    assert json.loads(json.dumps(plan.to_dict()))["edges"] == edges
