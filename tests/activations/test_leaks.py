"""Dozens of steps, blocks and broken-off graphs leave nothing behind: no bytes, no objects."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import os
import random
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_globals

import penstock
from _waiting import wait_until, wait_until_nothing_is_resident
from penstock.activations import Offload
from penstock.activations._chunks import Chunk, SmallHandle
from penstock.activations._record import Record, SavedHandle
from penstock.memory import Tier

MIB = 1024**2
WIDTH = 128
NUM_BEFORE, NUM_STEPS = 10, 40  # steps before and after the first count
# What 40 steps may add. One lost activation of 64 KiB a step is 2.5 MiB, and one lost object of
# ours every twenty steps is two.
ALLOCATED_NOISE_BYTES = MIB // 2
OBJECT_NOISE = 1
PYTHON_NOISE = 40
RSS_NOISE_BYTES = 6 * MIB  # pages that the C allocator keeps; a lost block of 256 KiB is 10 MiB
NUM_ROUNDS = 3
OURS = {Record, SavedHandle, Chunk, SmallHandle, Offload}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists in /proc"
    ),
]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Resources of the process that an Offload may hold."""

    num_objects: int
    num_threads: int
    num_descriptors: int
    num_module_hooks: int
    num_warning_filters: int
    num_python_objects: int  # of any kind; the interpreter's own caches let them vary
    allocated_bytes: int  # from the C allocator, and not freed
    rss_bytes: int  # without pages of files, such as libraries, which the kernel drops and reads

    def assert_not_above(self, before: Footprint) -> None:
        """Fail, naming what there is more of."""
        for name in ("objects", "threads", "descriptors", "module_hooks", "warning_filters"):
            now, then = getattr(self, f"num_{name}"), getattr(before, f"num_{name}")
            noise = OBJECT_NOISE if name == "objects" else 0
            assert now <= then + noise, f"{now} {name} after {then}"
        more_objects = self.num_python_objects - before.num_python_objects
        assert more_objects <= PYTHON_NOISE, f"{more_objects} more Python objects"
        more_bytes = self.allocated_bytes - before.allocated_bytes
        assert more_bytes <= ALLOCATED_NOISE_BYTES, f"{more_bytes / 1024:.0f} KiB not freed"
        more_bytes = self.rss_bytes - before.rss_bytes
        assert more_bytes <= RSS_NOISE_BYTES, f"{more_bytes / MIB:.1f} MiB more RSS"


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def count_allocated_bytes() -> int:
    """Count what all threads have from the C allocator; 0 where that is not glibc 2.33 or later."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def footprint() -> Footprint:
    gc.collect()
    allocated_bytes = count_allocated_bytes()
    objects = gc.get_objects()
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
    return Footprint(
        num_objects=sum(type(item) in OURS for item in objects),
        num_threads=threading.active_count(),
        num_descriptors=len(os.listdir("/proc/self/fd")),
        num_module_hooks=len(module_globals._global_forward_pre_hooks),
        num_warning_filters=len(warnings.filters),
        num_python_objects=len(objects),
        allocated_bytes=allocated_bytes,
        rss_bytes=(resident - shared) * os.sysconf("SC_PAGESIZE"),
    )


def assert_no_growth(before: Footprint) -> None:
    """Compare with `before`; a transfer under way may still hold its record for a moment."""
    deadline, pause = time.monotonic() + 5, 0.05
    while True:
        try:
            footprint().assert_not_above(before)
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause *= 2  # a footprint is a collection, which takes long


def repeat_without_growth(run: Callable[[], None], times: int = NUM_STEPS) -> int:
    """Run it so many times, and again if more is held then; returns how many times it ran.

    What leaks grows in every round; the heap of a process that ran other tests before does not.
    """
    for number in range(1, NUM_ROUNDS + 1):
        before = footprint()
        for _ in range(times):
            run()
        try:
            assert_no_growth(before)
            return number * times
        except AssertionError:
            if number == NUM_ROUNDS:
                raise
    raise AssertionError("unreachable")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def step(model: nn.Module, batch: int = 128) -> None:
    model(torch.randn(batch, WIDTH)).square().mean().backward()
    model.zero_grad()


def forward_only(model: nn.Module) -> None:
    model(torch.randn(128, WIDTH)).square().mean()


def failing_step(model: nn.Module) -> None:
    try:
        loss = model(torch.randn(128, WIDTH)).square().mean()
        raise KeyError(loss.item())
    except KeyError:
        pass


def step_with_cycle(model: nn.Module) -> None:
    """The loss is part of a reference cycle, which only the garbage collector ends."""
    holder: dict[str, object] = {"loss": model(torch.randn(128, WIDTH)).square().mean()}
    holder["holder"] = holder
    del holder
    gc.collect(0)


def step_in_changing_shape(model: nn.Module) -> None:
    step(model, batch=32 * random.randint(1, 7))


WORK: dict[str, Callable[[nn.Module], None]] = {
    "step": step,
    "abandoned": forward_only,
    "exception": failing_step,
    "cycle": step_with_cycle,
    "shapes": step_in_changing_shape,
}


@pytest.mark.parametrize(
    ("work", "policy"),
    [*((name, "all") for name in WORK), ("step", "auto")],
)
def test_50_steps_in_one_block(store, work, policy):
    model = small_model()
    offload = penstock.offload(store, policy=policy, min_bytes="4KiB")
    with offload:
        for _ in range(NUM_BEFORE):
            WORK[work](model)
        file_bytes = offload.report().peak_file_bytes
        num_runs = NUM_BEFORE + repeat_without_growth(functools.partial(WORK[work], model))
        report = offload.report()
    assert report.peak_file_bytes <= file_bytes + 4 * MIB
    if work in ("step", "shapes"):  # graphs that are abandoned quickly count as one step
        assert report.num_steps == num_runs
    assert report.bytes_written > 0
    wait_until_nothing_is_resident(offload)
    assert offload._file is not None and offload._file.used_bytes == 0
    offload.close()


def test_50_blocks(store):
    """Entering and leaving: hooks, threads and the allocator come and go."""
    model = small_model()
    offload = penstock.offload(store, policy="all", min_bytes="4KiB")

    def block() -> None:
        with offload:
            step(model)

    for _ in range(NUM_BEFORE):
        block()
    wait_until(no_thread_of_ours)
    num_runs = NUM_BEFORE + repeat_without_growth(block)
    assert offload.report().num_steps == num_runs
    offload.close()


@pytest.mark.parametrize("budget", [None, "8KiB"])
@pytest.mark.parametrize("work", ["step", "abandoned", "cycle"])
def test_50_steps_of_small_saves(work, budget, language, store):
    """Chunks that stay and chunks that are packed go with the last of their handles."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), *(nn.GELU() for _ in range(6)))
    offload = penstock.offload(store, device_memory=budget)
    assert offload.report().hooks == language
    with offload:
        for _ in range(NUM_BEFORE):
            WORK[work](model)
        repeat_without_growth(functools.partial(WORK[work], model))
    assert bool(offload.report().bytes_written) is (budget is not None)
    offload.close()
    assert all(offload.ledger.resident(tier) == 0 for tier in Tier)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_50_offloads(store, closed):
    """Each has a file, threads and a ledger of its own; closing it or dropping it ends them."""
    model = small_model()

    def use_one() -> None:
        offload = penstock.offload(store, policy="all", min_bytes="4KiB")
        with offload:
            step(model)
        if closed:
            offload.close()

    for _ in range(NUM_BEFORE):
        use_one()
    wait_until(no_thread_of_ours)
    repeat_without_growth(use_one)


def test_a_graph_that_outlives_its_offload(store):
    """Handles keep what they need; the file goes with the last of them."""
    model = small_model()

    def train() -> None:
        offload = penstock.offload(store, policy="all", min_bytes="4KiB")
        with offload:
            torch.manual_seed(3)
            loss = model(torch.randn(128, WIDTH)).square().mean()
        del offload
        gc.collect()
        loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        torch.manual_seed(3)
        model(torch.randn(128, WIDTH)).square().mean().backward()
        for ours, parameter in zip(found, model.parameters(), strict=True):
            assert torch.equal(ours, parameter.grad)
        model.zero_grad()
        wait_until(no_thread_of_ours)

    train()  # threads and descriptors that a process has once
    before = footprint()
    for _ in range(3):
        train()
    deadline = time.monotonic() + 20
    while footprint().num_descriptors > before.num_descriptors and time.monotonic() < deadline:
        time.sleep(0.05)
    after = footprint()
    assert after.num_objects <= before.num_objects
    assert after.num_descriptors <= before.num_descriptors


def no_thread_of_ours() -> bool:
    return not any(thread.name.startswith("penstock") for thread in threading.enumerate())
