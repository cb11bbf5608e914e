"""What the demo trains, in which ways, and what each of them reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.demo._plans import DIVISORS
from penstock.errors import PenstockError

PLANNED = {f"planned-{divisor}": divisor for divisor in DIVISORS}
ARMS = {
    "stock": "stock PyTorch",
    "checkpoint": "checkpointing",
    "penstock": "Penstock",
    **{name: f"planned, 1/{divisor}" for name, divisor in PLANNED.items()},
}


class DemoError(PenstockError):
    """The demo cannot go on; for a process that died, the message holds its last words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The model and its training; the same in every arm."""

    hidden_size: int = 512
    """Width of the model."""
    num_layers: int = 4
    """Transformer layers."""
    num_heads: int = 8
    """Attention heads of a layer."""
    sequence_length: int = 512
    """Bytes of text in one sequence."""
    batch_size: int = 8
    """Sequences in one step."""
    seed: int = 0
    """Seed of the weights and of the choice of text."""

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that one step trains on."""
        return self.batch_size * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What the process of one arm reported."""

    arm: str
    """``"stock"``, ``"checkpoint"``, ``"penstock"`` or ``"planned-8"`` and its like."""
    peak_bytes: int
    """The parameters, and how far the operating system saw the process grow beyond the loaded
    model, at most."""
    step_seconds: tuple[float, ...]
    """Duration of every measured step."""
    losses: tuple[float, ...]
    """Loss of every step, the warm-up first."""
    weights_sha256: str
    """Digest of all weights after the last step."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return dataclasses.asdict(self)
