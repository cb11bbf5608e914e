"""Attention sample by sample, so that its bits do not depend on the samples beside it.

Transformers' own causal attention is called on each sample's rows. Library products may round
otherwise for another alignment or stride, so rows whose strides depend on the rows beside them are
copied to memory of their own. Rows of filler get zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Named arguments of attention functions that change nothing of what is computed.
_HARMLESS = {
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache_position",
    "num_items_in_batch", "return_dict", "position_embeddings", "past_key_values",
}  # fmt: skip


class PackingError(Exception):
    """A model cannot be run on packed samples; the message says what of it is in the way."""


@contextmanager
def attend_by_sample(
    model: torch.nn.Module, name: str, runs_of: Callable[[], Sequence[tuple[int, bool]]]
) -> Iterator[list[int]]:
    """Let a model of Transformers compute its attention sample by sample.

    Args:
        model: The model; its choice of attention is as before afterwards.
        name: Name under which Transformers knows the function for that time.
        runs_of: Gives the lengths of the runs of rows, each with whether it is a sample.

    Yields:
        The number of calls so far, in a list of one.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = [0]

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        calls[0] += 1
        runs = runs_of()
        _check_call(module, query, key, attention_mask, arguments, sum(n for n, _ in runs))
        return _attend_runs(module, (query, key, value), runs, arguments), None

    configs = {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None)) is not None
        and hasattr(config, "_attn_implementation_internal")
    }
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield calls
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        del ALL_ATTENTION_FUNCTIONS[name]


def _check_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    arguments: dict[str, Any],
    num_rows: int,
) -> None:
    name = type(module).__name__
    if query.shape[0] != 1 or query.shape[2] != num_rows or key.shape[2] != num_rows:
        raise PackingError(f"attention of {name} is not between the tokens of one sequence")
    if mask is not None:
        raise PackingError(f"attention of {name} has a mask of its own")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise PackingError(f"attention of {name} is not causal")
    if arguments.get("dropout"):
        raise PackingError(
            f"attention of {name} has dropout {arguments['dropout']}: set it to 0 in the model's "
            "config before the model is made; LoraConfig(lora_dropout=...) is the job's own"
        )
    for key_word, setting in arguments.items():
        if key_word in _HARMLESS or key_word in ("dropout", "scaling", "is_causal"):
            continue
        if key_word != "sliding_window" and setting is not None and setting is not False:
            raise PackingError(f"attention of {name} has the argument {key_word}")


def _attend_runs(
    module: torch.nn.Module,
    operands: tuple[Tensor, Tensor, Tensor],
    runs: Sequence[tuple[int, bool]],
    arguments: dict[str, Any],
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    lengths = [length for length, _ in runs]
    query, _, value = operands
    parts = []
    for rows, (length, is_sample) in zip(
        zip(*(each.split(lengths, dim=2) for each in operands), strict=True), runs, strict=True
    ):
        if not is_sample:
            parts.append(query.new_zeros(1, length, query.shape[1], value.shape[3]))
            continue
        own = [each if _has_own_strides(each) else _OwnRows.apply(each) for each in rows]
        mask = _window_mask(length, arguments.get("sliding_window"), query.device)
        out, _ = sdpa_attention_forward(
            module, own[0], own[1], own[2], mask, scaling=arguments.get("scaling"), is_causal=True
        )
        parts.append(_OwnGradient.apply(out))
    return torch.cat(parts, dim=1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of a causal window over a sample; None where the window holds all of it."""
    if window is None or length <= window:
        return None
    rows = torch.arange(length, device=device)
    distance = rows[:, None] - rows[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def _has_own_strides(rows: Tensor) -> bool:
    """Tell that rows, (1, heads, n, head_dim), lie one after the other, each with all its heads."""
    heads, row, element = rows.stride()[1:]
    return element == 1 and (rows.shape[1] == 1 or heads < row)


class _OwnRows(torch.autograd.Function):
    """Rows copied to memory of their own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


class _OwnGradient(torch.autograd.Function):
    """A tensor as it is, with a gradient whose strides are its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.contiguous()
