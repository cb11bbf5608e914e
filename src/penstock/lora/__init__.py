"""LoRA: many low-rank adapters on one base, trained at once, in less memory.

`linear` is the operator. `docs/lora.md` shows how a model gets it.
"""

from penstock.lora._adapters import Adapter, AdapterRows
from penstock.lora._linear import add, linear

__all__ = ["Adapter", "AdapterRows", "add", "linear"]
