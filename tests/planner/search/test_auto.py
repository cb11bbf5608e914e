"""Every plan of the planner passes the checker, within its budget, on graphs of all sorts."""

import dataclasses
import itertools
import random
import sys
import time

import numpy as np
import pytest

from graph_cases import GraphBuilder, chain_step, machine, random_graph, request
from penstock.errors import InfeasibleError
from penstock.graph import Kind
from penstock.memory import Link, LinkProfile
from penstock.planner import Bound, Budget, check, min_working_set
from penstock.planner._request import LinkRates
from penstock.planner.bounds import operator_bytes
from penstock.planner.packing._pack import pack
from penstock.planner.search import _auto, _offsets
from penstock.planner.search._auto import AutoSearch
from penstock.planner.search._auto_plan import plan_auto
from penstock.planner.search._problem import GreedyWeights, Problem
from penstock.planner.search._residency import Arena, LowerTiers, ResidencySearch
from penstock.planner.search._sequence import OperatorSequence

FILE_LINKS = [(Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE)]
LINKS = [(Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)]


def planned(
    graph,
    seconds,
    device_bytes,
    *,
    links=LINKS,
    rate=256.0,
    host_bytes=1 << 40,
    device="cuda",
    **options,
):
    ideal = sum(seconds)
    profile = machine(out=rate, back=rate)
    file = LinkProfile(rate / 3, (rate / 3, rate / 3), 1)
    both = {**profile.links, Link.DEVICE_TO_FILE: file, Link.FILE_TO_DEVICE: file}
    file_bytes = 1 << 40 if len(links) > 1 else None
    host_bytes = host_bytes if links else None
    return plan_auto(
        request(
            graph,
            budget=Budget(device_bytes=device_bytes, host_bytes=host_bytes, file_bytes=file_bytes),
            profile=dataclasses.replace(
                profile, links=both, device=device, memcpy=LinkProfile(rate, (rate, rate), 1)
            ),
            seconds=seconds,
            time_limit=options.pop("time_limit", 0.3),
            **options,
        ),
        bound=Bound(seconds=ideal, binding="compute", seconds_of={"compute": ideal}),
    )


