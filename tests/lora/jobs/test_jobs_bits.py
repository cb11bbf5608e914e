"""A job has the same bits alone and beside others, and stock PEFT's numbers but for rounding."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from _jobs_cases import (
    ALL_LINEAR,
    EARLY,
    JOBS,
    add_job,
    have_same_bits,
    make_data,
    make_llama,
    results_of,
    weights_of,
)
from penstock.lora.jobs import Jobs

# PEFT and Transformers of today, without Jobs.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:`{name}` is deprecated:FutureWarning")
    for name in ("is_gradient_checkpointing", "gradient_checkpointing_enable")
]


@pytest.mark.parametrize(
    ("order", "num_steps"),
    [(list(JOBS), 50), (list(JOBS)[::-1], EARLY)],
    ids=["forward", "backward"],
)
def test_a_job_beside_three_others_has_the_bits_of_it_alone(request, base, order, num_steps):
    """Ranks, dropouts, batches, layers and lengths differ; one of them ends after 15 steps."""
    changes = {} if num_steps == 50 else {"num_steps": num_steps}
    alone = request.getfixturevalue("early" if changes else "alone")
    with Jobs(base, max_tokens=128) as jobs:
        for name in order:
            add_job(jobs, name, **changes)
        report = jobs.run()
        together = results_of(jobs)
    assert report.is_exact, report.inexact_reason
    assert report.num_micro_batches < sum(num_steps for _ in JOBS)
    for name in JOBS:
        assert len(alone[name][0]) == min(JOBS[name].get("num_steps", 50), num_steps)
        assert alone[name][0][0] != alone[name][0][-1]
        assert have_same_bits(together[name], alone[name])


def test_jobs_that_come_pause_and_go_at_any_step_leave_the_others_bits(base, early):
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=EARLY)
        jobs.run(num_steps=3)
        add_job(jobs, "wide", num_steps=EARLY)
        jobs.run(num_steps=4)
        jobs.pause("plain")
        jobs.run(num_steps=2)
        assert [job.num_steps for job in jobs.report().jobs] == [7, 6]
        add_job(jobs, "guest", data=JOBS["short"]["data"])
        jobs.resume("plain")
        jobs.run(num_steps=5, lookahead=5)
        jobs.remove("guest")
        assert [job.num_steps for job in jobs.report().jobs if job.name != "guest"] == [12, 11]
        add_job(jobs, "long", num_steps=EARLY)
        jobs.run(lookahead=4)
        together = results_of(jobs)
    for name in ("plain", "wide", "long"):
        assert have_same_bits(together[name], early[name])


def test_two_threads_leave_bits_as_they_are(base):
    """Shares of two threads end elsewhere; kernels of 128 x 416 elements have two of them.

    One layer: where another process needs the second core, each share waits for it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llama = make_llama(intermediate_size=416, num_hidden_layers=1)
        found = []
        for names in (["short"], ["short", "wide"], ["long", "short"]):
            with Jobs(llama, max_tokens=128) as jobs:
                for name in names:
                    add_job(jobs, name, num_steps=2)
                assert jobs.run().is_exact
                found.append(results_of(jobs)["short"])
    finally:
        torch.set_num_threads(before)
    assert have_same_bits(found[0], found[1])
    assert have_same_bits(found[0], found[2])


def train_stock(base, job, order, num_steps):
    """A loop over one job with stock PEFT: sample by sample, the mean over a batch's targets."""
    torch.manual_seed(5)
    model = get_peft_model(base, copy.deepcopy(job["config"]))
    parameters = [each for each in model.parameters() if each.requires_grad]
    with torch.no_grad():
        for each, start in zip(parameters, job["start"], strict=True):
            each.copy_(start)
    optimizer = job["optimizer"](parameters)
    losses = []
    for step in range(num_steps):
        batch = order[step]
        num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in batch)
        total = 0.0
        for tokens, labels in batch:
            if len(tokens) > 1:
                loss = model(
                    input_ids=tokens[None], labels=labels[None], num_items_in_batch=num_targets
                ).loss
                loss.backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    model.unload()
    return losses, [each.detach() for each in parameters]


