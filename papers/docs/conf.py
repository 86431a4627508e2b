"""Sphinx: `make docs` builds the site of the papers' results into build/site/papers."""

project = "fedloom-papers"
author = project_copyright = "The fedloom developers"
extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = True
smartquotes = False  # it would make one dash of the two of an option
html_static_path = ["../../docs/_static"]
html_css_files = ["site.css"]
html_theme = "furo"
html_title = "The papers' tables, with fedloom"
html_theme_options = {"navigation_with_keys": True}
