"""Keys and values of contexts longer than memory: a pool of blocks over tiers, read by selectors.

Read `_pool.py` (the blocks and where they are), `_attend.py` (attention over them),
`_lower.py` (the tiers below), `transformers/` (the cache for `generate`).
"""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily

if TYPE_CHECKING:
    from penstock.kv._layout import BlockLayout
    from penstock.kv._pool import BlockPool
    from penstock.kv._recompute import RecomputeSplit, fetch_or_recompute
    from penstock.kv._report import PoolReport
    from penstock.kv._selector import Selector
    from penstock.kv._simulate import SimulationReport, simulate
    from penstock.kv.selectors import (
        Accumulated,
        ChannelCalibration,
        DoubleSparsity,
        Nosa,
        Window,
    )
    from penstock.kv.transformers import cache, calibrate

__all__ = [
    "Accumulated",
    "BlockLayout",
    "BlockPool",
    "ChannelCalibration",
    "DoubleSparsity",
    "Nosa",
    "PoolReport",
    "RecomputeSplit",
    "Selector",
    "SimulationReport",
    "Window",
    "cache",
    "calibrate",
    "fetch_or_recompute",
    "simulate",
]

__getattr__, __dir__ = load_lazily(__name__)
