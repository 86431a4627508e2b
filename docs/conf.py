"""Sphinx: `make docs` builds the site into build/site, and fails on a broken link or reference."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import typer
from docutils import nodes
from pydantic import BaseModel
from sphinx.application import Sphinx
from typer.cli import get_docs_for_click

import fedloom
from fedloom import methods
from fedloom.cli.app import app as commands
from fedloom.data.partitions import PARTITIONS
from fedloom.data.sources import load
from fedloom.data.split import split
from fedloom.data.stats import describe, plot_counts
from fedloom.experiment.config.run import CompareConfig, RunConfig
from fedloom.remote.federation import FederationConfig
from fedloom.remote.node.config import NodeConfig

project = "fedloom"
author = project_copyright = "The fedloom developers"
version = release = fedloom.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

suppress_warnings = ["ref.python"]  # two classes may have an attribute of one name
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = True
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False, "undoc-members": False}
napoleon_google_docstring = True
napoleon_use_ivar = True

smartquotes = False  # it would make one dash of the two of an option

html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme = "furo"
html_title = "fedloom"
html_theme_options = {"navigation_with_keys": True}


def method_pages(app: Sphinx) -> None:
    """Write `reference/methods.md`: every page of the registry, by family, with its settings."""
    lines = [
        "# Methods",
        "",
        "Every method by family: its paper, what differs from it, and its settings under `params`.",
        "",
    ]
    family = ""
    for page in (p for p in methods.pages() if hasattr(p, "METHODS")):
        if page.METHODS[0].family != family:
            family = page.METHODS[0].family
            lines += [f"## {family.capitalize()}", ""]
        names = ", ".join(f"`{m.name}`" for m in page.METHODS)
        lines += [f"### {names}", "", "```text", (page.__doc__ or "").strip(), "```", ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        config = page.METHODS[0].config
        for name, value in page.METHODS[0].configure().model_dump(mode="json").items():
            meaning = " ".join((config.model_fields[name].description or "").split()).replace(
                "|", "\\|"
            )
            lines.append(f"| `{name}` | `{json.dumps(value)}` | {meaning} |")
        lines.append("")
    Path(app.srcdir, "reference", "methods.md").write_text("\n".join(lines))


def sections(config: type[BaseModel]) -> list[type[BaseModel]]:
    """The config of a file, and those of all tables in it, each once."""
    found = [config]
    for one in found:  # grows
        for field in one.model_fields.values():
            parts = [field.annotation, *get_args(field.annotation)]
            parts += [part for outer in parts for part in get_args(outer)]
            found += [
                p
                for p in parts
                if isinstance(p, type) and issubclass(p, BaseModel) and p not in found
            ]
    return found


def settings_page(app: Sphinx) -> None:
    """Write `reference/settings.md`: every table of a run's, a node's and a coordinator's file."""
    lines = [
        "# Settings",
        "",
        "Every table of a config file. A method's own settings, under `params`, are in "
        "[](methods.md).",
        "",
    ]
    files = {
        "A run, and a comparison": (RunConfig, CompareConfig),
        "A node": (NodeConfig,),
        "The coordinator": (FederationConfig,),
    }
    for title, configs in files.items():
        lines += [f"## {title}", ""]
        for config in (one for each in configs for one in sections(each)):
            text = " ".join((config.__doc__ or "").split("\n\n")[0].split())
            lines += [text, "", "| setting | default | meaning |", "|---|---|---|"]
            for name, field in config.model_fields.items():
                default = (
                    None if field.is_required() else field.get_default(call_default_factory=True)
                )
                if isinstance(default, BaseModel):
                    continue  # a table, with a section of its own
                shown = (
                    "–"
                    if field.is_required()
                    else "none"
                    if default is None
                    else f"`{json.dumps(default, default=str)}`"
                )
                meaning = (
                    " ".join((field.description or "").split())
                    .replace("\\", "\\\\")
                    .replace("|", "\\|")
                )
                lines.append(f"| `{name}` | {shown} | {meaning} |")
            lines.append("")
    Path(app.srcdir, "reference", "settings.md").write_text("\n".join(lines))


def command_pages(app: Sphinx) -> None:
    """Write `reference/commands.md`: the help of every command that `fedloom --help` lists."""
    group = typer.main.get_command(commands)
    group.commands = {
        name: command for name, command in group.commands.items() if not command.hidden
    }
    context = typer.Context(group, info_name="fedloom")
    Path(app.srcdir, "reference", "commands.md").write_text(
        get_docs_for_click(obj=group, ctx=context, name="fedloom", title="Commands")
    )


def partition_pictures(app: Sphinx) -> None:
    """Draw `_partitions/NAME.svg`: how each partition gives the digits' rows to ten clients."""
    folder = Path(app.srcdir, "_partitions")
    folder.mkdir(exist_ok=True)
    digits = load("digits")
    names = [name for name, scheme in PARTITIONS.items() if not scheme.needs_groups]
    drawn = {name: split(digits, clients=10, seed=0, partition=name) for name in names}
    drawn["dirichlet-mild"] = split(digits, clients=10, seed=0, options={"alpha": 1.0})
    # invented: some write much more
    owners = np.random.default_rng(0).geometric(0.2, len(digits.y)).clip(1, 10) - 1
    written = replace(digits, groups=owners, owners=tuple(f"writer {k}" for k in range(10)))
    drawn["natural"] = split(written, clients=10, seed=0, partition="natural")
    for name, rows in drawn.items():
        plot_counts(describe(digits.y, rows.shards, digits.classes), folder / f"{name}.svg")


def as_restructured_text(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Docstrings use Markdown's code spans, and write |x| for a norm and **settings
    for keywords.
    """
    for n, line in enumerate(lines):
        spans = re.split(r"(`+[^`]+`+)", line)
        plain = [
            re.sub(r"\||(?<!\S)\*\*(?=\w)", lambda m: "".join("\\" + c for c in m[0]), s)
            for s in spans[::2]
        ]
        code = [f"``{s.strip('`')}``" for s in spans[1::2]]
        lines[n] = "".join(a + b for a, b in itertools.zip_longest(plain, code, fillvalue=""))


def dashes(app: Sphinx, tree: nodes.document) -> None:
    """Before the description of a parameter Sphinx writes two hyphens, of which its smart quotes
    would make a dash.
    """
    for text in [one for one in tree.findall(nodes.Text) if one == " -- "]:
        text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: Sphinx) -> None:
    """Generate what the registry knows before the pages are read."""
    app.connect("doctree-read", dashes)
    app.connect("builder-inited", method_pages)
    app.connect("builder-inited", command_pages)
    app.connect("builder-inited", settings_page)
    app.connect("builder-inited", partition_pictures)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
