"""Layers with the signatures and parameters of PyG's, as programs in the language of this package.

A layer has no kernels of its own: what it computes is the compiled function at the top of its file.
"""

from penstock.rgnn.layers._hgt import HGTConv
from penstock.rgnn.layers._rgat import RGATConv
from penstock.rgnn.layers._rgcn import RGCNConv

__all__ = ["HGTConv", "RGATConv", "RGCNConv"]
