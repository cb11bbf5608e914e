"""The batches of an epoch: balanced, below the cap, each sample once, on every rank alike."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching import BalancedBatchSampler, SampleCosts
from penstock.batching.sampler._packing import UNPLACED, place_rest

# Small sizes too, which fill a cap to the last unit.
SIZES = st.one_of(
    st.lists(st.integers(0, most), min_size=1, max_size=120) for most in (5, 30, 1000)
)


def every_rank(costs, num_replicas, **arguments):
    """One epoch: for each rank its batches."""
    return [
        list(BalancedBatchSampler(costs, num_replicas=num_replicas, rank=rank, **arguments))
        for rank in range(num_replicas)
    ]


def lognormal(count, seed=0, sigma=1.0):
    return np.random.default_rng(seed).lognormal(3, sigma, count).astype(int) + 1


@settings(max_examples=300)
@given(
    sizes=SIZES,
    slack=st.integers(0, 10) | st.integers(0, 3000),
    num_replicas=st.integers(1, 8),
    most_samples=st.none() | st.integers(1, 20),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_a_cap_holds_and_each_sample_comes_once(
    sizes, slack, num_replicas, most_samples, shuffle, seed
):
    cap = max(sizes) + slack
    arguments = {"max_bytes": cap, "batch_size": most_samples, "shuffle": shuffle, "seed": seed}
    try:
        ranks = every_rank(sizes, num_replicas, **arguments)
    except ValueError:
        # Only where there cannot be enough batches: nearly every sample is alone.
        alone = every_rank(sizes, 1, **arguments)[0]
        assert -(-len(alone) // num_replicas) * num_replicas > len(sizes)
        return
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert all(batch and sum(sizes[i] for i in batch) <= cap for batch in batches)
    assert all(len(batch) <= (most_samples or len(sizes)) for batch in batches)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**9),
    sigma=st.floats(0, 2.5),
    largest=st.sampled_from([1, 10, 1000, 10**9]),
    room=st.floats(1, 40),
    num_replicas=st.sampled_from([1, 1, 1, 2, 3, 8]),
    epoch=st.integers(0, 3),
)
def test_a_cap_holds_over_a_quarter_of_a_million_samples(
    seed, sigma, largest, room, num_replicas, epoch
):
    """200 epochs of 1250 samples; what a batch costs is added up here, over all ranks at once.

    The ranks have one plan, as in the test before: it is made once, and read as each of them.
    """
    random = np.random.default_rng(seed)
    sizes = (largest * np.minimum(random.lognormal(-1, sigma, 1250), 1)).astype(np.int64)
    cap = int(max(room * sizes.max(), 1))
    try:
        sampler = BalancedBatchSampler(
            sizes, max_bytes=cap, num_replicas=num_replicas, rank=0, seed=seed
        )
    except ValueError:  # nearly every sample is alone, and the ranks do not divide them
        assert num_replicas > 1 and (2 * sizes > cap).sum() > 1250 - num_replicas
        return
    batches = []
    for rank in range(num_replicas):
        sampler._rank_arguments = (num_replicas, rank)
        sampler.set_epoch(epoch)
        mine = list(sampler)
        assert sampler.rank == rank
        assert len(mine) == len(sampler)
        batches += mine
    assert len(batches) == num_replicas * len(sampler)
    items = np.concatenate(batches)
    starts = np.cumsum([0, *map(len, batches)])[:-1]
    assert np.add.reduceat(sizes[items], starts).max() <= cap
    assert (np.bincount(items, minlength=1250) == 1).all()


@pytest.mark.parametrize("arguments", [{"batch_size": 16}, {"max_bytes": 4000}])
def test_memory_grows_as_the_samples_do(arguments):
    """Peak bytes of planning and handing out an epoch, per sample."""
    per_sample = []
    for count in (5_000, 60_000):  # on both sides of what counts as many
        sizes = lognormal(count)
        tracemalloc.start()
        for _ in BalancedBatchSampler(sizes, **arguments):
            pass
        per_sample.append(tracemalloc.get_traced_memory()[1] / count)
        tracemalloc.stop()
    assert max(per_sample) < 160
    assert per_sample[-1] < 1.15 * per_sample[0]


@settings(max_examples=200)
@given(
    costs=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    num_batches=st.integers(1, 8),
    most_samples=st.integers(1, 6),
    data=st.data(),
)
def test_the_rest_goes_into_the_fullest_batch_that_has_room(costs, num_batches, most_samples, data):
    """`place_rest`, against the same said plainly: every batch is looked at for every sample."""
    most_cost = 12 + data.draw(st.integers(0, 10))
    batches, loads, counts = [], [0] * num_batches, [0] * num_batches
    for cost in costs:
        batch = data.draw(st.integers(UNPLACED, num_batches - 1))
        if batch != UNPLACED and (loads[batch] + cost > most_cost or counts[batch] == most_samples):
            batch = UNPLACED
        batches.append(batch)
        if batch != UNPLACED:
            loads[batch] += cost
            counts[batch] += 1
    found, num_found = place_rest(
        np.array(costs),
        np.array(batches),
        num_batches,
        most_cost=most_cost,
        most_samples=most_samples,
    )
    unplaced = [k for k, batch in enumerate(batches) if batch == UNPLACED]
    for k in sorted(unplaced, key=lambda k: -costs[k]):
        room = [
            (most_cost - loads[b], b)
            for b in range(len(loads))
            if loads[b] + costs[k] <= most_cost and counts[b] < most_samples
        ]
        if not room:
            loads.append(0)
            counts.append(0)
        batch = min(room)[1] if room else len(loads) - 1
        loads[batch] += costs[k]
        counts[batch] += 1
        batches[k] = batch
    assert (found.tolist(), num_found) == (batches, len(loads))


@settings(max_examples=200)
@given(sizes=SIZES, batch_size=st.integers(2, 40), num_replicas=st.integers(1, 8))
def test_a_fixed_count_holds_and_each_sample_comes_once(sizes, batch_size, num_replicas):
    if len(sizes) < num_replicas:
        with pytest.raises(ValueError, match="use fewer ranks"):
            every_rank(sizes, num_replicas, batch_size=batch_size)
        return
    ranks = every_rank(sizes, num_replicas, batch_size=batch_size)
    assert len({len(batches) for batches in ranks}) == 1
    lengths = [len(batch) for rank in ranks for batch in rank]
    assert max(lengths) <= batch_size and max(lengths) - min(lengths) <= 1
    assert sorted(i for rank in ranks for b in rank for i in b) == list(range(len(sizes)))


@settings(max_examples=150)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80),
    slack=st.integers(0, 30) | st.integers(0, 4000),
    fixed=st.integers(0, 50),
    most=st.integers(1, 60),
)
def test_a_cap_counts_padding_and_fixed_bytes(lengths, slack, fixed, most):
    source, target = np.minimum(np.array(lengths), most).T
    costs = SampleCosts(
        fixed_bytes=fixed, summed_bytes=3 * source, padded_bytes=(source**2, 2 * target)
    )
    cap = int(costs.of_each().max()) + slack
    sampler = BalancedBatchSampler(costs, max_bytes=cap)
    seen = []
    for batch in sampler:
        padded = max(source[batch]) ** 2 + 2 * max(target[batch])
        assert fixed + 3 * sum(source[batch]) + len(batch) * padded <= cap
        seen += batch
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 100), min_size=30, max_size=90),
    num_replicas=st.integers(1, 3),
    epoch=st.integers(0, 4),
    data=st.data(),
    capped=st.booleans(),
)
def test_an_interrupted_epoch_goes_on_with_what_was_left(sizes, num_replicas, epoch, data, capped):
    arguments = {"max_bytes": 300} if capped else {"batch_size": 4}
    arguments |= {"num_replicas": num_replicas, "rank": num_replicas - 1}
    whole = BalancedBatchSampler(sizes, **arguments)
    whole.set_epoch(epoch)
    expected = list(whole)
    done = data.draw(st.integers(0, len(whole) - 1))

    first = BalancedBatchSampler(sizes, **arguments)
    first.set_epoch(epoch)
    batches = iter(first)
    assert [next(batches) for _ in range(done)] == expected[:done]
    state = json.loads(json.dumps(first.state_dict()))
    second = BalancedBatchSampler(sizes, **arguments)
    second.load_state_dict(state)
    second.set_epoch(epoch)  # as Lightning and Accelerate do before every epoch
    assert len(second.loss_weights()) == len(expected) - done
    assert list(second) == expected[done:]
    after = BalancedBatchSampler(sizes, **arguments)
    after.set_epoch(epoch + 1)
    assert list(second) == list(after)


def test_epochs_follow_each_other_and_differ():
    sizes = lognormal(500)
    sampler = BalancedBatchSampler(sizes, max_bytes=800)
    epochs = [list(sampler) for _ in range(6)]
    assert sampler.epoch == 5
    assert {len(batches) for batches in epochs} == {len(sampler)}
    composed = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert len(set().union(*composed)) > 5 * len(sampler)  # hardly a batch comes twice
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


def test_an_abandoned_iteration_begins_again():
    sampler = BalancedBatchSampler(lognormal(100), batch_size=7)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first and sampler.epoch == 0


def test_without_shuffling_every_epoch_is_the_same():
    sizes = lognormal(300)
    sampler = BalancedBatchSampler(sizes, batch_size=10, window=4, shuffle=False)
    first = list(sampler)
    assert list(sampler) == first
    # Windows are consecutive: the first 4 of 30 batches have the first 40 samples.
    assert sorted(i for batch in first[:4] for i in batch) == list(range(40))


def test_any_two_samples_meet_about_as_often():
    """With two windows or more, composition is random but for samples of the same size."""
    sizes = np.arange(64)
    sampler = BalancedBatchSampler(sizes, batch_size=8)
    together = np.zeros((64, 64))
    for _ in range(400):
        for batch in sampler:
            together[np.ix_(batch, batch)] += 1
    rate = together / 400
    apart = np.abs(sizes[:, None] - sizes) > 12
    assert rate[apart].mean() == pytest.approx(7 / 63, rel=0.35)
    assert (rate[apart] > 0).mean() > 0.99 and rate[apart].max() < 0.6


@pytest.mark.parametrize("sigma", [0.3, 0.6, 1.0, 1.4])
@pytest.mark.parametrize("batch_size", [16, 64])
def test_the_largest_batch_is_as_small_as_dealing_over_the_epoch_makes_it(sigma, batch_size):
    sizes = lognormal(2000, seed=3, sigma=sigma)
    sampler = BalancedBatchSampler(sizes, batch_size=batch_size)
    largest = np.mean([max(sizes[b].sum() for b in sampler) for _ in range(5)])
    whole = BalancedBatchSampler(sizes, batch_size=batch_size, window=10**6)
    over_epoch = np.mean([max(sizes[b].sum() for b in whole) for _ in range(5)])
    random = np.random.default_rng(0)
    parts = range(batch_size, 2000, batch_size)
    drawn = np.mean(
        [max(b.sum() for b in np.split(random.permutation(sizes), parts)) for _ in range(5)]
    )
    assert drawn - largest > 0
    assert (largest - over_epoch) / drawn < 0.03
    # No batch can be smaller than the mean, nor than that of the largest sample.
    with_largest = sizes.max() + np.sort(sizes)[: batch_size - 1].sum()
    assert largest < 1.05 * max(with_largest, sizes.sum() / len(sampler))


def test_a_cap_is_filled():
    sizes = lognormal(3000)
    cap = 4 * int(sizes.max())
    bound = -(-int(sizes.sum()) // cap)
    assert len(BalancedBatchSampler(sizes, max_bytes=cap)) <= bound + 1


def test_the_batches_of_a_step_are_alike_on_all_ranks():
    sizes = lognormal(4000) * 1000 + np.arange(4000) % 997
    ranks = every_rank(sizes, 4, max_bytes=3 * int(sizes.max()))
    loads = np.array([[sizes[batch].sum() for batch in batches] for batches in ranks])
    assert (loads.max(0) / loads.min(0)).mean() < 1.02
    shares = [loads.argmax(0).tolist().count(rank) for rank in range(4)]
    assert min(shares) > 0  # no rank always has the largest


def test_packing_windows_together_or_one_by_one_is_the_same(monkeypatch):
    from penstock.batching.sampler import _packing

    for dtype in (np.int64, np.float64):
        costs = np.sort(lognormal(900).astype(dtype))[::-1].copy()
        batches = np.array([5, 5, 4, 4])
        starts = np.array([0, 250, 500, 700, 900])
        for most_samples, most_cost in ((900, None), (900, 1200), (49, None)):
            most = np.full(18, most_samples)
            limits = {"most_samples": most, "most_cost": most_cost}
            results = []
            for many in (1, 100):
                monkeypatch.setattr(_packing, "_MANY_WINDOWS", many)
                results.append(_packing.pack_lightest_first(costs, starts, batches, **limits))
            np.testing.assert_array_equal(*results)


def test_many_samples_have_few_words():
    """A million samples pass through arrays; the promise of batches holds in later epochs."""
    sizes = lognormal(60_000)
    sampler = BalancedBatchSampler(sizes, max_bytes=4000)
    for _ in range(3):
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert max(int(sizes[batch].sum()) for batch in batches) <= 4000
    assert len(sampler) <= 1.005 * sizes.sum() / 4000 + 2


def test_weights_make_ranks_and_steps_add_up_to_the_mean_over_all_samples():
    sizes, values = lognormal(200), torch.arange(200.0)
    total, steps = 0.0, 0
    for rank in range(3):
        sampler = BalancedBatchSampler(sizes, max_bytes=500, num_replicas=3, rank=rank)
        for batch, weight in zip(sampler, sampler.loss_weights(), strict=True):
            total += weight * float(values[batch].mean())
            steps += 1
    assert total / steps == pytest.approx(float(values.mean()))


def test_weights_count_what_the_loss_is_a_mean_of():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    sampler = BalancedBatchSampler(tokens, max_bytes=10)
    batches = list(sampler)
    sampler.set_epoch(0)
    weights = sampler.loss_weights(denominators=tokens)
    mean = sum(tokens) / len(batches)
    assert weights == [sum(tokens[i] for i in batch) / mean for batch in batches]
    assert weights == sampler.loss_weights(denominators=lambda index: tokens[index])
    with pytest.raises(ValueError, match="one number per sample"):
        sampler.loss_weights(denominators=[1, 2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_weights_are_those_of_the_next_iteration_in_every_epoch(num_workers):
    """The loops of the guide and of the docstring, for four epochs, one of them given up."""
    sizes = lognormal(60)
    sampler = BalancedBatchSampler(sizes, max_bytes=200)
    loader = torch.utils.data.DataLoader(
        torch.arange(60), batch_sampler=sampler, num_workers=num_workers
    )
    mean = 60 / len(sampler)
    for epoch in range(4):
        seen = []
        for batches in (loader, sampler):
            for batch, weight in zip(batches, sampler.loss_weights(), strict=True):
                assert weight == pytest.approx(len(batch) / mean)
                seen += [int(i) for i in batch]
            if num_workers == 0 and epoch == 1:
                batches = iter(sampler)
                next(batches), next(batches)
                assert len(sampler.loss_weights()) == len(sampler)
                assert len(list(sampler)) == len(sampler)
        assert sorted(seen) == sorted([*range(60)] * 2)


def test_a_restored_position_that_a_loop_discards_is_said(caplog):
    sampler = BalancedBatchSampler(lognormal(60), max_bytes=200)
    sampler.set_epoch(3)
    next(iter(sampler))
    other = BalancedBatchSampler(lognormal(60), max_bytes=200)
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(3)
    assert not caplog.records
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(0)
    assert "discards the restored position, epoch 3 after 1 batches" in caplog.text


def test_a_sample_that_is_too_large_is_an_error_alone_or_split():
    sizes = [5, 30, 5, 5, 5]
    with pytest.raises(ValueError, match=r"sample 1 with 30 bytes.*oversize='alone'"):
        BalancedBatchSampler(sizes, max_bytes=10)
    alone = list(BalancedBatchSampler(sizes, max_bytes=10, oversize="alone"))
    assert sorted(map(len, alone)) == [1, 2, 2] and [1] in alone

    split = BalancedBatchSampler(
        sizes, max_bytes=10, oversize=lambda index, cost: [((index, k), cost // 4) for k in "abcd"]
    )
    batches = list(split)
    keys = [key for batch in batches for key in batch]
    assert set(keys) == {0, 2, 3, 4, *((1, k) for k in "abcd")} and len(keys) == 8
    cost = {0: 5, 2: 5, 3: 5, 4: 5, **{(1, k): 7 for k in "abcd"}}
    assert all(sum(cost[key] for key in batch) <= 10 for batch in batches)
    with pytest.raises(ValueError, match="function of the key"):
        split.loss_weights(denominators=sizes)

    left_out = BalancedBatchSampler(sizes, max_bytes=10, oversize=lambda index, cost: [])
    assert sorted(i for batch in left_out for i in batch) == [0, 2, 3, 4]
    with pytest.raises(ValueError, match="smaller parts"):
        BalancedBatchSampler(sizes, max_bytes=10, oversize=lambda i, cost: [((i, 0), cost)])
    costs = SampleCosts(summed_bytes=np.array(sizes), least_bytes=20)
    with pytest.raises(ValueError, match=r"costs 20 bytes at least \(least_bytes\)"):
        BalancedBatchSampler(costs, max_bytes=10, oversize=lambda i, cost: [((i, 0), 1)])


def test_every_sample_too_large_is_every_sample_alone():
    ranks = every_rank([20, 30, 40, 50], 2, max_bytes=10, oversize="alone")
    assert sorted(i for rank in ranks for batch in rank for i in batch) == [0, 1, 2, 3]


def test_drop_last_leaves_out_other_samples_in_every_epoch():
    sizes = lognormal(103)
    sampler = BalancedBatchSampler(sizes, batch_size=10, drop_last=True)
    missing = []
    for _ in range(4):
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [10] * 10
        missing.append(frozenset(range(103)) - {i for batch in batches for i in batch})
    assert all(len(left_out) == 3 for left_out in missing) and len(set(missing)) > 1


@pytest.mark.parametrize(
    ("costs", "arguments", "error", "message"),
    [
        ([1, -2], {"batch_size": 1}, ValueError, r"costs must be finite and >= 0; sample 1 has -2"),
        ([1, float("nan")], {"max_bytes": 9}, ValueError, "sample 1 has nan"),
        ([float("inf")], {"max_bytes": 9}, ValueError, "sample 0 has inf"),
        ([], {"batch_size": 1}, ValueError, "costs is empty"),
        ([[1, 2]], {"batch_size": 1}, ValueError, r"one axis; got shape \(1, 2\)"),
        (["a"], {"batch_size": 1}, TypeError, "must be numbers"),
        ([1e300, 1], {"max_bytes": 9}, ValueError, "sum to at most"),
        ([1e308] * 6, {"batch_size": 2}, ValueError, "costs must have a finite sum"),
        ([[1], [2, 3]], {"batch_size": 1}, TypeError, "costs must be numbers, one per sample"),
        ([9], {"max_bytes": 2, "oversize": lambda i, c: None}, TypeError, "sample 0 .* None"),
        ([9], {"max_bytes": 2, "oversize": lambda i, c: [4]}, TypeError, r"\(key, bytes\) pairs"),
        ([9], {"max_bytes": 2, "oversize": lambda i, c: []}, ValueError, "left out every sample"),
        ([1], {}, ValueError, "give batch_size, max_bytes or both"),
        ([1], {"batch_size": 0}, ValueError, "batch_size is 0, but must be at least 1"),
        ([1], {"batch_size": 1.5}, TypeError, "batch_size is 1.5 of type float, but must be"),
        ([1], {"max_bytes": "x"}, ValueError, "max_bytes"),
        ([1], {"batch_size": 1, "window": 0}, ValueError, "window"),
        ([1], {"batch_size": 1, "rank": 1}, ValueError, "rank must be below num_replicas=1"),
        ([1, 1], {"batch_size": 1, "num_replicas": 3}, ValueError, "2 samples .*num_replicas=3"),
        ([1] * 5, {"batch_size": 1, "num_replicas": 4}, ValueError, "raise batch_size"),
        ([1], {"max_bytes": 9, "drop_last": True}, ValueError, "drop_last needs batch_size"),
        ([1], {"batch_size": 2, "drop_last": True}, ValueError, "drop_last leaves nothing"),
        ([1], {"max_bytes": 9, "oversize": "skip"}, ValueError, "oversize must be"),
        (
            SampleCosts(summed_bytes=np.array([1]), padded_bytes=(np.array([1]),)),
            {"batch_size": 1},
            ValueError,
            "give max_bytes",
        ),
    ],
)
def test_wrong_arguments_are_refused(costs, arguments, error, message):
    with pytest.raises(error, match=message):
        BalancedBatchSampler(costs, **arguments)


def test_costs_may_be_tensors_arrays_or_fractions():
    for costs in (torch.tensor([1.5, 2.5, 3.0]), np.float32([1.5, 2.5, 3.0]), (1.5, 2.5, 3.0)):
        assert sorted(BalancedBatchSampler(costs, max_bytes=5, shuffle=False)) == [[0, 1], [2]]
    half = torch.tensor([1.5, 2.5, 3.0], dtype=torch.bfloat16)  # a type that NumPy lacks
    assert sorted(BalancedBatchSampler(half, max_bytes=5, shuffle=False)) == [[0, 1], [2]]
    # 1.5 and 2.5 count as 2 and 3 whole bytes.
    assert len(BalancedBatchSampler([1.5, 2.5], max_bytes=4)) == 2


def test_costs_by_hand_are_whole_bytes_of_64_bits():
    small = np.array([200, 100, 250], dtype=np.uint8)
    costs = SampleCosts(summed_bytes=small, padded_bytes=(small,))
    assert costs.of_each().tolist() == [400, 200, 500]
    assert SampleCosts(summed_bytes=[0.5, 1]).of_batch([0, 1]) == 2
    for values, message in (([-1], "sample 0 has -1"), ([float("nan")], "sample 0 has nan")):
        with pytest.raises(ValueError, match=f"summed_bytes must be finite and >= 0; {message}"):
            SampleCosts(summed_bytes=values)
    with pytest.raises(ValueError, match=r"got lengths \[2, 1\]"):
        SampleCosts(summed_bytes=[1, 2], padded_bytes=([1],))
    with pytest.raises(TypeError, match=r"fixed_bytes is 1\.5"):
        SampleCosts(summed_bytes=[1], fixed_bytes=1.5)


def test_a_state_of_other_data_is_refused():
    sampler = BalancedBatchSampler([1, 2, 3, 4], batch_size=2)
    other = BalancedBatchSampler([1, 2, 3, 5], batch_size=2)
    with pytest.raises(ValueError, match="other costs or arguments"):
        other.load_state_dict(sampler.state_dict())
    for state in ({"epoch": 1}, None):
        with pytest.raises(ValueError, match="state_dict"):
            sampler.load_state_dict(state)
    for wrong, error, message in (
        ({"num_batches": -3}, ValueError, "num_batches is -3, but must be at least 0"),
        ({"num_batches": 3}, ValueError, "num_batches must be at most 2; got 3"),
        ({"num_batches": "1"}, TypeError, "num_batches is '1' of type str, but must be"),
        ({"epoch": 0.5}, TypeError, "epoch is 0.5 of type float, but must be"),
    ):
        with pytest.raises(error, match=message):
            sampler.load_state_dict(sampler.state_dict() | wrong)
    with pytest.raises(ValueError, match="between 0 and 2"):
        sampler.state_dict(num_batches=3)


def test_a_loader_with_workers_reads_ahead_and_the_state_says_what_was_used():
    sizes = lognormal(64)
    sampler = BalancedBatchSampler(sizes, batch_size=4)
    loader = torch.utils.data.DataLoader(torch.arange(64), batch_sampler=sampler, num_workers=2)
    assert len(loader) == 16
    batches = iter(loader)
    used = [next(batches).tolist() for _ in range(3)]
    state = sampler.state_dict(num_batches=3)
    assert sampler.state_dict()["num_batches"] > 3
    del batches
    again = BalancedBatchSampler(sizes, batch_size=4)
    again.load_state_dict(state)
    assert sorted(i for batch in [*used, *again] for i in batch) == list(range(64))


def test_pyg_and_accelerate_take_it():
    loader_module = pytest.importorskip("torch_geometric.loader")
    accelerate = pytest.importorskip("accelerate")
    from torch_geometric.data import Data

    graphs = [Data(x=torch.ones(n, 1), num_nodes=n) for n in range(1, 40)]
    sampler = BalancedBatchSampler([g.num_nodes for g in graphs], max_bytes=60)
    loader = loader_module.DataLoader(graphs, batch_sampler=sampler)
    prepared = accelerate.Accelerator(cpu=True).prepare_data_loader(loader)
    for epoch in range(2):
        nodes = [batch.num_nodes for batch in prepared]
        assert max(nodes) <= 60 and sum(nodes) == sum(range(1, 40))
