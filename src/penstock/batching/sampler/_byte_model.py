"""A model of the bytes of a batch: a sum over its samples, fitted to a few measured steps.

Memory of a step is nearly linear in its work: so much per node, edge, token or pair of tokens.
With `f_k(b)` the value of feature k for batch b (its sum, or its maximum times the samples),

    bytes(b) = max(least, x_0 + sum_k x_k * f_k(b)),    x >= 0

The coefficients x minimise the relative squared error. They are never negative: more work never
needs less memory, also far from the measured batches. `least` is the peak of another moment of the
step, that of the optimizer, which does not depend on the batch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.batching._arrays import Floats, Integers
from penstock.batching._meter import measured_peak
from penstock.batching._numbers import check_numbers, read_samples, round_up_bytes
from penstock.batching.sampler._packing import SampleCosts
from penstock.memory.files import replace_file
from penstock.tables import Report
from penstock.units import parse_count

logger = logging.getLogger(__name__)

_FORMAT, _VERSION = "penstock-byte-model", 2
_LEAST_MARGIN = 0.05
_CLEARLY = 1.03  # a peak that exceeds the least one by this factor is decided by the batch
_SUSPICIOUS_MARGIN = 0.5  # beyond it a feature is probably missing
_RESIDUAL_MARGIN = 2.0  # of the largest relative amount that a probe lies above its prediction
_MOST_ITERATIONS = 1000
_MIXED_SEED = 0
# Positions of a probe's samples among all, sorted by size; None: random.
_PROBED_RANKS = (None, 1.0, 0.15, 0.5, 0.0, None, 0.3)


@dataclass(frozen=True)
class Padded:
    """A feature that is padded: every sample of a batch counts as the largest of them.

    Example:
        >>> features = {"tokens": Padded([3, 5, 2]), "pairs": Padded([9, 25, 4])}
    """

    values: Any
    """One number >= 0 per sample."""


Features = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ByteModel(Report, title="byte model"):
    """Bytes that a batch needs at the peak of a step.

    Example:
        >>> features = {"nodes": [10, 200, 30, 40]}
        >>> def step(batch):
        ...     nodes = sum(features["nodes"][sample] for sample in batch)
        ...     torch.ones(nodes, 16, requires_grad=True).exp().sum().backward()
        >>> model = ByteModel.fit(step, [[0], [1], [0, 2], [1, 2, 3]], features)
        >>> costs = model.costs(features)
        >>> costs.of_batch([0, 3]) >= model.predict([0, 3], features)
        True
    """

    fixed_bytes: float
    """Bytes of every batch."""
    least_bytes: float
    """Bytes at the moment of the step that does not depend on the batch; 0 if no probe shows it."""
    summed_bytes: dict[str, float]
    """Bytes per unit of each feature that is summed over the samples."""
    padded_bytes: dict[str, float]
    """Bytes per unit of each feature that is padded to the largest of the batch."""
    margin: float
    """Fraction that `costs` adds."""
    measured_bytes: tuple[int, ...] = ()
    """Peaks of the probes."""
    predicted_bytes: tuple[int, ...] = ()
    """Predicted peaks of the probes, without the margin."""

    @classmethod
    def fit(
        cls,
        step: Callable[[list[int]], Any],
        samples: Sequence[Sequence[int]],
        features: Features,
        *,
        margin: float | None = None,
        device: torch.device | str = "cpu",
    ) -> ByteModel:
        """Measure steps on a few batches and fit the model to their peaks.

        Args:
            step: Runs a training step on a batch, given as the numbers of its samples. The first
                one is run once more before, without measuring, so that optimizers have their
                states.
            samples: The batches to measure, at least two; `probe_batches` chooses some. They should
                reach the sizes that are to be predicted.
            features: For each feature one number per sample of the data set, or a `Padded`.
            margin: Fraction that `costs` adds to predictions; by default twice the largest by
                which a probe exceeds its prediction, and at least 5 %.
            device: The device of the step. On a GPU its allocator is asked; on the CPU the tensors
                are counted.

        Returns:
            The model; printed, it shows its errors for the probes.

        Raises:
            TypeError: Features are no dictionary of numbers, or samples no batches.
            ValueError: There are fewer than two batches, features differ in length or are not
                numbers >= 0, the margin is negative, or the step took no memory.
        """
        arrays = _read_features(features)
        probes = _read_probes(samples)
        if margin is not None and not 0 <= margin < math.inf:
            raise ValueError(f"margin must be finite and >= 0; got {margin}")
        rows = np.array([_sum_features(batch, arrays) for batch in probes])
        measured = _measure_steps(step, probes, device)
        peaks = np.array(measured, dtype=np.float64)
        found, least = _fit_peaks(rows, peaks)
        predicted = np.maximum(rows @ found, least)
        names = list(arrays)
        if margin is None:
            margin = _choose_margin(peaks, predicted, names)
        coefficients = dict(zip(names, found[1:].tolist(), strict=True))
        return cls(
            fixed_bytes=float(found[0]),
            least_bytes=least,
            summed_bytes={n: coefficients[n] for n in names if not arrays[n][1]},
            padded_bytes={n: coefficients[n] for n in names if arrays[n][1]},
            margin=float(margin),
            measured_bytes=tuple(measured),
            predicted_bytes=tuple(round(each) for each in predicted.tolist()),
        )

    def predict(self, batch: Sequence[int], features: Features) -> int:
        """Return the bytes that a batch will need, without the margin.

        Args:
            batch: Numbers of its samples.
            features: The features of the fit, of any data set.

        Returns:
            Bytes.
        """
        arrays = self._check_features(features)
        bytes_of = {**self.summed_bytes, **self.padded_bytes}
        coefficients = [self.fixed_bytes, *(bytes_of[name] for name in arrays)]
        total = float(np.dot(_sum_features(batch, arrays), coefficients))
        return round(max(total, self.least_bytes))

    def costs(self, features: Features) -> SampleCosts:
        """Return the bytes of each sample, margin included, for `BalancedBatchSampler`.

        Args:
            features: The features of the fit, of any data set.

        Returns:
            The costs; `costs.of_batch(batch)` is at least `predict` plus the margin.
        """
        arrays = self._check_features(features)
        summed = np.zeros(len(next(iter(arrays.values()))[0]))
        padded: list[Integers] = []
        for name, (values, is_padded) in arrays.items():
            known = self.padded_bytes if is_padded else self.summed_bytes
            bytes_of = values * known[name] * (1 + self.margin)
            if not is_padded:
                summed += bytes_of
            elif known[name] > 0:
                padded.append(round_up_bytes(bytes_of, name=name))
        return SampleCosts(
            fixed_bytes=int(np.ceil(self.fixed_bytes * (1 + self.margin))),
            least_bytes=int(np.ceil(self.least_bytes * (1 + self.margin))),
            summed_bytes=round_up_bytes(summed, name="costs"),
            padded_bytes=tuple(padded),
        )

    def save(self, path: str | Path) -> None:
        """Write the model as JSON."""
        text = json.dumps({"format": _FORMAT, "version": _VERSION, **self.to_dict()}, indent=1)
        replace_file(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ByteModel:
        """Read a model that `save` wrote.

        Raises:
            ValueError: The file is no model, or one of another version.
        """
        try:
            values = json.loads(Path(path).read_text())
            if (values.pop("format"), values.pop("version")) != (_FORMAT, _VERSION):
                raise ValueError("another format or version")
            for name in ("measured_bytes", "predicted_bytes"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} does not hold a byte model: {error}") from error

    def _rows(self) -> list[tuple[str, object]]:
        rows: list[tuple[str, object]] = [
            ("fixed_bytes", round(self.fixed_bytes)),
            ("least_bytes", round(self.least_bytes)),
        ]
        for name, value in {**self.summed_bytes, **self.padded_bytes}.items():
            padded = ", padded" if name in self.padded_bytes else ""
            rows.append((f"per {name}{padded}", f"{value:,.1f} B"))
        rows.append(("margin", f"{self.margin:.1%}"))
        pairs = list(zip(self.measured_bytes, self.predicted_bytes, strict=True))
        if pairs:
            errors = [predicted / max(measured, 1) - 1 for measured, predicted in pairs]
            rows.append(("probes", len(pairs)))
            rows.append(("errors of probes", f"{min(errors):+.1%} to {max(errors):+.1%}"))
        return rows

    def _check_features(self, features: Features) -> dict[str, tuple[Floats, bool]]:
        arrays = _read_features(features)
        given = {name: is_padded for name, (_, is_padded) in arrays.items()}
        fitted = dict.fromkeys(self.summed_bytes, False) | dict.fromkeys(self.padded_bytes, True)
        if given != fitted:
            raise ValueError(
                f"features must be those of the fit, {fitted} (True: padded); got {given}"
            )
        return arrays


def probe_batches(
    features: Features, *, num_probes: int = 8, max_samples: int = 32, seed: int = _MIXED_SEED
) -> list[list[int]]:
    """Choose batches to measure: few and many samples, small, large and mixed ones, the smallest.

    Example:
        >>> [len(batch) for batch in probe_batches({"nodes": range(100)}, num_probes=4)]
        [32, 16, 8, 1]

    Args:
        features: For each feature one number per sample of the data set, or a `Padded`.
        num_probes: Number of batches.
        max_samples: Samples in the largest of them: about as many as are to be predicted.
        seed: Seed of the random samples.

    Returns:
        The batches, the largest first; the last is the smallest sample alone.

    Raises:
        TypeError, ValueError: Features are no numbers >= 0, or a count is none above 0.
    """
    num_probes = parse_count(num_probes, name="num_probes", least=1)
    max_samples = parse_count(max_samples, name="max_samples", least=1)
    arrays = _read_features(features)
    ranks = np.sum([values / max(float(values.max()), 1e-300) for values, _ in arrays.values()], 0)
    by_size = np.argsort(ranks, kind="stable")
    random = np.random.default_rng(seed)
    batches: list[list[int]] = []
    for probe in range(num_probes - 1):
        count = max_samples >> (probe // 2 if num_probes > 5 else probe)
        count = min(max(count, 1), len(ranks))
        among = _PROBED_RANKS[probe % len(_PROBED_RANKS)]
        if among is None:
            chosen = random.choice(len(ranks), count, replace=False)
        else:
            first = round(among * (len(ranks) - count))
            chosen = by_size[first : first + count]
        batches.append(chosen.tolist())
    batches.append(by_size[:1].tolist())
    return batches


def _read_probes(samples: Any) -> list[list[int]]:
    """Return the batches to measure as lists."""
    if not all(isinstance(batch, Iterable) for batch in samples):
        raise TypeError(f"samples must be batches, lists of numbers; got {samples!r:.200}")
    probes = [list(batch) for batch in samples]
    if len(probes) < 2 or not all(probes):
        raise ValueError(f"samples must be two batches or more, none empty; got {samples!r}")
    return probes


def _measure_steps(
    step: Callable[[list[int]], Any], probes: list[list[int]], device: torch.device | str
) -> list[int]:
    """Return the peak of a step on each probe, after one step that is not measured."""
    step(probes[0])
    measured = [measured_peak(lambda batch=batch: step(batch), device)[0] for batch in probes]
    if not any(measured):
        raise ValueError(
            f"step took no memory on {device} for any of the samples: it has to run the batch in "
            "this thread, with torch, and device has to be that of its tensors"
        )
    return measured


def _choose_margin(peaks: Floats, predicted: Floats, names: list[str]) -> float:
    """Return twice the largest relative excess of a probe; warn if it is suspicious."""
    above = float(np.max((peaks - predicted) / np.maximum(predicted, 1.0), initial=0.0))
    margin = max(_LEAST_MARGIN, _RESIDUAL_MARGIN * above)
    if margin > _SUSPICIOUS_MARGIN:
        logger.warning(
            "a margin of %.0f %% is needed: bytes do not follow from the features %s; one "
            "is missing, as the square of a length is for attention",
            *(100 * margin, names),
        )
    return margin


def _fit_peaks(rows: Floats, peaks: Floats) -> tuple[Floats, float]:
    """Fit `max(rows @ x, least)` to the peaks; return x and least.

    The probes below `least` are not known in advance: every peak is tried as the highest of them,
    and `least` is 0 unless that makes the worst error much smaller.
    """

    def fit(least: float) -> tuple[float, Floats, float]:
        above = peaks > _CLEARLY * least
        weights = 1 / np.maximum(peaks[above], 1.0)
        found = nonnegative_least_squares(rows[above] * weights[:, None], peaks[above] * weights)
        errors = np.maximum(rows @ found, least) / np.maximum(peaks, 1.0) - 1
        return float(np.abs(errors).max()), found, least

    tries = [fit(0.0)]
    for least in np.unique(peaks).tolist():
        if (peaks > _CLEARLY * least).sum() >= min(rows.shape[1], len(peaks) - 1):
            tries.append(fit(least))
    best = min(tries, key=lambda each: each[0])
    _, found, least = best if best[0] < tries[0][0] / 2 else tries[0]
    return found, least


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Minimise `|matrix @ x - target|` over x >= 0 (Lawson and Hanson 1974, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    columns = matrix / scale
    x = np.zeros(columns.shape[1])
    free = np.zeros(len(x), dtype=bool)
    tolerance = 1e-12 * max(float(np.abs(columns.T @ target).max(initial=0.0)), 1e-300)
    for _ in range(_MOST_ITERATIONS):
        gradient = columns.T @ (target - columns @ x)
        gradient[free] = 0.0
        entering = int(gradient.argmax())
        if gradient[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            solution = np.zeros(len(x))
            solution[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            negative = free & (solution <= 0)
            if not negative.any():
                break
            # Go towards the solution until a value reaches 0; that value is no longer free.
            steps = x[negative] / (x[negative] - solution[negative])
            x += float(steps.min()) * (solution - x)
            free &= x > 1e-14 * max(float(x.max()), 1e-300)
            x[~free] = 0.0
            if not free.any():
                break
        x = solution
        x[~free] = 0.0
    return x / scale


def _read_features(features: Features) -> dict[str, tuple[Floats, bool]]:
    if not isinstance(features, Mapping):
        raise TypeError(
            f"features is a {type(features).__name__}; pass a dictionary, such as "
            "{'nodes': numbers}"
        )
    if not features:
        raise ValueError("features is empty; give at least one, such as the nodes of each sample")
    arrays = {}
    for name, given in features.items():
        is_padded = isinstance(given, Padded)
        values = given.values if is_padded else given
        if isinstance(values, range):
            values = list(values)
        numbers = check_numbers(values, name=f"features[{name!r}]")
        arrays[name] = (numbers.astype(np.float64), is_padded)
    lengths = {name: len(values) for name, (values, _) in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"features must have one number per sample each; got lengths {lengths}")
    return arrays


def _sum_features(batch: Sequence[int], arrays: dict[str, tuple[Floats, bool]]) -> list[float]:
    """Return the features of a batch, after a 1 for the bytes of every batch."""
    num_samples = len(next(iter(arrays.values()))[0])
    chosen = read_samples(batch, num_samples, name="batch")
    row = [1.0]
    for values, is_padded in arrays.values():
        selected = values[chosen]
        row.append(float(len(chosen) * selected.max(initial=0.0) if is_padded else selected.sum()))
    return row
