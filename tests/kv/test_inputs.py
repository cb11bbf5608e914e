"""Keys and values that are computed again from kept inputs, instead of being read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from kv_models import MODELS, assert_same, cache_bytes, generate, make_model, make_prompt
from penstock.errors import PenstockError
from penstock.kv import BlockPool
from penstock.kv._inputs import InputPages
from penstock.kv.transformers._inputs import AttentionInputs

pytestmark = pytest.mark.usefixtures("one_thread")

T, H, DIM, WIDTH = 4, 2, 8, 6
DECODERS = [kind for kind in MODELS if kind != "t5"]


@pytest.fixture
def compute_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute every block that can be computed, whatever was measured."""
    monkeypatch.setattr(InputPages, "_split", lambda *args: args[-1])


class Projection:
    """Keys and values that are products of inputs."""

    def __init__(self) -> None:
        self.num_blocks = 0
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.rand((2, WIDTH, H * DIM), generator=generator)

    def project(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return keys and values `(B, H, n, DIM)` of `(B, n, WIDTH)`."""
        return tuple((inputs @ w).unflatten(2, (H, DIM)).transpose(1, 2) for w in self.weights)

    def __call__(self, layer: int, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.num_blocks += len(inputs)
        return self.project(inputs + layer)

    def append(self, pool: BlockPool, layer: int, inputs: torch.Tensor) -> None:
        """Append tokens to a layer, which adds its number to its inputs."""
        pool.append(layer, *self.project(inputs + layer), inputs=inputs)


def read_keys(pool: BlockPool, layer: int) -> torch.Tensor:
    """Return the keys of all full blocks, `(B, H, tokens, DIM)`."""
    blocks = torch.arange(pool.num_blocks(layer)).expand(pool.batch_size(layer), H, -1)
    return pool.keys_of(layer, blocks).flatten(2, 3)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 3 * T)),
        st.tuples(st.just("crop"), st.integers(0, 2 * T)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.usefixtures("compute_all")
@settings(deadline=None, max_examples=60)
@given(operations=OPERATIONS, with_host=st.booleans(), seed=st.integers(0, 9))
def test_computed_keys_are_those_that_were_appended(
    store_of_module: Path, operations: list[tuple[str, Any]], with_host: bool, seed: int
):
    projection = Projection()
    generator = torch.Generator().manual_seed(seed)
    pool = BlockPool(
        device_memory=2 * 4096 + 4096,  # a page, and inputs, in one buffer
        host_memory="8KiB" if with_host else 0,
        store=str(store_of_module),
        block_tokens=T,
        recompute=projection,
    )
    held = torch.zeros(2, 0, WIDTH)
    try:
        for operation, value in operations:
            if operation == "append":
                inputs = torch.rand((2, value, WIDTH), generator=generator)
                for layer in range(2):
                    projection.append(pool, layer, inputs)
                held = torch.cat([held, inputs], 1)
            elif operation == "crop":
                held = held[:, : max(0, held.shape[1] - value)]
                pool.crop(held.shape[1])
            elif held.shape[1]:
                pool.reorder(torch.tensor(value))
                held = held[value]
            for layer in range(2) if held.shape[1] >= T else ():
                keys = projection.project(held + layer)[0][:, :, : held.shape[1] // T * T]
                torch.testing.assert_close(read_keys(pool, layer), keys)
        assert pool.report().num_computed == projection.num_blocks
    finally:
        pool.close()
    assert list(store_of_module.iterdir()) == []


@pytest.fixture(scope="module")
def store_of_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.usefixtures("compute_all")
def test_what_is_computed_is_not_read(store: Path):
    projection = Projection()
    options: dict[str, Any] = {"device_memory": "48KiB", "store": str(store), "block_tokens": T}
    with_inputs, without = BlockPool(**options, recompute=projection), BlockPool(**options)
    inputs = torch.rand(1, 64 * T, WIDTH)
    for pool in (with_inputs, without):
        given = inputs if pool is with_inputs else None
        pool.append(0, *projection.project(inputs), inputs=given)
    torch.testing.assert_close(read_keys(with_inputs, 0), read_keys(without, 0))
    report = with_inputs.report()
    num_whole = report.num_computed
    assert num_whole > 32
    # A page of inputs is 4096 bytes here, one of keys and values two records of 4096.
    assert report.read_bytes == (report.num_misses - num_whole * H) * 4096 + num_whole * 4096
    assert report.peak_device_bytes <= 48 * 1024 + report.tail_bytes
    for pool in (with_inputs, without):
        pool.close()


def test_the_choice_follows_from_what_was_measured(store: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a measurement one block is computed; a slow computation is left alone after that."""
    projection = Projection()
    pool = BlockPool(device_memory="48KiB", store=str(store), block_tokens=T, recompute=projection)
    inputs = torch.rand(1, 64 * T, WIDTH)
    pool.append(0, *projection.project(inputs), inputs=inputs)
    read_keys(pool, 0)
    assert pool._tiers.inputs is not None
    pool._tiers.inputs._seconds_per_token = {0: 1.0}
    before = projection.num_blocks
    assert before > 0
    read_keys(pool, 0)
    assert projection.num_blocks == before
    pool._tiers.inputs._seconds_per_token = {0: 1e-12}
    read_keys(pool, 0)
    assert projection.num_blocks > before
    pool.close()


@pytest.mark.usefixtures("compute_all")
@pytest.mark.parametrize("kind", DECODERS)
def test_tokens_are_those_of_dynamic_cache(kind: str, store: Path):
    model, prompt = make_model(kind), make_prompt(170)
    theirs = generate(model, prompt, 8)
    budget = cache_bytes(model, 178) // 4
    options = {"device_memory": budget, "block_tokens": 16, "store": store, "keep_inputs": True}
    with penstock.kv.cache(model, **options) as cache:
        assert_same(generate(model, prompt, 8, past_key_values=cache), theirs)
        report = cache.report()
        # All layers of this Mistral have a window.
        assert (report.num_computed > 0) == (kind != "mistral")
        assert report.peak_device_bytes <= budget + report.tail_bytes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("change", ["weights", "adapter"])
def test_other_weights_than_those_that_made_the_keys(change: str):
    model, tokens = make_model("llama"), make_prompt(40, num_padding=0)["input_ids"]
    adapted: Any = model
    if change == "adapter":
        peft = pytest.importorskip("peft")
        settings = peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, settings).eval()
    with (
        torch.no_grad(),
        penstock.kv.cache(model, device_memory="1MiB", keep_inputs=True) as cache,
    ):
        for part in tokens[:, :20], tokens[:, 20:39]:
            adapted(input_ids=part, past_key_values=cache)
        with contextlib.ExitStack() as stack:
            if change == "adapter":
                stack.enter_context(adapted.disable_adapter())
            else:
                model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
            with pytest.raises(PenstockError, match=r"others than those that made .* reset\(\)"):
                adapted(input_ids=tokens[:, 39:], past_key_values=cache)
            cache.reset()
            ours = adapted(input_ids=tokens, past_key_values=cache).logits
            torch.testing.assert_close(ours, adapted(input_ids=tokens).logits)


