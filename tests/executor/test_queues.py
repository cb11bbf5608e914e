"""Large buffers that a step changes before its loss is known, as queues of keys, are undone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from _planned import MACHINE, differences, everything
from penstock.errors import NonFiniteLossError

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


class Queue(nn.Module):
    """Contrasts outputs with those of earlier batches."""

    def __init__(self, num_keys):
        super().__init__()
        self.layer = nn.Linear(64, 128)
        self.register_buffer("queue", torch.randn(num_keys, 128))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        key = F.normalize(self.layer(x), dim=-1)
        loss = (key @ self.queue.clone().t()).logsumexp(-1).mean()
        with torch.no_grad():
            self.queue.copy_(torch.cat([key.detach(), self.queue[: -x.shape[0]]]))
            self.num_seen += 1
        return loss


@pytest.mark.parametrize("num_keys", [1024, 16384])
@pytest.mark.parametrize("tier", ["none", "host", "file"])
def test_a_loss_that_is_nan_undoes_them(num_keys, tier, store):
    torch.manual_seed(0)
    model = Queue(num_keys)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    below = {"none": {}, "host": {"host_memory": "64MiB"}, "file": {"store": store}}[tier]
    arguments = {"device_memory": "64MiB", "machine": MACHINE, "time_limit": 0.05, "cache": False}
    step = penstock.fit(model, optimizer, X, **below, **arguments)
    step(X)
    before = everything(model, optimizer, [])
    with pytest.raises(NonFiniteLossError, match="nothing has been updated"):
        step(X * float("nan"))
    assert differences(before, everything(model, optimizer, []), "") == []
    assert step.report().undo_bytes >= num_keys * 128 * 4
    step(X)
    step.close()
    assert not list(store.iterdir())
