"""Tiny models of ten architectures, with batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from _steps import Case

IDS = torch.arange(32).reshape(2, 16) * 7 % 100
LABELLED = {"input_ids": IDS, "labels": IDS}
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()


def _make_from_transformers(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options)).train()


def from_transformers(model: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    """Return a maker of a model of a library that is imported when it is called."""
    return functools.partial(_make_from_transformers, model, config, **options)


class Lstm(nn.Module):
    """A bidirectional LSTM of two layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        options = {"num_layers": 2, "bidirectional": True, "dropout": 0.2, "batch_first": True}
        self.lstm = nn.LSTM(16, 24, **options)
        self.head = nn.Linear(48, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms and a shortcut, with additions and ReLUs in place."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_out)
        self.shortcut = nn.Sequential(
            nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += self.shortcut(x)
        return F.relu_(y)


def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(3, 2, 1), ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


class Mixture(nn.Module):
    """Four experts, of which two count for each token; all are calculated, so shapes are static."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        mask = torch.zeros(*x.shape[:-1], 4, device=x.device).scatter(-1, chosen, weights)
        hidden = torch.einsum("td,edf->etf", x, self.up).relu()
        output = torch.einsum("etf,efd,te->td", hidden, self.down, mask)
        return (output - x).square().mean()


def _convolution(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(2, num_out), nn.SiLU()
    )


class UNet(nn.Module):
    """One level down and up again, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = _convolution(3, 8), _convolution(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge, self.head = _convolution(16, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer = self.outer(x)
        inner = self.inner(F.max_pool2d(outer, 2))
        y = self.merge(torch.cat([outer, self.up(inner)], 1))
        y = F.interpolate(F.avg_pool2d(y, 2), scale_factor=2, mode="bilinear")
        return F.mse_loss(self.head(y), x)


def _classes(output: torch.Tensor, batch: object) -> torch.Tensor:
    return F.cross_entropy(output, torch.tensor([1, 3], device=output.device))


def _tokens(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


_WIDTHS = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 64},
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CASES = {
    "gpt2": Case(
        from_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            **{"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64},
            **{"bos_token_id": 0, "eos_token_id": 0},
        ),
        LABELLED,
    ),
    "llama": Case(
        from_transformers(
            *("LlamaForCausalLM", "LlamaConfig"),
            **_WIDTHS,
            **_SPECIAL,
            num_key_value_heads=1,
            use_cache=False,
        ),
        LABELLED,
    ),
    "bert": Case(
        from_transformers("BertForMaskedLM", "BertConfig", **_WIDTHS),
        {**LABELLED, "attention_mask": torch.ones_like(IDS)},
    ),
    "t5": Case(
        from_transformers(
            *("T5ForConditionalGeneration", "T5Config"),
            **{"vocab_size": 100, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2},
            **{"num_heads": 2, "decoder_start_token_id": 0},
        ),
        LABELLED,
    ),
    "vit": Case(
        from_transformers(
            *("ViTForImageClassification", "ViTConfig"),
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": 16, "patch_size": 4, "num_labels": 5},
        ),
        {"pixel_values": IMAGES[..., :16, :16], "labels": torch.tensor([1, 3])},
    ),
    "mamba": Case(
        from_transformers(
            *("MambaForCausalLM", "MambaConfig"),
            **{"vocab_size": 100, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
            use_cache=False,
        ),
        LABELLED,
    ),
    "lstm": Case(Lstm, IDS, _tokens),
    "resnet": Case(resnet, IMAGES, _classes),
    "mixture": Case(Mixture, IMAGES.reshape(-1, 8)[:12]),
    "unet": Case(UNet, IMAGES[..., :16, :16]),
}
