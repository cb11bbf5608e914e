"""I/O model: bytes per level of memory, lower bounds, tile orders, chains, and `explain`.

`attention`, `matmul`, `convolution` and `spgemm` predict the bytes of the best tiles.
"""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily

if TYPE_CHECKING:
    from penstock.iomodel._access import AccessTrace, declare_access, simulate_caches
    from penstock.iomodel._attention import attention
    from penstock.iomodel._chain import ChainPlan, ChainSegment, chain
    from penstock.iomodel._chain_operator import ChainOperator
    from penstock.iomodel._convolution import convolution
    from penstock.iomodel._explain import IOReport, explain
    from penstock.iomodel._levels import IOModel, LevelBytes, MemoryLevel, memory_levels
    from penstock.iomodel._matmul import matmul
    from penstock.iomodel._plan_chain import plan_chain
    from penstock.iomodel._roofline import Roofline
    from penstock.iomodel._run_chain import run_chain
    from penstock.iomodel._spgemm import spgemm
    from penstock.iomodel._tile_order import (
        TiledProduct,
        TileOrder,
        choose_order,
        simulate_order,
        tile_order,
    )

__all__ = [
    "AccessTrace",
    "ChainOperator",
    "ChainPlan",
    "ChainSegment",
    "IOModel",
    "IOReport",
    "LevelBytes",
    "MemoryLevel",
    "Roofline",
    "TileOrder",
    "TiledProduct",
    "attention",
    "chain",
    "choose_order",
    "convolution",
    "declare_access",
    "explain",
    "matmul",
    "memory_levels",
    "plan_chain",
    "run_chain",
    "simulate_caches",
    "simulate_order",
    "spgemm",
    "tile_order",
]

__getattr__, __dir__ = load_lazily(__name__)
