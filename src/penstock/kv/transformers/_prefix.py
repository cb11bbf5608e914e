"""Prefixes of models: which model made the keys, and which prompts go on from them.

Keys of another model, or of another text, have the right shapes and give wrong answers. So a saved
prefix holds the model's configuration and a checksum of every parameter and buffer, and may hold
its tokens, with which prompts are then compared. A call of `generate` that was interrupted leaves
tokens in its cache that the caller never got, so that the cache is not used any more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from penstock.errors import PenstockError
from penstock.kv._pool import BlockPool
from penstock.kv._prefix_file import PrefixFile
from penstock.memory import WorkerThreads

# Entries of configurations that change no key and no value.
_WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}

_ENCODER_INPUTS = (
    "inputs",
    "input_ids",
    "input_features",
    "input_values",
    "pixel_values",
    "inputs_embeds",
)

_states: weakref.WeakKeyDictionary[BlockPool, tuple[object, ...]] = weakref.WeakKeyDictionary()


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Return all that keys and values depend on beside the tokens, as JSON has it.

    Returns:
        The model's class, the version of Transformers, the configuration's entries by path, PEFT's
        adapters that are active, and per parameter and buffer dtype, shape and CRC-32 of its bytes.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with WorkerThreads(os.cpu_count() or 1, thread_name_prefix="penstock-kv") as threads:
        described = list(threads.map(_describe_tensor, tensors.values()))
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    return {
        "class": type(model).__name__,
        "transformers": transformers.__version__,
        "config": dict(_flatten(config, "")),
        "adapters": _describe_adapters(model),
        "tensors": dict(zip(tensors, described, strict=True)),
    }


def _describe_adapters(model: torch.nn.Module) -> dict[str, Any]:
    """Return the active adapters of PEFT's layers, by name, with their scales."""
    found = {}
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list) and not getattr(module, "disable_adapters", False):
            scales = getattr(module, "scaling", {})
            found[name] = [[each, str(scales.get(each))] for each in active]
    return found


def describe_state(module: torch.nn.Module) -> tuple[object, ...]:
    """Return what changes with a module's weights and adapters, as far as it takes no reading.

    Buffers are left out: frequencies of positions are made anew as a context grows.
    """
    tensors = list(module.parameters())
    versions = [0 if each.is_inference() else each._version for each in tensors]
    plain = torch.Tensor, torch.nn.Parameter  # others may have no memory of their own
    places = [each.data_ptr() if type(each) in plain else id(each) for each in tensors]
    merged = [getattr(each, "merged_adapters", None) for each in module.modules()]
    return places, versions, _describe_adapters(module), [list(each) for each in merged if each]


def note_state(cache: Any) -> None:
    """Note the state of the model that computes the first tokens of a cache."""
    model = getattr(cache, "_own", cache)._model()
    if model is not None:
        _states[cache.pool] = describe_state(model)


def check_state(pool: BlockPool, model: PreTrainedModel) -> None:
    """Raise `PenstockError` if the model is not in the state that was noted."""
    if pool in _states and describe_state(model) != _states[pool]:
        raise PenstockError(
            f"the weights or active adapters of this {type(model).__name__} are others than when "
            "the cache got its first tokens, and a prefix file says those of the present; give the "
            "model that state back, or reset() the cache and run the prompt again"
        )


def _describe_tensor(tensor: torch.Tensor) -> list[Any]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, [*tensor.shape], zlib.crc32(content.data)]


