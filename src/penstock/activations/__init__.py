"""Activation offloading: saved tensors leave the device and come back in time.

Read `_offload.py` (the public surface), `_record.py` (a saved storage), `_engine.py` (its life),
`_transfers.py` (how it moves), `_routes.py` (along which way), `_policy.py` (what leaves).
"""

from penstock.activations._offload import Offload, OffloadReport, offload

__all__ = ["Offload", "OffloadReport", "offload"]
