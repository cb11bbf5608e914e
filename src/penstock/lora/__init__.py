"""LoRA: many low-rank adapters on one base, trained at once, in less memory.

`linear` is the operator, `fuse` gives it to a model of PEFT, `pack` puts the data of many jobs into
few micro-batches, and `Jobs` trains them. `docs/lora.md` shows how a model gets the operator.
"""

from penstock.lora._adapters import Adapter, AdapterRows
from penstock.lora._fuse import FuseReport, fuse, fuse_report, unfuse
from penstock.lora._linear import add, linear
from penstock.lora._packing import pack
from penstock.lora._schedule import JobBatches, JobPiece, Schedule
from penstock.lora.jobs import JobReport, Jobs, JobsReport

__all__ = [
    "Adapter",
    "AdapterRows",
    "FuseReport",
    "JobBatches",
    "JobPiece",
    "JobReport",
    "Jobs",
    "JobsReport",
    "Schedule",
    "add",
    "fuse",
    "fuse_report",
    "linear",
    "pack",
    "unfuse",
]
