"""Training loops of others take the sampler: DDP, Transformers, Lightning, compiled cells."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from _ranks import spawn
from penstock.batching import BalancedBatchSampler

NUM_SAMPLES, CAP, NUM_RANKS = 90, 160, 2


@functools.cache
def sizes():
    return np.random.default_rng(0).lognormal(3, 0.8, NUM_SAMPLES).astype(int).clip(1, CAP)


@functools.cache
def samples():
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 3, generator=random, dtype=torch.float64)
    return inputs, inputs.sin().sum(1)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_of(network, indices):
    inputs, targets = samples()
    return (network(inputs[indices])[:, 0] - targets[indices]).square().mean()


def train_rank(folder):
    distributed.init_process_group("gloo")
    network = DistributedDataParallel(model())
    sampler = BalancedBatchSampler(sizes(), max_bytes=CAP)  # asks torch.distributed who it is
    total, seen = [], []
    for batch, weight in zip(sampler, sampler.loss_weights(), strict=True):
        network.zero_grad()
        (weight * loss_of(network, batch)).backward()
        mine = [each.grad.clone() for each in network.parameters() if each.grad is not None]
        total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
        seen.append(batch)
    return total, seen


def test_ranks_of_ddp_take_equal_steps_and_weights_give_the_mean_gradient(tmp_path):
    ranks = spawn(train_rank, NUM_RANKS, tmp_path)
    steps = [seen for _, seen in ranks]
    assert len(steps[0]) == len(steps[1])
    assert sorted(i for seen in steps for batch in seen for i in batch) == list(range(NUM_SAMPLES))
    assert all(sizes()[batch].sum() <= CAP for seen in steps for batch in seen)
    assert len({len(batch) for seen in steps for batch in seen}) > 1  # the weights are needed
    network = model()
    loss_of(network, list(range(NUM_SAMPLES))).backward()
    for gradient, _ in ranks:
        for mine, parameter in zip(gradient, network.parameters(), strict=True):
            torch.testing.assert_close(mine / len(steps[0]), parameter.grad, rtol=1e-9, atol=1e-12)


class Regression(nn.Module):
    """What Transformers' trainer calls."""

    def __init__(self):
        super().__init__()
        self.inner = model().float()

    def forward(self, inputs, labels):
        predicted = self.inner(inputs)[:, 0]
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


def test_transformers_trainer_takes_it(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    inputs, targets = samples()
    data = [
        {"inputs": x.float(), "labels": y.float(), "number": k}
        for k, (x, y) in enumerate(zip(inputs, targets, strict=True))
    ]
    sampler = BalancedBatchSampler(sizes(), max_bytes=CAP)
    seen: list[list[int]] = []

    def collate(batch):
        seen.append([each["number"] for each in batch])
        return {k: torch.stack([each[k] for each in batch]) for k in ("inputs", "labels")}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=collate)
            return self.accelerator.prepare(loader)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    network = Regression()
    before = [each.detach().clone() for each in network.parameters()]
    trained = Trainer(model=network, args=arguments, train_dataset=data).train()
    assert trained.global_step == 2 * len(sampler) == len(seen)
    for epoch in (seen[: len(sampler)], seen[len(sampler) :]):
        assert sorted(i for batch in epoch for i in batch) == list(range(NUM_SAMPLES))
        assert all(sizes()[batch].sum() <= CAP for batch in epoch)
    assert {frozenset(batch) for batch in seen[: len(sampler)]} != {
        frozenset(batch) for batch in seen[len(sampler) :]
    }
    assert any((a != b).any() for a, b in zip(before, network.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # lightning's own
def test_what_lightning_asks_of_a_batch_sampler():
    """It looks for `set_epoch` on the batch sampler, and saves and restores its state."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.seen = model(), []

        def training_step(self, batch, _):
            self.seen.append(batch.tolist())
            return loss_of(self.inner, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    sampler = BalancedBatchSampler(sizes(), max_bytes=CAP)
    loader = torch.utils.data.DataLoader(torch.arange(NUM_SAMPLES), batch_sampler=sampler)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    count = len(sampler)
    assert len(module.seen) == 2 * count
    for epoch in (0, 1):
        expected = BalancedBatchSampler(sizes(), max_bytes=CAP)
        expected.set_epoch(epoch)
        assert module.seen[epoch * count : (epoch + 1) * count] == list(expected)


def test_loops_that_call_set_epoch_on_the_batch_sampler_get_each_epoch_once():
    """The protocol of Lightning and Accelerate: the length, then the epoch, then iterate."""
    sampler = BalancedBatchSampler(sizes(), max_bytes=CAP)
    loader = torch.utils.data.DataLoader(torch.arange(NUM_SAMPLES), batch_sampler=sampler)
    assert loader.batch_size is None and len(loader) == len(sampler)
    epochs = []
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        epochs.append([batch.tolist() for batch in loader])
    for epoch, batches in enumerate(epochs):
        expected = BalancedBatchSampler(sizes(), max_bytes=CAP)
        expected.set_epoch(epoch)
        assert batches == list(expected)
    assert epochs[0] != epochs[1] != epochs[2]


def test_capped_weighted_training_learns_what_fixed_batches_learn():
    """Final losses of five seeds: the means are closer than the seeds are to each other."""

    def trained(make, seed):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
        for epoch in range(6):
            batches, weights = make(seed, epoch)
            for batch, weight in zip(batches, weights, strict=True):
                optimizer.zero_grad()
                (weight * loss_of(network, batch)).backward()
                optimizer.step()
        return float(loss_of(network, list(range(NUM_SAMPLES))).detach())

    def capped(seed, epoch):
        sampler = BalancedBatchSampler(sizes(), max_bytes=CAP, seed=seed)
        sampler.set_epoch(epoch)
        weights = sampler.loss_weights()
        return list(sampler), weights

    def fixed(seed, epoch):
        order = np.random.default_rng([seed, epoch]).permutation(NUM_SAMPLES)
        count = len(BalancedBatchSampler(sizes(), max_bytes=CAP))
        return [part.tolist() for part in np.array_split(order, count)], [1.0] * count

    mine = [trained(capped, seed) for seed in range(5)]
    theirs = [trained(fixed, seed) for seed in range(5)]
    spread = max(max(each) - min(each) for each in (mine, theirs))
    assert abs(np.mean(mine) - np.mean(theirs)) <= spread
    assert max(mine) < 0.5 * float(samples()[1].var())  # all have learnt
