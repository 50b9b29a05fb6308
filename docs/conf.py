"""How the documentation is built: ``make docs`` writes it to site/, and no page of it asks the network for anything."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from pygments.lexers import BashLexer
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))

project = "eigengrain"
author = "the authors of eigengrain"
version = release = installed_version("eigengrain")
language = "en_GB"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    # MathJax from a local copy in place of a server's
    "sphinx-mathjax-offline",
    "command_reference",
    "docstring_text",
    "measured_tables",
    "short_references",
]
exclude_patterns = ["README.md", "figures/README.md", "extensions"]

html_theme = "furo"
html_title = f"eigengrain {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3
# $ is mathematics in text; in the rest of a page it may be a shell's
myst_dmath_double_inline = True

# code has a button that copies it, outputs of notebooks have none
copybutton_selector = "div:not(.output) > div.highlight pre"

# outputs are in the notebooks; docs/run_notebooks.py makes them anew
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# what torch says about every forward is of no use here
autodoc_inherit_docstrings = False
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 96
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape"]
napoleon_use_rtype = False
napoleon_use_ivar = True


def setup(app: Sphinx) -> None:
    # commands stand without a prompt, to be copied; the lexer of consoles would take them for output
    app.add_lexer("console", BashLexer)
