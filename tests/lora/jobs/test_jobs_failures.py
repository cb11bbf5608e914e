"""A job that fails or is interrupted leaves the others, and itself, at the end of a step."""

import functools
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig

from _jobs_cases import (
    JOBS,
    adamw,
    add_job,
    have_same_bits,
    make_data,
    make_llama,
    results_of,
    weights_of,
)
from penstock.lora import fuse
from penstock.lora.jobs import Jobs
from penstock.lora.jobs._insertion import AdapterHost
from penstock.lora.jobs._packed_model import PackedModel

STEPS = 6


@pytest.fixture(scope="module")
def undisturbed(base):
    """The job "plain" after a few steps alone."""
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=STEPS)
        jobs.run()
        return results_of(jobs)["plain"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_jobs_train_also_where_gradients_are_off(base, undisturbed, mode):
    with mode(), Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=STEPS)
        jobs.run()
        assert have_same_bits(results_of(jobs)["plain"], undisturbed)


def fail_at(step, wrong):
    """A loss that is as ever for a number of calls in training, and `wrong` of it then."""
    calls = [-2]  # `add` tries it twice

    def loss(logits, targets):
        calls[0] += 1
        total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        return wrong(total) if calls[0] > step else total

    return loss


def raise_error(total):
    raise RuntimeError("no loss today")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda total: total * torch.nan, "the loss of step 2 is nan"),
        (lambda total: total * torch.inf, "the loss of step 2 is inf"),
        (lambda total: total + (total - total.detach()).sqrt(), "a gradient of step 2 is not"),
        (raise_error, "its loss raised RuntimeError: no loss today"),
        (lambda total: total.detach(), "its loss raised ValueError: the loss is no number"),
        (lambda total: 3.0, "its loss raised ValueError: the loss is a float"),
    ],
    ids=["nan", "inf", "gradient", "raises", "constant", "float"],
)
def test_a_job_that_fails_keeps_its_last_weights_and_leaves_the_other(
    base, undisturbed, wrong, reason
):
    with Jobs(base, max_tokens=128) as jobs:
        # Its samples are one chunk a step.
        add_job(jobs, "short", num_steps=STEPS, batch_size=2, loss=fail_at(2, wrong))
        add_job(jobs, "plain", num_steps=STEPS)
        jobs.run(num_steps=2)
        before = weights_of(jobs, "short")
        report = jobs.run()
        failed, other = report.jobs
        assert failed.state == "failed"
        assert failed.reason is not None
        assert failed.reason.startswith(reason)
        assert failed.num_steps == len(failed.losses) == 2
        assert f"failed, 2/{STEPS} steps" in str(report)
        assert all(map(torch.equal, before.values(), weights_of(jobs, "short").values()))
        assert other.state == "finished"
        assert have_same_bits(results_of(jobs)["plain"], undisturbed)
        with pytest.raises(ValueError, match=r"job 'short' is failed .*not paused"):
            jobs.resume("short")


class LazyData:
    """Samples that are read from somewhere, which may fail."""

    def __init__(self, samples):
        self.samples, self.broken = samples, False

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if self.broken:
            raise OSError("the disk is gone")
        return self.samples[index]


def test_data_that_raises_fails_its_job_alone(base, undisturbed):
    data = LazyData(make_data(5, 8, 3, 9))
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "short", data=data, num_steps=STEPS)
        add_job(jobs, "plain", num_steps=STEPS)
        jobs.step()
        data.broken = True
        report = jobs.run()
        assert report.jobs[0].reason == "its data raised OSError: the disk is gone"
        assert report.jobs[0].num_steps == 1
        assert have_same_bits(results_of(jobs)["plain"], undisturbed)


def change_token(data):
    data[3][1] += 1


def change_label(data):
    data[3] = {"input_ids": data[3], "labels": torch.where(data[3] == data[3][1], -100, data[3])}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_token, r"data\[3\] is not what it was when job 'short' was added: give add a copy"),
        (change_label, r"data\[3\] is not what it was when job 'short' was added"),
        (list.clear, "data has 0 samples, and had 8 when job 'short' was added: give add a copy"),
        (list.pop, "data has 7 samples, and had 8"),
    ],
)
def test_data_that_changes_fails_its_job_alone(base, undisturbed, change, reason):
    data = make_data(5, 8, 3, 9)
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "short", data=data, num_steps=STEPS)
        add_job(jobs, "plain", num_steps=STEPS)
        jobs.step()
        change(data)
        report = jobs.run()
        assert report.jobs[0].state == "failed"
        assert re.match(f"its data raised ValueError: {reason}", str(report.jobs[0].reason))
        assert have_same_bits(results_of(jobs)["plain"], undisturbed)


