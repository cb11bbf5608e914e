"""Eigenvalues, singular values and principal components, with basis and operator in tiers.

`docs/spectral.md` shows them.
"""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily

if TYPE_CHECKING:
    from penstock.spectral._curvature import fisher, hessian
    from penstock.spectral._eigs import eigs
    from penstock.spectral._pca import PrincipalComponents, pca
    from penstock.spectral._report import Eigenpairs, SpectralReport
    from penstock.spectral._sources import CSR, SymmetricOperator
    from penstock.spectral._svds import SingularTriplets, svds

__all__ = [
    "CSR",
    "Eigenpairs",
    "PrincipalComponents",
    "SingularTriplets",
    "SpectralReport",
    "SymmetricOperator",
    "eigs",
    "fisher",
    "hessian",
    "pca",
    "svds",
]

__getattr__, __dir__ = load_lazily(__name__)
