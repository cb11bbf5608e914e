"""Arguments of a pool that are none change nothing, and changes of some layers only those."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.errors import PenstockError
from penstock.kv import BlockPool, Nosa, fetch_or_recompute, simulate

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(batch_size: int, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, 2, count, 8, generator=generator)


@contextlib.contextmanager
def opened(batch_sizes: tuple[int, ...] = (2, 2), selector: Any = "all") -> Iterator[BlockPool]:
    pool = BlockPool(device_memory="1MiB", block_tokens=4, selector=selector)
    with contextlib.closing(pool):
        for layer, batch_size in enumerate(batch_sizes):
            pool.append(layer, tokens(batch_size, 22, layer), tokens(batch_size, 22, 9 + layer))
        yield pool


def keys(pool: BlockPool, layer: int) -> torch.Tensor:
    blocks = torch.arange(pool.num_blocks(layer)).expand(pool.batch_size(layer), 2, -1)
    return pool.keys_of(layer, blocks)


WRONG: dict[str, tuple[Callable[[BlockPool], object], type[Exception]]] = {
    "a mask as index": (lambda pool: pool.reorder(torch.tensor([False, True])), TypeError),
    "an index of floats": (lambda pool: pool.reorder(torch.tensor([1.9, 0.2])), TypeError),
    "an index of two dimensions": (lambda pool: pool.reorder(torch.tensor([[1, 0]])), ValueError),
    "repeats of 1.5": (lambda pool: pool.repeat(1.5), TypeError),  # type: ignore[arg-type]
    "a crop to 9.5": (lambda pool: pool.crop(9.5), TypeError),  # type: ignore[arg-type]
    "three heads": (lambda pool: pool.keys_of(0, torch.zeros(2, 3, 1).long()), ValueError),
    "block -2": (lambda pool: pool.keys_of(0, torch.full((2, 2, 1), -2)), ValueError),
    "block 5": (lambda pool: pool.keys_of(0, torch.full((2, 2, 1), 5)), ValueError),
    "keys of another layer": (
        lambda pool: pool.keys_of(7, torch.zeros(2, 2, 1).long()),
        ValueError,
    ),
    "no sequence": (lambda pool: pool.append(3, tokens(0, 9), tokens(0, 9)), ValueError),
    "no dim": (lambda pool: pool.append(3, tokens(1, 9)[..., :0], tokens(1, 9)), ValueError),
    "layer 2**40": (lambda pool: pool.append(2**40, tokens(1, 9), tokens(1, 9)), ValueError),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_changes_nothing(name: str):
    call, error = WRONG[name]
    with opened() as pool:
        before = [keys(pool, 0), keys(pool, 1)]
        with pytest.raises(error):
            call(pool)
        assert pool.layers() == [0, 1]
        torch.testing.assert_close([keys(pool, 0), keys(pool, 1)], before)


def test_an_index_beyond_one_layer_changes_none():
    with opened((3, 2)) as pool:
        with pytest.raises(IndexError, match="of layer 1"):
            pool.reorder(torch.tensor([2, 1]))
        assert [pool.batch_size(0), pool.batch_size(1)] == [3, 2]


def test_layers_of_other_batch_sizes_repeat_their_own_sequences():
    with opened((2, 3)) as pool:
        before = [keys(pool, 0), keys(pool, 1)]
        pool.repeat(2)
        after = [keys(pool, 0), keys(pool, 1)]
    torch.testing.assert_close(after, [each.repeat_interleave(2, 0) for each in before])
    for change in (lambda: pool.repeat(2), lambda: pool.drop_before(0, 9)):
        with pytest.raises(PenstockError, match="closed"):
            change()


def test_dropped_blocks_have_keys_of_zero():
    with opened() as pool:
        before = keys(pool, 0)
        pool.drop_before(0, 9)
        before[:, :, :2] = 0
        torch.testing.assert_close(keys(pool, 0), before)


def test_keys_that_need_gradients_keep_no_graph():
    with opened() as pool:
        leaf = tokens(2, 22).requires_grad_()
        pool.append(2, leaf, leaf * 2)
        assert not pool.blocks(2).tail.requires_grad
        torch.testing.assert_close(keys(pool, 2)[:, :, 0], leaf.detach()[:, :, :4])


def choose(pool: BlockPool, selector: Nosa) -> list[torch.Tensor]:
    query = tokens(1, 1, 50)
    found = [selector.select(query.expand(pool.batch_size(i), -1, -1, -1), i, pool) for i in (0, 1)]
    assert None not in found
    return found


CHANGES: dict[str, Callable[[BlockPool, list[int] | None], None]] = {
    "reorder": lambda pool, layers: pool.reorder(torch.tensor([1, 0]), layers),
    "repeat": lambda pool, layers: pool.repeat(2, layers),
    "crop": lambda pool, layers: pool.crop(17, layers),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_selector_follows_changes_of_single_layers(name: str):
    chosen = []
    for parts in ([None], [[0], [1]], [[1], [0]], [[0]], []):
        selector = Nosa(num_blocks=3, num_query_blocks=1)
        with opened(selector=selector) as pool:
            for layers in parts:
                CHANGES[name](pool, layers)
            chosen.append(choose(pool, selector))
    whole, upward, downward, first, none = chosen
    torch.testing.assert_close([upward, downward], [whole, whole])
    torch.testing.assert_close(first, [whole[0], none[1]])


def test_a_selector_goes_on_after_one_layer_is_reset():
    selector = Nosa(num_blocks=3, num_query_blocks=1)
    with opened(selector=selector) as pool:
        before = choose(pool, selector)
        pool.reset([0])
        pool.append(0, tokens(2, 22, 0), tokens(2, 22, 9))
        torch.testing.assert_close(choose(pool, selector), before)


class Ordered:
    """A selector of the user that follows beams."""

    def select(self, query: torch.Tensor, layer: int, pool: Any) -> None:
        return None

    def reorder(self, index: torch.Tensor) -> None:
        self.index = index


def test_a_users_selector_cannot_follow_the_order_of_one_layer():
    selector = Ordered()
    with opened(selector=selector) as pool:
        before = keys(pool, 0)
        with pytest.raises(PenstockError, match=r"reorder of layers \[0\] alone"):
            pool.reorder(torch.tensor([1, 0]), [0])
        torch.testing.assert_close(keys(pool, 0), before)
        pool.reorder(torch.tensor([1, 0]))
        assert selector.index.tolist() == [1, 0]


def test_threads_take_turns():
    wrong: list[object] = []

    def work(layer: int) -> None:
        try:
            known = tokens(2, 0)
            for number in range(40):
                some = tokens(2, 3, 100 * layer + number)
                known = torch.cat([known, some], 2)
                pool.append(layer, some, some)
                whole = known[:, :, : 4 * pool.num_blocks(layer)].unflatten(2, (-1, 4))
                wrong.extend([layer] * (not torch.equal(keys(pool, layer), whole)))
        except Exception as error:
            wrong.append(error)

    with contextlib.closing(BlockPool(device_memory="4KiB", block_tokens=4)) as pool:
        threads = [threading.Thread(target=work, args=(layer,)) for layer in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("options", [{"slots": float("nan")}, {"slots": 2.5}])
def test_a_simulation_of_slots_that_are_none(options: dict[str, Any]):
    with pytest.raises(TypeError, match="whole number"):
        simulate([[1]], **options)


def test_a_simulation_of_more_slots_than_memory_has():
    assert simulate([[1], [1]], slots=10**12).num_hits == 1
    with pytest.raises(ValueError, match="whole numbers of records"):
        simulate([[0.5, 0.7]], slots=1)


@pytest.mark.parametrize("changes", [{"input_bytes_per_token": float("inf")}, {"num_tokens": 10.5}])
def test_a_split_by_numbers_that_are_none(changes: dict[str, Any]):
    numbers = {"num_tokens": 64, "bytes_per_token": 64, "flops_per_token": 64, **changes}
    with pytest.raises(ValueError, match=next(iter(changes))):
        fetch_or_recompute(**numbers, bandwidth=1e9, flop_rate=1e9)
