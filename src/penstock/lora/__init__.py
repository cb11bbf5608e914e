"""LoRA: many low-rank adapters on one base, trained at once, in less memory.

`linear` is the operator, `pack` puts the data of many jobs into few micro-batches. `docs/lora.md`
shows how a model gets the operator.
"""

from penstock.lora._adapters import Adapter, AdapterRows
from penstock.lora._linear import add, linear
from penstock.lora._packing import pack
from penstock.lora._schedule import JobBatches, JobPiece, Schedule

__all__ = ["Adapter", "AdapterRows", "JobBatches", "JobPiece", "Schedule", "add", "linear", "pack"]
