"""Caches for `generate`, and the attention implementation that models have while one lives."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)

from penstock.errors import PenstockError
from penstock.kv._layout import KeyShape
from penstock.kv._owner import Savable
from penstock.kv._pool import BlockPool
from penstock.kv._prefix import save_pool
from penstock.kv._prefix_file import PrefixFile
from penstock.kv._report import PoolReport
from penstock.kv.transformers._inputs import AttentionInputs
from penstock.kv.transformers._layer import PooledLayer
from penstock.kv.transformers._model import (
    check_supported,
    find_attention,
    find_shape,
    install,
    restore,
)
from penstock.kv.transformers._prefix import (
    check_mask,
    check_model,
    check_prompt,
    check_state,
    check_tokens,
    describe_model,
    note_state,
)
from penstock.memory import FileStore

_OF_PREFIX = ("prefix_tokens", "prefix_attention_mask", "known_tokens")
_FULL = {"full_attention"}
_SLIDING = {"sliding_attention", "chunked_attention"}


class PooledCache(Savable, Cache):
    """Cache of a decoder's keys and values in a `BlockPool`; made by `penstock.kv.cache`.

    Usable in a `with` block, which closes it.

    Attributes:
        pool: The pool.
        prefix_tokens: Tokens of the prefix that the cache began with, int64 `(B, n)`; None where
            there is no prefix, or where it was saved without them.
        prefix_attention_mask: Its attention mask, int64 `(B, n)` or None.
        known_tokens: First tokens that it holds, where they are known from a prefix or `generate`.
    """

    def __init__(self, layers: list[Any], pool: BlockPool, model: PreTrainedModel) -> None:
        super().__init__(layers=layers)
        self.pool = pool
        self.prefix_tokens: torch.Tensor | None = None
        self.prefix_attention_mask: torch.Tensor | None = None
        self.known_tokens: torch.Tensor | None = None
        self._model = weakref.ref(model)
        self._release: weakref.finalize | None = None
        pooled = [layer for layer in layers if isinstance(layer, PooledLayer)]
        for layer in pooled:
            layer.siblings = [each.index for each in pooled]
            layer.model = self._model

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i a copy of sequence `beam_idx[i]`, in all layers."""
        self.pool.reorder(beam_idx, self._flush())
        self._select_prefix(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every sequence `repeats` sequences, one after the other."""
        self.pool.repeat(repeats, self._flush())
        for name in _OF_PREFIX:
            if (kept := getattr(self, name)) is not None:
                setattr(self, name, kept.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, numbers or a bool mask."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.pool.reorder(indices, self._flush())
        self._select_prefix(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, a negative number or 0."""
        for layer in self.layers:
            if isinstance(layer, PooledLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        for name in _OF_PREFIX:
            if (kept := getattr(self, name)) is not None:
                setattr(self, name, kept[:, : self.get_seq_length()])

    def reset(self) -> None:
        """Forget all tokens, those of a prefix included."""
        super().reset()
        self.prefix_tokens = self.prefix_attention_mask = self.known_tokens = None

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> None:
        """Save what the cache holds, to be the prefix of other caches, also in other processes.

        The file appears when it is complete; a full disk, an error or SIGKILL leaves none.

        Example:
            >>> model(input_ids=tokens, past_key_values=cache)  # doctest: +SKIP
            >>> cache.save("prefix.kv", tokens=tokens)  # doctest: +SKIP
            >>> cache = penstock.kv.cache(model, device_memory="2GiB", prefix="prefix.kv")
            ... # doctest: +SKIP

        Args:
            path: Its name; a file that has it is replaced.
            tokens: Tokens of the cache, whole numbers `(B, n)` from the first on; further ones
                are left out. Prompts are compared with them, which would else be wrong in silence.
            attention_mask: Their mask `(B, n)`, where there is padding.

        Raises:
            ValueError: The cache holds nothing, or the tokens or the mask are not of it.
            StoreUnavailableError: The directory is missing, or cannot be written.
            StoreFullError, StoreWriteError: The file could not be written.
            PenstockError: The cache cannot be used, or tokens could not be read.
        """
        self._save(os.fspath(path), tokens, attention_mask, self.get_seq_length())

    def _save(
        self,
        path: str,
        tokens: torch.Tensor | None,
        mask: torch.Tensor | None,
        mask_tokens: int,
    ) -> None:
        """Save, with a mask of `mask_tokens` tokens."""
        self.pool.check_usable()
        layers = self._flush()
        num_tokens = self.get_seq_length()
        if not num_tokens:
            raise ValueError("the cache holds no tokens to save; run the model with it before")
        self._check_whole()
        model = self._model()
        if model is None:
            raise PenstockError("the model of this cache is gone; save while it is there")
        check_state(self.pool, model)
        batch_size = self.pool.batch_size(layers[0])
        if tokens is not None:
            tokens = check_tokens("tokens", tokens, batch_size, num_tokens)
        if mask is not None:
            mask = check_tokens("attention_mask", mask, batch_size, mask_tokens)
        save_pool(
            self.pool,
            path,
            header={"model": describe_model(model)},
            tensors={"prefix_tokens": tokens, "prefix_attention_mask": mask},
        )

    def check_prompt(
        self, tokens: torch.Tensor | None, attention_mask: torch.Tensor | None = None
    ) -> None:
        """Raise an error if a prompt does not go on from what the cache holds; `generate` asks.

        Args:
            tokens: The prompt from its first token on, `(B, m)`.
            attention_mask: Its mask; a longer one says that `tokens` are only the new ones.

        Raises:
            ValueError: It has no token beyond the cache's, differs from `known_tokens`, or the
                mask differs from `prefix_attention_mask`.
        """
        check_prompt(self.known_tokens, self.get_seq_length(), tokens, attention_mask)
        if self.prefix_attention_mask is not None:
            check_mask(self.prefix_attention_mask, attention_mask)

    def report(self) -> PoolReport:
        """Return bytes per tier and counts so far."""
        return self.pool.report()

    def close(self) -> None:
        """Give back memory and file, and the model its attention. Further calls do nothing."""
        self.pool.close()
        if self._release is not None:
            self._release()

    def __enter__(self) -> PooledCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _select_prefix(self, index: torch.Tensor) -> None:
        for name in _OF_PREFIX:
            if (kept := getattr(self, name)) is not None:
                setattr(self, name, kept[index.to(kept.device)])

    def _check_whole(self) -> None:
        for layer in self.layers:
            if isinstance(layer, PooledLayer):
                layer.check_whole()
                return

    def _flush(self) -> list[int]:
        """Move what is pending to the pool; return the numbers of the layers there."""
        layers = [layer for layer in self.layers if isinstance(layer, PooledLayer)]
        for layer in layers:
            layer.flush()
        return [layer.index for layer in layers]


class PooledEncoderDecoderCache(Savable, EncoderDecoderCache):
    """Caches of a decoder's own keys and of those of the encoder's output, in one pool.

    Attributes:
        pool: The pool.
    """

    def __init__(self, own: PooledCache, cross: PooledCache) -> None:
        super().__init__(own, cross)
        self.pool = own.pool
        self._own = own
        self._cross = cross
        self._encoder_inputs: tuple[str, list[Any] | None] = "", None

    @property
    def prefix_tokens(self) -> torch.Tensor | None:
        """Tokens of the decoder that the cache began with, as of `PooledCache`."""
        return self._own.prefix_tokens

    @property
    def prefix_attention_mask(self) -> torch.Tensor | None:
        """The encoder's mask that they were computed with."""
        return self._cross.prefix_attention_mask

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokens: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> None:
        """Save as `PooledCache.save` does; the tokens are the decoder's, the mask the encoder's."""
        self._cross._flush()
        self._own._save(os.fspath(path), tokens, attention_mask, self._cross.get_seq_length())

    def check_prompt(
        self,
        tokens: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
    ) -> None:
        """Raise an error as `PooledCache.check_prompt` does, for tokens of the decoder.

        Args:
            tokens: The decoder's tokens from the first on, `(B, m)`.
            attention_mask: The encoder's mask.
            decoder_attention_mask: The mask of `tokens`, without which `generate` of Transformers
                takes them for new ones; a longer one says that they are.
        """
        known, length = self._own.prefix_tokens, self._own.get_seq_length()
        if tokens is None or decoder_attention_mask is not None:
            check_prompt(known, length, tokens, decoder_attention_mask)
        elif known is not None:
            raise ValueError(
                "generate takes decoder_input_ids without a mask for new tokens; "
                "pass decoder_attention_mask=torch.ones_like(decoder_input_ids)"
            )
        if self._cross.prefix_attention_mask is not None:
            check_mask(self._cross.prefix_attention_mask, attention_mask)

    def check_encoder_inputs(self, name: str, described: list[Any] | None) -> None:
        """Raise an error if a call's encoder reads other than that of the call before.

        Args:
            name: Argument that it reads.
            described: Dtype, shape and checksum of it; None: not known.

        Raises:
            ValueError: The keys that the cache holds are of another input of that name.
        """
        before, self._encoder_inputs = self._encoder_inputs, (name, described)
        is_same = before[0] != name or None in (before[1], described) or before[1] == described
        if self._cross.get_seq_length() and not is_same:
            self._encoder_inputs = before
            raise ValueError(
                f"the cache holds the encoder's keys of other {name} than this call's; pass the "
                "same again, or reset() the cache"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the decoder."""
        self.self_attention_cache.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every sequence `repeats` sequences, one after the other."""
        self.self_attention_cache.batch_repeat_interleave(repeats)
        self.cross_attention_cache.batch_repeat_interleave(repeats)
        self._encoder_inputs = "", None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, numbers or a bool mask."""
        self.self_attention_cache.batch_select_indices(indices)
        self.cross_attention_cache.batch_select_indices(indices)
        self._encoder_inputs = "", None

    def report(self) -> PoolReport:
        """Return bytes per tier and counts so far."""
        return self.pool.report()

    def close(self) -> None:
        """Give back memory and file, and the model its attention. Further calls do nothing."""
        self._own.close()

    def __enter__(self) -> PooledEncoderDecoderCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cache(
    model: PreTrainedModel,
    *,
    device_memory: int | str,
    host_memory: int | str | None = None,
    store: FileStore | str | None = None,
    selector: object = "all",
    block_tokens: int = 64,
    prefix: str | os.PathLike[str] | None = None,
    keep_inputs: bool = False,
) -> PooledCache | PooledEncoderDecoderCache:
    """Make a cache for `model.generate(..., past_key_values=cache)` that is larger than memory.

    While the cache lives, the model's attention implementation is Penstock's. Close the cache, or
    let it die, to have the old one back.

    Example:
        >>> cache = penstock.kv.cache(model, device_memory="2GiB", store="/mnt/nvme")
        ... # doctest: +SKIP
        >>> model.generate(**inputs, past_key_values=cache, prefill_chunk_size=4096)
        ... # doctest: +SKIP

    Args:
        model: A model of Transformers on the CPU or one GPU, not compiled.
        device_memory: Budget of resident blocks and staging, as an int or text such as `"2GiB"`.
            The unfinished block of each sequence and layer is beyond it.
        host_memory: The most bytes of host memory below; None: as much as is needed, or none where
            there is a store.
        store: Directory, or `FileStore`, of the file below; None: no file.
        selector: Blocks that steps of few tokens read in layers without a window: `"all"` (exact),
            `"window"`, `"nosa"` or `"accumulated"` (a sixteenth of the blocks), or a selector, or a
            function `(query, layer, pool) -> blocks`.
        block_tokens: Tokens of a block.
        prefix: File that `save` of a cache of this model wrote; the cache begins with its tokens,
            which stay in the file and are read from there when they are needed.
        keep_inputs: Whether the inputs of layers without a window are stored as well, so that
            missing blocks are computed from them where that is faster than to read them from the
            file. Keys that are computed again may differ in the last bits.

    Returns:
        A cache of Transformers; for an encoder-decoder model, one of both attentions.

    Raises:
        TypeError: `model` is not a model of Transformers.
        PrefixFileError: The prefix file is none, damaged, of another model or of other blocks.
        PenstockError: The model computes attention itself, or has layers that are not supported.
        ValueError: An argument is wrong.
        StoreUnavailableError: The directory cannot be used.
    """
    check_supported(model)
    config = model.config.get_text_config(decoder=True)
    kinds, settings = get_layer_types_and_kwargs(config)
    num_layers = getattr(config, "num_decoder_layers", None)
    if num_layers is not None:  # T5 counts its encoder's in num_hidden_layers
        kinds, settings = ["full_attention"] * num_layers, [{}] * num_layers
    if getattr(config, "cross_attention_layers", None):  # among the others, as Mllama has them
        kinds = [*kinds, "cross_attention"]
    unknown = sorted(set(kinds) - _FULL - _SLIDING - {"dummy"})
    if unknown:
        raise PenstockError(
            f"{type(model).__name__} has layers of the types {unknown}, which penstock.kv.cache "
            "does not support; use another cache"
        )
    is_pair = bool(model.config.is_encoder_decoder)
    modules = find_attention(model)
    inputs: dict[int, AttentionInputs] = {}
    if keep_inputs:
        _check_inputs_can_be_kept(model, prefix)
        full = {i for i, kind in enumerate(kinds) if kind in _FULL}
        inputs = {i: AttentionInputs(*modules[i]) for i in modules.keys() & full}
    recompute = (lambda layer, given: inputs[layer].compute(given)) if keep_inputs else None
    with _open_prefix(model, prefix) as file:
        pool = BlockPool(
            device_memory=device_memory,
            host_memory=host_memory,
            store=store,
            block_tokens=block_tokens,
            device=model.device,
            num_layers=(1 + is_pair) * sum(kind != "dummy" for kind in kinds),
            shapes=_find_shapes(modules, kinds),
            selector=selector,
            selected_layers=[i for i, kind in enumerate(kinds) if kind in _FULL],
            recompute=recompute,
            prefix=file,
        )
    names = [modules[i][1] if i in modules else f"layer {i}" for i in range(len(kinds))]
    layers = [
        DummyLayer()
        if kind == "dummy"
        else PooledLayer(
            pool, i, names[i], some.get("sliding_window"), inputs.get(i), _count_readers(config, i)
        )
        for i, (kind, some) in enumerate(zip(kinds, settings, strict=True))
    ]
    own = PooledCache(layers, pool, model)
    hooks = [hook for each in inputs.values() for hook in each.hooks]
    own._release = weakref.finalize(own, restore, own._model, hooks)
    install(model)
    note_state(own)
    tensors = {} if file is None else file.tensors
    own.prefix_tokens = own.known_tokens = tensors.get("prefix_tokens")
    if not is_pair:
        own.prefix_attention_mask = tensors.get("prefix_attention_mask")
        return own
    cross = [
        PooledLayer(pool, len(kinds) + i, f"{name} (cross attention)")
        for i, name in enumerate(names)
    ]
    pair = PooledEncoderDecoderCache(own, PooledCache(cross, pool, model))
    pair._cross.prefix_attention_mask = tensors.get("prefix_attention_mask")
    return pair


def _find_shapes(
    modules: Mapping[int, tuple[torch.nn.Module, str]], kinds: Sequence[str]
) -> dict[int, KeyShape]:
    """Return the shapes of layers that keep keys, where their modules say them."""
    found = {i: find_shape(module) for i, (module, _) in modules.items()}
    kept = {i for i, kind in enumerate(kinds) if kind != "dummy"}
    return {i: shape for i, shape in found.items() if shape is not None and i in kept}


def _count_readers(config: Any, layer: int) -> int:
    """Return how many layers read the keys of one: further ones of its type, where they share."""
    modes = getattr(config, "kv_sharing_modes", None) or [None] * (layer + 1)
    if modes[layer] != "store":
        return 1
    kinds = config.layer_types
    return 1 + sum(
        mode == "reuse" and kind == kinds[layer] for mode, kind in zip(modes, kinds, strict=True)
    )


def _check_inputs_can_be_kept(
    model: PreTrainedModel, prefix: str | os.PathLike[str] | None
) -> None:
    if prefix is not None:
        raise PenstockError(
            f"keep_inputs=True: the prefix {os.fspath(prefix)!r} holds no inputs; leave one out"
        )
    if model.device.type != "cpu":
        raise PenstockError(f"keep_inputs=True is for models on the CPU, not on {model.device}")
    if model.config.is_encoder_decoder:
        raise PenstockError(
            f"keep_inputs=True: {type(model).__name__} is an encoder-decoder model, of which no "
            "inputs are kept; leave it out"
        )


@contextlib.contextmanager
def _open_prefix(
    model: PreTrainedModel, path: str | os.PathLike[str] | None
) -> Iterator[PrefixFile | None]:
    """Open a prefix of this model; it is closed where the block raises."""
    if path is None:
        yield None
        return
    file = PrefixFile(os.fspath(path))
    try:
        check_model(model, file)
        yield file
    except BaseException:
        file.close()
        raise
