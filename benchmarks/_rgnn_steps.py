"""A step of an arm of `rgnn.py`: its results, its peak of bytes, its time beside others."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from _rgnn_arms import Arm

SHORT_SECONDS = 0.5  # an arm below it is measured at least MIN_ROUNDS times
ENDLESS_SECONDS = 10.0  # an arm above it is measured once
MIN_ROUNDS, MAX_ROUNDS, MIN_LONG_ROUNDS = 9, 15, 3
TRAINING, INFERENCE = "training step", "inference"
MODES = (TRAINING, INFERENCE)


class Step:
    """An arm's training step or inference, with the gradients that come from above.

    Args:
        arm: The arm.
        mode: One of `MODES`.
        device: "cpu" or a CUDA device.
        among: For each result, the rows that a gradient comes to; None for all of all.
    """

    def __init__(
        self, arm: Arm, mode: str, device: str, among: list[torch.Tensor] | None = None
    ) -> None:
        self.arm, self.mode, self._device, self._among = arm, mode, device, among
        self.rough_seconds = 0.0
        self._seeds: list[torch.Tensor] = []

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Return the results; gradients are left in the leaves after a training step."""
        if self.mode == INFERENCE:
            with torch.no_grad():
                return self.arm.forward()
        for leaf in self.arm.leaves:
            leaf.grad = None
        results = self.arm.forward()
        if not self._seeds:
            self._draw_seeds(results)
        torch.autograd.backward(results, self._seeds)
        return results

    def everywhere(self) -> Step:
        """Return the step with gradients of all rows; this one has been run."""
        if self._among is None:
            return self
        other = Step(self.arm, self.mode, self._device)
        other._draw_seeds(self._seeds)
        return other

    def _draw_seeds(self, results: Sequence[torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        self._seeds = [
            torch.randn(out.shape, generator=generator).to(out.device) for out in results
        ]
        for seed, rows in zip(self._seeds, self._among or (), strict=False):
            seed.mul_(rows.unsqueeze(1))

    def answers(self) -> list[torch.Tensor]:
        """Return the results of a step, and after training gradients of the features."""
        results = [out.detach() for out in self()]
        if self._among is not None:
            pairs = zip(results, self._among, strict=True)
            results = [out[rows.to(out.device)] for out, rows in pairs]
        if self.mode == INFERENCE:
            return results
        gradients = (x.grad for x in self.arm.inputs)
        return results + [gradient.clone() for gradient in gradients if gradient is not None]

    def timed(self) -> float:
        """Return the seconds of one run."""
        self.wait()
        start = time.perf_counter()
        self()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._device != "cpu":
            torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        """Return the peak bytes of tensors in one run, beyond those that were there before.

        Memory that the arm keeps from step to step counts: it is let go of first.

        On the CPU, allocator events of the profiler are added up: they are exact, and are there
        for whatever allocates through torch, also inside of compiled code. Resident bytes would
        show the allocator's habits instead. The run's time is kept as `rough_seconds`.
        """
        for leaf in self.arm.leaves:
            leaf.grad = None
        self.arm.release()
        gc.collect()  # what earlier steps have left must not be freed in this one
        if self._device != "cpu":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.rough_seconds = self.timed()
            return torch.cuda.max_memory_allocated() - before
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profiler:
            self.rough_seconds = self.timed()
        results = profiler.profiler and profiler.profiler.kineto_results
        assert results is not None
        events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return peak


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float | None:
    """Return the largest difference over the largest value; None where shapes differ."""
    if [a.shape for a in found] != [b.shape for b in expected]:
        return None
    pairs = zip(found, expected, strict=True)
    return max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs))


def measure(steps: dict[str, Step], budget_seconds: float) -> dict[str, list[float]]:
    """Measure the seconds of every arm, round by round, in an order that alternates.

    Before each measured run of a short arm stands one that is not measured, so that it does not pay
    for what the arm before it has left in caches and allocator. Long arms take part in the first
    rounds only.

    Args:
        steps: By arm, each of which has told its peak and so had its warm-up.
        budget_seconds: What the rounds of one arm may take, roughly.
    """
    rounds = {name: num_rounds(step.rough_seconds, budget_seconds) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(max(rounds.values(), default=0)):
        order = list(steps) if number % 2 == 0 else list(reversed(steps))
        for name in order:
            if number < rounds[name]:
                if steps[name].rough_seconds < SHORT_SECONDS:
                    steps[name]()
                seconds[name].append(steps[name].timed())
    return seconds


def num_rounds(seconds: float, budget_seconds: float) -> int:
    """Return the number of rounds for an arm that takes so long."""
    if seconds >= ENDLESS_SECONDS:
        return 1
    least = MIN_ROUNDS if seconds < SHORT_SECONDS else MIN_LONG_ROUNDS
    return max(least, min(MAX_ROUNDS, int(budget_seconds / seconds)))
