"""Bins below a cap: whole samples in as few bins as possible, and how far from that they are."""

from penstock.batching.packing._bins import BinPacking as BinPacking
from penstock.batching.packing._bins import pack_bins as pack_bins
from penstock.batching.packing._bound import least_bins as least_bins
from penstock.batching.packing._first_fit import FirstFit as FirstFit
