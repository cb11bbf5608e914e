"""Checkpoints: the same bits after resuming, adapters for stock PEFT, and never half of one."""

import copy
import datetime
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from _jobs_cases import EARLY, JOBS, add_job, have_same_bits, make_data, make_llama, results_of
from fork_servers import find_python
from penstock.lora.jobs import Jobs, _checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, early):
    """In a model that is made again; "long" is paused, "wide" not yet begun when it is saved."""
    with Jobs(make_llama(), max_tokens=128) as jobs:
        for name in ("plain", "short", "long"):
            add_job(jobs, name, num_steps=EARLY)
        jobs.run(num_steps=7)
        jobs.pause("long")
        jobs.run(num_steps=2)
        add_job(jobs, "wide", num_steps=EARLY)
        jobs.save(tmp_path)
    with Jobs(make_llama(), max_tokens=128) as jobs:
        for name in ("wide", "long", "short", "plain"):
            add_job(jobs, name, num_steps=EARLY)
        jobs.restore(tmp_path)
        steps = {job.name: (job.state, job.num_steps) for job in jobs.report().jobs}
        assert steps == {
            "wide": ("running", 0),
            "long": ("paused", 7),
            "short": ("running", 9),
            "plain": ("running", 9),
        }
        jobs.resume("long")
        jobs.run()
        resumed = results_of(jobs)
    for name in JOBS:
        assert have_same_bits(resumed[name], early[name])


def test_stock_peft_loads_the_adapters(tmp_path, llama):
    tokens = torch.arange(20)[None]
    with Jobs(llama, max_tokens=128) as jobs:
        for name in ("plain", "wide"):
            add_job(jobs, name, num_steps=5)
        jobs.run()
        jobs.save(tmp_path)
        jobs.save_adapter("wide", tmp_path / "wide")
        llama.eval()
        expected = {}
        for name in ("plain", "wide"):
            jobs.peft_model.set_adapter(name)
            expected[name] = llama(input_ids=tokens).logits
    loaded = PeftModel.from_pretrained(make_llama(), tmp_path / "latest" / "plain")
    loaded.eval()
    assert torch.equal(loaded(input_ids=tokens).logits, expected["plain"])
    loaded.load_adapter(tmp_path / "wide", adapter_name="second")
    loaded.set_adapter("second")
    assert torch.equal(loaded(input_ids=tokens).logits, expected["wide"])
    assert not torch.equal(expected["plain"], expected["wide"])
    # The files are those that stock PEFT writes.
    stock = get_peft_model(make_llama(), copy.deepcopy(JOBS["plain"]["config"]))
    stock.save_pretrained(tmp_path / "stock")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "stock" / file).exists()
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "latest" / "plain", tmp_path / "stock")
    )
    assert {key: each for key, each in ours.items() if key != "target_modules"} == {
        key: each for key, each in theirs.items() if key != "target_modules"
    }
    assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"])


KILLED_SAVES = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from _jobs_cases import add_job, make_llama
from penstock.lora.jobs import Jobs
jobs = Jobs(make_llama(), max_tokens=128)
add_job(jobs, "short", num_steps=9)
jobs.step()
jobs.save(sys.argv[1])
found = []
for moment in range(1000):
    jobs.step()
    child = os.fork()
    if not child:
        events = []
        def die(event, arguments):
            if event.startswith(("open", "os.", "shutil.")) and event != "os.kill":
                events.append(event)
                if len(events) > moment:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(die)
        jobs.save(sys.argv[1])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    jobs.restore(sys.argv[1])
    found.append(jobs.report().jobs[0].num_steps)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(*found)
