"""Cache for models of Transformers, which attends over a `BlockPool`.

Read `_cache.py` (the caches), `_layer.py` (what a model gets for its keys), `_attention.py` (where
it hands them in), `_mask.py`.
"""

try:
    from penstock.kv.transformers._cache import PooledCache, PooledEncoderDecoderCache, cache
    from penstock.kv.transformers._calibrate import calibrate
except ImportError as error:
    raise ImportError(
        "penstock.kv.cache and calibrate need Transformers 5.23 or later (pip install --upgrade "
        f"transformers): {error}"
    ) from error

__all__ = ["PooledCache", "PooledEncoderDecoderCache", "cache", "calibrate"]