@pytest.mark.parametrize(
    ("labels", "num_steps"), [(False, 10), (True, 50)], ids=["tokens", "labels"]
)
def test_without_dropout_a_job_is_stock_peft_but_for_rounding(llama, labels, num_steps):
    data = make_data(6, 13, 2, 30)
    samples = [{"input_ids": each} for each in data]
    if labels:
        samples = [
            {"input_ids": each, "labels": torch.where(each % 3 == 0, -100, each)} for each in data
        ]
    # AdamW divides by the root of small gradients, which makes their rounding large.
    job = {
        "config": LoraConfig(r=4, lora_alpha=16, target_modules=[*ALL_LINEAR, "lm_head"]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    }
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "wide", num_steps=num_steps)
        add_job(
            jobs,
            "mine",
            data=samples,
            config=job["config"],
            optimizer=job["optimizer"],
            batch_size=2,
            accumulation=2,
            clipping=0.5,
            num_steps=num_steps,
        )
        mine = jobs._jobs["mine"]
        job["start"] = [each.detach().clone() for each in mine.parameters]
        order = []
        for step in range(num_steps):
            drawn = [mine.data.read(step * 4 + i) for i in range(4)]
            order.append(
                [
                    (each.tokens, torch.cat([torch.tensor([-100]), each.targets[:-1]]))
                    for each in drawn
                ]
            )
        jobs.run()
        losses, weights = mine.losses, [each.detach().clone() for each in mine.parameters]
    expected, expected_weights = train_stock(llama, job, order, num_steps)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    for each, other in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=1e-6)


def test_each_epoch_has_every_sample_once_in_another_order(llama):
    data = make_data(7, 9, 3, 12)
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "plain", data=data)
        order = jobs._jobs["plain"].data
        epochs = [[order.read(epoch * 9 + i).tokens.tolist() for i in range(9)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(each.tolist() for each in data)
    assert epochs[0] != epochs[1]


def test_masks_differ_by_step_and_layer_and_seed_and_not_by_neighbours(llama):
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "plain")
        job = jobs._jobs["plain"]
        (first, *_), (again, *_), (later, *_) = (job.draw(step).chunks for step in (0, 0, 1))
    assert first.seeds == again.seeds
    seeds = [*first.seeds.values(), *later.seeds.values()]
    assert len(set(seeds)) == len(seeds) == 2 * len(first.adapters)


def test_gradient_checkpointing_gives_the_same_bits(llama):
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            llama.gradient_checkpointing_enable({"use_reentrant": False})
        with Jobs(llama, max_tokens=128) as jobs:
            for name in ("plain", "short"):
                add_job(jobs, name, num_steps=5)
            jobs.run()
            found.append(results_of(jobs))
    for name in ("plain", "short"):
        assert have_same_bits(found[0][name], found[1][name])


def test_a_loss_of_the_users_own_gets_logits_and_targets_of_whole_samples(llama):
    shapes = []

    def loss(logits, targets):
        shapes.append((tuple(logits.shape), len(targets)))
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    found = []
    for given in (None, loss):
        with Jobs(llama, max_tokens=128) as jobs:
            add_job(jobs, "short", num_steps=3, loss=given)
            jobs.run()
            found.append(results_of(jobs)["short"])
    assert all(shape == (length, 80) for shape, length in shapes)
    assert have_same_bits(*found)


def test_weights_begin_at_the_jobs_seed(llama):
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "plain", seed=1)
        add_job(jobs, "again", seed=1)
        add_job(jobs, "other", seed=2)
        first, again, other = (
            list(weights_of(jobs, name).values()) for name in ("plain", "again", "other")
        )
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
