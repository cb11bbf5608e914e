"""Costs of operators: counted operations and bytes, rooflines, workspace, measurements."""
