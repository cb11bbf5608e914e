"""What the disk alone needs for the transfers of a plan: no step that makes them is faster."""

from __future__ import annotations

import mmap
import statistics
import threading
import time

import torch

from penstock.memory import ExtentFile, FileStore, Link
from penstock.planner import Plan

_FILE_BYTES = 1 << 30
_NUM_RUNS = 3


def disk_alone_seconds(plan: Plan, store: str) -> float:
    """Write and read what a step of a plan does, beside each other, with nothing to wait for.

    Sizes and their order are the plan's, one request at a time and direction, as its links do;
    places in the file follow one another.
    """
    lists = {
        link: [transfer.num_bytes for transfer in plan.transfers if transfer.link is link]
        for link in (Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE)
    }
    largest = max((num_bytes for sizes in lists.values() for num_bytes in sizes), default=0)
    if not largest:
        return 0.0
    file = ExtentFile(FileStore.of(store))
    try:
        extent = file.allocate(max(_FILE_BYTES, largest))
        memories = {
            link: torch.frombuffer(mmap.mmap(-1, largest), dtype=torch.uint8) for link in lists
        }
        for memory in memories.values():
            memory.fill_(1)  # its pages are there

        def run(link: Link) -> None:
            offset, address = 0, memories[link].data_ptr()
            move = file.write if link is Link.DEVICE_TO_FILE else file.read
            for num_bytes in lists[link]:
                if offset + num_bytes > extent.num_bytes:
                    offset = 0
                move(extent, address, num_bytes, offset)
                offset += -(-num_bytes // 4096) * 4096

        seconds = []
        for _ in range(_NUM_RUNS + 1):  # the first one finds the file empty
            threads = [threading.Thread(target=run, args=(link,)) for link in lists]
            begin = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[1:])
    finally:
        file.close()
