"""Version counters of tensors: which tensors share one, found without changing a count.

Views and `detach()` share a version counter; `x.data` has one of its own over the same memory, so
two tensors on one storage can differ in content at equal versions. PyTorch offers the count and not
the counter. Raising one and looking at the other would tell, but every thread that uses the tensor
compares versions too. A tensor's C++ object holds a pointer to its counter, and where in the object
is found by comparing objects that share one with objects that do not.
"""

from __future__ import annotations

import ctypes
import functools

import torch

_WORD = ctypes.sizeof(ctypes.c_void_p)
_NUM_WORDS = 20  # of the C++ object, which is longer


def shares_version_counter(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether both count their in-place changes together: views of one another, `detach()`.

    False where that cannot be told: then they count as different, and are moved twice.
    """
    offset = _offset()
    if offset is None:
        return False
    read = ctypes.c_void_p.from_address
    return read(first._cdata + offset).value == read(second._cdata + offset).value


@functools.cache
def _offset() -> int | None:
    """Return the pointer's offset in a tensor's object, in bytes; None if this PyTorch hides it."""
    x, other = (
        torch.zeros(4, 4, dtype=torch.float32, device="cpu"),
        torch.zeros(4, 4, dtype=torch.float32, device="cpu"),
    )
    again = torch.empty(0, dtype=torch.float32, device="cpu").set_(
        x.untyped_storage(), 0, (4, 4), (4, 1)
    )  # type: ignore[call-overload]
    mine = _words(x)
    same = [_words(each) for each in (x.detach(), x.view(16), x[1])]
    different = [_words(each) for each in (x.data, again, other)]
    found = [
        number
        for number, word in enumerate(mine)
        if word
        and all(words[number] == word for words in same)
        and all(words[number] != word for words in different)
    ]
    return found[0] * _WORD if len(found) == 1 else None


def _words(tensor: torch.Tensor) -> list[int | None]:
    pointers = (ctypes.c_void_p * _NUM_WORDS).from_address(tensor._cdata)
    return list(pointers)
