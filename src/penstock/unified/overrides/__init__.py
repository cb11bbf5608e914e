"""Functions of PyTorch that run differently on a table."""
