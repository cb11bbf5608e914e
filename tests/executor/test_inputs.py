"""A batch that is larger than the device: parts of it lie below and come when they are needed."""

import pytest
import torch

from _sequence import Recurrent
from penstock.executor import bind
from penstock.graph import Kind, capture
from penstock.memory import Tier
from penstock.planner import plan

pytestmark = pytest.mark.usefixtures("one_thread")
TIMES, ROWS, WIDTH = 12, 8, 32


def trainee():
    torch.manual_seed(0)
    model = Recurrent(WIDTH)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches():
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        yield tuple(
            torch.randn(shape, generator=random) for shape in ((TIMES, ROWS, WIDTH), (ROWS, WIDTH))
        )


def planned(tier):
    model, optimizer = trainee()
    graph = capture(model, optimizer, next(batches()))
    below = {"store": "/tmp"} if tier is Tier.FILE else {"host_memory": "1MiB"}
    options = {"machine": "v100-16gb-pcie3", "time_limit": 0.5, **below}
    return graph, plan(graph, device_memory="16KiB", **options)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.FILE])
def test_each_batch_arrives_whole(tier, store):
    graph, found = planned(tier)
    parts = found.planned_graph(graph).storages
    below = {
        parts[found.planned_graph(graph).storage_of_value[copy.value]].kind
        for copy in found.copies
        if copy.start == 0
    }
    assert Kind.INPUT in below
    model, optimizer = trainee()
    with bind(found, model, optimizer, graph=graph, store=store, debug=True) as step:
        losses = [step(batch) for batch in batches()]
    plain, stepper = trainee()
    for batch, loss in zip(batches(), losses, strict=True):
        stepper.zero_grad()
        expected = plain(*batch)
        expected.backward()
        stepper.step()
        assert torch.equal(expected.detach(), loss)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
