"""Encoder-decoder models: calls of `generate` that encode more than one input, or cut masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock
from kv_models import generate, make_model, make_prompt, transformers
from penstock.errors import PenstockError

pytestmark = pytest.mark.usefixtures("one_thread")


def make_whisper() -> Any:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=89,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=30,
        max_target_positions=100,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        init_std=0.2,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for name, value in (("no_timestamps_token_id", 60), ("is_multilingual", False)):
        setattr(model.generation_config, name, value)
    return model


def test_sound_that_is_longer_than_the_window():
    model = make_whisper()
    sound, mask = torch.randn(1, 8, 150), torch.ones(1, 150, dtype=torch.int64)
    options = {"return_timestamps": True, "max_new_tokens": 8, "temperature": 0.0}
    with penstock.kv.cache(model, device_memory="64KiB", block_tokens=16) as cache:
        with pytest.raises(PenstockError, match=r"Whisper.* encodes a further input.*reset\(\)"):
            model.generate(sound, attention_mask=mask, past_key_values=cache, **options)
        for part in (sound[..., :60], sound[..., 60:120]):
            cache.reset()
            ours = model.generate(part, past_key_values=cache, **options)
            assert torch.equal(ours, model.generate(part, **options))
        cache.reset()
        with pytest.raises(PenstockError, match=r"Whisper.* return_dict_in_generate=False"):
            model.generate(part, past_key_values=cache, return_dict_in_generate=True, **options)


def test_a_prefill_in_chunks_which_would_cut_the_encoders_mask():
    model, prompt = make_model("t5"), make_prompt(40)
    with penstock.kv.cache(model, device_memory="64KiB", block_tokens=16) as cache:
        with pytest.raises(ValueError, match=r"prefill_chunk_size=16: .*leave it out for T5"):
            generate(model, prompt, 4, past_key_values=cache, prefill_chunk_size=16)
