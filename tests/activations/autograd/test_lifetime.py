"""When saved tensors die, their memory goes with them; whichever thread they live in."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import grad
from torch.multiprocessing.reductions import StorageWeakRef

import penstock
from _cases import SavesAll, assert_same, error_of, leaf, outcome_of, wave
from _waiting import nothing_is_held, wait_until_written


def test_memory_of_a_saved_tensor_is_freed_and_comes_back(everything):
    x = leaf(64, 64)
    with everything:
        hidden = x * 1
        out = hidden.sin().sum()
        storage = StorageWeakRef(hidden.untyped_storage())
        wait_until_written(everything)
        assert not storage.expired()  # the user holds it
        del hidden
        assert storage.expired()
        assert torch.equal(grad(out, x)[0], x.detach().cos())


@pytest.mark.parametrize("end", ["backward", "dropped", "hook raises", "two graphs"])
def test_handles_die_with_their_graph(everything, end):
    """By reference counting alone; the fixture has switched the garbage collector off."""
    x = leaf(64, 64)
    with everything:
        out = SavesAll.apply(wave(x), 1)
        raw = out.grad_fn._raw_saved_tensors
        handles = [weakref.ref(saved.data) for saved in (raw[0], raw[2], raw[3])]
        del raw
        assert all(handle() is not None for handle in handles)
        other, loss = (out * 2).sum(), out.sum()
        del out
        if end == "backward":
            loss.backward()
        elif end == "dropped":
            del other, loss
        elif end == "hook raises":
            x.register_hook(lambda gradient: 1 / 0)
            assert "ZeroDivisionError" in error_of(loss.backward)
            del other, loss
        else:
            loss.backward(retain_graph=True)
            del loss
            assert all(handle() is not None for handle in handles)
            other.backward()
        assert [handle() for handle in handles] == [None] * 3


def test_close_right_after_the_graph_has_died(store):
    """Deaths that no thread has noted yet count when `close` is called."""
    x = leaf()
    for _ in range(100):
        offload = penstock.offload(store, policy="all", min_bytes="0B")
        with offload:
            out = wave(x).sum()
        del out
        offload.close()


NUM_NODES = 2500  # 800 bytes of stack for each, which a call of its own for each would exceed


@pytest.fixture
def small_stacks() -> Iterator[None]:
    """Threads, those of an Offload too, have 2 MB of stack."""
    before = threading.stack_size(800 * NUM_NODES // 4096 * 4096)
    yield
    threading.stack_size(before)


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.usefixtures("small_stacks")
def test_deep_graph_frees_without_recursion(is_small, store):
    """Thousands of nodes, abandoned and back-propagated; small ones share records."""
    min_bytes = "1MiB" if is_small else "0B"
    offload = penstock.offload(store, policy="all", min_bytes=min_bytes)
    x = leaf(1)

    def run(abandoned: bool) -> None:
        with offload:
            out = x * 1
            for _ in range(NUM_NODES):
                out = out.sin()
        records = list(offload._engine._records)
        assert sum(max(1, len(record.small_keys)) for record in records) == NUM_NODES
        assert (len(records) < NUM_NODES // 100) is is_small
        del records
        if not abandoned:
            out.backward()
        del out
        assert nothing_is_held(offload)

    for abandoned in (True, False):
        _run_in_thread(functools.partial(run, abandoned))
    assert x.grad is not None
    offload.close()


def _run_in_thread(function: Callable[[], None]) -> None:
    """Run it in a thread of its own; its error is raised here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def _in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """What they return, all started at once."""
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(index: int) -> None:
        start.wait(30)
        results[index] = outcome_of(functions[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_backward_in_other_threads(everything):
    """Four threads share a graph; a fifth has its own, made in the main thread."""
    x, y = leaf(32, 32), leaf(32, 32)
    expected = grad(wave(x).sum(), x)[0], grad(wave(y).sum(), y)[0]
    for _ in range(5):
        with everything:
            shared, own = wave(x).sum(), wave(y).sum()
        found = _in_threads(
            [lambda out=shared: grad(out, x, retain_graph=True)[0]] * 4
            + [lambda out=own: grad(out, y)[0]]
        )
        del shared, own
        assert_same(found, [expected[0]] * 4 + [expected[1]])


def test_forward_and_backward_in_threads(everything):
    """Hooks belong to the thread that entered; a thread that did not is left alone."""
    inputs = [leaf(16, 16) for _ in range(4)]
    expected = [grad(wave(x).sum(), x)[0] for x in inputs]

    def step(x: torch.Tensor) -> torch.Tensor:
        with everything:
            return grad(wave(x).sum(), x)[0]

    before = everything.report().num_saved
    assert_same(_in_threads([functools.partial(step, x) for x in inputs]), expected)
    after = everything.report().num_saved
    assert after > before
    with everything:
        assert_same(_in_threads([lambda: grad(wave(inputs[0]).sum(), inputs[0])[0]]), expected[:1])
    assert everything.report().num_saved == after


def test_saving_leaves_the_version_counter_alone(everything):
    """It is shared: PyTorch compares it before and after each pack hook, in every thread."""
    shared, weight, versions = leaf() * 1, leaf(), set()

    def look(frame: Any, event: str, argument: Any) -> Any:
        versions.add(shared._version)
        return look

    with everything:
        first = shared * weight
        traced = sys.gettrace()
        sys.settrace(look)  # called before every line that saving runs
        try:
            second = shared * weight
        finally:
            sys.settrace(traced)
        found = grad((first + second).sum(), weight)
    del first, second
    assert_same(found, (shared.detach() * 2,))
    assert versions == {0}


def test_what_a_thread_has_saved_last_leaves_when_the_thread_has_ended(everything):
    """Its operator may not have run yet, as long as the thread records no other one."""
    x = leaf(64, 64)

    def forward() -> torch.Tensor:
        with everything:
            return (torch.ones(64, 64) * 3 * x).sum()

    (out,) = _in_threads([forward])
    before = everything.report().bytes_written
    with everything:
        other = leaf(2, 2).sin().exp()
    wait_until_written(everything)
    assert everything.report().bytes_written - before >= 64 * 64 * 4
    assert torch.equal(grad(out, x)[0], torch.full_like(x, 3))
    del other
