"""Work of threads where Python starts none any more, and attributes that are computed once."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from fork_servers import WHOLE_END, find_python
from penstock._lazy import cached_property
from penstock.batching import BalancedBatchSampler
from penstock.memory import WorkerThreads

AFTER_MAIN = """
import atexit, sys, threading
import numpy as np, torch
import penstock
from penstock import spectral

folder, store = sys.argv[1:]
np.save(folder + "/rows.npy", np.arange(4000, dtype=np.float32).reshape(1000, 4))
memory = penstock.unify(torch.arange(4000.0).reshape(1000, 4))
matrix = torch.diag(torch.arange(400).double())

def work():
    threading.main_thread().join()
    table = penstock.unify(folder + "/rows.npy", requires_grad=True)
    rows = torch.tensor([5, 999, 0])
    print(table[rows].detach()[:, 0].tolist())
    table[rows].sum().backward()
    penstock.unified.optim.SGD([table], lr=1.0).step()
    print(table[rows].detach()[:, 0].tolist())
    print(memory.gather_rows_async(rows).wait()[:, 0].tolist())
    found = spectral.eigs(matrix, 4, which="SA", max_bytes="120KB", store=store)
    print([round(each) for each in found.values.sort().values.tolist()])

atexit.register(lambda: print(memory.gather_rows_async(torch.tensor([7])).wait()[:, 0].tolist()))
threading.Thread(target=work).start()
"""


def test_a_thread_works_on_after_the_main_one(tmp_path):
    done = subprocess.run(
        [find_python("torch"), "-c", AFTER_MAIN, str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | WHOLE_END | {"PYTHONPATH": str(Path(penstock.__file__).parents[1])},
        timeout=100,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[20.0, 3996.0, 0.0]",
        "[19.0, 3995.0, -1.0]",
        "[20.0, 3996.0, 0.0]",
        "[0, 1, 2, 3]",
        "[28.0]",
    ]


def test_threads_that_were_shut_down_take_no_work():
    threads = WorkerThreads(1)
    assert threads.submit(pow, 2, 3).result() == 8
    threads.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(pow, 2, 3)


def test_errors_are_those_of_the_future(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    threads = WorkerThreads(1)
    assert list(threads.map(abs, [-1, 2])) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result()
    with pytest.raises(KeyboardInterrupt):
        threads.submit(_interrupt)


def _interrupt() -> None:
    raise KeyboardInterrupt


class Slow:
    """Its value takes until another thread says so."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.num_calls = 0

    @cached_property
    def value(self) -> int:
        """A number."""
        self.num_calls += 1
        self.begun.set()
        self.goes_on.wait(60)
        return 7


def test_a_forked_child_computes_what_another_thread_was_computing():
    slow, quick = Slow(), Slow()
    quick.goes_on.set()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.begun.wait(60)
    child = os.fork()
    if not child:
        os._exit(quick.value)
    deadline = threading.Timer(60, os.kill, (child, 9))
    deadline.start()
    _, status = os.waitpid(child, 0)
    deadline.cancel()
    slow.goes_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7
    assert (slow.value, slow.value, slow.num_calls) == (7, 7, 1)
    assert Slow.value.__doc__ == "A number."


def test_threads_iterate_one_sampler():
    sampler = BalancedBatchSampler(torch.arange(1, 2001) % 490 + 10, max_bytes=8000)
    seen: list[Any] = []

    def iterate() -> None:
        seen.append(np.sort(np.concatenate(list(sampler))))

    for _ in range(5):
        threads = [threading.Thread(target=iterate) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(seen) == 20
    for each in seen:
        assert np.array_equal(each, np.arange(2000))
