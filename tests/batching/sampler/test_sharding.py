"""Loops that share batches among ranks themselves: every sample once an epoch, on 1 to 4 ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from _ranks import spawn
from penstock.batching import BalancedBatchSampler

NUM_SAMPLES, CAP = 90, 160


def sizes():
    return np.random.default_rng(0).lognormal(3, 0.8, NUM_SAMPLES).astype(int).clip(1, CAP)


def loader_of(sampler, **arguments):
    return torch.utils.data.DataLoader(
        torch.arange(NUM_SAMPLES), batch_sampler=sampler, **arguments
    )


def assert_each_once(ranks, num_epochs):
    """`ranks` has the batches of all epochs, rank by rank; all take equally many steps."""
    assert len({len(batches) for batches in ranks}) == 1
    steps = len(ranks[0]) // num_epochs
    for epoch in range(num_epochs):
        mine = [batch for rank in ranks for batch in rank[epoch * steps : (epoch + 1) * steps]]
        assert sorted(i for batch in mine for i in batch) == list(range(NUM_SAMPLES))
        assert all(sizes()[batch].sum() <= CAP for batch in mine)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("arguments", [{"max_bytes": CAP}, {"max_bytes": CAP, "batch_size": 4}])
@pytest.mark.parametrize("made", ["with its ranks", "for one rank", "before there were ranks"])
def test_a_sampler_that_accelerate_shards_gives_each_sample_once(num_ranks, arguments, made):
    """`BatchSamplerShard` takes every n-th batch of what may be a rank's share already."""
    shard_of = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    ranks = []
    for rank in range(num_ranks):
        own = {
            "with its ranks": {"num_replicas": num_ranks, "rank": rank},
            "for one rank": {"num_replicas": 1, "rank": 0},
            "before there were ranks": {},
        }[made]
        sampler = BalancedBatchSampler(sizes(), **arguments, **own)
        shard = shard_of(sampler, num_ranks, rank)
        mine = [batch for _ in range(2) for batch in shard]
        assert len(shard) * 2 == len(mine)
        sampler.set_epoch(0)
        assert list(sampler) == mine[: len(shard)]  # what is known now holds outside as well
        ranks.append(mine)
    assert_each_once(ranks, 2)


def test_a_fixed_count_is_kept_where_the_data_do_not_divide_evenly():
    """Accelerate drops batches that are shorter than the `batch_size` of a batch sampler."""
    shard_of = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    ranks = [
        list(shard_of(BalancedBatchSampler(sizes(), batch_size=16), 2, rank)) for rank in (0, 1)
    ]
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(NUM_SAMPLES))


def test_weights_for_other_ranks_than_those_of_the_batches_are_refused():
    shard_of = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    sampler = BalancedBatchSampler(sizes(), max_bytes=CAP, num_replicas=1, rank=0)
    with pytest.raises(ValueError, match=r"rank 0 of 1, but the batches are those of rank 1 of 2"):
        for _ in zip(shard_of(sampler, 2, 1), sampler.loss_weights(), strict=False):
            pass
    sampler = BalancedBatchSampler(sizes(), max_bytes=CAP, num_replicas=3, rank=0)
    with pytest.raises(ValueError, match="num_replicas is 3, but Accelerate shares"):
        list(shard_of(sampler, 2, 1))


def test_batches_that_accelerate_would_put_together_are_refused():
    """`dispatch_batches=True` reads on one rank, concatenates, and cuts into equal parts."""
    accelerate = pytest.importorskip("accelerate")
    loader = loader_of(BalancedBatchSampler(sizes(), max_bytes=CAP))
    configuration = accelerate.utils.DataLoaderConfiguration(dispatch_batches=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    with pytest.raises(ValueError, match="dispatch_batches=False"):
        list(accelerator.prepare_data_loader(loader))


class Regression(nn.Module):
    """What Transformers' trainer calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs, labels):
        return {"loss": (self.linear(inputs) - labels).square().mean()}


def in_loops_of_accelerate_and_transformers(folder):
    import accelerate
    import transformers

    early = BalancedBatchSampler(sizes(), max_bytes=CAP)  # before there is a process group
    accelerator = accelerate.Accelerator(cpu=True)
    found = {}
    late = BalancedBatchSampler(sizes(), max_bytes=CAP)
    for name, sampler in (("early", early), ("late", late)):
        loader = accelerator.prepare(loader_of(sampler, num_workers=0))
        assert len(loader) == len(sampler)
        found[name], weights = [], []
        for _ in range(3):
            for batch, weight in zip(loader, sampler.loss_weights(), strict=True):
                found[name].append(batch.tolist())
                weights.append((weight, len(batch)))
        assert len({round(weight / length, 9) for weight, length in weights}) == 1

    for prepares in (True, False):
        seen: list[list[int]] = []
        sampler = BalancedBatchSampler(sizes(), max_bytes=CAP)
        found[f"trainer, {prepares=}"] = seen

        def collate(batch, seen=seen):
            seen.append(list(batch))
            values = torch.tensor(batch, dtype=torch.float32)[:, None]
            return {"inputs": values, "labels": values}

        class Trainer(transformers.Trainer):
            def get_train_dataloader(self, sampler=sampler, collate=collate, prepares=prepares):
                loader = torch.utils.data.DataLoader(
                    range(NUM_SAMPLES), batch_sampler=sampler, collate_fn=collate
                )
                return self.accelerator.prepare(loader) if prepares else loader

        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(model=Regression(), args=arguments, train_dataset=range(NUM_SAMPLES)).train()
    return found


def test_accelerate_and_transformers_on_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ranks = spawn(in_loops_of_accelerate_and_transformers, 2, tmp_path)
    for loop in ranks[0]:
        assert_each_once([rank[loop] for rank in ranks], 3 if loop in ("early", "late") else 2)


def in_lightning(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(1, 1), []

        def training_step(self, batch, _):
            self.seen.append(batch.tolist())
            return self.linear(batch[:, None].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    sampler = BalancedBatchSampler(sizes(), max_bytes=CAP)  # before there is a process group
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader_of(sampler))
    return module.seen


def test_lightning_on_two_ranks(tmp_path):
    pytest.importorskip("lightning")
    assert_each_once(spawn(in_lightning, 2, tmp_path), 2)
