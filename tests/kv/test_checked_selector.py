"""The user's selector: what it returns is checked, what it has is used."""

import pytest
import torch

from _fake_pool import BATCH, HEADS, FakePool, draw_keys, draw_query
from penstock.kv.selectors import CheckedSelector

NUM_BLOCKS = 6


def checked(blocks):
    selector = CheckedSelector(lambda query, layer, pool: blocks)
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    return selector


def rows(*numbers):
    return torch.tensor(numbers).expand(BATCH, HEADS, -1)


@pytest.mark.parametrize(
    "blocks",
    [None, rows(0, 3, 5), rows(-1, 0, -1, 5), rows(2, -1, -1), rows(-1, -1), rows(0)[..., :0]],
)
def test_right_results_pass(blocks):
    assert checked(blocks).select(draw_query(), 0, FakePool(NUM_BLOCKS)) is blocks


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ([0, 1], TypeError, "int64 tensor or None; got list"),
        (rows(0, 1).int(), TypeError, "got torch.int32"),
        (rows(0, 1).to_sparse(), TypeError, "got torch.sparse_coo"),
        (torch.arange(3), ValueError, r"shape \(2, 2, k\); got \(3,\)"),
        (rows(0, 1)[:1], ValueError, r"got \(1, 2, 2\)"),
        (rows(0, 1)[:, :1], ValueError, r"got \(2, 1, 2\)"),
        (rows(0, NUM_BLOCKS), ValueError, "0 to 5, or -1; got 6"),
        (rows(-2, 1), ValueError, "got -2"),
        (rows(1, 0), ValueError, r"ascending order; .* has \[1, 0\]"),
        (rows(0, 2, -1, 2), ValueError, "distinct"),
        (rows(0, 1).to("meta"), ValueError, "on the query's cpu; got meta"),
    ],
)
def test_wrong_results_are_named(blocks, error, message):
    with pytest.raises(error, match=f"<lambda>.*layer 0: must return .*{message}"):
        checked(blocks).select(draw_query(), 0, FakePool(NUM_BLOCKS))


def test_a_query_that_a_function_changes_is_not_the_one_of_attention():
    query = draw_query()
    before = query.clone()
    CheckedSelector(lambda query, *_: (query.zero_(), None)[1]).select(query, 0, FakePool(4))
    assert torch.equal(query, before)


def test_what_is_neither_function_nor_selector_is_refused():
    with pytest.raises(TypeError, match="must be a function"):
        CheckedSelector(5)


def test_methods_of_the_users_object_are_called():
    calls = []

    class Own:
        nbytes = 12

        def select(self, query, layer, pool):
            return None

        def observe(self, *args):
            calls.append("observe")

        def note(self, *args):
            calls.append("note")

        def crop(self, num_blocks):
            calls.append(num_blocks)

    selector = CheckedSelector(Own())
    selector.observe(0, 0, draw_keys(1))
    selector.note(0, rows(0), rows(0).float())
    selector.crop(3)
    selector.reorder(torch.tensor([0]))  # which it does not have
    assert calls == ["observe", "note", 3]
    assert selector.nbytes == 12
    assert not hasattr(checked(None), "note")


@pytest.mark.parametrize("num_bytes", [-1, 1.5, None])
def test_bytes_that_are_no_number(num_bytes):
    class Own:
        nbytes = num_bytes

        def select(self, query, layer, pool):
            return None

    with pytest.raises((TypeError, ValueError), match="nbytes of selector 'Own' is"):
        _ = CheckedSelector(Own()).nbytes
