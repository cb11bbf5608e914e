"""LoRA: many low-rank adapters on one base, trained at once, in less memory.

`linear` is the operator, `fuse` gives it to a model of PEFT. `docs/lora.md` shows both.
"""

from penstock.lora._adapters import Adapter, AdapterRows
from penstock.lora._fuse import FuseReport, fuse, fuse_report, unfuse
from penstock.lora._linear import add, linear

__all__ = [
    "Adapter",
    "AdapterRows",
    "FuseReport",
    "add",
    "fuse",
    "fuse_report",
    "linear",
    "unfuse",
]