def test_an_adapter_for_each_sequence():
    """Blocks of several sequences are computed at once, and without their adapters."""
    peft, model = pytest.importorskip("peft"), make_model("llama")
    settings = peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(model, settings).eval()
    adapted.add_adapter("second", settings)
    options = {"input_ids": make_prompt(20)["input_ids"], "adapter_names": ["default", "second"]}
    with penstock.kv.cache(model, device_memory="1MiB", keep_inputs=True) as cache, torch.no_grad():
        with pytest.raises(PenstockError, match=r"one sequence alone .*adapter_names"):
            adapted(past_key_values=cache, **options)


def test_encoder_decoder_models_are_refused():
    with pytest.raises(PenstockError, match="keep_inputs=True: T5"):
        penstock.kv.cache(make_model("t5"), device_memory="1MiB", keep_inputs=True)


def test_inputs_that_belong_to_no_append_are_refused():
    pool = BlockPool(device_memory="1MiB", block_tokens=T)
    keys = torch.rand(1, H, T, DIM)
    with pytest.raises(ValueError, match="recompute="):
        pool.append(0, keys, keys, inputs=torch.rand(1, T, WIDTH))
    pool = BlockPool(device_memory="1MiB", block_tokens=T, recompute=Projection())
    with pytest.raises(ValueError, match="inputs must be"):
        pool.append(0, keys, keys, inputs=torch.rand(1, T + 1, WIDTH))


class Mixing(torch.nn.Module):
    """Attention module whose keys are sums over tokens."""

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any = None) -> Any:
        keys = hidden_states.cumsum(1).unsqueeze(1)
        return past_key_values.update(keys, keys, 0)


def test_keys_that_follow_from_other_tokens_are_refused():
    module, hidden = Mixing(), torch.rand(1, 40, WIDTH)
    inputs = AttentionInputs(module, "mixing")

    class Cache:
        def update(self, keys: torch.Tensor, values: torch.Tensor, _: int) -> None:
            inputs.take(keys, values)

    with pytest.raises(PenstockError, match="mixing makes other keys"):
        module(hidden, past_key_values=Cache())


def test_inputs_without_tokens_are_refused():
    class Scaled(torch.nn.Module):
        def forward(self, hidden_states: Any, scales: torch.Tensor, past_key_values: Any) -> Any:
            keys = (hidden_states * scales).unsqueeze(1)
            return past_key_values.update(keys, keys, 0)

    module = Scaled()
    inputs = AttentionInputs(module, "scaled")

    class Cache:
        def update(self, keys: torch.Tensor, values: torch.Tensor, _: int) -> None:
            inputs.take(keys, values)

    with pytest.raises(PenstockError, match="scaled is called with scales="):
        module(torch.rand(1, 40, WIDTH), torch.rand(WIDTH), Cache())
