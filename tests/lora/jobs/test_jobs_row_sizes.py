"""Numbers of rows: products keep the bits of rows there, and kernels have whole vectors."""

import pytest
import torch
from torch import nn

from _jobs_cases import add_job, have_same_bits, make_llama, results_of
from penstock.lora.jobs import Jobs
from penstock.lora.jobs._row_sizes import find_row_sizes, keeps_vectors


class RoundingLinear(nn.Linear):
    """A product that rounds otherwise below some rows, as libraries do, or by the row's place."""

    num_least_rows = 0
    rounds_by_place = False

    def forward(self, x):
        y = super().forward(x)
        if x.shape[:-1].numel() < self.num_least_rows:
            y = y * (1 + 2**-20)
        if self.rounds_by_place:
            y = y * (1 + torch.arange(y.shape[-2])[:, None] * 2**-23)
        return y


def make_rounding(**changes):
    model = make_llama()
    head = RoundingLinear(32, 80, bias=False)
    head.weight = model.lm_head.weight
    for name, each in changes.items():
        setattr(head, name, each)
    model.lm_head = head
    return model


def test_micro_batches_have_the_rows_from_which_products_keep_their_bits():
    model = make_rounding(num_least_rows=90)
    sizes = find_row_sizes(model, 256)
    assert sizes.is_exact
    assert sizes.sizes == (96, 128, 160, 192, 224, 256)
    assert (sizes.least, sizes.most, sizes.fit(1), sizes.fit(97)) == (96, 256, 96, 128)
    found = []
    for names in (["short"], ["short", "long"]):
        with Jobs(model, max_tokens=256) as jobs:
            for name in names:
                add_job(jobs, name, num_steps=4)
            report = jobs.run()
            found.append(results_of(jobs)["short"])
        assert report.is_exact
        assert report.num_least_rows == 96
    assert have_same_bits(*found)


def test_a_model_without_such_a_number_is_not_said_to_be_exact():
    model = make_rounding(rounds_by_place=True)
    sizes = find_row_sizes(model, 64)
    assert not sizes.is_exact
    assert sizes.reason == "rows of products 32 -> 80 do not keep their bits at any number of rows"
    with Jobs(model, max_tokens=64) as jobs:
        add_job(jobs, "short", num_steps=1)
        report = jobs.run()
    assert not report.is_exact
    assert report.inexact_reason == sizes.reason
    assert report.jobs[0].state == "finished"


class Router(nn.Linear):
    """A linear layer that returns scores beside its product, as Llama 4 has them."""

    def forward(self, x):
        y = super().forward(x)
        return y.sigmoid(), y


def test_a_linear_layer_that_returns_more_than_rows_is_not_compared():
    sizes = find_row_sizes(nn.Sequential(nn.Linear(32, 32), Router(32, 4)), 64)
    assert not sizes.is_exact
    assert sizes.reason == "Router returns more than rows, which were not compared"


@pytest.mark.parametrize("threads", [1, 2, 3, 6])
@pytest.mark.parametrize("width", [32, 48, 80, 1000])
def test_threads_shares_of_element_wise_kernels_are_whole_vectors(threads, width):
    """As ATen divides them: at most one share a thread, of at least 32768 elements."""
    kept = [rows for rows in range(32, 4096, 32) if keeps_vectors(rows, [width], threads)]
    assert kept
    for rows in kept:
        shares = min(threads, max(1, -(-rows * width // 32768)))
        ends = range(0, rows * width, -(-rows * width // shares))
        assert all(end % 32 == 0 for end in [*ends, rows * width])


def test_other_threads_than_the_probed_ones_are_reported(llama):
    before = torch.get_num_threads()
    with Jobs(llama, max_tokens=64) as jobs:
        add_job(jobs, "short", num_steps=2)
        assert jobs.report().is_exact
        torch.set_num_threads(before + 1)
        try:
            jobs.step()
        finally:
            torch.set_num_threads(before)
        reason = jobs.report().inexact_reason
    assert reason == f"rows were probed with {before} threads, and passes run with {before + 1}"
