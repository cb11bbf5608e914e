"""Locks that a collection, a fork, another thread or an error of ours must not leave held."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import warnings
from typing import Any

import pytest
import torch

import penstock
from _waiting import wait_until, wait_until_nothing_is_resident, wait_until_written
from penstock.activations import _engine
from penstock.activations._routes import FileRoute
from penstock.activations._transfers import Reaper
from penstock.memory import Tier, deferred_signals

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


def chain(x: torch.Tensor, length: int = 6) -> torch.Tensor:
    for _ in range(length):
        x = (x * 1.01).sin()
    return x.sum()


def test_an_offload_is_collected_in_the_middle_of_its_own_graphs_backward(store, monkeypatch):
    class Trainer:
        pass

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        trainer = Trainer()
        trainer.me = trainer  # type: ignore[attr-defined]
        trainer.offload = penstock.offload(store, policy="all", min_bytes=0)  # type: ignore[attr-defined]
        x = torch.randn(64, 64, requires_grad=True)
        with trainer.offload:  # type: ignore[attr-defined]
            return chain(x), x

    collect = _engine.Engine._collect
    closed = threading.Event()
    close = FileRoute.close
    monkeypatch.setattr(FileRoute, "close", lambda route: (close(route), closed.set()))

    def collect_garbage_too(engine: _engine.Engine) -> None:  # called with the lock held
        monkeypatch.setattr(_engine.Engine, "_collect", collect)
        gc.collect()
        collect(engine)

    loss, x = step()
    monkeypatch.setattr(_engine.Engine, "_collect", collect_garbage_too)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, torch.autograd.grad(chain(x), x)[0])
    del loss, found
    assert closed.wait(20)  # when the graph was gone


@pytest.fixture
def slow_write(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Set when the first write has begun; to be set when it may end."""
    begun, go_on = threading.Event(), threading.Event()
    store = FileRoute.store

    def wait_and_store(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return store(*args)

    monkeypatch.setattr(FileRoute, "store", wait_and_store)
    return begun, go_on


def test_closing_waits_for_a_write_that_outlived_its_graph_and_the_block(store, slow_write):
    begun, go_on = slow_write
    offload = penstock.offload(store, policy="all", min_bytes=0)
    with offload:
        loss = chain(torch.randn(64, 64, requires_grad=True))
        assert begun.wait(20)
        del loss
    closing = threading.Thread(target=offload.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and offload.ledger.resident(Tier.DEVICE) > 0
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert all(offload.ledger.resident(tier) == 0 for tier in Tier)


def test_an_offload_that_is_gone_closes_after_a_write_that_outlived_it(
    store, slow_write, monkeypatch
):
    begun, go_on = slow_write
    close, closed = FileRoute.close, threading.Event()
    monkeypatch.setattr(FileRoute, "close", lambda route: (close(route), closed.set()))
    with penstock.offload(store, policy="all", min_bytes=0) as offload:
        loss = chain(torch.randn(64, 64, requires_grad=True))
        assert begun.wait(20)
    ledger = offload.ledger
    del offload
    gc.collect()
    del loss
    assert not closed.wait(0.2)
    go_on.set()
    assert closed.wait(20)
    assert all(ledger.resident(tier) == 0 for tier in Tier)


def test_signals_wait_in_a_block_that_is_entered_while_the_last_graph_dies(store, monkeypatch):
    """The thread that hears of the death ends the watch that the block has just begun."""
    offload = penstock.offload(store, policy="all", min_bytes=0)
    with offload:
        losses = [chain(torch.randn(64, 64, requires_grad=True))]
    watch, users = deferred_signals.watch, deferred_signals._users

    def watch_and_forget(user: object) -> None:
        watch(user)
        if losses:
            losses.clear()
            wait_until(lambda: id(offload._engine) not in users)

    monkeypatch.setattr(deferred_signals, "watch", watch_and_forget)
    with offload:
        assert not losses and id(offload._engine) in users
    offload.close()
    assert id(offload._engine) not in users


def test_an_exception_as_the_last_watch_ends_leaves_the_block_whole(store, monkeypatch):
    class Came(BaseException):
        pass

    unwatch = deferred_signals.unwatch

    def unwatch_and_raise(user: object) -> None:
        unwatch(user)
        raise Came  # out of a signal's handler, which nothing holds back now

    offload = penstock.offload(store, policy="all", min_bytes=0)
    x = torch.randn(64, 64, requires_grad=True)
    allocator = offload._allocator
    num_acquired = allocator and allocator._num_acquired
    offload.__enter__()
    torch.autograd.grad(chain(x), x)
    wait_until_nothing_is_resident(offload)
    monkeypatch.setattr(deferred_signals, "unwatch", unwatch_and_raise)
    with pytest.raises(Came):
        offload.__exit__(None, None, None)
    monkeypatch.undo()
    assert (allocator and allocator._num_acquired) == num_acquired and offload._num_entered == 0
    engine = offload._engine
    workers = (engine._writes.workers, engine._reads.workers, engine._reaper)
    assert all(each._stop[0] for each in workers)
    offload.close()


def test_the_reaper_may_be_faster_than_a_thread_that_looks_up(monkeypatch):
    class OneTaken:
        """Says that there is something, which is gone when it is asked for."""

        num_asked = 0

        def empty(self) -> bool:
            self.num_asked += 1
            return self.num_asked > 1

        def get_nowait(self) -> None:
            import queue

            raise queue.Empty

        def put(self, _: object) -> None:
            pass

    reaper = Reaper(threading.Lock(), lambda: None)
    monkeypatch.setattr(reaper, "_queue", OneTaken())
    assert list(reaper.dead()) == []


def test_a_fork_while_other_threads_hold_every_lock(store):
    offload = penstock.offload(store, policy="all", min_bytes=0)
    with offload:
        chain(torch.randn(8, 8, requires_grad=True))
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        locks = (offload._lock, offload._engine._lock, offload.ledger._mailbox._lock)
        with locks[0], locks[1], locks[2]:
            held.set()
            assert go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        with offload:
            pass
        offload.report()
        offload.timeline()
        offload.close()
        os._exit(0)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    offload.close()


def test_threads_that_save_one_tensor(store):
    """In-place changes are counted by tensor, and nothing here changes one."""
    offload = penstock.offload(store, policy="all", min_bytes=0)
    shared, errors = torch.randn(64) * 2, []

    def work() -> None:
        x = torch.randn(64, requires_grad=True)
        try:
            with offload:
                for _ in range(100):
                    y = x
                    for _ in range(10):
                        y = y * shared
                    y.sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and shared._version == 0
    offload.close()


def test_a_storage_that_another_thread_saves_while_this_one_waits_is_saved_once(store, monkeypatch):
    offload = penstock.offload(store, policy="all", min_bytes=0)
    engine, x = offload._engine, torch.randn(64, requires_grad=True)
    y = x * 1
    admit = engine._budget.admit
    route = offload._routes["cpu"]

    def save_meanwhile(num_bytes: int, *, limits_backlog: bool) -> None:
        monkeypatch.setattr(engine._budget, "admit", admit)
        kept.append(engine._save(y, route, True))  # as a thread does while this one waits
        admit(num_bytes, limits_backlog=limits_backlog)

    kept: list[object] = []
    monkeypatch.setattr(engine._budget, "admit", save_meanwhile)
    kept.append(engine.save(y, route, offloadable=True))
    assert len(engine._records) == 1 and offload.report().num_saved == 1
    kept.clear()
    offload.close()


def test_a_worker_that_fails_lives_on_and_the_step_is_right(store, monkeypatch):
    offload = penstock.offload(store, policy="all", min_bytes=0)
    monkeypatch.setattr(offload._engine.steps.writes, "end", lambda _: 1 / 0)
    x = torch.randn(64, 64, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with offload:
            for _ in range(3):
                (found,) = torch.autograd.grad(chain(x), x)
    assert torch.equal(found, torch.autograd.grad(chain(x), x)[0])
    assert any("a transfer failed" in str(each.message) for each in said)

    def has_no_backlog() -> bool:
        # The last one may be under way; threads that end with the block do not count anew.
        offload._engine.settle()
        return offload._engine._writes.backlog_bytes == 0

    wait_until(has_no_backlog)
    monkeypatch.undo()
    offload.close()


def test_a_block_is_left_where_it_was_entered_and_closed_afterwards(store):
    offload = penstock.offload(store)
    with pytest.raises(RuntimeError, match="has not entered this Offload"):
        offload.__exit__(None, None, None)
    with offload:
        with pytest.raises(RuntimeError, match=r"close\(\) inside its own `with` block"):
            offload.close()
    offload.close()
    with pytest.raises(RuntimeError, match="is closed"):
        offload.__enter__()


def test_a_read_that_is_taken_back_before_it_began_is_asked_for_again(store, monkeypatch):
    x = torch.full((64, 64), 0.5, requires_grad=True)
    offload = penstock.offload(store, policy="all", min_bytes=0)
    with offload:
        loss = (x.sin() * x.cos()).sum()
        wait_until_written(offload)
    engine = offload._engine
    workers = engine._reads.workers_now

    def put_as_another_thread_closes(record: Any) -> None:
        monkeypatch.undo()
        workers.queue.append(record)  # and no thread has it
        threading.Thread(target=engine.close).start()

    monkeypatch.setattr(workers, "put", put_as_another_thread_closes)
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, math.cos(1.0)))


def test_a_record_whose_put_was_interrupted_leaves_after_all(store, monkeypatch):
    x = torch.full((64, 64), 0.5, requires_grad=True)
    offload = penstock.offload(store, policy="all", min_bytes=0)
    with offload:
        loss = (x.sin() * x.cos()).sum()
        wait_until_written(offload)
        workers = offload._engine._writes.workers
        wait_until(lambda: len(workers._has_work._waiting) == 2)

        def interrupted() -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(workers._has_work, "notify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = x.tan() * x.exp()
        assert workers.queue
        offload._engine.settle()
        wait_until(lambda: not workers.queue)
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, math.cos(1.0)))
