"""Constants that a program makes during a capture and keeps: they get the numbers they stand for.

Programs keep masks and tables of positions in caches (`functools.lru_cache`, dictionaries, class
attributes) when they are called first. If that is during a capture, a cache holds tensors without
data, with which the program cannot run afterwards.
"""

from __future__ import annotations

import gc
import itertools

import torch

from penstock.compat.dispatch import give_memory, no_dispatch
from penstock.compat.fake_tensors import FakeTensor
from penstock.graph.capturing.recorder import Recorder


def materialize_constants(recorder: Recorder) -> bool:
    """Give the constants of a record that are still held somewhere their numbers, in place.

    Returns:
        Whether there were any.
    """
    if not recorder.has_kept_constants():  # looking at all objects there are takes long
        return False
    objects = gc.get_objects()
    kept = itertools.compress(objects, map({FakeTensor}.__contains__, map(type, objects)))
    found = False
    for fake in list(kept):
        real = recorder.constant_tensor(fake) if fake.layout is torch.strided else None
        if real is not None:
            with no_dispatch():
                give_memory(fake, real)
            found = True
    return found