class BrokenSchedule(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        if self.last_epoch == 3:
            raise ArithmeticError("no rate")
        return [0.01]


class BrokenOptimizer(torch.optim.SGD):
    def step(self):
        super().step()
        if "momentum_buffer" in self.state[self.param_groups[0]["params"][0]]:
            raise ArithmeticError("half done")


def test_a_schedule_and_an_optimizer_that_raise_fail_their_jobs_alone(base, undisturbed):
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "short", num_steps=STEPS, schedule=BrokenSchedule)
        add_job(
            jobs,
            "wide",
            num_steps=STEPS,
            optimizer=lambda parameters: BrokenOptimizer(parameters, lr=0.1, momentum=0.9),
        )
        add_job(jobs, "plain", num_steps=STEPS)
        before = weights_of(jobs, "wide")
        report = jobs.run()
        short, wide, _ = report.jobs
        assert short.reason == "the schedule after step 2 raised ArithmeticError: no rate"
        assert short.num_steps == 3
        assert wide.reason == "the optimizer of step 0 raised ArithmeticError: half done"
        assert wide.num_steps == 0
        assert all(map(torch.equal, before.values(), weights_of(jobs, "wide").values()))
        assert have_same_bits(results_of(jobs)["plain"], undisturbed)


class ReplacingOptimizer(torch.optim.SGD):
    """Plain descent that gives parameters other memory, as many by hand do."""

    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.data = each.data - group["lr"] * each.grad


def test_updates_that_are_packed_at_once_follow_replaced_parameters(base):
    found = []
    for lookahead in (1, 3):
        with Jobs(base, max_tokens=128) as jobs:
            make = functools.partial(ReplacingOptimizer, lr=0.5)
            add_job(jobs, "plain", num_steps=3, optimizer=make)
            jobs.run(lookahead=lookahead)
            found.append(results_of(jobs)["plain"])
    assert have_same_bits(*found)


def test_ctrl_c_in_a_pass_leaves_all_jobs_at_the_end_of_a_step(base, undisturbed):
    pressed = []

    def press(total):
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        return total

    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=STEPS)
        add_job(jobs, "long", num_steps=STEPS, loss=fail_at(3, press))
        with pytest.raises(KeyboardInterrupt):
            jobs.run()
        stopped = jobs.report().jobs
        assert pressed
        assert any(job.num_steps < STEPS for job in stopped)
        assert type(base.model.layers[0].self_attn.q_proj).__name__ == "Linear"
        assert "forward" not in vars(base.model.layers[0].self_attn.q_proj)
        assert base.config._attn_implementation == "sdpa"
        jobs.run()
        interrupted = results_of(jobs)
    assert have_same_bits(interrupted["plain"], undisturbed)
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "long", num_steps=STEPS)
        jobs.run()
        assert have_same_bits(interrupted["long"], results_of(jobs)["long"])


class PressingOptimizer(torch.optim.SGD):
    """An optimizer in the middle of whose second step the user presses Ctrl-C."""

    steps = 0

    def step(self):
        self.steps += 1
        if self.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # Python runs handlers between its instructions
                pass
        super().step()


def test_ctrl_c_in_an_update_waits_for_its_end(base):
    found = []
    for kind in (torch.optim.SGD, PressingOptimizer):
        with Jobs(base, max_tokens=128) as jobs:
            add_job(jobs, "short", num_steps=4, optimizer=lambda p, k=kind: k(p, lr=0.1))
            if kind is PressingOptimizer:
                with pytest.raises(KeyboardInterrupt):
                    jobs.run()
                assert jobs.report().jobs[0].num_steps == 2
            jobs.run()
            found.append(results_of(jobs)["short"])
    assert have_same_bits(*found)


def test_the_model_is_as_it_was_after_a_step_and_after_close(llama):
    llama.eval()
    trainable = [name for name, each in llama.named_parameters() if each.requires_grad]
    before = {name: each.clone() for name, each in llama.state_dict().items()}
    tokens = torch.arange(10)[None]
    logits = llama(input_ids=tokens).logits
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=2)
        add_job(jobs, "wide", num_steps=2)
        jobs.step()
        assert not any(module.training for module in (llama, llama.model.layers[0].mlp))
        assert llama.config._attn_implementation == "sdpa"
        assert not torch.equal(llama(input_ids=tokens).logits, logits)  # the last adapter is active
    assert [name for name, each in llama.named_parameters() if each.requires_grad] == trainable
    assert llama.state_dict().keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in llama.state_dict().items())
    assert torch.equal(llama(input_ids=tokens).logits, logits)
    assert not hasattr(llama, "peft_config")


