"""Small seeded models with LoRA, for the tests of `penstock.lora.fuse`."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

VOCABULARY, SAMPLES, TOKENS = 64, 3, 7


def _llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def _bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _t5() -> torch.nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
            dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def _vit() -> torch.nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=8, patch_size=4, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            num_labels=4,
        )
    )  # fmt: skip


def _gpt2() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


MAKERS = {"llama": _llama, "bert": _bert, "t5": _t5, "vit": _vit, "gpt2": _gpt2}
TARGETS = {
    "llama": "all-linear",
    "bert": ["query", "key", "value", "dense"],
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "vit": "all-linear",
    "gpt2": ["c_attn", "c_fc", "c_proj"],
}


def make(kind: str = "llama", *, second: dict[str, Any] | None = None, **config: Any) -> PeftModel:
    """Return a model in training mode; with `second` it has the adapters "default" and "other"."""
    torch.manual_seed(0)
    base = MAKERS[kind]()
    given = {"target_modules": TARGETS[kind], "r": 4, "init_lora_weights": False}
    if kind == "gpt2":
        given["fan_in_fan_out"] = True
    model = get_peft_model(base, LoraConfig(**{**given, **config}))
    if second is not None:
        model.add_adapter("other", LoraConfig(**{**given, **config, **second}))
        model.base_model.set_adapter(["default", "other"])
    return model.train()


def make_batch(
    kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return the arguments of a call that has a loss."""
    torch.manual_seed(100 + seed)
    if kind == "vit":
        images = torch.randn(SAMPLES, 3, 8, 8, dtype=dtype)
        return {"pixel_values": images, "labels": torch.randint(4, (SAMPLES,))}
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS))
    return {"input_ids": tokens, "labels": tokens.clone()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by name, and clear them."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def backward(model: torch.nn.Module, seed: int = 0, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return the loss, as "loss", and the gradients of a step that is seeded."""
    torch.manual_seed(seed)
    loss = model(**arguments).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def assert_same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float = 0.0
) -> None:
    """Compare tensors by name; relative to the largest element of each, at least 1."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        error = float((found[name] - tensor).abs().max())
        assert error <= tolerance * scale, (name, error, scale)


def twin(model: PeftModel) -> PeftModel:
    """Return a copy with parameters of its own."""
    return copy.deepcopy(model)
