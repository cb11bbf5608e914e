"""Options of the demo, its arms, and the result of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli._options import directory_option, hidden_option
from penstock.cli._run import MIN_BYTES_HELP
from penstock.errors import PenstockError

PLANNED = {f"planned-{divisor}": divisor for divisor in (2, 4, 8)}
"""Planned arms, with the divisors of the memory that the program itself needs."""
ARMS = {
    "stock": "stock PyTorch",
    "checkpoint": "checkpointing",
    "penstock": "Penstock",
    **{name: f"planned, 1/{divisor}" for name, divisor in PLANNED.items()},
}


class DemoError(PenstockError):
    """The demo cannot go on; after the death of a process, the message holds its last words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The model and its training; the same in every arm."""

    hidden_size: Annotated[int, hidden_option("Width of the model.")] = 512
    num_layers: Annotated[int, hidden_option("Transformer layers.", "--layers")] = 4
    num_heads: Annotated[int, hidden_option("Attention heads.", "--heads")] = 8
    sequence_length: Annotated[int, hidden_option("Bytes of text in one sequence.")] = 512
    batch_size: Annotated[int, hidden_option("Sequences in one step.")] = 8
    seed: int = 0
    """Seed of the weights and of the choice of text."""

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that one step trains on."""
        return self.batch_size * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions(DemoConfig):
    """The model, and how the demo runs."""

    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the timeline and the numbers are written.")
    ] = Path("penstock-demo")
    store: Annotated[
        str | None,
        directory_option("Directory for the activations. Default: a temporary one inside --out."),
    ] = None
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measured steps per arm, after one warm-up.")
    ] = 6
    policy: Annotated[
        Literal["auto", "all"], typer.Option(help="What leaves; see penstock run --help.")
    ] = "auto"
    min_bytes: Annotated[str, typer.Option(hidden=True, help=MIN_BYTES_HELP)] = "1MiB"
    plan_seconds: Annotated[int, hidden_option("Seconds for each plan.")] = 8

    @property
    def model(self) -> DemoConfig:
        """The model and its training alone."""
        names = [field.name for field in dataclasses.fields(DemoConfig)]
        return DemoConfig(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmResult:
    """Measurements of one arm, as its process reported them."""

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
