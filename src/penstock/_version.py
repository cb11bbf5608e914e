"""The version of the package, for the files that it writes."""

__version__ = "0.1.0"
