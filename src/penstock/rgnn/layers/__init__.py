"""Layers with the signatures and parameters of PyG's, as programs in the language of this package.

A layer has no kernels: it calls a compiled function, which is public here as well.
"""

from penstock.rgnn.layers._hgt import HGTConv, hgt, hgt_of_features
from penstock.rgnn.layers._rgat import RGATConv, rgat
from penstock.rgnn.layers._rgcn import RGCNConv, rgcn, rgcn_of_embeddings, rgcn_of_messages

__all__ = [
    "HGTConv",
    "RGATConv",
    "RGCNConv",
    "hgt",
    "hgt_of_features",
    "rgat",
    "rgcn",
    "rgcn_of_embeddings",
    "rgcn_of_messages",
]
