"""PyTorch Geometric: tables as a feature store, and mini-batches without compiled samplers.

`data.x = penstock.unify(data.x)` needs nothing of this: PyG's own loaders gather rows of the table,
in this process and in workers. This module has the loader for which PyG needs compiled extensions,
and tables as a `FeatureStore`.
"""

try:
    import torch_geometric as _torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch_geometric":  # it is there, and something that it needs is not
        raise
    raise ModuleNotFoundError(
        "penstock.integrations.pyg needs PyTorch Geometric: pip install 'penstock[pyg]'",
        name=error.name,
    ) from error

from penstock.integrations.pyg._feature_store import UnifiedFeatureStore
from penstock.integrations.pyg._loader import LoaderReport, NeighborLoader
from penstock.integrations.pyg._sampler import UnifiedSampler

__all__ = ["LoaderReport", "NeighborLoader", "UnifiedFeatureStore", "UnifiedSampler"]
