"""Faults of caches, caused for real: the right answer or a clear error, and no file is left."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import penstock
from fork_servers import WHOLE_END, find_python
from kv_models import assert_same, generate, make_model, make_prompt
from penstock.errors import (
    CapacityError,
    PenstockError,
    StoreFullError,
    StoreReadError,
    StoreWriteError,
)
from penstock.kv import _attend
from penstock.memory import FileStore, _transfers

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 4


def make_cache(model: Any, store: Any, budget: int | str = "48KiB", **options: Any) -> Any:
    return penstock.kv.cache(
        model, device_memory=budget, block_tokens=BLOCK, store=store, **options
    )


@contextlib.contextmanager
def child(store: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of something, once it has said that it is."""
    search = [str(Path(penstock.__file__).parents[1]), str(Path(__file__).parent)]
    process = subprocess.Popen(
        [find_python("libraries"), search[1] + "/interrupted_process.py", str(store), what],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
        | WHOLE_END,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        assert said == "ready\n", said + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("what", ["prefill", "decode", "save"])
def test_signals_leave_no_file(what: str, number: signal.Signals, store: Path):
    with child(store, what) as process:
        time.sleep(0.2)
        assert os.listdir(store) == []  # no name, even while it is in use
        for _ in range(6):  # Python drops what a handler raises in a finaliser
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=10)
                break
        assert process.returncode == -number, said
    assert os.listdir(store) == []


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would also stop pytest."""


@pytest.fixture
def _interrupts_in_finalisers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what a handler raises in a `__del__`, of torch's too, and only says so."""
    say = sys.unraisablehook
    monkeypatch.setattr(
        sys,
        "unraisablehook",
        lambda what: None if isinstance(what.exc_value, Interrupted) else say(what),
    )


@pytest.mark.parametrize("what", ["prefill", "decode"])
@pytest.mark.usefixtures("_interrupts_in_finalisers")
def test_interrupts_at_any_moment(what: str, store: Path):
    """After each the cache gives the right tokens or refuses by name, and after `reset` it goes."""

    def interrupt(*_: object) -> NoReturn:
        raise Interrupted

    numbers, main = random.Random(3), threading.main_thread().ident
    assert main is not None
    model, prompt = make_model("llama"), make_prompt(130 if what == "prefill" else 50)
    num_new = 2 if what == "prefill" else 8
    theirs = generate(model, prompt, num_new)
    begin = time.perf_counter()
    with make_cache(model, store) as cache:
        assert_same(generate(model, prompt, num_new, past_key_values=cache), theirs)
    longest = time.perf_counter() - begin
    previous = signal.signal(signal.SIGUSR1, interrupt)
    counts = {"interrupted": 0, "refused": 0}
    try:
        with make_cache(model, store) as cache:
            for _ in range(12):
                timer = threading.Timer(
                    numbers.uniform(0.0, longest), signal.pthread_kill, (main, signal.SIGUSR1)
                )
                try:
                    timer.start()
                    while timer.is_alive():
                        cache.reset()
                        generate(model, prompt, num_new, past_key_values=cache)
                except Interrupted:
                    counts["interrupted"] += 1
                timer.join()
                try:
                    assert_same(generate(model, prompt, num_new, past_key_values=cache), theirs)
                except (PenstockError, ValueError) as error:
                    counts["refused"] += 1
                    words = ("interrupted", "an interrupt", "cache holds", "lost tokens")
                    if not any(word in str(error) for word in words):
                        raise
                cache.reset()
                assert_same(generate(model, prompt, num_new, past_key_values=cache), theirs)
                report = cache.report()
                assert report.peak_device_bytes <= report.budget_bytes + report.tail_bytes
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert counts["interrupted"] > 6 and counts["refused"] > 0
    assert os.listdir(store) == []