def test_finished_jobs_may_be_removed_and_others_added_under_their_name(base, undisturbed):
    with Jobs(base, max_tokens=128) as jobs:
        for _ in range(2):
            add_job(jobs, "plain", num_steps=STEPS)
            jobs.run()
            assert have_same_bits(results_of(jobs)["plain"], undisturbed)
            jobs.remove("plain")
        assert jobs.report().jobs == ()
        assert jobs.step() == {}
        with pytest.raises(ValueError, match="there is no job 'plain'"):
            jobs.remove("plain")


def test_reports_are_plain_data_and_a_table(base):
    with Jobs(base, max_tokens=128, pipeline_depth=2) as jobs:
        add_job(jobs, "plain", num_steps=3)
        seen = []
        jobs.run(num_steps=2, on_step=seen.append)
        report = jobs.report()
        assert [each.jobs[0].num_steps for each in seen] == [1, 2]
        plain = report.to_dict()
        assert plain["jobs"][0]["losses"] == report.jobs[0].losses
        assert plain["pipeline_depth"] == 2
        assert report.jobs[0].num_tokens == report.num_tokens > 0
        assert report.jobs[0].tokens_per_second > 0
        assert report.jobs[0].learning_rate == adamw([torch.zeros(1)]).param_groups[0]["lr"]
        assert report.num_least_micro_batches <= report.num_micro_batches
        assert report.num_least_rows <= report.num_most_rows == 128
        assert "running, 2/3 steps" in str(report)
        assert "plain" in str(report.jobs[0])


def test_one_base_serves_four_jobs_without_a_copy(base):
    with Jobs(base, max_tokens=128) as jobs:
        first = {id(each) for each in base.parameters()}
        for name in JOBS:
            add_job(jobs, name)
        adapters = {id(each) for job in jobs._jobs.values() for each in job.parameters}
        assert {id(each) for each in base.parameters()} == first | adapters


def set_scaling(peft_model):
    for layer in peft_model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("plain", 5.0)


def replace_parameters(peft_model):
    for layer in peft_model.modules():
        if "plain" in getattr(layer, "lora_A", ()):
            layer.lora_A["plain"].weight = torch.nn.Parameter(layer.lora_A["plain"].weight * 2)


def hook_gradients(peft_model):
    for name, each in peft_model.named_parameters():
        if "lora_B.plain" in name:
            each.register_hook(torch.neg)


def hook_accumulation(peft_model):
    for name, each in peft_model.named_parameters():
        if "lora_A.plain" in name:
            each.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hook_gradients, "has hooks on the gradients"),
        (hook_accumulation, "has hooks on the gradients"),
        (lambda peft_model: peft_model.merge_adapter(), r"merged.*unmerge_adapter\(\) first"),
        (lambda peft_model: peft_model.delete_adapter("plain"), "no longer has its adapter"),
        (lambda peft_model: peft_model.unload(), "no longer has its adapter"),
        (set_scaling, "has the scaling"),
        (replace_parameters, "other parameters in place"),
    ],
)
def test_adapters_that_are_changed_through_peft_are_refused(llama, change, message, tmp_path):
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=2)
        change(jobs.peft_model)
        for go_on in (jobs.step, lambda: jobs.save(tmp_path)):
            with pytest.raises(ValueError, match=message):
                go_on()


def test_fused_layers_are_refused_with_the_remedy(llama):
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=2)
        fuse(jobs.peft_model)
        with pytest.raises(ValueError, match=r"unfuse\(jobs.peft_model\) first"):
            add_job(jobs, "other")


@pytest.mark.parametrize("first", [0, 10])
def test_a_base_that_is_changed_is_reported(llama, first):
    with Jobs(llama, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=2)
        jobs.step()
        assert jobs.report().is_exact
        with torch.no_grad():
            jobs.peft_model.get_base_model().lm_head.weight[first:].mul_(1.1)
        jobs.step()
        assert "parameters of the base were changed" in str(jobs.report().inexact_reason)


def test_initial_weights_of_two_threads_are_drawn_one_after_the_other(monkeypatch):
    draw, calls = torch.nn.init.kaiming_uniform_, []

    def note(*arguments, **named):
        calls.append(threading.get_ident())
        time.sleep(0.005)
        return draw(*arguments, **named)

    hosts = [AdapterHost(PackedModel(make_llama())) for _ in range(2)]
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", note)
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda host: host.insert("plain", LoraConfig(target_modules=["q_proj"]), 3), hosts
            )
        )
    assert len(set(calls)) == 2
    assert calls in (sorted(calls), sorted(calls, reverse=True))
    for name, adapter in found[0].items():
        assert torch.equal(adapter.down, found[1][name].down)
