"""The user's objects between steps: values read there are true, and changes count."""

import copy

import pytest
import torch
from torch import distributed, nn

from _planned import CASES, Case, bound, differences, eager_step, everything, trainee
from _ranks import needs_gloo

pytestmark = pytest.mark.usefixtures("one_thread")
CASE, OPTIMIZER = "mixture", "adamw"
WHERE = [(1, "host"), (1 / 3, "host"), (1 / 3, "file")]


def side_by_side(between, *, share, tier, store, num_steps=3, case=CASE):
    """Train eagerly and as planned, with the same deeds between steps; returns what differs."""
    ends = []
    for planned in (False, True):
        model, stepper = trainee(CASES[case], OPTIMIZER)
        kept = {}
        losses = []
        step = None
        if planned:
            step = bound(
                case, OPTIMIZER, model, stepper, share=share, tier=tier, store=store, debug=True
            )
        for number in range(num_steps):
            between(model, stepper, number, kept)
            if step is None:
                losses.append(eager_step(model, stepper, CASES[case]))
            else:
                losses.append(step(CASES[case].batch))
        ends.append(everything(model, stepper, losses))
        if step is not None:
            step.close()
    return differences(ends[0], ends[1], "")


def change_in_place(model, stepper, number, kept):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
        for state in stepper.state.values() if number else ():
            state["exp_avg"].add_(0.25)


def replace_state(model, stepper, number, kept):
    if number:
        stepper.load_state_dict(copy.deepcopy(stepper.state_dict()))


def back_to_the_first(model, stepper, number, kept):
    if number == 1:
        kept["model"] = copy.deepcopy(model.state_dict())
        kept["optimizer"] = copy.deepcopy(stepper.state_dict())
    if number == 2:
        model.load_state_dict(kept["model"])
        stepper.load_state_dict(kept["optimizer"])


def schedule(model, stepper, number, kept):
    stepper.param_groups[0]["lr"] /= number + 1
    stepper.param_groups[0]["betas"] = (0.8 - 0.1 * number, 0.9)


def evaluate(model, stepper, number, kept):
    with torch.no_grad():
        kept[number] = model(CASES[CASE].batch)
    assert kept[number].isfinite()


@pytest.mark.parametrize(("share", "tier"), WHERE)
@pytest.mark.parametrize(
    "between", [change_in_place, replace_state, back_to_the_first, schedule, evaluate]
)
def test_what_happens_between_steps_counts(between, share, tier, store):
    assert side_by_side(between, share=share, tier=tier, store=store) == []


def test_a_backward_pass_of_parameters_before_a_step_is_an_error(store):
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    with bound(CASE, OPTIMIZER, model, stepper, share=1, tier="host", store=store) as step:
        loss = model(case.batch)
        step(case.batch)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(case.batch).backward()


@pytest.mark.parametrize(("share", "tier"), WHERE)
def test_what_a_step_changes_is_not_taken_for_a_change_of_the_users(share, tier, store):
    """Else all that lies in several places would be copied in each step."""
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    options = {"share": share, "tier": tier, "store": store}
    with bound(CASE, OPTIMIZER, model, stepper, **options) as step:
        assert step._current is not None
        state, memory = step._current.state, step._current.memory
        for _ in range(3):
            step(case.batch)
            assert state.copy_changes(step._current.drain) == set()
        for intervals in state.places.values():
            places = {(each.tier, memory.offset_of(each.tier, each.place)) for each in intervals}
            assert len(places) == len(intervals)


@pytest.mark.parametrize(("share", "tier"), WHERE)
def test_a_run_goes_on_from_a_checkpoint(share, tier, store, tmp_path):
    case = CASES[CASE]
    losses = []
    model, stepper = trainee(case, OPTIMIZER)
    options = {"share": share, "tier": tier, "store": store}
    with bound(CASE, OPTIMIZER, model, stepper, **options) as step:
        for number in range(5):
            if number == 2:
                saved = {"model": model.state_dict(), "optimizer": stepper.state_dict()}
                torch.save(saved, tmp_path / "checkpoint.pt")
            losses.append(step(case.batch).item())
    model, stepper = trainee(case, OPTIMIZER)
    saved = torch.load(tmp_path / "checkpoint.pt")
    for tensor in saved["model"].values():  # what was saved is the tensors, not all memory
        assert tensor.untyped_storage().nbytes() - tensor.nbytes < 64
    model.load_state_dict(saved["model"])
    stepper.load_state_dict(saved["optimizer"])
    with bound(CASE, OPTIMIZER, model, stepper, **options) as step:
        assert [step(case.batch).item() for _ in range(3)] == losses[2:]


@pytest.mark.parametrize("optimizer", [OPTIMIZER, "fused adamw"])
def test_eager_steps_between_planned_ones(optimizer, store):
    case = CASES[CASE]
    ends = []
    for planned in (False, True):
        model, stepper = trainee(case, optimizer)
        losses = []
        step = None
        if planned:
            step = bound(
                CASE, optimizer, model, stepper, share=1 / 3, tier="host", store=store, debug=True
            )
        for number in range(4):
            if step is None or number % 2:
                losses.append(eager_step(model, stepper, case))
            else:
                losses.append(step(case.batch))
        ends.append(everything(model, stepper, losses))
        if step is not None:
            step.close()
    assert differences(ends[0], ends[1], "") == []


def test_two_plans_take_turns(store):
    """Another plan for the same model: each takes over from where the other left off."""
    case = CASES[CASE]
    model, stepper = trainee(case, OPTIMIZER)
    options = {"store": store, "debug": True}
    one = bound(CASE, OPTIMIZER, model, stepper, share=1, tier="host", **options)
    other = bound(CASE, OPTIMIZER, model, stepper, share=1 / 3, tier="host", **options)
    losses = [step(case.batch) for step in (one, other, other, one, other)]
    found = everything(model, stepper, losses)
    one.close()
    other.close()
    model, stepper = trainee(case, OPTIMIZER)
    losses = [eager_step(model, stepper, case) for _ in range(5)]
    assert differences(everything(model, stepper, losses), found, "") == []


class Normed(nn.Module):
    """Layers with batch norms whose running statistics are on the device and below it."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(8, 64) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(64, 8) for _ in range(2))

    def forward(self, x):
        for wide, norm, narrow in zip(self.wide, self.norms, self.narrow, strict=True):
            x = x + narrow(norm(wide(x)).relu())
        return x.square().mean()


def test_ordinary_forward_passes_update_running_statistics(store, monkeypatch):
    """Torch counts no version of them."""

    def forward(model, stepper, number, kept):
        if number == 2:
            with torch.no_grad():
                model(3 * CASES["normed"].batch)

    monkeypatch.setitem(CASES, "normed", Case(Normed, torch.ones(4, 8).tril()))
    assert side_by_side(forward, case="normed", share=0.4, tier="host", store=store) == []


@needs_gloo
@pytest.mark.parametrize(("share", "tier"), WHERE[1:])
def test_collectives_between_steps_count(share, tier, store):
    """Torch counts no version of what they write."""

    def scatter(model, stepper, number, kept):
        if number == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    distributed.scatter(parameter, [0.9 * parameter])

    options = {"rank": 0, "world_size": 1, "store": distributed.HashStore()}
    distributed.init_process_group("gloo", **options)
    try:
        assert side_by_side(scatter, share=share, tier=tier, store=store) == []
    finally:
        distributed.destroy_process_group()
