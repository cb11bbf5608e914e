"""Cache for models of Transformers, which attends over a `BlockPool`.

Read `_cache.py` (the caches), `_layer.py` (what a model gets for its keys), `_attention.py` (where
it hands them in), `_mask.py`.
"""

from penstock.kv.transformers._cache import PooledCache, PooledEncoderDecoderCache, cache
from penstock.kv.transformers._calibrate import calibrate

__all__ = ["PooledCache", "PooledEncoderDecoderCache", "cache", "calibrate"]
