"""Programs as generated C++, for the CPU.

Files, in the order in which to read them: `_backend.py` calls a library and places values in
memory (`_memory.py`). `_source.py` writes the library, with `_traversals.py` its
kernels; `_kernel.py` has the expressions in them, and what they are given. `_graph_arrays.py` keeps
what is precomputed per graph.
"""

from penstock.rgnn.backends.cpp._backend import CppBackend

__all__ = ["CppBackend"]
