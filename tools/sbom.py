"""Write a software bill of materials of a node's image: CycloneDX 1.6 as JSON.

    python tools/sbom.py > fedloom.cdx.json

It lists fedloom and every package of `examples/net/requirements.txt` with version, package URL and
SHA-256. The same files give the same bytes.
"""

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINE = re.compile(
    r"(?P<name>[a-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})"
)


def component(name: str, version: str, **more: Any) -> dict[str, Any]:
    """A package of the registry."""
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        **more,
    }


def bill(requirements: str, version: str) -> dict[str, Any]:
    """The bill of materials for a requirements file and fedloom's version.

    Raises:
        ValueError: a line is not `name==version --hash=sha256:…`.
    """
    packages = []
    for line in requirements.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"each line must be name==version --hash=sha256:HASH, not {line!r}")
        hashes = [{"alg": "SHA-256", "content": match["sha256"]}]
        packages.append(component(match["name"], match["version"], hashes=hashes))
    fedloom = component("fedloom", version, licenses=[{"license": {"id": "Apache-2.0"}}]) | {
        "type": "application"
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, version + requirements)}",
        "version": 1,
        "metadata": {"component": fedloom},
        "components": packages,
        "dependencies": [
            {"ref": fedloom["bom-ref"], "dependsOn": [package["bom-ref"] for package in packages]},
        ],
    }


def main() -> None:
    """Write the bill of this checkout to standard output."""
    version = re.search(
        r'__version__ = "(.+)"', (ROOT / "src" / "fedloom" / "_version.py").read_text()
    )
    assert version is not None
    requirements = (ROOT / "examples" / "net" / "requirements.txt").read_text(encoding="utf-8")
    json.dump(bill(requirements, version[1]), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
