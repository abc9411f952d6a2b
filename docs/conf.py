"""Sphinx configuration: MyST pages, furo, an API reference from docstrings, results pages from ``results/``."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))
sys.path.insert(0, str(DOCS.parent / "src"))

project = "splitfg"
author = "the splitfg developers"
project_copyright = "the splitfg developers, Apache-2.0"
release = version = metadata.version("splitfg")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "equations",
    "aliases",
    "mathml",
    "results_pages",
    "ranks_page",
    "adapters_page",
]
exclude_patterns = ["_build", "_parts", "notes"]
highlight_language = "none"  # of docstring equations; code blocks name theirs

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Params": "Params", "Inputs": "Inputs", "Target": "Target"}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!splitfg).*"),  # other projects' names stay plain text: the build needs no network
    (r"py:(class|obj)", r"splitfg.*\._.*"),  # private bases, helpers and type variables in signatures
    (r"py:class", r"splitfg_lab\..*"),  # the laboratory documents only what an experiment needs
]

html_theme = "furo"
html_title = "splitfg"
html_static_path = ["_static"]
html_css_files = ["splitfg.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ee", "color-brand-content": "#7fb2ee"},
}