def test_a_forked_process_is_refused(store: Path):
    model, prompt = make_model("llama"), make_prompt(80)
    theirs = generate(model, prompt, 5)
    with make_cache(model, store) as cache:
        assert_same(generate(model, prompt, 5, past_key_values=cache), theirs)
        process = os.fork()
        if process == 0:  # no thread of the cache lives here
            signal.alarm(20)
            code = 1
            for change in (lambda: cache.crop(-1), cache.reset, lambda: cache.save(store / "x")):
                try:
                    change()
                except PenstockError as error:
                    code += "fork" in str(error)
            cache.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 4
        cache.reset()
        assert_same(generate(model, prompt, 5, past_key_values=cache), theirs)


def call_twice(model: Any, tokens: torch.Tensor, cache: Any) -> None:
    for _ in range(2):
        model(input_ids=tokens, past_key_values=cache)


def test_a_call_that_ends_in_the_middle(monkeypatch: pytest.MonkeyPatch):
    """Between two layers, where only their lengths say so."""
    model, prompt = make_model("llama"), make_prompt(50, batch_size=1)
    theirs = generate(model, prompt, 5)
    for num_calls in (1, 2, 3, 4):
        with make_cache(model, None) as cache:
            left, mlp = num_calls, type(model.model.layers[0].mlp)
            forward = mlp.forward

            def stop(self: Any, x: torch.Tensor, forward: Any = forward) -> torch.Tensor:
                nonlocal left
                left -= 1
                if not left:
                    raise ZeroDivisionError
                return forward(self, x)

            with monkeypatch.context() as patch:
                patch.setattr(mlp, "forward", stop)
                with pytest.raises(ZeroDivisionError), torch.no_grad():
                    call_twice(model, prompt["input_ids"], cache)
            with pytest.raises((PenstockError, ValueError), match=r"reset\(\)"):
                generate(model, prompt, 5, past_key_values=cache)
            if num_calls % 2:  # in the first of two layers
                for length in (1, 20):
                    tokens = torch.full((1, length), 5)
                    with pytest.raises(PenstockError, match="before all layers"), torch.no_grad():
                        model(input_ids=tokens, past_key_values=cache)
                with pytest.raises(PenstockError, match="before all layers"):
                    cache.save("none")
            cache.reset()
            assert_same(generate(model, prompt, 5, past_key_values=cache), theirs)


def test_a_step_that_ends_while_its_traceback_is_kept(store: Path, monkeypatch: pytest.MonkeyPatch):
    """As a notebook keeps it: the records of the step are free all the same."""
    model, prompt = make_model("llama"), make_prompt(90, batch_size=1)
    theirs = generate(model, prompt, 5)
    with make_cache(model, store) as cache:
        generate(model, prompt, 5, past_key_values=cache)

        def stop(*_: Any) -> NoReturn:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(_attend._Step, "attend", stop)
            with pytest.raises(ZeroDivisionError) as kept, torch.no_grad():
                model(input_ids=torch.full((1, 1), 5), past_key_values=cache)
        cache.reset()
        assert_same(generate(model, prompt, 5, past_key_values=cache), theirs)
        assert kept.traceback


@pytest.mark.parametrize("error", [Interrupted, RuntimeError])
def test_tokens_that_an_interrupted_caller_never_got(error: type[BaseException]):
    model, prompt = make_model("llama"), make_prompt(50, batch_size=1)
    other = {"input_ids": torch.cat([prompt["input_ids"], torch.full((1, 30), 7)], 1)}
    theirs = generate(model, other, 5)

    class Streamer:
        num_tokens = 0

        def put(self, _: torch.Tensor) -> None:
            self.num_tokens += 1
            if self.num_tokens == 6:
                raise error

        def end(self) -> None:
            pass

    with make_cache(model, None) as cache:
        with pytest.raises(error):
            generate(model, prompt, 9, past_key_values=cache, streamer=Streamer())
        with pytest.raises(PenstockError, match="interrupted"):
            generate(model, other, 5, past_key_values=cache)
        cache.reset()
        assert_same(generate(model, other, 5, past_key_values=cache), theirs)


def test_prompts_that_the_cache_holds_already():
    for kind in ("gemma3", "t5"):
        model, prompt = make_model(kind), make_prompt(50)
        theirs = generate(model, prompt, 5)
        with make_cache(model, None, "64KiB") as cache:
            assert_same(generate(model, prompt, 5, past_key_values=cache), theirs)
            with pytest.raises(ValueError, match=r"the cache holds \d+"):
                generate(model, prompt, 5, past_key_values=cache)
            cache.reset()
            assert_same(generate(model, prompt, 5, past_key_values=cache), theirs)


