"""What a release ships besides the package: pinned requirements of a node's image, and its bill of
materials.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from fedloom import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def requirements() -> dict[str, str]:
    """The versions by name."""
    lines = (ROOT / "examples/net/requirements.txt").read_text().splitlines()
    pins = [line.partition(" --hash=sha256:") for line in lines if not line.startswith("#")]
    assert all(len(sha256) == 64 for _, _, sha256 in pins)
    return dict(pin.split("==") for pin, _, _ in pins)


def test_the_image_has_every_requirement_in_the_tested_version() -> None:
    pinned = requirements()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["net"]]
    assert {name.partition(">=")[0] for name in needed} <= pinned.keys()
    tested = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert {
        name: version.partition("+")[0] for name, version in pinned.items()
    }.items() <= tested.items()
    container = (ROOT / "examples/net/Containerfile").read_text()
    assert (
        "--require-hashes" in container
        and container.count("pip install") == container.count("--no-deps") == 2
    )


def test_the_bill_of_materials_lists_each_package_with_its_hash() -> None:
    made = [
        subprocess.run([sys.executable, ROOT / "tools/sbom.py"], capture_output=True, check=True)
        for _ in "ab"
    ]
    assert made[0].stdout == made[1].stdout
    bill = json.loads(made[0].stdout)
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "1.6",
        "fedloom",
    )
    assert {c["name"]: c["version"] for c in bill["components"]} == requirements()
    assert all(
        c["hashes"][0]["alg"] == "SHA-256" and c["purl"].startswith("pkg:pypi/")
        for c in bill["components"]
    )
    assert [*bill["dependencies"][0]["dependsOn"]] == [c["bom-ref"] for c in bill["components"]]


def test_a_package_without_a_hash_is_refused() -> None:
    import sbom  # type: ignore[import-not-found]

    with pytest.raises(ValueError, match="HASH"):
        sbom.bill("torch==2.13.0\n", "0.2")


def test_the_recipe_for_conda_has_the_version_the_requirements_and_the_command() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    parts = [one.partition(">=") for one in project["dependencies"]]
    needed = {f"{named.get(name, name)} >={version}" for name, _, version in parts}
    needed.add(f"python {project['requires-python']}")
    assert set(recipe["requirements"]["run"]) == needed
    assert recipe["context"]["version"] == __version__
    commands = [f"{name} = {where}" for name, where in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == commands


def test_the_hosted_documentation_is_built_as_make_docs_builds_it() -> None:
    hosted = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (install,) = hosted["python"]["install"]
    assert set(install["extra_requirements"]) <= extras.keys()
    # conf.py reads the settings of nodes
    assert {"docs", "net"} <= set(install["extra_requirements"])
    assert (ROOT / hosted["sphinx"]["configuration"]).is_file() and hosted["sphinx"][
        "fail_on_warning"
    ]
    assert " -W " in (ROOT / "Makefile").read_text()
