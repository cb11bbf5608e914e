"""Tiny seeded models of several architectures, and greedy generation with one cache or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 89
TOLERANCE = 1e-4
"""Of logits up to 10: sums in float32 of some hundred products in another order."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def _decoder(config: str, model: str, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        settings = getattr(transformers, config)(**{**_SIZES, **changes})
        return getattr(transformers, model)(settings)

    return make


def _gpt2() -> Any:
    settings = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.2,
    )
    return transformers.GPT2LMHeadModel(settings)


def _t5() -> Any:
    settings = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=32,
        d_ff=96,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(settings)


_GEMMA = {"sliding_window": 70, "query_pre_attn_scalar": 32}
MODELS = {
    "llama": _decoder("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": _decoder("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": _decoder("MistralConfig", "MistralForCausalLM", sliding_window=70),
    "gemma2": _decoder("Gemma2Config", "Gemma2ForCausalLM", **_GEMMA),
    "gemma3": _decoder(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        layer_types=["sliding_attention", "full_attention"],
        **_GEMMA,
    ),
    "gpt2": _gpt2,
    "t5": _t5,
    "mixtral": _decoder("MixtralConfig", "MixtralForCausalLM", num_local_experts=4),
}
_SINKS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 70,
}
WITH_SINKS = {
    "gpt_oss": _decoder(
        "GptOssConfig", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, **_SINKS
    ),
    "granite": _decoder("GraniteSWAConfig", "GraniteSWAForCausalLM", **_SINKS),
    "mimo": _decoder(  # sinks, and twice the heads of keys, in the layer with a window only
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        v_head_dim=16,
        mlp_layer_types=["dense", "dense"],
        **_SINKS,
    ),
}
"""Models whose attention has a sink of each head: one score more, of a key without a value."""


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    model = (MODELS | WITH_SINKS)[kind]().eval()
    model.generation_config.eos_token_id = None
    return model


def make_prompt(num_tokens: int, batch_size: int = 2, num_padding: int = 37) -> dict[str, Any]:
    """Sequences of which the second one has padding on the left."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch_size, num_tokens)
    tokens = torch.randint(3, VOCABULARY, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.int64)
    mask[1:, :num_padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Any], num_tokens: int, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
    }
    return model.generate(**inputs, **{**settings, **options})


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare the tokens, and the logits that they were chosen by."""
    assert torch.equal(ours.sequences, theirs.sequences)
    for some, others in zip(ours.logits, theirs.logits, strict=True):
        # Padding's queries see nothing, and nothing depends on them.
        torch.testing.assert_close(some, others, atol=TOLERANCE, rtol=TOLERANCE)


def cache_bytes(model: Any, num_tokens: int, batch_size: int = 2) -> int:
    """Keys and values of all tokens in all decoder layers, in float32."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * 2 * batch_size * heads * num_tokens * 32 * 4  # two layers, keys and values
