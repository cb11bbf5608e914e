"""Tiny models of ten architectures, with batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from _steps import Case

IDS = torch.arange(32).reshape(2, 16) * 7 % 100
LABELLED = {"input_ids": IDS, "labels": IDS}
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()


def from_transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker of a model of a library that is imported when it is called."""

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options)).train()

    return make


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
}
