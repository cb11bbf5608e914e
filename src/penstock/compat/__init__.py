"""Private names of torch, what differs between its versions, and packages that may be missing.

What a release of torch renames or removes is found and mended here; no other package names
`torch._C` or a private module of torch. `penstock env` tests that the names are there.
"""
