"""Training of a model of Transformers on packed documents: by blocks, and by SDPA with a mask."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from _attention_layouts import document_lengths
from penstock.integrations.transformers import register_attention

OURS, STOCK = "penstock", "SDPA, packed mask"
BAR = 0.6  # of the time of SDPA


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Steps of an arm.

    Attributes:
        seconds: Of each step.
        losses: Mean loss of each document in the first step, `(documents,)`.
    """

    seconds: list[float]
    losses: Tensor


def make_model(num_layers: int, hidden: int) -> Any:
    """Return a Llama with heads of 64, two of which share keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def document_losses(model: torch.nn.Module, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return the mean loss of each of some documents that lie in one row."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
    targets = torch.roll(tokens[0], -1)
    targets[torch.tensor(lengths).cumsum(0) - 1] = -100
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return torch.stack([each.sum() / (len(each) - 1) for each in losses.split(lengths)])


def measure(
    num_tokens: int, num_layers: int, hidden: int, rounds: int
) -> tuple[dict[str, Measured], Tensor]:
    """Return the steps of both arms, which take turns, and the losses of documents alone."""
    register_attention()
    lengths = document_lengths(num_tokens)
    tokens = torch.randint(2048, (1, num_tokens), generator=torch.Generator().manual_seed(3))
    models = {OURS: make_model(num_layers, hidden), STOCK: make_model(num_layers, hidden)}
    models[OURS].set_attn_implementation("penstock")
    with torch.no_grad():
        parts = zip(tokens.split(lengths, 1), lengths, strict=True)
        alone = torch.cat([document_losses(models[STOCK], part, [n]) for part, n in parts])
    found = {arm: Measured(seconds=[], losses=torch.empty(0)) for arm in models}
    for number in range(rounds + 1):
        for arm, model in models.items():
            start = time.perf_counter()
            losses = document_losses(model, tokens, lengths)
            losses.mean().backward()
            seconds = time.perf_counter() - start
            model.zero_grad()
            if number == 0:
                found[arm] = Measured(seconds=[], losses=losses.detach())
            else:
                found[arm].seconds.append(seconds)
    return found, alone


def ratio(found: dict[str, Measured]) -> float:
    """Return the time of ours as a share of SDPA's, the median over rounds."""
    pairs = zip(found[OURS].seconds, found[STOCK].seconds, strict=True)
    return statistics.median(ours / stock for ours, stock in pairs)
