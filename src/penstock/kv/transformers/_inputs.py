"""Inputs of attention modules: kept per token, and made keys and values again.

A hook notes what an attention module is called with. To compute keys and values again, the module's
own `forward` is called with some tokens of it and a cache that takes the keys and values from it.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.kv.transformers._prefix import describe_state

_WITHOUT_EFFECT = {"attention_mask", "cache_position", "position_ids", "output_attentions"}
_CACHES = {"past_key_value", "past_key_values", "layer_past"}
_COMPARED_TOKENS = 8
_TOLERANCE = 1e-4  # relative to the largest; products of other shapes round otherwise


class _Taken(Exception):
    """Keys and values that a module handed to its cache."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class _Taker:
    """Cache that takes what it is given, and ends the call."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Raise `_Taken`."""
        raise _Taken(keys, values)


class AttentionInputs:
    """Inputs of one attention module.

    Args:
        module: A module whose keys and values of a token follow from that token's inputs alone.
        name: Its name, for errors.

    Attributes:
        hooks: Handles of the module's hooks, to be removed.

    Raises:
        PenstockError: Inputs are none that can be kept by tokens, or keys and values do not follow
            from them; from `take`.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._signature = inspect.signature(module.forward)
        self._call: dict[str, Any] | None = None
        self._widths: dict[tuple[str, int], int] | None = None
        self._shapes: dict[tuple[str, int], torch.Size] = {}
        self._others: dict[str, Any] = {}
        self._is_compared = False
        self._state: tuple[object, ...] | None = None
        self.hooks = (
            module.register_forward_pre_hook(self._note, with_kwargs=True),
            module.register_forward_hook(self._forget, always_call=True),
        )

    def _note(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind == parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        self._call = arguments

    def _forget(self, *_: object) -> None:
        self._call = None

    def take(
        self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool = False
    ) -> torch.Tensor:
        """Return the inputs of the module's call that hands over keys and values.

        Args:
            keys: `(B, H, n, key_dim)`.
            values: `(B, H, n, value_dim)`.
            is_first: Whether no tokens are held whose inputs were taken before.

        Returns:
            `(B, n, width)`: all tensors of a token, one after the other.
        """
        call, self._call = self._call, None
        if call is None:
            raise PenstockError(
                f"{self._name} was not called as a module, so that its inputs cannot be kept; use "
                "keep_inputs=False"
            )
        self._check_state(is_first)
        batch_size, num_tokens = keys.shape[0], keys.shape[2]
        tensors, self._others = self._divide(call, num_tokens)
        widths = {place: each[0, 0].numel() for place, each in tensors.items()}
        if self._widths is not None and widths != self._widths:
            raise PenstockError(
                f"{self._name} had inputs of the widths {self._widths} and now {widths}; use "
                "keep_inputs=False"
            )
        self._widths = widths
        self._shapes = {place: each.shape[2:] for place, each in tensors.items()}
        inputs = torch.cat(
            [each.expand(batch_size, *each.shape[1:]).flatten(2) for each in tensors.values()], 2
        )
        if not self._is_compared:
            self._compare(inputs, keys, values)
        return inputs

    def _check_state(self, is_first: bool) -> None:
        """Raise an error if keys of tokens before would be computed by other weights."""
        module = self._module()
        assert module is not None
        state = describe_state(module)
        if self._state is not None and state != self._state and not is_first:
            raise PenstockError(
                f"the weights or active adapters of {self._name} are others than those that made "
                "the keys of the tokens that the cache holds, and keep_inputs=True computes keys "
                "again; use keep_inputs=False, or reset() the cache"
            )
        self._state = state

    def compute(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute keys and values again.

        Args:
            inputs: `(B, n, width)`, as `take` returned them, any tokens.

        Returns:
            Keys `(B, H, n, key_dim)` and values `(B, H, n, value_dim)`.
        """
        module = self._module()
        assert module is not None and self._widths is not None
        pieces = inputs.split(list(self._widths.values()), dim=2)
        arguments = dict(self._others)
        for (name, number), piece in zip(self._widths, pieces, strict=True):
            tensor = piece.contiguous().unflatten(2, self._shapes[name, number])
            if number < 0:
                arguments[name] = tensor
            else:
                arguments[name] = (*arguments.get(name, ()), tensor)
        for name in self._signature.parameters:
            if name in _CACHES:
                arguments[name] = _Taker()
            elif name == "attention_mask":
                arguments[name] = None
        try:
            with torch.inference_mode():
                module.forward(**arguments)
        except _Taken as taken:
            return taken.keys, taken.values
        raise PenstockError(
            f"{self._name} hands no keys to its cache when it is called alone; use "
            "keep_inputs=False"
        )

    def _divide(
        self, call: dict[str, Any], num_tokens: int
    ) -> tuple[dict[tuple[str, int], torch.Tensor], dict[str, Any]]:
        """Divide arguments into tensors by tokens, `(1 or B, n, ...)`, and all others.

        Tensors are named by argument and place in its tuple, -1 where it is none.
        """
        tensors: dict[tuple[str, int], torch.Tensor] = {}
        others: dict[str, Any] = {}
        for name, given in call.items():
            if name in _WITHOUT_EFFECT | _CACHES:
                continue
            leaves = (
                {(name, i): each for i, each in enumerate(given)}
                if (isinstance(given, tuple))
                else {(name, -1): given}
            )
            if not any(isinstance(each, torch.Tensor) for each in leaves.values()):
                others[name] = given
                continue
            for place, each in leaves.items():
                if not self._is_by_token(each, num_tokens):
                    raise PenstockError(
                        f"{self._name} is called with {name}=, which is not a floating tensor by "
                        "tokens (B, n, ...) that could be kept; use keep_inputs=False"
                    )
                tensors[place] = each
        return tensors, others

    @staticmethod
    def _is_by_token(leaf: Any, num_tokens: int) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.is_floating_point()
            and leaf.dim() > 2
            and leaf.shape[1] == num_tokens
        )

    def _compare(self, inputs: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise an error if the last tokens of one sequence alone have other keys or values."""
        try:
            again = self.compute(inputs[-1:, -_COMPARED_TOKENS:])
        except (ValueError, TypeError, RuntimeError) as error:  # as of an adapter per sequence
            raise PenstockError(
                f"{self._name} cannot be called with some tokens of one sequence alone ({error}), "
                "so that keys cannot be computed again; use keep_inputs=False"
            ) from error
        for ours, theirs in zip(again, (keys, values), strict=True):
            theirs = theirs[-1:, :, -_COMPARED_TOKENS:].float()
            error = (ours.float() - theirs).abs().max()
            tolerance = max(_TOLERANCE, 8 * torch.finfo(keys.dtype).eps)
            if not error <= tolerance * theirs.abs().max():
                raise PenstockError(
                    f"{self._name} makes other keys or values of a token when it is called with "
                    f"that token alone (off by {error:.2g}), so that they cannot be computed "
                    "again; use keep_inputs=False"
                )
        self._is_compared = True
