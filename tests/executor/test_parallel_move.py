"""Parallel moves within one memory lose nothing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.executor.state._parallel_move import ByteMove, move_in_parallel


@st.composite
def relocations(draw):
    """Lengths, and two orders (with gaps) in which they lie in one memory."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    layouts = []
    for _ in range(2):
        order = draw(st.permutations(range(len(lengths))))
        places, at = {}, 0
        for index in order:
            at += draw(st.integers(0, 2))
            places[index] = at
            at += lengths[index]
        layouts.append((places, at))
    return lengths, layouts


@given(relocations())
def test_as_if_all_moved_at_once(relocation):
    lengths, ((sources, end), (targets, other_end)) = relocation
    memory = torch.arange(max(end, other_end), dtype=torch.uint8)
    before = memory.clone()
    move_in_parallel(
        [
            ByteMove(
                memory[sources[index] : sources[index] + length],
                memory[targets[index] : targets[index] + length],
            )
            for index, length in enumerate(lengths)
        ]
    )
    for index, length in enumerate(lengths):
        expected = before[sources[index] : sources[index] + length]
        assert memory[targets[index] : targets[index] + length].equal(expected)
