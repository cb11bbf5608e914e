"""The allocator must show in the memory that the system sees, and in no number of a training."""

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fork_servers import find_python
from penstock.codegen import find_compiler, load_library
from penstock.memory import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 2 * MIB  # what becomes resident, and is given back, as one

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or find_compiler() is None,
    reason="needs Linux and a C++ compiler",
)


def block(num_bytes: int, value: int | None = None) -> torch.Tensor:
    """A tensor of `num_bytes` bytes; touched, if it gets a value."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    return tensor if value is None else tensor.fill_(value)


def resident_bytes() -> int:
    """Memory of this process as the operating system counts it."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def in_child(function) -> None:
    """Run `function` in a forked child and fail if it fails there."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # a deadlock ends with a failure
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def shared() -> Iterator[CachingAllocator]:
    """The process's allocator, not installed, holding nothing."""
    allocator = CachingAllocator.instance()
    assert allocator.available(), allocator.reason
    gc.collect()
    allocator.trim()
    yield allocator
    allocator.set_idle_limit(None)
    gc.collect()
    allocator.trim()


@pytest.fixture
def allocator(shared: CachingAllocator) -> Iterator[CachingAllocator]:
    """The process's allocator, installed."""
    assert shared.acquire()
    yield shared
    shared.release()


class TestInstallation:
    def test_serves_only_while_acquired(self, shared):
        before = shared.statistics().num_live
        outside = block(MIB)
        assert shared.statistics().num_live == before
        shared.acquire()
        inside = block(MIB)
        assert shared.statistics().num_live == before + 1
        shared.release()
        after = block(MIB)
        assert shared.statistics().num_live == before + 1
        del outside, inside, after
        assert shared.statistics().num_live == before

    def test_nested_use_ends_with_the_last_release(self, shared):
        before = shared.statistics().num_live
        shared.acquire()
        shared.acquire()
        shared.release()
        tensor = block(MIB)
        assert shared.statistics().num_live == before + 1
        shared.release()
        del tensor

    def test_release_without_acquire_is_an_error(self, shared):
        with pytest.raises(RuntimeError, match="without an acquire"):
            shared.release()

    def test_tensors_outlive_installation_in_both_directions(self, shared):
        earlier = block(8 * MIB, 1)
        shared.acquire()
        inside = block(8 * MIB, 2)
        earlier_sum = int(earlier.sum())
        del earlier  # freed by the allocator that made it
        shared.release()
        assert earlier_sum == 8 * MIB
        assert int(inside.sum()) == 16 * MIB

    def test_blocks_that_outlive_it_are_not_kept_idle(self, shared):
        before = shared.statistics()
        shared.acquire()
        inside = block(64 * MIB, 2)
        shared.release()
        del inside
        assert shared.statistics().mapped_bytes == before.mapped_bytes

    def test_release_gives_idle_memory_back(self, shared):
        start, before = resident_bytes(), shared.statistics()
        shared.acquire()
        block(256 * MIB, 1)
        assert resident_bytes() > start + 240 * MIB
        shared.release()
        assert resident_bytes() < start + 32 * MIB
        assert shared.statistics().idle_bytes == before.idle_bytes

    def test_another_library_on_top_is_left_alone(self):
        """In a process of its own, because it replaces the allocator for good."""
        source = textwrap.dedent("""
            #include <c10/core/CPUAllocator.h>
            static c10::Allocator* below;
            struct Other final : c10::Allocator {
              c10::DataPtr allocate(size_t n) override { return below->allocate(n); }
              void copy_data(void* to, const void* from, size_t n) const override {
                default_copy_data(to, from, n);
              }
            };
            extern "C" void replace() {
              below = c10::GetCPUAllocator();
              c10::SetCPUAllocator(new Other);
            }
        """)
        assert load_library("other_allocator", source, include_torch=True)
        run_python(f"""
            import torch
            from penstock.codegen import load_library
            from penstock.memory import CachingAllocator
            allocator = CachingAllocator.instance()
            other = load_library("other_allocator", {source!r}, include_torch=True)
            assert allocator.acquire()
            other.replace()
            tensor = torch.ones(1 << 20)  # through the other one to ours
            assert allocator.statistics().num_live == 1
            allocator.release()
            later = torch.ones(1 << 20)  # through the other one, past ours
            assert allocator.statistics().num_live == 1
            assert not allocator.acquire()
            assert "another library" in allocator.reason
            assert float((torch.ones(1 << 20) + tensor + later).sum()) == 3 << 20
            allocator.release()
        """)


