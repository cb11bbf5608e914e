"""Layers of the cache, and the tensors without memory that a model gets for its keys and values.

A model calls `update` and hands what that returns to the attention function. These placeholders
have the shape that the model expects and name the layer; any other use of them is refused.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from penstock.compat.attention import leaves, make_shape_only
from penstock.compat.dynamo import run_uncompiled
from penstock.errors import PenstockError
from penstock.kv._attend import FEW_TOKENS
from penstock.kv._pool import BlockPool
from penstock.kv.transformers._inputs import AttentionInputs


class KeysPlaceholder(torch.Tensor):
    """Tensor of a shape, without memory, that stands for keys or values in a pool.

    Attributes:
        layer: The layer that it stands for.
        start: Token of its first row.
    """

    layer: PooledLayer
    start: int

    @staticmethod
    def __new__(
        cls: type[torch.Tensor],
        layer: PooledLayer,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        start: int,
    ) -> KeysPlaceholder:
        """Make one for `(B, H, tokens, dim)`, on the device of the layer's pool."""
        made: Any = make_shape_only(cls, shape, dtype, layer.pool.platform.device)
        made.layer, made.start = layer, start
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:
        return f"KeysPlaceholder({self.layer.name}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: the numbers are not in this tensor."""
        given = leaves((args, kwargs or {}))
        name = next(each.layer.name for each in given if isinstance(each, cls))
        raise PenstockError(
            f"the cached keys of {name} are computed with ({func}) outside of Transformers' "
            "attention interface, which penstock.kv.cache needs. Where the model does so, use "
            "another cache for it, and leave its attention implementation as the cache has set it; "
            "another model than that of the cache needs one of its own; and where generate cuts "
            "its result, as Whisper's does, pass return_dict_in_generate=False"
        )


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that autocast, which is on, computes attention of a tensor in."""
    if tensor.dtype == torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(tensor.device.type)


class PooledLayer(CacheLayerMixin):
    """Keys and values of one layer of a model, in a pool.

    Args:
        pool: The pool.
        index: Number of the layer in it.
        name: Name of the model's module, for errors.
        sliding_window: Tokens that the layer looks back, its own included; None: all.
        inputs: Inputs of the module, which the pool keeps as well; None: it does not.
        num_readers: Attentions of a call over these keys, those of layers that share them included.
    """

    is_croppable = True

    def __init__(
        self,
        pool: BlockPool,
        index: int,
        name: str,
        sliding_window: int | None = None,
        inputs: AttentionInputs | None = None,
        num_readers: int = 1,
    ) -> None:
        self.pool = pool
        self.index = index
        self.name = name
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.record_past = False
        self.siblings: list[int] = []  # layers that every call of the model adds to
        self.model: weakref.ref[Any] | None = None
        self._readers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # Keys and values of a long call, until its attention has used them as they are.
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._num_readers = self._readers_left = num_readers
        self._inputs = inputs
        self._pending_inputs: torch.Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        """True where the layer holds tokens."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Placeholder of all keys, as models read them for cross attention."""
        return self._placeholders(self.get_seq_length(), 0)[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Placeholder of all values."""
        return self._placeholders(self.get_seq_length(), 0)[1] if self.is_initialized else None

    @property
    def pending(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the last call that are not in the pool yet."""
        return self._pending

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool makes a layer with its first tokens."""

    @run_uncompiled(reason="penstock.kv keeps keys and values outside of graphs")
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens.

        Args:
            key_states: `(B, H, n, key_dim)`.
            value_states: `(B, H, n, value_dim)`.
            *args: Not used.
            **kwargs: Not used.

        Returns:
            Placeholders of the keys and values that the call's queries may see.

        Raises:
            PenstockError: The pool is closed or lost tokens, or gradients are wanted.
        """
        self.pool.check_usable()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self.refuse_gradients()
        self.flush()
        key_states, value_states = self._cast(key_states, value_states)
        num_tokens = key_states.shape[2]
        if self.siblings:
            self.check_whole(num_tokens)
        kv_length, start = self.get_mask_sizes(num_tokens)
        if self.is_sliding and not self.record_past:
            self.pool.drop_before(self.index, start)
        if self._inputs is not None:
            is_first = not self.pool.length(self.index)
            self._pending_inputs = self._inputs.take(key_states, value_states, is_first=is_first)
        self._pending = key_states, value_states
        self._readers_left = self._num_readers
        shown = self._placeholders(kv_length, start)
        if num_tokens <= FEW_TOKENS:
            self._flush(start)  # attention is to come, and its first query sees so far back
        return shown

    def _cast(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new keys and values in the dtype of those before, or of autocast."""
        held = self.pool.layout(self.index).dtype if self.pool.batch_size(self.index) else None
        if torch.is_autocast_enabled(keys.device.type):
            if self._inputs is not None:
                raise PenstockError(
                    f"{self.name}: with keep_inputs=True keys are computed again later, in which "
                    "autocast would be off; use keep_inputs=False, or leave torch.autocast"
                )
            dtype = held or autocast_dtype(keys)
            return keys.to(dtype), values.to(dtype)
        if held not in (None, keys.dtype):
            raise ValueError(
                f"{self.name} holds keys of {held}, and is given keys of {keys.dtype}; go on in "
                "the torch.autocast that it was begun in, or reset() it"
            )
        return keys, values

    def refuse_gradients(self) -> NoReturn:
        """Raise `PenstockError`: the cache has no backward pass."""
        raise PenstockError(
            f"{self.name}: no gradients pass through penstock.kv.cache; call the model under "
            "torch.inference_mode() or torch.no_grad()"
        )

    def check_reader(self, module: torch.nn.Module) -> None:
        """Raise `PenstockError` if an attention module is of another model than the cache."""
        model = None if self.model is None else self.model()
        if model is None or module in self._readers:
            return
        if not any(each is module for each in model.modules()):
            raise PenstockError(
                f"this penstock.kv.cache was made for a {type(model).__name__}, and a "
                f"{type(module).__name__} of another model uses its {self.name}; make a cache for "
                "that model, and reset() this one"
            )
        self._readers.add(module)

    def finish_attention(self) -> None:
        """Flush after the last attention of a call that reads these keys."""
        self._readers_left -= 1
        if self._readers_left <= 0:
            self.flush()

    def check_whole(self, num_tokens: int = 0) -> None:
        """Raise an error if the layers hold tokens of a call that did not reach them all.

        Args:
            num_tokens: Tokens of the call under way, which other layers may hold already.
        """
        length = self.get_seq_length()
        others = self.siblings if self.index == self.siblings[0] else self.siblings[:1]
        for other in others:
            if self.pool.length(other) not in (length, length + num_tokens):
                raise PenstockError(
                    "a call of the model ended before all layers of penstock.kv.cache had its "
                    f"tokens, by an error or an interrupt (layer {other} has "
                    f"{self.pool.length(other)}, {self.name} {length}); call reset() and run the "
                    "prompt again"
                )

    def flush(self) -> None:
        """Move keys and values of the last call to the pool, where they are not there yet."""
        window = self.sliding_window
        self._flush(0 if window is None else max(0, self.get_seq_length() - window + 1))

    def _flush(self, keep_from: int) -> None:
        """Flush, but for blocks of a layer with a window that end before the token `keep_from`."""
        pending, self._pending = self._pending, None
        inputs, self._pending_inputs = self._pending_inputs, None
        if pending is not None:
            keep_from = 0 if self.record_past else keep_from
            self.pool.append(self.index, *pending, keep_from=keep_from, inputs=inputs)

    @run_uncompiled(reason="penstock.kv keeps keys and values outside of graphs")
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next call's mask covers, and the token of the first."""
        past = self.get_seq_length()
        if self.sliding_window is None:
            return past + query_length, 0
        start = max(past - self.sliding_window + 1, 0)
        return past + query_length - start, start

    @run_uncompiled(reason="penstock.kv keeps keys and values outside of graphs")
    def get_seq_length(self) -> int:
        """Return the number of tokens of a sequence, those that left the window included."""
        pending = 0 if self._pending is None else self._pending[0].shape[2]
        return self.pool.length(self.index) + pending

    def get_max_length(self) -> int:
        """Return the window, or -1: there is no most."""
        return -1 if self.sliding_window is None else self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the window until the next `crop`."""
        self.record_past = self.is_sliding

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Args:
            tokens_to_remove: Their number, negative or 0.

        Raises:
            ValueError: It is positive.
            RuntimeError: The layer keeps a window only, and the tokens before have left it.
        """
        self.check_crop(tokens_to_remove)
        length = max(0, self.get_seq_length() + tokens_to_remove)
        self.pool.crop(length, [self.index])
        if self.sliding_window is not None:
            self.pool.drop_before(self.index, length - self.sliding_window + 1)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise the errors of `crop`, without forgetting anything."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the negative number of tokens to remove; got {tokens_to_remove}"
            )
        self.flush()
        length, window = self.get_seq_length(), self.sliding_window
        if window is None or not length:
            return
        left = max(0, length + tokens_to_remove)
        is_full = length >= window and not self.record_past
        first = max(0, left - window + 1)  # that the next token sees
        if is_full or not self.pool.blocks(self.index).keeps(first, left):
            raise RuntimeError(
                f"{self.name} keeps a window of {window} tokens only, of which a crop to {left} "
                f"tokens needs those from {first} on; call activate_past_recording() before the "
                "tokens come that are to be removed, or reset() and run the prompt again"
            )

    def reset(self) -> None:
        """Forget all tokens, and to keep those that leave the window."""
        self.record_past = False
        self._pending = self._pending_inputs = None
        self.pool.reset([self.index])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i a copy of sequence `beam_idx[i]`."""
        self.flush()
        self.pool.reorder(beam_idx, [self.index])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every sequence `repeats` sequences, one after the other."""
        self.flush()
        self.pool.repeat(repeats, [self.index])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, numbers or a bool mask."""
        self.flush()
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.pool.reorder(indices, [self.index])

    def offload(self) -> None:
        """Do nothing: the pool moves blocks by itself."""

    def prefetch(self) -> None:
        """Do nothing: the pool moves blocks by itself."""

    def _placeholders(self, num_tokens: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._pending is not None:
            shapes = [(each.shape, each.dtype) for each in self._pending]
        else:
            layout, batch_size = self.pool.layout(self.index), self.pool.batch_size(self.index)
            dims = layout.key_dim, layout.value_dim
            shapes = [((batch_size, layout.num_heads, 0, dim), layout.dtype) for dim in dims]
        keys, values = (((*shape[:2], num_tokens, shape[3]), dtype) for shape, dtype in shapes)
        shown = KeysPlaceholder(self, *keys, start)
        return shown, shown if values == keys else KeysPlaceholder(self, *values, start)
