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