class TestMemory:
    def test_reuse_hits_and_does_not_grow(self, allocator):
        block(48 * MIB, 1)
        start, before = resident_bytes(), allocator.statistics()
        for value in range(20):
            block(48 * MIB, value)
        after = allocator.statistics()
        assert after.num_hits - before.num_hits == 20
        assert after.num_misses == before.num_misses
        assert abs(resident_bytes() - start) < 8 * MIB

    def test_one_hole_serves_smaller_blocks(self, allocator):
        block(64 * MIB, 1)
        before = allocator.statistics()
        tensors = [block(16 * MIB, value) for value in range(4)]
        assert allocator.statistics().num_hits - before.num_hits == 4
        assert allocator.statistics().mapped_bytes == before.mapped_bytes
        del tensors

    def test_neighbouring_holes_serve_a_larger_block(self, allocator):
        tensors = [block(16 * MIB, value) for value in range(4)]
        del tensors
        before = allocator.statistics()
        whole = block(64 * MIB, 1)
        assert allocator.statistics().num_hits == before.num_hits + 1
        del whole

    def test_idle_memory_does_not_raise_the_peak(self, allocator):
        # The 40 MiB hole between two blocks does not fit 60 MiB: it must go before they come.
        before = allocator.statistics()
        low, hole, high = block(8 * MIB, 1), block(40 * MIB, 1), block(72 * MIB, 1)
        del hole
        assert allocator.statistics().idle_bytes == before.idle_bytes + 40 * MIB
        large = block(60 * MIB, 1)
        after = allocator.statistics()
        assert after.live_bytes == before.live_bytes + (8 + 72 + 60) * MIB
        assert after.peak_mapped_bytes == before.mapped_bytes + (8 + 72 + 60) * MIB
        assert after.idle_bytes == before.idle_bytes
        del low, high, large

    def test_idle_limit_holds(self, allocator):
        before = allocator.statistics().mapped_bytes
        allocator.set_idle_limit("32MiB")
        assert allocator.statistics().idle_limit_bytes == 32 * MIB
        start = resident_bytes()
        tensors = [block(32 * MIB, 1) for _ in range(8)]
        while tensors:
            tensors.pop()
            assert allocator.statistics().idle_bytes <= 32 * MIB
        assert resident_bytes() < start + 48 * MIB
        allocator.set_idle_limit(0)
        assert allocator.statistics().mapped_bytes == before
        assert resident_bytes() < start + 16 * MIB

    def test_memory_that_is_given_back_is_usable_again(self, allocator):
        allocator.set_idle_limit(0)
        for value in (1, 2, 3):
            tensor = block(10 * MIB + 12345, value)
            assert int(tensor.sum()) == value * tensor.numel()

    def test_what_nobody_needs_for_a_while_goes(self, allocator):
        library, before = allocator._library, allocator.statistics().mapped_bytes
        assert library is not None
        try:
            large, small = block(128 * MIB, 1), block(16 * MIB, 1)
            del large, small
            library.penstock_allocator_set_idle_window(0.0)  # every allocation ends a window
            for _ in range(3):
                block(16 * MIB, 1)
            assert allocator.statistics().mapped_bytes <= before + 16 * MIB + CHUNK
        finally:
            library.penstock_allocator_set_idle_window(60.0)

    def test_partly_used_chunks_are_shared(self, allocator):
        before = allocator.statistics()
        tensors = [block(300 * KIB, value) for value in range(60)]
        after = allocator.statistics()
        assert after.live_bytes == before.live_bytes + 60 * 320 * KIB
        assert after.mapped_bytes <= before.mapped_bytes + 60 * 320 * KIB + CHUNK
        assert all(int(tensor[-1]) == value for value, tensor in enumerate(tensors))

    @pytest.mark.parametrize(
        "num_bytes", [256 * KIB, MIB, MIB + 1, 4 * MIB, 4 * MIB + 64, 63 * MIB]
    )
    def test_blocks_start_on_pages(self, allocator, num_bytes):
        tensors = [block(num_bytes) for _ in range(3)]
        assert [tensor.data_ptr() % 4096 for tensor in tensors] == [0, 0, 0]

    def test_small_blocks_come_from_torch(self, allocator):
        before = allocator.statistics().num_live
        small = block(256 * KIB - 1)
        assert allocator.statistics().num_live == before
        assert small.data_ptr() % 64 == 0

    def test_limit_must_be_a_size(self, allocator):
        with pytest.raises(ValueError, match="num_bytes"):
            allocator.set_idle_limit("much")
        with pytest.raises(ValueError, match="num_bytes"):
            allocator.set_idle_limit(-1)


