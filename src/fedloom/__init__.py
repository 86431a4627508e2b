"""fedloom: federated learning beyond weight averaging.

The public names, all of them:

    run, compare, read              run a method: by name, file or config; on named data or on your own objects
    Experiment, RunConfig           configs
    Result, CompareResult, TrialResult, OwnerCard, Stats    what run, compare, trial and stats return
    RunSettings                     the typed keywords of run and compare
    Method, MethodConfig, Party     the parts of a method page
    Federation, ClientContext       the primitives of a round, and a party's private resources
    FederatedClassifier, FederatedRegressor    scikit-learn estimators that train by a federation
    trial                           whether owners of data gain by federating
    stats                           Table 1 of several owners' rows
    load, split                     data sets, and their rows by client
    FedloomError                    base of every error raised on purpose

Names are imported when they are first used, so that `import fedloom` costs nothing.
"""  # noqa: E501

import importlib
from typing import TYPE_CHECKING, Any

from fedloom._version import __version__

if TYPE_CHECKING:
    from fedloom.api import (
        CompareResult,
        Experiment,
        Result,
        RunConfig,
        RunSettings,
        compare,
        read,
        run,
    )
    from fedloom.core.context import ClientContext
    from fedloom.core.errors import FedloomError
    from fedloom.core.federation import Federation
    from fedloom.core.method import Method, MethodConfig
    from fedloom.core.party import Party
    from fedloom.data.sources import load
    from fedloom.data.split import split
    from fedloom.estimators import FederatedClassifier, FederatedRegressor
    from fedloom.experiment.stats import Stats, stats
    from fedloom.experiment.trial import trial
    from fedloom.experiment.trial.result import OwnerCard, TrialResult

_HOMES = {
    "fedloom.data.sources": ("load",),
    "fedloom.data.split": ("split",),
    "fedloom.experiment.stats": ("Stats", "stats"),
    "fedloom.experiment.trial": ("trial",),
    "fedloom.experiment.trial.result": ("OwnerCard", "TrialResult"),
    "fedloom.estimators": ("FederatedClassifier", "FederatedRegressor"),
    "fedloom.core.errors": ("FedloomError",),
    "fedloom.api": (
        "CompareResult",
        "Experiment",
        "Result",
        "RunConfig",
        "RunSettings",
        "compare",
        "read",
        "run",
    ),
    "fedloom.core.federation": ("Federation",),
    "fedloom.core.method": ("Method", "MethodConfig"),
    "fedloom.core.party": ("Party",),
    "fedloom.core.context": ("ClientContext",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ClientContext",
    "CompareResult",
    "Experiment",
    "FederatedClassifier",
    "FederatedRegressor",
    "Federation",
    "FedloomError",
    "Method",
    "MethodConfig",
    "OwnerCard",
    "Party",
    "Result",
    "RunConfig",
    "RunSettings",
    "Stats",
    "TrialResult",
    "__version__",
    "compare",
    "load",
    "read",
    "run",
    "split",
    "stats",
    "trial",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
