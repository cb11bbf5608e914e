"""A captured training step does what eager does, bit for bit, and leaves no trace."""

import pytest
import torch

from _steps import unlike_eager
from _zoo import CASES
from penstock.graph import Kind, Phase, capture

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_eagers_bit_for_bit(case, optimizer):
    assert unlike_eager(CASES[case], OPTIMIZERS[optimizer]) == []


def test_a_model_without_memory_is_captured():
    with torch.device("meta"):
        model = CASES["gpt2"].make()
        optimizer = torch.optim.AdamW(model.parameters())
    graph = capture(model, optimizer, CASES["gpt2"].batch)
    kinds = {storage.kind for storage in graph.storages}
    assert kinds == set(Kind) - {Kind.BUFFER}
    assert {operator.phase for operator in graph.operators} == set(Phase)
    parameters = [storage for storage in graph.storages if storage.kind is Kind.PARAMETER]
    assert sum(storage.num_bytes for storage in parameters) == 4 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    gradients = [storage for storage in graph.storages if storage.kind is Kind.GRADIENT]
    assert len(gradients) == len(parameters)


def test_a_batch_norm_runs_again_without_its_statistics():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    graph = capture(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(2, 3, 8, 8),
        loss=lambda output, batch: output.sum(),
    )
    (norm,) = (operator for operator in graph.operators if operator.recompute_target)
    assert norm.recomputable
    assert norm.recompute_args is not None and norm.recompute_args[3:5] == (None, None)
    tensors = [torch.randn(2, 8, 6, 6), torch.rand(8), torch.rand(8)]
    statistics = [torch.zeros(8), torch.ones(8)]
    first, again = (
        getattr(getattr(torch.ops.aten, name), overload)
        for name, overload in (
            target.removeprefix("aten.").split(".")
            for target in (norm.target, norm.recompute_target)
        )
    )
    expected = first(*tensors, *statistics, *norm.args[5:])
    assert not torch.equal(statistics[0], torch.zeros(8))
    results = again(*tensors, *norm.recompute_args[3:])
    assert all(map(torch.equal, results, expected))


def test_random_operators_run_again_and_batch_statistics_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    graph = capture(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(2, 4),
        loss=lambda output, batch: output.sum(),
    )
    random = [operator for operator in graph.operators if operator.random]
    assert random and all(operator.recomputable for operator in random)
    updates = [operator for operator in graph.operators if operator.phase is Phase.OPTIMIZER]
    assert updates and not any(operator.recomputable for operator in updates)
