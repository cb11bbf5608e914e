"""Selectors on the real pool: exact where they hold everything, fewer reads where they do not."""

from dataclasses import dataclass

import pytest
import torch

import penstock.kv
from kv_models import assert_same, cache_bytes, generate, make_model, make_prompt
from penstock.errors import PenstockError
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule
from penstock.kv._visibility import Visibility
from penstock.kv.selectors import Accumulated, CheckedSelector, DoubleSparsity, Nosa, Window
from penstock.kv.transformers._calibrate import calibrate

NUM_TOKENS = 250
NUM_NEW = 14  # the last token of a block, and the first one of the next among them
BLOCK = 16


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


def make_selector(name, model, **budget):
    if name == "double_sparsity":
        text = make_prompt(100)["input_ids"]
        return DoubleSparsity(calibrate(model, [text], num_channels=8), bits=4, **budget)
    if name == "own":
        inner = Window(**budget)
        return CheckedSelector(inner)
    return {"nosa": Nosa, "accumulated": Accumulated, "window": Window}[name](**budget)


NAMES = ["double_sparsity", "nosa", "accumulated", "window", "own"]


def run(model, selector, **options):
    inputs = make_prompt(NUM_TOKENS, num_padding=0)
    with penstock.kv.cache(
        model,
        device_memory=cache_bytes(model, NUM_TOKENS),
        selector=selector,
        block_tokens=BLOCK,
    ) as cache:
        result = generate(model, inputs, NUM_NEW, past_key_values=cache, **options)
        return result, cache.report()


@pytest.fixture(scope="module", params=[{}, {"num_beams": 3}], ids=["greedy", "beams"])
def options(request):
    return request.param


@pytest.fixture(scope="module")
def exact(model, options):
    """Tokens of a stock cache."""
    return generate(model, make_prompt(NUM_TOKENS, num_padding=0), NUM_NEW, **options)


@pytest.fixture(scope="module")
def num_dense(model, options):
    """Records that are read without a selector."""
    _, report = run(model, "all", **options)
    return report.num_hits + report.num_misses


@pytest.mark.parametrize("name", NAMES)
def test_a_selector_that_holds_all_blocks_is_exact(model, name, options, exact):
    ours, _ = run(model, make_selector(name, model, share=1.0), **options)
    assert_same(ours, exact)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget_reads_its_blocks_only(model, name, options, num_dense):
    result, report = run(model, make_selector(name, model, num_blocks=3), **options)
    assert torch.isfinite(torch.stack(list(result.logits))).all()
    num_read = report.num_hits + report.num_misses
    assert 0 < num_read < num_dense / 3


@pytest.mark.parametrize("selector", ["nosa", "accumulated", "window"])
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_after_a_reset_there_may_be_other_sequences(selector: str, first: int, then: int):
    model, prompt = make_model("llama"), make_prompt(300, batch_size=then)
    options = {"device_memory": "4MiB", "block_tokens": 16, "selector": selector}
    with penstock.kv.cache(model, **options) as cache:
        fresh = generate(model, prompt, 8, past_key_values=cache)
    with penstock.kv.cache(model, **options) as cache:
        generate(model, make_prompt(300, batch_size=first), 8, past_key_values=cache)
        cache.reset()
        assert_same(generate(model, prompt, 8, past_key_values=cache), fresh)


@pytest.mark.parametrize("selector", ["nosa", "accumulated"])
@pytest.mark.parametrize("slots", [10, 16, 30])
def test_fewer_sequences_in_a_full_budget(selector: str, slots: int):
    """What the selector has taken from the slots does not come back with the sequences that go."""
    model = make_model("gpt2")
    budget = slots * cache_bytes(model, 4)
    with (
        penstock.kv.cache(model, device_memory=budget, block_tokens=4, selector=selector) as cache,
        torch.inference_mode(),
    ):
        for length in (64, 15, 18):
            model(input_ids=torch.randint(3, 80, (2, length)), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1]))
        for length in (1, 40):
            model(input_ids=torch.randint(3, 80, (1, length)), past_key_values=cache)
        assert cache.get_seq_length() == 138


@pytest.mark.parametrize("name", ["nosa", "accumulated", "own"])
def test_one_selector_in_two_open_caches(model, name):
    selector = _Observer() if name == "own" else make_selector(name, model, share=0.5)
    options = {"device_memory": "1MiB", "block_tokens": BLOCK, "selector": selector}
    with penstock.kv.cache(model, **options):
        with pytest.raises(ValueError, match="make a selector for each cache"):
            penstock.kv.cache(model, **options)
    penstock.kv.cache(model, **options).close()


@dataclass
class _Observer:  # which has no hash
    num_shown: int = 0

    def select(self, query, layer, pool):
        return None

    def observe(self, layer, first_block, keys):
        self.num_shown += keys.shape[2]


@pytest.mark.parametrize("change", ["append", "crop", "reset", "close"])
def test_a_selector_that_changes_the_pool(change):
    def select(query, layer, pool):
        arguments = {"append": (layer, token, token), "crop": (3,)}
        return getattr(pool, change)(*arguments.get(change, ()))

    token = torch.rand(1, 1, 1, 8)
    pool = penstock.kv.BlockPool(device_memory="64KiB", block_tokens=4, selector=select)
    pool.append(0, torch.rand(1, 1, 9, 8), torch.rand(1, 1, 9, 8))
    with pytest.raises(PenstockError, match=r"selector 'select' changed layer 0 .* from 9 tokens"):
        attend_pool(pool, 0, token, ScoreRule(1.0), Visibility())
    pool.close()


def test_weights_of_heads_that_read_nothing():
    """With fills only, and no unfinished block, a head has no weights; they were NaN."""

    class Halved:
        def select(self, query, layer, pool):
            return torch.tensor([[[-1], [2]]])

        def note(self, layer, blocks, weights):
            noted.append((blocks.tolist(), weights.tolist()))

    noted = []
    pool = penstock.kv.BlockPool(device_memory="64KiB", block_tokens=4, selector=Halved())
    pool.append(0, torch.rand(1, 2, 12, 8), torch.rand(1, 2, 12, 8))
    out = attend_pool(pool, 0, torch.rand(1, 4, 1, 8), ScoreRule(1.0), Visibility())
    assert noted == [([[[-1], [2]]], [[[0.0], [pytest.approx(2.0)]]])]
    assert not out[:, :2].any() and out[:, 2:].all()
    pool.close()
