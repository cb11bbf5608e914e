"""Masks of Transformers as ranges of keys, read from its mask functions without evaluating them.

Transformers composes a mask of nested functions of indices. Those that leave each query a range of
keys are known here by name, with the values that they enclose; any other is refused, so that no
mask is taken for another one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._lazy import cached_property
from penstock.attention import Layout
from penstock.compat.dynamo import run_uncompiled
from penstock.compat.fake_tensors import FakeTensor
from penstock.errors import PenstockError

MaskFunction = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """The keys that a query sees, by its own index.

    Attributes:
        is_causal: Whether it sees no key after it.
        before: The most keys before it that it sees; None for all.
        after: The most keys after it that it sees; None for all.
        documents: `(B, tokens)`, ascending: it sees those of its own document; None for all.
    """

    is_causal: bool = False
    before: int | None = None
    after: int | None = None
    documents: Tensor | None = None

    def __and__(self, other: MaskRule) -> MaskRule:
        return MaskRule(
            is_causal=self.is_causal or other.is_causal,
            before=_least(self.before, other.before),
            after=_least(self.after, other.after),
            documents=self.documents if other.documents is None else other.documents,
        )


def _least(left: int | None, right: int | None) -> int | None:
    given = [each for each in (left, right) if each is not None]
    return min(given) if given else None


# By qualified name of a mask function, the rule from the values that it encloses.
_RULES: dict[str, Callable[[dict[str, Any]], MaskRule]] = {
    "causal_mask_function": lambda _: MaskRule(is_causal=True),
    "bidirectional_mask_function": lambda _: MaskRule(),
    "and_masks.<locals>.and_mask": lambda values: _read_all(values["mask_functions"]),
    "sliding_window_overlay.<locals>.inner_mask": lambda values: MaskRule(
        before=values["sliding_window"] - 1
    ),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda values: MaskRule(
        before=values["sliding_window"], after=values["sliding_window"]
    ),
    "packed_sequence_mask_function.<locals>.inner_mask": lambda values: MaskRule(
        documents=values["packed_sequence_mask"]
    ),
    # Positions ascend by one within a document, so differences of them are those of indices.
    "remap_positions_for_packed_sequence.<locals>.inner_mask": lambda values: read_rule(
        values["mask_function"]
    ),
}


def read_rule(mask_function: MaskFunction) -> MaskRule:
    """Return the rule of a mask function of Transformers.

    Raises:
        PenstockError: It is not one of those that leave each query a range of keys.
    """
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    is_theirs = getattr(mask_function, "__module__", "") == "transformers.masking_utils"
    if not is_theirs or name not in _RULES:
        raise PenstockError(
            f"attn_implementation='penstock' does not offer the mask function {name!r}: it has "
            "causal, bidirectional, sliding-window and packed masks and padding; use "
            "attn_implementation='sdpa' for this model"
        )
    return _RULES[name](dict(inspect.getclosurevars(mask_function).nonlocals))


def _read_all(mask_functions: Sequence[MaskFunction]) -> MaskRule:
    return functools.reduce(MaskRule.__and__, map(read_rule, mask_functions))


class KeyRanges:
    """Keys that the queries of a call see; for Penstock's attention function only.

    Attributes:
        first_key: int64 `(R, queries)`, R = 1 for the same in all sequences of the batch, or B.
        end_key: int64 `(R, queries)`.
        num_keys: Keys of a sequence.
        shown: bool `(B, keys)`: False for keys of padding that no range leaves out; None for none.
    """

    ndim = 4  # as `generate` takes a mask that is made before the call, with a static cache

    def __init__(
        self, first_key: Tensor, end_key: Tensor, num_keys: int, shown: Tensor | None
    ) -> None:
        _refuse_fake(first_key)
        self.first_key, self.end_key = first_key, end_key
        self.num_keys = num_keys
        self.shown = shown
        self._within: tuple[Tensor, KeyRanges] | None = None

    @cached_property
    def layout(self) -> Layout:
        """The blocks; with R > 1 those of all sequences one after the other."""
        num_rows, num_queries = self.first_key.shape
        device = self.first_key.device
        query = torch.arange(num_queries, device=device)
        if num_rows == 1 and not self.first_key.any() and num_queries == self.num_keys:
            if torch.equal(self.end_key[0], query + 1):
                return Layout.causal(num_queries).to(device)
            if bool((self.end_key == self.num_keys).all()):
                num_blocks = -(-num_queries // 64)
                return Layout.from_blocks(
                    torch.ones(num_blocks, num_blocks, dtype=torch.bool, device="cpu")
                ).to(device)
        start = self.num_keys * torch.arange(num_rows, device=device)[:, None]
        first_key, end_key = ((start + each).flatten() for each in (self.first_key, self.end_key))
        return Layout.from_ranges(first_key, end_key, num_keys=num_rows * self.num_keys)

    def token_mask(self) -> Tensor:
        """Return which keys queries see, bool `(R or B, 1, queries, keys)`: for few queries."""
        key = torch.arange(self.num_keys, device=self.first_key.device)
        seen = (self.first_key[..., None] <= key) & (key < self.end_key[..., None])
        return (seen if self.shown is None else seen & self.shown[:, None])[:, None]

    def contiguous(self) -> KeyRanges:
        """Return the mask itself, as `generate` asks for with a static cache."""
        return self

    def within_documents(self, offsets: Tensor) -> KeyRanges:
        """Return the ranges within documents, whose first tokens, and the end, are `offsets`."""
        if self._within is None or self._within[0] is not offsets:
            starts, ends = offsets[:-1].long(), offsets[1:].long()
            lengths = ends - starts
            first = torch.maximum(self.first_key, starts.repeat_interleave(lengths))
            end = torch.minimum(self.end_key, ends.repeat_interleave(lengths))
            self._within = offsets, KeyRanges(first, end, self.num_keys, self.shown)
        return self._within[1]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model asks its attention mask for {name!r}, which that of "
            "attn_implementation='penstock' does not offer; use attn_implementation='sdpa'"
        )


@run_uncompiled(reason="the blocks of a layout depend on the numbers of a mask")
def make_key_ranges(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | KeyRanges | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> KeyRanges:
    """Return the mask of a call, as Transformers' mask interface asks for it.

    Raises:
        PenstockError: The mask leaves a query no range of keys, or is not one of Transformers' own;
            or a step is being captured.
    """
    if isinstance(attention_mask, KeyRanges):  # made before the call, with a static cache
        return attention_mask
    rule = MaskRule(is_causal=True) if mask_function is None else read_rule(mask_function)
    query = torch.arange(q_length, device=device)[None]
    _refuse_fake(query)
    query = int(q_offset) - int(kv_offset) + query
    first = torch.zeros_like(query) if rule.before is None else query - rule.before
    end = torch.full_like(query, kv_length) if rule.after is None else query + rule.after + 1
    end = torch.minimum(end, query + 1) if rule.is_causal else end
    if rule.documents is not None:
        starts, ends = _document_bounds(rule.documents)
        first, end = torch.maximum(first, starts), torch.minimum(end, ends)
    shown = None
    if attention_mask is not None and not bool(attention_mask.all()):
        shown = attention_mask[:, int(kv_offset) : int(kv_offset) + kv_length].bool()
        shown = torch.nn.functional.pad(shown, (0, kv_length - shown.shape[1]))
        least = shown.int().argmax(1, keepdim=True)
        most = kv_length - shown.flip(1).int().argmax(1, keepdim=True)
        most = most * shown.any(1, keepdim=True)
        first, end = torch.maximum(first, least), torch.minimum(end, most)
        shown = None if torch.equal(shown.sum(1, keepdim=True), most - least) else shown
    return KeyRanges(first.clamp(min=0), end.clamp(max=kv_length), kv_length, shown)


def _refuse_fake(bounds: Tensor) -> None:
    if isinstance(bounds, FakeTensor):
        raise PenstockError(
            "attn_implementation='penstock' makes a layout of the numbers of a mask, which a "
            "captured step (penstock.capture, penstock.fit, plan_training) does not have; use "
            "attn_implementation='sdpa', or train without a plan (penstock.offload)"
        )


def _document_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token and the end of each token's document, `(B, tokens)` each."""
    token = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents.diff(dim=1) != 0
    starts = torch.where(is_first, token, 0).cummax(1).values
    is_last = is_first.roll(-1, 1)  # the last token of all precedes the first one
    ends = torch.where(is_last, token + 1, documents.shape[1]).flip(1).cummin(1).values.flip(1)
    return starts, ends
