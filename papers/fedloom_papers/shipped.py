"""The shipped files of tables and figures. It imports nothing of fedloom, so that the command line
may list them.
"""

from importlib import resources

SYSTEMS = {
    "fedal": "FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial Learning",
    "afind": "Smart Sampling: Helping from Friendly Neighbors for Decentralized Federated Learning "
    "(AFIND+)",
    "evfl": "Proto-EVFL: Enhanced Vertical Federated Learning via Dual Prototype with Extremely "
    "Unaligned Data",
    "augfl": "AugFL: Augmenting Federated Learning with Pretrained Models",
}
"""The papers, by the first word of a file's name."""


def shipped() -> dict[str, str]:
    """The shipped files: text by name, in the order of the papers."""
    folder = resources.files("fedloom_papers") / "presets"
    texts = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return {name: texts[name] for name in sorted(texts, key=_order)}


def _order(name: str) -> tuple[int, int, int]:
    """Sort key: by paper, tables before figures, by number."""
    system, kind, number = name.split("-")
    return [*SYSTEMS].index(system), "table figure section".index(kind), int(number)
