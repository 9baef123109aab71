"""How Sphinx builds the book from the pages that docs/book.py gathers: ``make book``."""

from docutils import nodes
from docutils.utils.math import latex2mathml

project, author, copyright = "labkit", "labkit contributors", "labkit contributors, BSD-3-Clause"
extensions = ["myst_nb"]
exclude_patterns = ["files"]
# The solved notebooks hold their outputs; nothing is executed.
nb_execution_mode = "off"
nb_merge_streams = True
nb_number_source_lines = False
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_dmath_allow_space = False
myst_dmath_allow_digits = False
myst_heading_anchors = 4
add_module_names = False
toc_object_entries = False

html_theme = "furo"
html_title = "labkit"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["messages.js", "regions.js", "explorers.js"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
# A page that was opened from a folder cannot fetch the others, from which summaries are made.
html_show_search_summary = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5394",
        "color-brand-content": "#0b5394",
        "color-foreground-muted": "#4d5461",
        "color-foreground-border": "#6b7280",
    },
    "dark_css_variables": {
        "color-brand-primary": "#8ab8e6",
        "color-brand-content": "#8ab8e6",
        "color-foreground-muted": "#b4b9c2",
        "color-foreground-border": "#9aa0aa",
    },
    "navigation_with_keys": False,
}


def show_inline_formula(translator, node):
    """Write a formula of a line as MathML, which browsers draw by themselves."""
    translator.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def show_formula(translator, node):
    """Write a formula of its own as MathML."""
    formula = latex2mathml.tex2mathml(node.astext(), as_block=True)
    translator.body.append(
        f'<div class="math" tabindex="0" role="group" aria-label="formula">{formula}</div>\n'
    )
    raise nodes.SkipNode


def level_captions(app, pagename, templatename, context, doctree):
    """Give the sidebar's captions the level that a heading has to have for who hears the page."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


def setup(app):
    """Register the renderer of formulas; MathJax would have to come from somewhere."""
    app.connect("html-page-context", level_captions, priority=900)  # after the theme
    app.add_html_math_renderer("mathml", (show_inline_formula, None), (show_formula, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
