"""The split of fetching and recomputing against a clockwork of every possible split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv._recompute import fetch_or_recompute


def clockwork_seconds(num_recomputed, num_tokens, setting):
    """Time of a split: the link sends block after block, the device computes what has arrived."""
    block = setting["block_tokens"]
    link = device = 0.0
    for first in range(0, num_recomputed, block):
        tokens = min(block, num_recomputed - first)
        link += tokens * setting["input_bytes_per_token"] / setting["bandwidth"]
        device = max(device, link) + tokens * setting["flops_per_token"] / setting["flop_rate"]
    if num_recomputed:
        device += setting["overhead_seconds"]
    link += (num_tokens - num_recomputed) * setting["bytes_per_token"] / setting["bandwidth"]
    return max(link, device)


settings_of_machines = st.fixed_dictionaries(
    {
        "bytes_per_token": st.integers(1, 10_000),
        "input_bytes_per_token": st.one_of(st.just(0), st.integers(0, 12_000)),
        "bandwidth": st.floats(1e3, 1e9),
        "flops_per_token": st.floats(0, 1e6),
        "flop_rate": st.floats(1e3, 1e12),
        "block_tokens": st.integers(5, 70),
        "overhead_seconds": st.one_of(st.just(0.0), st.floats(0, 10)),
    }
)


@given(st.integers(0, 500), settings_of_machines)
@settings(max_examples=100, deadline=None)
def test_no_split_is_faster(num_tokens, setting):
    split = fetch_or_recompute(num_tokens, **setting)
    block = setting["block_tokens"]
    every = [*range(0, num_tokens, block), num_tokens]
    best = min(clockwork_seconds(tokens, num_tokens, setting) for tokens in every)
    assert split.num_recomputed in every
    assert split.num_recomputed + split.num_fetched == num_tokens
    own = clockwork_seconds(split.num_recomputed, num_tokens, setting)
    assert split.seconds == pytest.approx(own, rel=1e-9)
    assert split.seconds <= best * 1.02 + 1e-15


def test_link_and_device_finish_together_to_a_block():
    split = fetch_or_recompute(
        4096,
        bytes_per_token=4096,
        bandwidth="10GB/s",
        flops_per_token=2**23,
        flop_rate=10e12,
        input_bytes_per_token=1024,
    )
    assert 0 < split.num_recomputed < 4096
    per_block = 64 * (2**23 / 10e12 + 4096 / 10e9)
    assert abs(split.link_seconds - split.compute_seconds) <= per_block
    assert split.fetched_bytes == 1024 * split.num_recomputed + 4096 * split.num_fetched


@pytest.mark.parametrize(
    ("changed", "num_recomputed"),
    [
        ({"input_bytes_per_token": 4096}, 0),  # inputs as large as keys and values
        ({"flops_per_token": 0}, 1000),  # computing costs nothing
        ({"overhead_seconds": 1.0}, 0),
        ({"flop_rate": 1.0}, 0),
    ],
)
def test_extremes(changed, num_recomputed):
    setting = {
        "bytes_per_token": 4096,
        "bandwidth": 1e9,
        "flops_per_token": 2**20,
        "flop_rate": 1e12,
    }
    assert fetch_or_recompute(1000, **(setting | changed)).num_recomputed == num_recomputed


@pytest.mark.parametrize("name", ["num_tokens", "bytes_per_token", "flop_rate", "block_tokens"])
def test_wrong_arguments_are_named(name):
    setting = {
        "num_tokens": 10,
        "bytes_per_token": 1,
        "bandwidth": 1e9,
        "flops_per_token": 1,
        "flop_rate": 1e9,
        "block_tokens": 1,
    }
    with pytest.raises(ValueError, match=name):
        fetch_or_recompute(**(setting | {name: -1}))
