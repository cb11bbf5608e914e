"""Loops of Accelerate and Lightning, of one and of two ranks: offloaded, planned, or refused."""

import contextlib
import os
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from _ranks import needs_gloo, spawn
from penstock.errors import CaptureError
from penstock.executor import average_gradients

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
STEPS, ROWS, WIDTH = 4, 8, 32
LOOPS = ("accelerate", "lightning")
PLAN: dict[str, Any] = {
    "device_memory": "64KiB",  # parameters, their gradients and moments have 144 KiB
    "host_memory": "1GiB",
    "machine": "h200",
    "time_limit": 0.05,
    "cache": False,
}


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, rows, targets):
        return (self.layers(rows) - targets).square().mean()


def loader():
    generator = torch.Generator().manual_seed(7)
    num_rows = STEPS * ROWS * int(os.environ.get("WORLD_SIZE", "1"))
    rows = torch.randn(num_rows, 2, WIDTH, generator=generator)
    return torch.utils.data.DataLoader([(x, y) for x, y in rows], batch_size=ROWS)  # type: ignore


def offloading(arm, folder):
    if arm == "offloaded":
        return penstock.offload(folder, min_bytes=1, device_memory="32KiB")
    return contextlib.nullcontext()


def fitted(model, optimizer, batch, folder, **options):
    return penstock.fit(model, optimizer, tuple(batch), store=folder, **PLAN, **options)


def in_accelerate(arm, folder):
    """Train in Accelerate's loop; returns losses and parameters."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, wrapper, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    if arm.startswith("planned"):
        if arm == "planned, as prepared":
            optimizer = wrapper
        if arm == "planned, wrapped":
            model = wrapped
        options = {}
        if accelerator.num_processes > 1 and arm != "planned, apart":
            options["before_step"] = lambda: average_gradients(model)
        step = fitted(model, optimizer, next(iter(batches)), folder, **options)
        with step:
            losses = [step(tuple(batch)) for batch in batches]
            return losses, [each.clone() for each in model.parameters()]
    for rows, targets in batches:
        with offloading(arm, folder):
            loss = wrapped(rows, targets)
        accelerator.backward(loss)
        wrapper.step()
        wrapper.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters())


def in_lightning(arm, folder):
    """Train in Lightning's loop; returns losses and parameters."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses, self.planned = Regression(), [], None
            self.automatic_optimization = not arm.startswith("planned")

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def training_step(self, batch, _):
            if not self.automatic_optimization:
                self.losses.append(self.step_as_planned(batch))
                return None
            with offloading(arm, folder):
                loss = self.model(*batch)
            self.losses.append(loss.detach())
            return loss

        def step_as_planned(self, batch):
            if self.planned is None:
                wrapper: Any = self.optimizers()
                optimizer = wrapper if arm == "planned, as prepared" else wrapper.optimizer
                model: Any = self.model
                if arm == "planned, wrapped":
                    model = self.trainer.strategy.model
                options = {}
                if self.trainer.world_size > 1 and arm != "planned, apart":
                    options["before_step"] = lambda: average_gradients(self.model)
                self.planned = fitted(model, optimizer, batch, folder, **options)
            return self.planned(tuple(batch))

        def on_train_end(self):
            if self.planned is not None:
                self.planned.close()

    module = Module()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy="ddp" if num_ranks > 1 else "auto",
        devices=num_ranks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())
    return module.losses, list(module.model.parameters())


def train(loop, arm, folder):
    losses, parameters = (in_accelerate if loop == "accelerate" else in_lightning)(arm, folder)
    return [each.detach().clone() for each in (*losses, *parameters)]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("arm", ["offloaded", "planned"])
def test_one_rank_trains_as_without(loop, arm, tmp_path):
    expected, found = train(loop, "eager", tmp_path), train(loop, arm, tmp_path)
    assert len(found) == STEPS + 4
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("loop", LOOPS)
def test_optimizers_as_prepared_are_refused_by_name(loop, tmp_path):
    with pytest.raises(TypeError, match=r"(Accelerated|Lightning)\w+ around .*pass optimizer\.opt"):
        train(loop, "planned, as prepared", tmp_path)


def on_a_rank(folder):
    found = {}
    for loop in LOOPS:
        for arm in ("eager", "offloaded", "planned"):
            found[loop, arm] = train(loop, arm, folder)
        for arm in ("planned, apart", "planned, wrapped"):
            try:
                train(loop, arm, folder)
            except CaptureError as error:
                found[loop, arm] = str(error)
    return found


@needs_gloo
def test_two_ranks_train_as_without(tmp_path):
    ranks = spawn(on_a_rank, 2, tmp_path)
    for found in ranks:
        for loop in LOOPS:
            expected = found[loop, "eager"]
            assert len(expected) == STEPS + 4
            assert all(map(torch.equal, expected, found[loop, "offloaded"]))
            for one, other in zip(expected, found[loop, "planned"], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            assert "2 ranks" in found[loop, "planned, apart"]
            assert "wrapped for data parallelism" in found[loop, "planned, wrapped"]
    for loop in LOOPS:
        one, other = (found[loop, "planned"][STEPS:] for found in ranks)
        assert all(map(torch.equal, one, other))