def _flatten(entries: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if name in _WITHOUT_EFFECT:
            continue
        if isinstance(value, dict):
            yield from _flatten(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def check_model(model: PreTrainedModel, prefix: PrefixFile) -> None:
    """Raise `PrefixFileError` if another model made a prefix, naming the first difference."""
    saved = prefix.header.get("model")
    if saved is None:
        raise prefix.refuse(
            "was saved by a BlockPool without a model; pass one that the save() of a cache wrote"
        )
    own = describe_model(model)
    problem = _difference(own, saved)
    if problem is None:
        return
    versions = {saved["transformers"], own["transformers"]}
    if len(versions) > 1:
        problem += f", under Transformers {saved['transformers']} and not {own['transformers']}"
    raise prefix.refuse(
        f"is of another model: {problem}; load the model that made it, or make the prefix again"
    )


def _is_made_anew(name: str, tensors: dict[str, Any]) -> bool:
    """Return whether frequencies of positions are made of others as a context grows."""
    module, _, kind = name.rpartition("inv_freq")
    is_original = module.endswith("original_")
    return not (kind or is_original) and f"{module}original_inv_freq" in tensors


def _difference(own: dict[str, Any], saved: dict[str, Any]) -> str | None:
    if own["class"] != saved["class"]:
        return f"it was made by a {saved['class']}, and this is a {own['class']}"
    for name in {**saved["config"], **own["config"]}:
        theirs, ours = (each["config"].get(name, "nothing") for each in (saved, own))
        if theirs != ours:
            return f"its configuration had {name}={theirs!r}, and here it is {ours!r}"
    theirs, ours = (each.get("adapters", {}) for each in (saved, own))
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            return (
                f"the adapters of {name} were {theirs.get(name, 'off')}, and here they are "
                f"{ours.get(name, 'off')}"
            )
    for name in {**saved["tensors"], **own["tensors"]}:
        if _is_made_anew(name, own["tensors"]):
            continue
        theirs, ours = (each["tensors"].get(name, ["no tensor", [], 0]) for each in (saved, own))
        if theirs[:2] != ours[:2]:
            return (
                f"{name} was {theirs[0]} {tuple(theirs[1])}, and here it is {ours[0]} "
                f"{tuple(ours[1])}"
            )
        if theirs != ours:
            return f"the numbers of {name} are others"
    return None


def check_tokens(name: str, tensor: torch.Tensor, batch_size: int, num_tokens: int) -> torch.Tensor:
    """Return the first `num_tokens` columns of the user's tokens or mask, int64 `(B, n)`.

    Raises:
        ValueError: It is not of the cache's sequences, or shorter.
    """
    is_whole = tensor.dim() == 2 and not tensor.is_floating_point()
    if not is_whole or tensor.shape[0] != batch_size or tensor.shape[1] < num_tokens:
        raise ValueError(
            f"{name} must be whole numbers ({batch_size}, at least {num_tokens}), of all tokens "
            f"that the cache holds; got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor[:, :num_tokens].to("cpu", torch.int64).contiguous()


def check_prompt(
    prefix_tokens: torch.Tensor | None,
    num_tokens: int,
    tokens: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    """Raise an error if a prompt is not one that goes on from what a cache holds.

    Args:
        prefix_tokens: First tokens of the cache that are known, `(B, n)`; None: none are.
        num_tokens: Tokens of the cache.
        tokens: The prompt, `(B, m)`, or of fewer sequences of which each is repeated.
        mask: Its mask. A longer one says that `tokens` are only those that the cache lacks.

    Raises:
        ValueError: It differs from the prefix, or has no token beyond the cache's.
    """
    if not num_tokens:
        return
    if tokens is None:
        raise ValueError(
            f"the cache holds {num_tokens} tokens, and the call names none to go on from; pass "
            "them followed by at least one more token (of an encoder-decoder model as "
            "decoder_input_ids=), or reset() the cache"
        )
    if mask is not None and mask.shape[1] != tokens.shape[1]:
        return
    if tokens.shape[1] <= num_tokens:
        raise ValueError(
            f"the prompt has {tokens.shape[1]} tokens and the cache holds {num_tokens}; pass "
            "those (of a prefix: cache.prefix_tokens) and at least one more token, or reset() it"
        )
    if prefix_tokens is None:
        return
    at = _first_difference(tokens, prefix_tokens[:, :num_tokens])
    if at is not None:
        raise ValueError(
            f"the prompt differs from what the cache holds at token {at}; begin it with the tokens "
            "of the calls before (of a prefix: cache.prefix_tokens), or reset() the cache"
        )


def check_mask(prefix_mask: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raise `ValueError` if an attention mask does not begin as that of the prefix, `(B, n)`."""
    if mask is None and bool(prefix_mask.all()):
        return
    at = 0 if mask is None else _first_difference(mask, prefix_mask)
    if at is not None:
        given = "none is given" if mask is None else f"attention_mask differs from it at token {at}"
        raise ValueError(
            f"the cache's prefix has an attention mask, and {given}; pass attention_mask= that "
            "begins with cache.prefix_attention_mask"
        )


def _first_difference(some: torch.Tensor, prefix: torch.Tensor) -> int | None:
    """Return the first column of `(B or fewer, m)` that is not that of `prefix`, `(B, n)`."""
    if some.shape[1] < prefix.shape[1] or len(prefix) % len(some):
        return some.shape[1]
    prefix = prefix.to(some.device)
    beginning = some[:, : prefix.shape[1]].repeat_interleave(len(prefix) // len(some), 0)
    is_other = (beginning != prefix).any(0)
    return int(is_other.nonzero()[0]) if bool(is_other.any()) else None


def watch_calls(model: PreTrainedModel) -> None:
    """Have the model's `generate` compare prompts with what its cache holds.

    Only the object is changed, not its class; `unwatch_calls` takes it back.
    """
    inner: Any = getattr(type(model), "generate", None)
    if "generate" in model.__dict__ or inner is None:
        return

    @functools.wraps(inner)
    def generate(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        cache: Any = options.get("past_key_values")
        if not hasattr(cache, "check_prompt"):
            return inner(self, *args, **options)
        named = _name_arguments(inner, self, args, options)
        _check_call(self, cache, named)
        length = cache.get_seq_length()
        try:
            with _refuse_further_inputs(self, cache):
                result = inner(self, *args, **options)
        except BaseException as error:
            if cache.get_seq_length() != length:
                cache.pool.fail(error)
            raise
        _check_arrival(self, cache, result, options)
        _note_tokens(self, cache, named, result)
        return result

    generate.__dict__["is_watching"] = True
    model.__dict__["generate"] = types.MethodType(generate, model)


@contextlib.contextmanager
def _refuse_further_inputs(model: PreTrainedModel, cache: Any) -> Iterator[None]:
    """Refuse to encode once more, within one call, after tokens came to the cache.

    Whisper does so of sound that is longer than its window, and for each of several temperatures.
    """
    if not model.config.is_encoder_decoder:
        yield
        return
    length = cache.get_seq_length()

    def check(*_: object) -> None:
        if cache.get_seq_length() != length:
            raise PenstockError(
                f"generate of {type(model).__name__} encodes a further input, and past_key_values "
                "holds the keys of the one before; call it for each part of the input and with one "
                "temperature=, with reset() of the cache in between, or without past_key_values"
            )

    handle = model.get_encoder().register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _name_arguments(
    inner: Any, model: PreTrainedModel, args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call of `generate` by name, those that are given by place, too."""
    signature = inspect.signature(inner)
    try:
        named = dict(signature.bind_partial(model, *args, **options).arguments)
    except TypeError:  # which the call raises itself
        return options
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _check_call(model: PreTrainedModel, cache: Any, named: dict[str, Any]) -> None:
    given: Any = named.get("generation_config") or model.generation_config
    if named.get("use_cache", getattr(given, "use_cache", None)) is False:
        raise ValueError(
            "use_cache=False: every step would add all tokens to past_key_values again; leave one "
            "of them out"
        )
    refuse_weights(named.get("output_attentions", getattr(given, "output_attentions", None)))
    _check_assistance(cache, given, named)
    mask = named.get("attention_mask")
    if model.config.is_encoder_decoder:
        _refuse_chunks(
            model, named.get("prefill_chunk_size", getattr(given, "prefill_chunk_size", None))
        )
        own_mask = named.get("decoder_attention_mask")
        cache.check_prompt(named.get("decoder_input_ids"), mask, own_mask)
        cache.check_encoder_inputs(*_describe_encoder_inputs(named))
    elif named.get("inputs_embeds") is not None:
        check_prompt(None, cache.get_seq_length(), named["inputs_embeds"], None)
    else:
        cache.check_prompt(_find_prompt(named), mask)


def _find_prompt(named: dict[str, Any]) -> torch.Tensor | None:
    tokens = [named.get(name) for name in ("input_ids", "inputs")]
    return next((each for each in tokens if each is not None), None)


def _refuse_chunks(model: PreTrainedModel, chunk_size: object) -> None:
    """Refuse a prefill in chunks: Transformers cuts the mask of the encoder's tokens with them."""
    if chunk_size is not None:
        raise ValueError(
            f"prefill_chunk_size={chunk_size}: Transformers cuts the encoder's attention_mask to "
            f"the chunks of the decoder's tokens; leave it out for {type(model).__name__}"
        )


def refuse_weights(asked: object) -> None:
    """Raise `PenstockError` where weights of attention are asked for."""
    if asked:
        raise PenstockError(
            "output_attentions=True: attention over a penstock.kv.cache has no weights to return; "
            "leave it out, or use another cache"
        )


def _check_assistance(cache: Any, given: Any, options: dict[str, Any]) -> None:
    """Refuse drafts of tokens on a cache that holds some: Transformers would append these again."""
    named = {
        name: options.get(name, getattr(given, name, None))
        for name in ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit")
    }
    names = [name for name, value in named.items() if value is not None]
    if names and cache.get_seq_length():
        raise ValueError(
            f"{names[0]} is set, and the cache holds {cache.get_seq_length()} tokens, which "
            "Transformers' assisted decoding would append once more; leave it out, or reset() the "
            "cache and pass all tokens"
        )


def _check_arrival(
    model: PreTrainedModel, cache: Any, result: Any, options: dict[str, Any]
) -> None:
    """Raise `PenstockError` if tokens of a call are in another cache.

    Phi-3 takes one of its own where the prompt is longer than its first scaling of positions.
    """
    sequences = getattr(result, "sequences", result)
    if model.config.is_encoder_decoder or options.get("inputs_embeds") is not None:
        return
    if not isinstance(sequences, torch.Tensor) or sequences.dim() != 2:
        return
    num_tokens = sequences.shape[1] - 1  # the last one was not computed with yet
    if cache.get_seq_length() < num_tokens:
        raise PenstockError(
            f"{type(model).__name__} left past_key_values for a cache of its own: "
            f"{cache.get_seq_length()} of {num_tokens} tokens are in the one given, and the others "
            "were beyond its budget; shorten the prompt, or call the model without a cache"
        )


def _note_tokens(model: PreTrainedModel, cache: Any, named: dict[str, Any], result: Any) -> None:
    """Note the tokens that a call left in its cache, with which the next prompt is compared.

    Nothing is noted of calls that are given new tokens only, or embeddings; of beam search, after
    which the beams may be in another order than its result, the prompt.
    """
    prompt, mask = _find_prompt(named), named.get("attention_mask")
    sequences = getattr(result, "sequences", result)
    is_whole = prompt is not None and (mask is None or mask.shape[1] == prompt.shape[1])
    if model.config.is_encoder_decoder or named.get("inputs_embeds") is not None or not is_whole:
        return
    if not isinstance(sequences, torch.Tensor) or not cache.get_seq_length():
        return
    assert prompt is not None
    given: Any = named.get("generation_config") or model.generation_config
    num_beams = named.get("num_beams") or getattr(given, "num_beams", None) or 1
    num_sequences = cache.pool.batch_size(cache.pool.layers()[0])
    if num_beams > 1 and num_sequences % len(prompt) == 0:
        cache.known_tokens = prompt.cpu().repeat_interleave(num_sequences // len(prompt), 0)
    elif sequences.shape == (num_sequences, cache.get_seq_length() + 1):
        cache.known_tokens = sequences[:, :-1].to("cpu", copy=True)


def _describe_encoder_inputs(options: dict[str, Any]) -> tuple[str, list[Any] | None]:
    """Return name, and dtype, shape and CRC-32, of what an encoder reads in a call; or None."""
    outputs = options.get("encoder_outputs")
    read = {"encoder_outputs": None if outputs is None else outputs[0]}
    read |= {name: options.get(name) for name in _ENCODER_INPUTS}
    for name, given in read.items():
        if isinstance(given, torch.Tensor):
            return name, _describe_tensor(given)
    return "", None


def unwatch_calls(model: torch.nn.Module) -> None:
    """Take back what `watch_calls` did."""
    if getattr(model.__dict__.get("generate"), "is_watching", False):
        del model.__dict__["generate"]
