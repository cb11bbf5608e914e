"""The cache in other modes of torch: inference mode in turns, autocast, defaults, compiled."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import penstock.kv
from kv_models import TOLERANCE, cache_bytes, generate, make_model, make_prompt
from penstock.errors import PenstockError
from penstock.kv.selectors import Window

MODES = [torch.inference_mode, torch.no_grad]


class GrowingSelector:
    """Selector of a user, which counts its calls in a tensor of its own."""

    def __init__(self) -> None:
        self.inner = Window(share=1.0)
        self.counts: dict[int, torch.Tensor] = {}

    def select(self, query, layer, pool):
        self.counts.setdefault(layer, torch.zeros(1)).add_(1)
        return self.inner.select(query, layer, pool)


def run(model, cache, modes) -> torch.Tensor:
    """Logits of tokens by each way in which a cache is written, the mode changing every time."""
    tokens = make_prompt(120, num_padding=0)["input_ids"]
    logits, at = [], 0
    for i, length in enumerate((41, 20, 1, 1, 1)):
        with modes[i % 2]():
            some = tokens[:, at : at + length]
            logits.append(model(some, past_key_values=cache).logits[:, -1].clone())
        at += length
    swap = torch.tensor([1, 0])
    for i, change in enumerate((lambda: cache.crop(-9), lambda: cache.reorder_cache(swap))):
        with modes[i % 2]():
            change()
        for mode, length in ((i, 1), (i + 1, 3), (i + 1, 40)):
            with modes[mode % 2]():
                some = tokens[:, at : at + length]
                logits.append(model(some, past_key_values=cache).logits[:, -1].clone())
        at += 1
    return torch.stack(logits)


@functools.cache
def stock_logits(is_reversed: bool) -> torch.Tensor:
    model = make_model("llama")
    return run(model, DynamicCache(config=model.config), MODES[::-1] if is_reversed else MODES)


@pytest.mark.parametrize("modes", [MODES, MODES[::-1]], ids=["inference_first", "no_grad_first"])
@pytest.mark.parametrize("selector", ["all", "nosa", "accumulated", "window", "own"])
@pytest.mark.parametrize("memory", ["48KiB", "4MiB"])
def test_the_mode_may_change_between_calls(selector: str, memory: str, modes, store: Path):
    model = make_model("llama")
    expected = stock_logits(modes != MODES)
    made = {
        "all": "all",
        "window": Window(share=1.0),
        "nosa": penstock.kv.selectors.Nosa(share=1.0),
        "accumulated": penstock.kv.selectors.Accumulated(share=1.0),
        "own": GrowingSelector(),
    }[selector]
    options = {"device_memory": memory, "store": str(store), "block_tokens": 16}
    with penstock.kv.cache(model, selector=made, **options) as cache:
        ours = run(model, cache, modes)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("modes", [MODES, MODES[::-1]], ids=["inference_first", "no_grad_first"])
def test_a_cache_that_recomputes(modes, store: Path):
    model = make_model("llama")
    expected = stock_logits(modes != MODES)
    options = {"device_memory": "48KiB", "store": str(store), "block_tokens": 16}
    with penstock.kv.cache(model, keep_inputs=True, **options) as cache:
        ours = run(model, cache, modes)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_cache_from_a_file_of_a_prefix(tmp_path: Path):
    model = make_model("llama")
    tokens = make_prompt(60, num_padding=0)["input_ids"]
    options = {"device_memory": cache_bytes(model, 100), "block_tokens": 16}
    with penstock.kv.cache(model, **options) as cache, torch.inference_mode():
        model(tokens[:, :41], past_key_values=cache)
        cache.save(tmp_path / "prefix")
    exact = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(tokens[:, :41], past_key_values=exact)
        expected = model(tokens[:, 41:], past_key_values=exact).logits
        cache = penstock.kv.cache(model, prefix=tmp_path / "prefix", **options)
    with cache, torch.no_grad():
        ours = model(tokens[:, 41:], past_key_values=cache).logits
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("selector", ["all", "nosa", "accumulated", "window"])
def test_logits_do_not_depend_on_defaults(selector: str, other_defaults, store: Path):
    model = make_model("llama")
    tokens = make_prompt(180, num_padding=0)["input_ids"]
    options = {"device_memory": "96KiB", "store": str(store), "block_tokens": 16}
    found = []
    for make in (contextlib.nullcontext, other_defaults):
        with penstock.kv.cache(model, selector=selector, **options) as cache, torch.no_grad():
            model(tokens[:, :175], past_key_values=cache)
            with make():
                found.append(
                    [
                        model(tokens[:, at : at + 1], past_key_values=cache).logits
                        for at in range(175, 179)
                    ]
                )
            report = cache.report()
            assert report.num_misses > 0 or selector != "all"
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "t5", "granite"])
def test_autocast(kind: str, store: Path):
    model, prompt = make_model(kind), make_prompt(100)
    memory = {"device_memory": "64KiB", "store": str(store), "block_tokens": 16}
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(model, prompt, 12)
        with penstock.kv.cache(model, **memory) as cache:
            ours = generate(model, prompt, 12, past_key_values=cache)
    largest = max(float(each.abs().max()) for each in expected.logits)
    for one, other in zip(ours.logits[:3], expected.logits[:3], strict=True):
        # bfloat16 has 8 bits, and its sums are taken in other places.
        torch.testing.assert_close(one, other, atol=0.04 * largest, rtol=0)


def test_autocast_and_kept_inputs():
    model = make_model("llama")
    with (
        penstock.kv.cache(model, device_memory="4MiB", keep_inputs=True) as cache,
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
        pytest.raises(PenstockError, match="use keep_inputs=False, or leave"),
    ):
        model(**make_prompt(20), past_key_values=cache)


def test_autocast_begins_and_ends_between_calls(store: Path):
    model = make_model("llama")
    tokens = make_prompt(120, num_padding=0)["input_ids"]
    with torch.no_grad():
        expected = model(tokens).logits
        for turns in ((False, True), (True, False)):
            made = {"device_memory": "64KiB", "store": str(store), "block_tokens": 16}
            with penstock.kv.cache(model, **made) as cache:
                for part, is_cast in zip((slice(0, 80), slice(80, 120)), turns, strict=True):
                    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                        if turns[0] and not is_cast:
                            with pytest.raises(ValueError, match="bfloat16"):
                                model(tokens[:, part], past_key_values=cache)
                            continue
                        logits = model(tokens[:, part], past_key_values=cache).logits
                    torch.testing.assert_close(
                        logits.float(), expected[:, part], atol=0.3, rtol=0.05
                    )


def test_queries_alone_that_want_a_gradient():
    model = make_model("llama").requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
    with penstock.kv.cache(model, device_memory="4MiB") as cache:
        with pytest.raises(PenstockError, match="no gradients pass"):
            model(**make_prompt(20), past_key_values=cache)


@pytest.mark.usefixtures("one_thread")
def test_a_compiled_model_breaks_its_graphs_at_the_cache(monkeypatch: pytest.MonkeyPatch):
    # Dynamo measures its guards after it has emptied the processor's caches: a seventh of the time.
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    config, tokens = make_model("llama").config, make_prompt(70, batch_size=1)["input_ids"]
    config.num_hidden_layers = 1
    model = LlamaForCausalLM(config).eval()
    options = {"device_memory": "32KiB", "block_tokens": 16}
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager", dynamic=True)
    with penstock.kv.cache(model, **options) as cache, torch.no_grad():
        theirs = model(input_ids=tokens).logits
        parts = [
            compiled(input_ids=tokens[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 67), (67, 68), (68, 70))
        ]
        whole: Any = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"penstock\.kv keeps keys"):
            whole(input_ids=tokens[:, :3], past_key_values=cache)
    torch.compiler.reset()
    torch.testing.assert_close(torch.cat(parts, 1), theirs, atol=1e-4, rtol=1e-4)
