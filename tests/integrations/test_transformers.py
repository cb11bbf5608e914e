"""Transformers: the four model families bit for bit, and `Trainer` with one added line."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import _models
import penstock
from _waiting import wait_until
from penstock.activations import Offload

transformers = pytest.importorskip("transformers", reason="penstock[demo] installs Transformers")

NUM_STEPS = 3
BATCH, SEQ, VOCAB = 2, 64, 128
MIN_BYTES = 8 * 1024

pytestmark = pytest.mark.usefixtures("one_thread")


def build(name: str) -> nn.Module:
    return _models.build(name, hidden=64, layers=2, heads=4, seq=SEQ, vocab=VOCAB)


def train(
    name: str, *, after_forward: Callable[[], None] | None = None, vary: bool = False
) -> list[torch.Tensor]:
    """The loss and all gradients of each step; with `vary` the sequences differ in length."""
    model = build(name)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(NUM_STEPS):
        seq = SEQ - 8 * (step % 3) if vary else SEQ
        loss = model(**_models.batch_of(name, batch=BATCH, seq=seq, vocab=VOCAB, seed=step)).loss
        if after_forward is not None:
            after_forward()
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    return found


@cache
def stock(name: str, vary: bool = False) -> list[torch.Tensor]:
    return train(name, vary=vary)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 2 * NUM_STEPS
    different = [
        index
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        if not torch.equal(ours, theirs)
    ]
    assert not different, f"{len(different)} of {len(found)} differ, the first is {different[0]}"


@cache
def saved_by_one_step(name: str) -> dict[int, int]:
    """Bytes of each unique storage that a step saves, without the model's own; counted here."""
    model = build(name)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage  # kept, so that no address is used twice
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**_models.batch_of(name, batch=BATCH, seq=SEQ, vocab=VOCAB, seed=0)).loss
    loss.backward()
    return {key: storage.nbytes() for key, storage in storages.items()}


@pytest.mark.parametrize("name", _models.MODELS)
def test_all_is_bit_equal_and_85_percent_leave(store, name):
    saved, expected = saved_by_one_step(name), stock(name)
    offload = penstock.offload(store, policy="all", min_bytes=MIN_BYTES)
    seen = []

    def most_has_left() -> bool:
        report = offload.report()
        return report.bytes_written >= 0.85 * report.saved_bytes

    def after_forward() -> None:
        seen.append(offload.report().saved_bytes)
        wait_until(most_has_left)  # a model as small as this would not let the writes end

    with offload:
        assert_same(train(name, after_forward=after_forward), expected)
    report = offload.report()
    offload.close()
    assert seen[0] == sum(saved.values())
    assert report.saved_bytes == NUM_STEPS * seen[0]
    assert report.num_saved == NUM_STEPS * len(saved)
    # At most once each, however many views of it were saved.
    assert 0.85 * report.saved_bytes <= report.bytes_written <= report.offloaded_bytes
    assert report.offloaded_bytes <= report.saved_bytes
    assert report.bytes_read >= 0.5 * report.saved_bytes


@pytest.mark.parametrize("name", _models.MODELS)
def test_auto_is_bit_equal(store, name):
    expected = stock(name)
    offload = penstock.offload(store, policy="auto", min_bytes=MIN_BYTES)
    with offload:
        assert_same(train(name), expected)
    report = offload.report()
    offload.close()
    assert report.num_steps == NUM_STEPS
    assert report.saved_bytes == NUM_STEPS * sum(saved_by_one_step(name).values())
    assert "no step has ended" not in report.reason


@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("fraction", [2, 4])
@pytest.mark.parametrize("name", _models.MODELS)
def test_the_budget_holds(store, name, fraction, policy):
    sizes = saved_by_one_step(name).values()
    budget = sum(sizes) // fraction
    offload = penstock.offload(store, device_memory=budget, policy=policy, min_bytes=MIN_BYTES)
    peaks = []
    with offload:
        found = train(name, after_forward=lambda: peaks.append(offload.report().peak_device_bytes))
    assert_same(found, stock(name))
    peaks.append(offload.report().peak_device_bytes)
    offload.close()
    assert peaks[0] <= budget + max(sizes), "in the first step"
    assert peaks[-1] <= budget + max(sizes)


def test_lengths_that_change_every_step(store):
    expected = stock("gpt2", vary=True)
    budget = sum(saved_by_one_step("gpt2").values()) // 2
    for policy in ("all", "auto"):
        offload = penstock.offload(store, device_memory=budget, policy=policy, min_bytes=MIN_BYTES)
        with offload:
            assert_same(train("gpt2", vary=True), expected)
        largest = max(saved_by_one_step("gpt2").values())
        assert offload.report().peak_device_bytes <= budget + largest
        offload.close()


# ---------------------------------------------------------------------- Trainer


def train_with_trainer(directory: Any, offload: Offload | None, **options: Any) -> dict[str, Any]:
    """What Trainer logged, and the weights it trained."""
    model: Any = build("gpt2")
    tokens = torch.randint(1, VOCAB, (24, SEQ), generator=torch.Generator().manual_seed(1))
    dataset: Any = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(directory),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
            **options,
        ),
        train_dataset=dataset,
    )
    if offload is None:
        trainer.train()
    else:
        with offload:
            trainer.train()
    gc.collect()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in steps],
        "grad_norms": [entry["grad_norm"] for entry in steps],
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }


TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1},
    "checkpoint": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant checkpoint in bfloat16": {
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.parametrize("options", TRAINER_OPTIONS.values(), ids=TRAINER_OPTIONS)
# Transformers' own: no memory is pinned where there is no GPU, and an option has a newer name.
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_trainer(store, tmp_path, options):
    expected = train_with_trainer(tmp_path, None, **options)
    offload = penstock.offload(store, policy="all", min_bytes=MIN_BYTES)
    found = train_with_trainer(tmp_path, offload, **options)
    assert len(found["losses"]) == NUM_STEPS
    assert found["losses"] == expected["losses"]
    assert found["grad_norms"] == expected["grad_norms"]
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name
    report = offload.report()
    offload.close()
    assert report.num_steps == NUM_STEPS * options.get("gradient_accumulation_steps", 1)
    assert report.bytes_written > 0
