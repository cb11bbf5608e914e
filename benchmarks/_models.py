"""The four Transformers models of the offload benchmark, seeded, on random tokens."""

from __future__ import annotations

from typing import Any

import torch

MODELS = ("gpt2", "llama", "bert", "t5")


def build(
    name: str,
    *,
    hidden: int = 512,
    layers: int = 4,
    heads: int = 8,
    seq: int = 512,
    vocab: int = 8192,
) -> torch.nn.Module:
    """A model of the given shape with random weights from seed 0; T5 splits its layers in two."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=seq
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=seq,
        )
        model = transformers.LlamaForCausalLM(config)
    elif name == "bert":
        config = transformers.BertConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=seq,
        )
        model = transformers.BertForMaskedLM(config)
    elif name == "t5":
        config = transformers.T5Config(
            vocab_size=vocab,
            d_model=hidden,
            d_ff=4 * hidden,
            d_kv=hidden // heads,
            num_layers=layers // 2,
            num_decoder_layers=layers - layers // 2,
            num_heads=heads,
        )
        config.decoder_start_token_id = 0
        model = transformers.T5ForConditionalGeneration(config)
    else:
        raise ValueError(f"model={name!r}: expected one of {MODELS}")
    model.config.use_cache = False
    return model.train()


def batch_of(name: str, *, batch: int, seq: int, vocab: int, seed: int = 1) -> dict[str, Any]:
    """Random token ids, as inputs and labels; int64, (batch, seq)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab, (batch, seq), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}
