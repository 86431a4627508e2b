"""Print constraints that pin each requirement of fedloom and its extras to the lowest version of pyproject.toml.

    python tools/lowest.py > lowest.txt
    python -m pip install -c lowest.txt -e ".[all,dev]" -e papers

What these packages require themselves is not pinned: pip installs the newest version that fits.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9.]+)(,<[0-9.]+)?")


def lowest(pyproject: str) -> dict[str, str]:
    """The lowest version of each requirement, by name; the build system's and fedloom's own extras are left out.

    Raises:
        ValueError: a requirement states no lowest version, or two state different ones.
    """
    project = tomllib.loads(pyproject)["project"]
    found: dict[str, str] = {}
    for requirement in [
        *project["dependencies"],
        *(one for some in project["optional-dependencies"].values() for one in some),
    ]:
        if requirement.startswith("fedloom"):
            continue
        match = BOUND.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} states no lowest version: write name>=version")
        name, version = match["name"], match["version"]
        if found.setdefault(name, version) != version:
            raise ValueError(f"{name} has two lowest versions, {found[name]} and {version}: write one")
    return found


def main() -> None:
    """Write the constraints to standard output."""
    for name, version in sorted(lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8")).items()):
        sys.stdout.write(f"{name}=={version}\n")


if __name__ == "__main__":
    main()
