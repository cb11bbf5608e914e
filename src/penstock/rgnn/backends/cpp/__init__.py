"""Programs as generated C++, for the CPU.

Files, in the order in which to read them: `_backend.py` calls a library and places values in
memory (`_arena.py`, `_buffers.py`). `_source.py` writes the library: `_products.py` and
`_traversals.py` have its kernels, `_rowwise.py` the expressions in them, `_kernel.py` what they are
given. `_graph_arrays.py` keeps what is precomputed per graph.
"""

from penstock.rgnn.backends.cpp._backend import CppBackend

__all__ = ["CppBackend"]
