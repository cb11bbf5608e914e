"""Samples of one job: checked before anything is trained, and read in the order of its seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.lora.jobs._seeds import derive_seed

IGNORED = -100
"""The label of a token that is no target, as in Transformers."""

_KEYS = {"input_ids", "labels", "attention_mask"}
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class TokenSample:
    """One sample as the loss takes it.

    Attributes:
        tokens: Token numbers, int64 of shape `(n,)`.
        targets: By position the token that follows, `IGNORED` where there is no target; `(n,)`.
    """

    tokens: Tensor
    targets: Tensor

    @property
    def num_tokens(self) -> int:
        """Rows that the sample takes in a micro-batch."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        """Positions with a target."""
        return int((self.targets != IGNORED).sum())


class SampleOrder:
    """The samples of one job, by their numbers in the training: epoch after epoch, shuffled each.

    Attributes:
        fingerprint: Hash of all tokens and targets, by which a checkpoint knows its data.
    """

    def __init__(
        self, job: str, data: object, *, seed: int, max_tokens: int, vocab_size: int
    ) -> None:
        self._job, self._seed = job, seed
        self._max_tokens, self._vocab_size = max_tokens, vocab_size
        self._samples = self._list_samples(data)
        self._epoch = (-1, [0])
        self._digests = bytearray()
        self.fingerprint = self._check_all()

    def __len__(self) -> int:
        """Return the number of samples when the job was added."""
        return len(self._digests) // _DIGEST_BYTES

    def read(self, number: int) -> TokenSample:
        """Return the sample with a number of the training, from 0 on.

        Raises:
            ValueError: It, or the number of samples, is no longer what it was in the first reading.
        """
        remedy = "give add a copy that stays, or remove the job and add it with the new data"
        if len(self._samples) != len(self):
            raise ValueError(
                f"data has {len(self._samples)} samples, and had {len(self)} when job "
                f"{self._job!r} was added: {remedy}"
            )
        epoch, position = divmod(number, len(self))
        if self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
            order = torch.randperm(len(self), generator=generator, device="cpu")
            self._epoch = (epoch, order.tolist())
        index = self._epoch[1][position]
        sample = self._read_at(index)
        start = index * _DIGEST_BYTES
        if _hash(sample) != self._digests[start : start + _DIGEST_BYTES]:
            raise ValueError(
                f"data[{index}] is not what it was when job {self._job!r} was added: {remedy}"
            )
        return sample

    def take_targets(self, most: int) -> Tensor:
        """Return targets of the first sample from its first one on, the last row without."""
        targets = self._read_at(0).targets
        targets = targets[int((targets != IGNORED).nonzero()[0]) :][:most].clone()
        return torch.cat([targets, targets.new_tensor([IGNORED])])

    def _list_samples(self, data: object) -> Sequence[Any]:
        is_sequence = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if is_sequence and not isinstance(data, str | bytes | Mapping):
            return data  # pyright: ignore[reportReturnType]
        if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
            return list(data)
        raise ValueError(
            f"job {self._job!r}: data is a {type(data).__name__}; accepted are sequences and "
            "iterables of samples"
        )

    def _check_all(self) -> str:
        if not len(self._samples):
            raise ValueError(f"job {self._job!r}: data is empty; a job needs at least one sample")
        digest = hashlib.blake2b(digest_size=16)
        for index in range(len(self._samples)):
            sample = self._read_at(index)
            if not sample.num_targets:
                raise ValueError(
                    f"job {self._job!r}: data[{index}] has no target (one token, or no label but "
                    f"{IGNORED} after the first), so it trains nothing: leave it out"
                )
            self._digests += _hash(sample)
            for part in (sample.tokens, sample.targets):
                digest.update(part.numpy().tobytes())
            digest.update(b"|")
        return digest.hexdigest()

    def _read_at(self, index: int) -> TokenSample:
        place = f"job {self._job!r}: data[{index}]"
        sample = self._samples[index]
        tokens, labels = self._split(sample, place)
        if not len(tokens):
            raise ValueError(f"{place} has no token")
        if len(tokens) > self._max_tokens:
            raise ValueError(
                f"{place} has {len(tokens)} tokens; the most that a sample may have is "
                f"{self._max_tokens}: cut it, or raise max_tokens (and the positions that the "
                "model knows)"
            )
        if labels.shape != tokens.shape:
            raise ValueError(f"{place} has {len(tokens)} tokens and {len(labels)} labels")
        self._check_range(tokens, f"{place}: input_ids")
        self._check_range(labels[labels != IGNORED], f"{place}: labels")
        targets = torch.full_like(labels, IGNORED)
        targets[:-1] = labels[1:]
        return TokenSample(tokens, targets)

    def _split(self, sample: Any, place: str) -> tuple[Tensor, Tensor]:
        """Return the tokens and the labels of a sample as it was given."""
        if not isinstance(sample, Mapping):
            tokens = _to_integers(sample, place)
            return tokens, tokens
        if unknown := sorted(str(key) for key in sample.keys() - _KEYS):
            raise ValueError(f"{place} has the keys {unknown}; accepted are {sorted(_KEYS)}")
        if "input_ids" not in sample:
            raise ValueError(f"{place} has no input_ids")
        mask = sample.get("attention_mask")
        if (
            mask is not None
            and not torch.as_tensor(mask, device=getattr(mask, "device", "cpu")).bool().all()
        ):
            raise ValueError(f"{place} has padding (zeros in attention_mask): leave it out")
        tokens = _to_integers(sample["input_ids"], f"{place}: input_ids")
        labels = sample.get("labels")
        return tokens, tokens if labels is None else _to_integers(labels, f"{place}: labels")

    def _check_range(self, numbers: Tensor, place: str) -> None:
        wrong = numbers[(numbers < 0) | (numbers >= self._vocab_size)]
        if len(wrong):
            raise ValueError(
                f"{place} has the number {int(wrong[0])}; the model's vocabulary has "
                f"{self._vocab_size} entries"
            )


def _hash(sample: TokenSample) -> bytes:
    """Return a hash of a sample's tokens and targets."""
    digest = hashlib.blake2b(sample.tokens.numpy().tobytes(), digest_size=_DIGEST_BYTES)
    digest.update(sample.targets.numpy().tobytes())
    return digest.digest()


def _to_integers(numbers: Any, place: str) -> Tensor:
    try:
        found = torch.as_tensor(numbers, device=getattr(numbers, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{place} is no list of integers: {error}") from error
    if found.dim() != 1 or found.dtype.is_floating_point or found.dtype == torch.bool:
        raise ValueError(
            f"{place} has the dtype {found.dtype} and the shape {tuple(found.shape)}; accepted are "
            "integers in one dimension"
        )
    return found.detach().to("cpu", torch.int64)