def test_two_caches_in_one_directory(store: Path):
    """In two processes, both writing and reading at once."""
    model, prompt = make_model("llama"), make_prompt(100)
    theirs = generate(model, prompt, 8)
    with child(store, "decode") as process:
        for _ in range(3):
            with make_cache(model, store) as cache:
                assert_same(generate(model, prompt, 8, past_key_values=cache), theirs)
                assert cache.report().file_bytes > 0
        assert process.poll() is None
    assert os.listdir(store) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB that really runs full, mounted nowhere but here."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


@pytest.mark.filterwarnings("ignore::penstock.errors.StoreWarning")
def test_a_disk_that_runs_full_during_prefill(small_disk: Path):
    model, prompt = make_model("llama"), make_prompt(1500)
    short = make_prompt(100)
    theirs = generate(model, short, 5)
    with make_cache(model, FileStore(small_disk, reserve_bytes=0)) as cache:
        with pytest.raises(StoreFullError):
            generate(model, prompt, 5, past_key_values=cache, prefill_chunk_size=250)
        with pytest.raises(PenstockError, match="lost tokens"):
            generate(model, prompt, 5, past_key_values=cache)
        cache.reset()
        assert_same(generate(model, short, 5, past_key_values=cache), theirs)
        with pytest.raises(StoreFullError, match="Nothing is left"):
            fill_and_save(cache, small_disk)
    assert os.listdir(small_disk) == []


def fill_and_save(cache: Any, disk: Path) -> None:
    fd = os.open(disk, os.O_RDWR | os.O_TMPFILE)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, bytes(4096))
        cache.save(disk / "prefix")
    finally:
        os.close(fd)


@functools.cache
def stock_of_disk() -> Any:
    return generate(make_model("llama"), make_prompt(100), 5)


@pytest.mark.parametrize("what", ["write", "read"])
@pytest.mark.parametrize("at", [0, 1, 5, 20])
def test_errors_of_the_disk(what: str, at: int, store: Path, monkeypatch: pytest.MonkeyPatch):
    model, prompt = make_model("llama"), make_prompt(100)
    theirs = stock_of_disk()
    left, original = at, getattr(_transfers, f"_p{what}v")

    def fail(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*args)

    with make_cache(model, store) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(_transfers, f"_p{what}v", fail)
            patch.setattr(_transfers, "can_queue_reads", lambda: False)
            with pytest.raises((StoreReadError, StoreWriteError)):
                generate(model, prompt, 5, past_key_values=cache)
        with pytest.raises((PenstockError, ValueError), match="reset"):
            generate(model, prompt, 5, past_key_values=cache)
        cache.reset()
        assert_same(generate(model, prompt, 5, past_key_values=cache), theirs)
    assert os.listdir(store) == []


def test_no_room_while_a_step_evicts():
    """In a read, not in an `append`: the slot must not be taken for filled afterwards."""
    keys, values = torch.rand(2, 1, 2, 4 * 40, 16)
    pool = penstock.kv.BlockPool(
        device_memory=20 * 2 * 512, host_memory=20 * 2 * 512, block_tokens=4, selector="all"
    )
    pool.append(0, keys, values)  # half of the blocks in slots, half below
    below = torch.arange(20, 40).expand(1, 2, -1)
    with contextlib.suppress(CapacityError):
        for _ in range(200):
            assert torch.equal(pool.keys_of(0, below).flatten(2, 3), keys[:, :, 80:])
        pytest.fail("nothing was evicted")
    whole = torch.arange(40).expand(1, 2, -1)
    with contextlib.suppress(PenstockError):
        pool.check_usable()
        assert torch.equal(pool.keys_of(0, whole).flatten(2, 3), keys)
    pool.reset()
    pool.append(0, keys, values)
    assert torch.equal(pool.keys_of(0, whole).flatten(2, 3), keys)
    pool.close()
