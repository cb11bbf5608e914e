"""The models whose steps `plan.py` plans: no weights, no data, only shapes on the meta device.

Each case is what SwapAdvisor's table or its successors train, in float32, at batches that need 4 to
12 times the 16 GB of a V100 (`peak_of_program_order` of the captured graph says how much).
Convolutional and recurrent networks have SGD with momentum, transformers AdamW.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import _plan_convolutions as convolutions
from _plan_recurrent import Recurrent

V100_BYTES = 16 * 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its batch."""

    title: str
    """For tables: what the field calls it, and the batch."""
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    """Arguments of the model for a batch of so many samples."""
    batch_size: int
    optimizer: str = "sgd"
    """"sgd" (momentum 0.9) or "adamw"."""

    def build(self, batch_size: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Model, optimizer and batch on the meta device: what `penstock.capture` takes.

        Example:
            >>> model, optimizer, batch = CASES["rnn-8k"].build(batch_size=4)

        Args:
            batch_size: samples; the case's own if None.
        """
        with torch.device("meta"):
            model = self.model().train()
            batch = self.batch(batch_size or self.batch_size)
        return model, make_optimizer(self.optimizer, model), batch


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW, one operator per parameter and update (no foreach)."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def _images(side: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(num_images: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.empty(num_images, 3, side, side)
        return images, torch.zeros(num_images, dtype=torch.long)

    return batch


def _sequences(num_steps: int, width: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(num_steps, num_samples, width), torch.empty(num_samples, width)

    return batch


def _tokens(length: int, **lengths_of_others: int) -> Callable[[int], Mapping[str, torch.Tensor]]:
    def batch(num_samples: int) -> Mapping[str, torch.Tensor]:
        names = {"input_ids": length, "labels": length, **lengths_of_others}
        return {
            name: torch.zeros(num_samples, many, dtype=torch.long) for name, many in names.items()
        }

    return batch


def _recurrent(bidirectional: bool, cell: str, num_layers: int) -> Callable[[], nn.Module]:
    return lambda: Recurrent(
        num_layers=num_layers, width=8192, bidirectional=bidirectional, cell=cell
    )


def _transformer(config: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        values = getattr(transformers, config)(use_cache=False, **settings)
        return getattr(transformers, model)(values)

    return make


def _gpt2(**settings: Any) -> Callable[[], nn.Module]:
    return _transformer("GPT2Config", "GPT2LMHeadModel", **settings)


CASES: dict[str, Case] = {
    "wresnet-152-10": Case(
        title="WResNet-152-10, batch 32",
        model=convolutions.wide_resnet,
        batch=_images(224),
        batch_size=32,
    ),
    "inception-v4": Case(
        title="Inception-V4, batch 512",
        model=convolutions.inception_v4,
        batch=_images(299),
        batch_size=512,
    ),
    "nasnet-25": Case(
        title="NASNet-25, batch 128", model=convolutions.nasnet, batch=_images(331), batch_size=128
    ),
    "rnn-8k": Case(
        title="RNN 8K, 8 layers, 20 steps, batch 10240",
        model=_recurrent(False, "tanh", 8),
        batch=_sequences(20, 8192),
        batch_size=10240,
    ),
    "brnn-8k": Case(
        title="BRNN 8K, 8 layers, 20 steps, batch 2048",
        model=_recurrent(True, "tanh", 8),
        batch=_sequences(20, 8192),
        batch_size=2048,
    ),
    "lstm-8k": Case(
        title="LSTM 8K, 8 layers, 20 steps, batch 768",
        model=_recurrent(False, "lstm", 8),
        batch=_sequences(20, 8192),
        batch_size=768,
    ),
    "blstm-8k": Case(
        title="BLSTM 8K, 4 layers, 20 steps, batch 512",
        model=_recurrent(True, "lstm", 4),
        batch=_sequences(20, 8192),
        batch_size=512,
    ),
    "gpt2-12": Case(
        title="GPT-2, 12 layers, 1024 tokens, batch 24",
        model=_gpt2(),
        batch=_tokens(1024),
        batch_size=24,
        optimizer="adamw",
    ),
    "gpt2-48": Case(
        title="GPT-2 XL, 48 layers, 1024 tokens, batch 6",
        model=_gpt2(n_layer=48, n_embd=1600, n_head=25),
        batch=_tokens(1024),
        batch_size=6,
        optimizer="adamw",
    ),
    "gpt2-20": Case(
        title="GPT-2, 20 layers, 1024 tokens, batch 24",
        model=_gpt2(n_layer=20),
        batch=_tokens(1024),
        batch_size=24,
        optimizer="adamw",
    ),
    "gpt2-72": Case(
        title="GPT-2 XL, 72 layers, 1024 tokens, batch 4",
        model=_gpt2(n_layer=72, n_embd=1600, n_head=25),
        batch=_tokens(1024),
        batch_size=4,
        optimizer="adamw",
    ),
    "llama-7b": Case(
        title="Llama-7B, 2048 tokens, batch 4",
        model=_transformer("LlamaConfig", "LlamaForCausalLM"),
        batch=_tokens(2048),
        batch_size=4,
        optimizer="adamw",
    ),
    "t5-3b": Case(
        title="T5-3B, 512 and 512 tokens, batch 8",
        model=_transformer(
            "T5Config",
            "T5ForConditionalGeneration",
            d_model=1024,
            d_kv=128,
            d_ff=16384,
            num_layers=24,
            num_heads=32,
            decoder_start_token_id=0,
        ),
        batch=_tokens(512),
        batch_size=8,
        optimizer="adamw",
    ),
    "bert-large": Case(
        title="BERT large, 512 tokens, batch 64",
        model=_transformer(
            "BertConfig",
            "BertForMaskedLM",
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
        batch=_tokens(512),
        batch_size=64,
        optimizer="adamw",
    ),
}
LARGE = ("gpt2-20", "gpt2-72")  # for the planner's own speed; the table leaves them out
SWAPADVISOR = ("wresnet-152-10", "inception-v4", "nasnet-25", "rnn-8k", "brnn-8k")
