"""Private names of torch, and what differs between its versions, in one place.

What a release of torch renames or removes is found and mended here; no other package names
`torch._C` or a private module of torch. `penstock env` tests that the names are there.
"""