"""


def test_kill_9_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    """Processes are killed at each file that is opened, linked, renamed or removed."""
    done = subprocess.run(
        [
            *(find_python("libraries"), "-W", "ignore", "-c", KILLED_SAVES),
            *(tmp_path, Path(__file__).parent),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [int(number) for number in done.stdout.split()]
    assert len(found) > 20
    # The earlier checkpoint until the link is replaced, the new one from then on.
    assert set(found) >= {1, 2}
    assert found == sorted(found)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("moment", ["write_adapter", "_flush_tree", "_flush", "_remove_others"])
def test_an_error_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path, base, monkeypatch, moment
):
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "short", num_steps=4)
        jobs.step()
        jobs.save(tmp_path)
        jobs.step()

        def fail(*_):
            raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(_checkpoint, moment, fail)
            with pytest.raises(OSError, match="disk full"):
                jobs.save(tmp_path)
        jobs.step()
        jobs.restore(tmp_path)
        assert jobs.report().jobs[0].num_steps == (2 if moment == "_remove_others" else 1)
        jobs.save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2


def test_a_checkpoint_of_another_run_is_never_replaced(tmp_path, base):
    def add(jobs):
        add_job(jobs, "plain", num_steps=3)
        jobs.step()

    trainers = tmp_path / "checkpoint-500", tmp_path / "checkpoint-100000"
    for each in trainers:
        each.mkdir()
    with Jobs(base, max_tokens=128) as jobs:
        add(jobs)
        for _ in range(2):
            written = jobs.save(tmp_path)
    with Jobs(base, max_tokens=128) as jobs:
        add(jobs)
        jobs.step()
        with pytest.raises(ValueError, match=r"neither wrote nor restored.*: restore it first"):
            jobs.save(tmp_path)
        assert (tmp_path / "latest").resolve() == written.resolve()
        jobs.save(tmp_path / "other")
        jobs.restore(tmp_path)
        assert jobs.report().jobs[0].num_steps == 1
        jobs.save(tmp_path)
        assert not written.exists()
    assert all(each.exists() for each in trainers)


def test_a_save_that_fails_after_its_link_may_be_done_again(tmp_path, base, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "short", num_steps=4)
        with monkeypatch.context() as patch:
            patch.setattr(_checkpoint, "_remove_others", fail)
            with pytest.raises(OSError, match="disk full"):
                jobs.save(tmp_path)
        jobs.save(tmp_path)


def test_restore_refuses_what_would_have_other_bits(tmp_path, base):
    with Jobs(base, max_tokens=128) as jobs:
        with pytest.raises(ValueError, match="no job to save"):
            jobs.save(tmp_path)
        with pytest.raises(FileNotFoundError, match="no checkpoint of Jobs"):
            jobs.restore(tmp_path)
        add_job(jobs, "plain", num_steps=2)
        jobs.run()
        jobs.save(tmp_path)
    changes = [
        ({"seed": 77}, "another settings than in the checkpoint: seed was"),
        ({"data": make_data(8, 11, 4, 24)}, "another data"),
        ({"config": LoraConfig(r=5, target_modules=["q_proj", "v_proj"])}, "another config"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "another optimizer"),
        (
            {"schedule": lambda o: torch.optim.lr_scheduler.ConstantLR(o)},
            "another schedule than in the checkpoint",
        ),
    ]
    for arguments, message in changes:
        with Jobs(base, max_tokens=128) as jobs:
            add_job(jobs, "plain", **{"num_steps": 2, **arguments})
            with pytest.raises(ValueError, match=message):
                jobs.restore(tmp_path)
            assert jobs.report().jobs[0].num_steps == 0
    with Jobs(base, max_tokens=96) as jobs:
        add_job(jobs, "plain", num_steps=2)
        with pytest.raises(ValueError, match="max_tokens=128; it is 96 now"):
            jobs.restore(tmp_path)
    with Jobs(make_llama(initializer_range=0.1), max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=2)
        with pytest.raises(ValueError, match="was saved with base="):
            jobs.restore(tmp_path)
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "other", num_steps=2)
        with pytest.raises(ValueError, match=r"has the jobs \['plain'\]; added are \['other'\]"):
            jobs.restore(tmp_path)


class DatedSchedule(torch.optim.lr_scheduler.ConstantLR):
    """A schedule whose state has an object that is not loaded as weights are."""

    def state_dict(self):
        return {**super().state_dict(), "made": datetime.date(2020, 1, 1)}


def test_rates_of_numpy_are_restored_and_what_could_not_be_is_refused(tmp_path, base):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 9))

    for is_resumed in (False, True):
        with Jobs(base, max_tokens=128) as jobs:
            add_job(jobs, "plain", num_steps=2, schedule=schedule)
            if is_resumed:
                jobs.restore(tmp_path)
                assert jobs.report().jobs[0].num_steps == 1
                continue
            jobs.step()
            jobs.save(tmp_path)
    with Jobs(base, max_tokens=128) as jobs:
        add_job(jobs, "plain", num_steps=2, schedule=DatedSchedule)
        with pytest.raises(ValueError, match="job 'plain': the state of its optimizer or schedule"):
            jobs.save(tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