class TestTensors:
    def test_training_is_bit_equal(self, shared):
        def train() -> list[torch.Tensor]:
            torch.manual_seed(1)
            model = torch.nn.Sequential(
                torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)
            )
            optimizer = torch.optim.AdamW(model.parameters())
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(torch.randn(512, 512)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return [*losses, *(parameter.detach() for parameter in model.parameters())]

        expected = train()
        shared.acquire()
        try:
            actual = train()
        finally:
            shared.release()
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))

    def test_zero_bytes(self, allocator):
        tensor = torch.empty(0, 5)
        assert tensor.numel() == 0
        assert tensor.resize_(MIB).fill_(1).sum() == MIB

    def test_impossible_size_fails_as_usual_and_leaves_everything_working(self, allocator):
        kept = block(4 * MIB, 7)
        with pytest.raises(RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory"):
            torch.empty(1 << 46, dtype=torch.uint8)
        with pytest.raises(RuntimeError):
            torch.empty(1 << 62, dtype=torch.uint8)
        assert int(kept.sum()) == 7 * 4 * MIB
        assert int(block(4 * MIB, 3).sum()) == 3 * 4 * MIB

    def test_resize_across_the_minimum_keeps_the_values(self, allocator):
        tensor, before = torch.arange(1000.0), allocator.statistics().num_live
        tensor.resize_(4 * MIB)
        assert allocator.statistics().num_live == before + 1
        assert torch.equal(tensor[:1000], torch.arange(1000.0))
        storage = tensor.untyped_storage()
        storage.resize_(64 * KIB)
        assert torch.equal(tensor.set_(storage, 0, (1000,)), torch.arange(1000.0))
        assert allocator.statistics().num_live == before
        storage.resize_(0)

    def test_resize_after_the_release(self, shared):
        before = shared.statistics().num_live
        shared.acquire()
        tensor = block(MIB, 5)
        shared.release()
        tensor.resize_(8 * MIB)  # the storage still knows the allocator that made it
        assert int(tensor[:MIB].sum()) == 5 * MIB
        assert shared.statistics().num_live == before

    def test_memory_shared_with_numpy(self, allocator):
        tensor = torch.zeros(MIB)
        array = tensor.numpy()
        del tensor
        array += 1
        assert array.sum() == MIB
        mine = np.ones(MIB, dtype=np.float32)
        view = torch.from_numpy(mine)
        doubled = view * 2
        del mine
        assert float(view.sum()) == MIB
        assert float(doubled.sum()) == 2 * MIB

    def test_lazy_clone_copies_when_written(self, allocator):
        tensor = block(MIB, 1)
        clone = torch._lazy_clone(tensor)  # pyright: ignore[reportPrivateImportUsage]
        clone.fill_(2)
        assert int(tensor.sum()) == MIB
        assert int(clone.sum()) == 2 * MIB

    def test_shared_memory(self, allocator):
        tensor = block(4 * MIB, 9).share_memory_()
        in_child(lambda: tensor.fill_(4))
        assert int(tensor.sum()) == 4 * 4 * MIB

    def test_profiler_sees_the_blocks(self, allocator):
        profiler = torch.profiler
        with profiler.profile(
            activities=[profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            tensor = torch.empty(3 * MIB, dtype=torch.uint8)
            del tensor
        amounts = [event.self_cpu_memory_usage for event in profile.events() or []]
        assert 3 * MIB in amounts
        assert -3 * MIB in amounts


class Squares(torch.utils.data.Dataset):
    """Items large enough for the allocator, made in the worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256 * KIB,), float(index)).square()


class TestProcessesAndThreads:
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_forked_child_reads_writes_and_allocates(self, allocator):
        kept, idle = block(8 * MIB, 3), block(8 * MIB, 1)
        del idle

        def child() -> None:
            assert int(kept.sum()) == 3 * 8 * MIB
            mine = block(12 * MIB, 8)
            kept.fill_(5)
            assert int(mine.sum()) == 8 * 12 * MIB
            CachingAllocator.instance().trim()
            CachingAllocator.instance().acquire()
            CachingAllocator.instance().release()

        in_child(child)
        assert int(kept.sum()) == 3 * 8 * MIB

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_fork_while_other_threads_allocate(self, allocator):
        stop = threading.Event()

        def allocate() -> None:
            while not stop.is_set():
                block(MIB)

        threads = [threading.Thread(target=allocate) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                in_child(lambda: block(2 * MIB, 1))
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_data_loader_workers(self, allocator):
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        sums = [float(batch[:, 0].sum()) for batch in loader]
        assert sums == [1.0, 13.0, 41.0]

    def test_threads_never_share_a_block(self, allocator):
        hole, _kept = block(10 * MIB), block(MIB)  # as other tests may have left
        del hole
        gc.collect()
        lowest = block(100 * MIB).data_ptr()
        before = allocator.statistics()
        allocator.set_idle_limit("24MiB")
        errors: list[str] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            held: list[tuple[int, torch.Tensor]] = []
            for step in range(400):
                if held and (len(held) > 12 or random.random() < 0.5):
                    value, tensor = held.pop(int(random.integers(len(held))))
                    # First, last and some bytes between: the whole would be slow.
                    if tensor[:: 64 * KIB].ne(value).any() or int(tensor[-1]) != value:
                        errors.append(f"thread {seed}, step {step}: a block was overwritten")
                else:
                    num_bytes = int(2 ** random.uniform(18, 23))
                    value = int(random.integers(1, 250))
                    held.append((value, block(num_bytes, value)))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        gc.collect()
        after = allocator.statistics()
        assert (after.num_live, after.live_bytes) == (before.num_live, before.live_bytes)
        # All holes have grown together again: a block larger than any in between is where it was.
        assert block(100 * MIB).data_ptr() == lowest


def run_python(program: str, **environment: str) -> None:
    """Run a program in a process of its own with the same import path; show its errors."""
    finished = subprocess.run(
        [find_python("torch"), "-c", textwrap.dedent(program)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr


class TestUnavailable:
    def test_no_compiler_is_logged_once_and_trim_still_works(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
        allocator = CachingAllocator()
        with caplog.at_level(logging.INFO, logger="penstock.memory._cpu_allocator"):
            assert not allocator.available()
            assert not allocator.available()
            assert not allocator.acquire()
        assert len(caplog.records) == 1
        assert "no-such-compiler" in allocator.reason
        allocator.set_idle_limit("1MiB")
        allocator.trim()
        allocator.release()
        assert allocator.statistics().num_live == 0

    def test_limited_address_space(self):
        """A limit on addresses shrinks the range; too small a one leaves torch's allocator."""
        CachingAllocator.instance().available()  # builds it without the limit
        run_python("""
            import resource
            import torch
            from penstock.memory import CachingAllocator
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            allocator = CachingAllocator.instance()
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
            assert not allocator.available()
            assert "reserve addresses" in allocator.reason
            resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), -1))
            allocator = CachingAllocator()
            assert allocator.acquire()
            assert float(torch.ones(4 << 20).sum()) == 4 << 20
            blocks = [torch.empty(1 << 29, dtype=torch.uint8) for _ in range(6)]  # past the range
            parts = blocks[-1].view(512, 1 << 20)
            parts[:, [0, -1]] = 1
            assert int(parts[:, [0, -1]].sum()) == 1024
        """)
