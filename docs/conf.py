"""Sphinx configuration; nothing here needs the network."""

import re

import penstock

project = "Penstock"
author = "The Penstock authors"
copyright = "The Penstock authors"
version = release = penstock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Penstock {release}"

# Docstrings write code in single backticks, as Markdown does.
default_role = "literal"

myst_enable_extensions = ["deflist", "dollarmath", "amsmath"]

napoleon_use_ivar = True
napoleon_custom_sections = ["Source"]
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_typehints = "signature"
python_display_short_literal_types = True


def escape_stars(app, what, name, obj, options, lines):
    """A shape such as (num_rows, *row) or (*index.shape, *row) begins no emphasis."""
    lines[:] = [re.sub(r"(?<=[(\s])\*(?=[a-z][\w.]*[,)])", r"\\*", line) for line in lines]


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", escape_stars)