@pytest.mark.usefixtures("processor_time")
def test_the_file_takes_what_the_host_has_no_room_for():
    graph = chain_step(8, weight_bytes=4096, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    device_bytes = int(program(graph, seconds).base.max()) // 2
    options = {"rate": 2.0**16, "reorder": False, "recompute": False, "time_limit": 2}
    roomy = planned(graph, seconds, device_bytes, **options)
    host_bytes = roomy.peak_host_bytes // 2
    options["links"] = LINKS + FILE_LINKS
    plan = planned(graph, seconds, device_bytes, host_bytes=host_bytes, **options)
    check(graph, plan)
    assert 0 < plan.peak_host_bytes <= host_bytes
    assert set(plan.bytes_moved) == {link for pair in LINKS + FILE_LINKS for link in pair}
    only_file = planned(graph, seconds, device_bytes, host_bytes=0, **options)
    assert set(only_file.bytes_moved) == set(FILE_LINKS[0])
    assert roomy.step_seconds < plan.step_seconds < only_file.step_seconds


@pytest.mark.usefixtures("processor_time")
def test_where_transfers_take_the_cores_of_operators_less_moves():
    graph = chain_step(8, weight_bytes=4096, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    device_bytes = int(program(graph, seconds).base.max()) // 2
    options = {"rate": 2.0**17, "time_limit": 2}
    moved = {}
    for device in ("cuda", "cpu"):
        plan = planned(graph, seconds, device_bytes, device=device, **options)
        check(graph, plan)
        moved[device] = sum(plan.bytes_moved.values())
    assert 0 < moved["cpu"] < moved["cuda"]


@pytest.mark.usefixtures("processor_time")
def test_a_host_that_is_too_small_for_everything_is_used_with_care():
    graph = chain_step(8, weight_bytes=4096, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    peak = int(program(graph, seconds).base.max())
    options = {"rate": 2.0**16, "reorder": False, "recompute": False, "time_limit": 2}
    lax = planned(graph, seconds, peak * 3 // 4, **options)
    host_bytes = lax.peak_host_bytes
    plan = planned(graph, seconds, peak * 3 // 4, host_bytes=host_bytes, **options)
    check(graph, plan)
    assert plan.peak_host_bytes <= host_bytes
    with pytest.raises(InfeasibleError, match="host_memory"):
        planned(graph, seconds, peak // 2, host_bytes=host_bytes // 8, **options)


def program(graph, seconds):
    return OperatorSequence(Problem(graph, seconds), np.arange(len(graph.operators)))


@pytest.mark.parametrize("seed", range(330))
def test_plans_pass_the_checker(seed):
    """Plans for random steps, each another one: of 500 examples of hypothesis, 324 were."""
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 14))
    seconds = [rng.uniform(0.01, 10) for _ in graph.operators]
    sequence = program(graph, seconds)
    least, most = int(sequence.working_set.max(initial=0)), int(sequence.base.max(initial=0))
    share = rng.choice([0.0, 1.0, *(rng.random() for _ in range(6))])
    workspace = max((operator.workspace_bytes for operator in graph.operators), default=0)
    device_bytes = least + int(share * (most - least)) + workspace
    options = {
        "reorder": rng.random() < 0.5,
        "recompute": rng.random() < 0.5,
        "rate": rng.choice([16.0, 256.0, 1e6]),
        "links": rng.choice([LINKS, LINKS + FILE_LINKS]),
    }
    if len(options["links"]) > 1:
        options["host_bytes"] = rng.choice([0, most, rng.randint(0, most)])
    failure = None
    try:
        plan = planned(graph, seconds, device_bytes, time_limit=0.05, **options)
    except InfeasibleError as error:
        failure = error
    if failure is not None:  # addresses may need more than the bytes alone
        assert failure.minimum_device_bytes is not None and not failure.proved
        assert failure.sufficient_device_bytes is not None
        assert failure.minimum_device_bytes <= device_bytes < failure.sufficient_device_bytes
        return
    check(graph, plan)
    assert plan.peak_device_bytes <= device_bytes
    if not options["reorder"] and not options["recompute"]:
        assert plan.order == tuple(range(len(graph.operators)))
    if not options["recompute"]:
        assert not plan.recomputed


def test_with_room_for_everything_nothing_moves():
    graph = chain_step(6, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    plan = planned(graph, seconds, int(program(graph, seconds).base.max()))
    check(graph, plan)
    assert not plan.transfers and not plan.recomputed
    assert plan.step_seconds == pytest.approx(len(seconds))


@pytest.mark.parametrize("seed", range(8))
def test_without_a_limit_nothing_moves_even_when_there_is_no_time(seed):
    graph = random_graph(random.Random(seed), 20)
    plan = planned(graph, [1.0] * len(graph.operators), None, time_limit=1e-9)
    check(graph, plan)
    assert not plan.transfers and not plan.recomputed


def test_without_a_limit_the_arena_is_what_the_packer_needs(monkeypatch):
    graph = chain_step(6, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    enough = 2 * int(program(graph, seconds).base.max())

    def pack_badly(buffers, capacity, *options):
        if capacity < enough:
            raise InfeasibleError("no room", sufficient_device_bytes=enough)
        return pack(buffers, capacity, *options)

    monkeypatch.setattr(_offsets, "pack", pack_badly)
    check(graph, planned(graph, seconds, None))
    with pytest.raises(InfeasibleError, match=f"{enough} bytes suffice"):
        planned(graph, seconds, enough - 1, links=[])


def test_a_search_that_has_no_time_moves_no_more_than_it_has_to():
    graph = chain_step(24, weight_bytes=4096, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    device_bytes = int(program(graph, seconds).base.max()) // 2
    plan = planned(graph, seconds, device_bytes, rate=2.0**16, time_limit=1e-9)
    check(graph, plan)
    # Everything that is not in use could leave: that has addresses, and takes twice as long.
    assert plan.step_seconds == pytest.approx(sum(seconds))


@pytest.mark.usefixtures("processor_time")
def test_no_tier_below_means_recomputation_or_nothing():
    graph = chain_step(12, weight_bytes=256, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    peak = int(program(graph, seconds).base.max())
    plan = planned(graph, seconds, peak * 2 // 3, links=[], time_limit=0.5)
    check(graph, plan)
    assert plan.recomputed and not plan.transfers
    with pytest.raises(InfeasibleError, match="a tier for what does not fit"):
        planned(graph, seconds, peak * 2 // 3, links=[], recompute=False)


def test_too_small_a_budget_names_the_operator_and_what_it_needs():
    graph = chain_step(4, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    least = min_working_set(graph)
    with pytest.raises(InfeasibleError) as raised:
        planned(graph, seconds, least - 1)
    assert raised.value.minimum_device_bytes == least
    worst = graph.operators[int(operator_bytes(graph).argmax())]
    assert raised.value.operator == worst.name
    assert raised.value.proved
    enough = raised.value.sufficient_device_bytes
    assert enough is not None and enough >= least
    check(graph, planned(graph, seconds, enough))


def test_what_would_do_needs_no_more_of_the_tier_below():
    graph = chain_step(4, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    with pytest.raises(InfeasibleError) as raised:
        planned(graph, seconds, min_working_set(graph) - 1, host_bytes=4096, recompute=False)
    enough = raised.value.sufficient_device_bytes
    assert enough is not None
    check(graph, planned(graph, seconds, enough, host_bytes=4096, recompute=False))


def test_a_step_without_operators_has_a_plan():
    graph = GraphBuilder().graph()
    check(graph, planned(graph, [], 1024))


@pytest.mark.parametrize("device_bytes", [None, 3 * 4096])
def test_a_result_that_the_last_operator_reads_stays(device_bytes):
    build = GraphBuilder()
    result, other = build.storage(4096), build.storage(4096)
    build.run(creates=(result,))
    build.run(reads=(result,), creates=(other,), may_overwrite=((result, other),))
    graph = build.graph(result)
    check(graph, planned(graph, [1.0, 1.0], device_bytes))


def test_a_budget_that_ends_between_two_multiples_of_the_alignment_is_used_whole():
    """The step of an optimizer on one small and two large tensors needs all that there is."""
    build = GraphBuilder()
    large = [build.storage(2**16, Kind.PARAMETER) for _ in range(2)]
    small = build.storage(4, Kind.PARAMETER)
    for weight in large:
        build.run(reads=(small,), mutates=((weight, build.version(weight)),))
    graph = build.graph()
    seconds = [1.0] * len(graph.operators)
    for device_bytes in (2**16 + 4, 2**16 + 5, 2**16 + 511):
        plan = planned(graph, seconds, device_bytes)
        check(graph, plan)
        assert plan.peak_device_bytes <= device_bytes
    with pytest.raises(InfeasibleError) as raised:
        planned(graph, seconds, 2**16 + 3)
    assert raised.value.proved and raised.value.minimum_device_bytes == 2**16 + 4


def test_the_same_seed_gives_the_same_plan():
    graph = chain_step(4, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0 + index % 3 for index in range(len(graph.operators))]
    peak = int(program(graph, seconds).base.max())
    first, second = (
        planned(graph, seconds, peak // 2, time_limit=60, seed=3).to_dict() for _ in range(2)
    )
    for plan in (first, second):
        plan["notes"].pop("search_seconds")
        plan.pop("checksum")  # of the notes, too
    assert first == second


@pytest.mark.usefixtures("processor_time")
def test_an_interrupt_gives_the_best_plan_so_far():
    graph = chain_step(10, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    peak = int(program(graph, seconds).base.max())

    def interrupt(progress):
        raise KeyboardInterrupt

    begin = time.monotonic()
    plan = planned(graph, seconds, peak // 2, time_limit=60, progress=interrupt)
    assert time.monotonic() - begin < 30
    check(graph, plan)


def test_an_interrupt_between_any_two_lines_of_a_call_of_the_engine_is_one():
    graph = chain_step(6)
    problem = Problem(graph, np.ones(len(graph.operators)))
    order = np.arange(len(graph.operators), dtype=np.int32)
    weights = GreedyWeights(1.0, 1.0, 1.0, 0.0, 2**20)

    def interrupt_at(number):
        lines = itertools.count()

        def trace(frame, event, argument):
            if event == "line" and next(lines) == number:
                raise KeyboardInterrupt
            return trace

        return trace

    for number in itertools.count():
        tracer = sys.gettrace()
        sys.settrace(interrupt_at(number))
        try:
            found = problem.greedy_order(order, weights)
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(tracer)
        break
    assert number > 10
    assert sorted(found) == list(order)


@pytest.mark.usefixtures("processor_time")
def test_an_interrupt_at_the_start_of_a_frozen_search_keeps_the_best_plan(monkeypatch):
    graph = chain_step(10, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    peak = int(program(graph, seconds).base.max())
    found = []
    search_anew, try_one = AutoSearch._search_anew, AutoSearch._try

    def interrupt(search, *args):
        raise KeyboardInterrupt

    def interrupted(search):
        found.append(search.best.seconds)
        monkeypatch.setattr(AutoSearch, "_try", interrupt)
        try:
            search_anew(search)
        finally:
            monkeypatch.setattr(AutoSearch, "_try", try_one)

    monkeypatch.setattr(AutoSearch, "_search_anew", interrupted)
    plan = planned(graph, seconds, peak // 2, time_limit=60)
    check(graph, plan)
    assert plan.step_seconds <= found[0] * (1 + 1e-9)


@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.usefixtures("processor_time")
def test_a_search_remembers_few_candidates(monkeypatch, few):
    """Whatever it forgets, the best, the program's order and one without second runs stay."""
    sizes, quick = [], []
    note = AutoSearch._note

    def noted(search, candidate):
        improved = note(search, candidate)
        sizes.append(len(search._candidates))
        quick.append(sum(len(order) for order, _ in search._quick) // 4)
        kept = search._candidates.values()
        assert min(each.seconds for each in kept) <= candidate.seconds
        return improved

    monkeypatch.setattr(AutoSearch, "_note", noted)
    monkeypatch.setattr(_auto, "_MAX_CANDIDATES", 5)
    monkeypatch.setattr(_auto, "_MAX_QUICK", 200)
    monkeypatch.setattr(_auto, "_FEW_OPERATORS", few)
    graph = chain_step(8, weight_bytes=4096, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    device_bytes = int(program(graph, seconds).base.max()) // 2
    check(graph, planned(graph, seconds, device_bytes, time_limit=1.0))
    assert len(sizes) > 20
    assert max(sizes) == 5
    assert max(quick) <= 2 * (200 + len(graph.operators))


@pytest.mark.parametrize(("share", "is_free_first"), [(0.99, False), (0.5, True)])
@pytest.mark.usefixtures("processor_time")
def test_where_one_operator_fills_the_arena_the_order_of_the_program_comes_first(
    monkeypatch, share, is_free_first
):
    """All decisions are free afterwards, and each pair of frozen ones has its turn in any case."""
    searched, search = [], AutoSearch._search

    def noted(self, *, worth):
        searched.append((self.reorder, self.recompute, self.best is not None))
        search(self, worth=worth)

    monkeypatch.setattr(AutoSearch, "_search", noted)
    graph = chain_step(8, weight_bytes=4096, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    least = int(program(graph, seconds).working_set.max())
    plan = planned(graph, seconds, int(least / share), rate=2.0**12, time_limit=2.0)
    check(graph, plan)
    first = (True, True, False) if is_free_first else (False, True, False)
    assert searched[0] == first
    assert ((True, True, True) in searched) != is_free_first  # from the best so far
    pairs = {(True, True), (False, True), (True, False), (False, False)}
    assert {found[:2] for found in searched} == pairs


@pytest.mark.parametrize("share", [0.99, 0.5])
@pytest.mark.usefixtures("processor_time")
def test_an_arena_for_one_operator_and_little_more_is_searched_as_tight_as_that(monkeypatch, share):
    """In a smaller one the largest operator would not fit; larger arenas are searched by shares."""
    found, note = [], AutoSearch._note_tighter

    def noted(search, whole, part):
        note(search, whole, part)
        found.extend([search.arena.capacity] * len(search.tighter))

    monkeypatch.setattr(AutoSearch, "_note_tighter", noted)
    graph = chain_step(8, weight_bytes=4096, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    least = int(program(graph, seconds).working_set.max())
    device_bytes = int(least / share)
    check(graph, planned(graph, seconds, device_bytes, time_limit=2.0))
    assert (least if share > 0.95 else int(device_bytes * 0.95)) in found
    assert share > 0.95 or least not in found


def test_no_evictions_are_chosen_twice_for_the_same_bytes(monkeypatch):
    """Where an operator needs more than a profile leaves, and where no operator is in a part."""
    graph = chain_step(4, weight_bytes=4096, activation_bytes=65536)
    sequence = program(graph, [1.0] * len(graph.operators))
    lower = LowerTiers((LinkRates(2.0**12, 2.0**12),))
    search = ResidencySearch(sequence, Arena(int(sequence.base.max()) * 2 // 3, lower))
    best, asked, at = search.quick(), [], search.at

    def note(shares):
        asked.append(search._target(shares).tobytes())
        return at(shares)

    monkeypatch.setattr(search, "at", note)
    search.refine(best, deadline=time.monotonic() + 60, on_better=lambda _: None)
    assert len(set(asked)) == len(asked) > 10
    assert search._target(best.shares).tobytes() not in asked
