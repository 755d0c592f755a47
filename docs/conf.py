"""Settings of the documentation site."""

import inspect
import sys
from pathlib import Path
from typing import Any

from sphinx.util.inspect import stringify_signature

from wsam import __version__
from wsam._core.validation import CheckedArguments

sys.path.insert(0, str(Path(__file__).parent))
from api_page import for_site

project = "wsam"
author = "the wsam authors"
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "sg_execution_times.rst", "gallery/sg_execution_times.rst"]
html_theme = "furo"
html_title = f"wsam {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
# A button copies the commands of a block, without prompts and without their output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "write_computation_times": False,
    "show_memory": False,
    "min_reported_time": 1e9,
    "download_all_examples": False,
    "show_signature": False,
}


def setup(app: Any) -> None:
    """Show autodoc's directives in place of the generated text of the reference."""

    def replace(_app: Any, _page: str, source: list[str]) -> None:
        source[0] = for_site(source[0])

    def signature(_app: Any, what: str, _name: str, value: Any, *_rest: Any) -> Any:
        # Autodoc would show the signature of `__new__`, which takes any argument and suggests names.
        if what != "class" or not issubclass(value, CheckedArguments):
            return None
        shown = stringify_signature(inspect.signature(value), show_annotation=False)
        return shown, None

    app.connect("source-read", replace)
    app.connect("autodoc-process-signature", signature)
