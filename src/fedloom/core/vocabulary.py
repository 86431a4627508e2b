"""Words of other libraries and of papers for fedloom's settings, so that a hint finds what was
meant.
"""

import difflib
from collections.abc import Collection
from typing import Final

SAME: Final[dict[str, tuple[str, ...]]] = {
    "learning_rate": ("lr",),
    "eta": ("lr",),
    "step_size": ("lr", "alpha"),
    "epochs": ("epochs", "tau", "iterations"),
    "local_epochs": ("epochs", "tau"),
    "local_steps": ("tau", "local_steps", "epochs"),
    "num_epochs": ("epochs", "tau"),
    "n_epochs": ("epochs", "tau"),
    "batch": ("batch_size",),
    "bs": ("batch_size",),
    "minibatch_size": ("batch_size",),
    "temperature": ("kd_temperature", "temperature"),
    "distillation_weight": ("kd",),
    "proximal_mu": ("mu", "lam"),
    "lambda": ("lam",),
    "fraction_fit": ("clients_per_round",),
    "participation": ("clients_per_round",),
    "num_clients": ("clients",),
    "n_clients": ("clients",),
    "clients_number": ("clients",),
    "num_parties": ("clients",),
    "nodes": ("clients",),
    "num_rounds": ("rounds",),
    "n_rounds": ("rounds",),
    "global_rounds": ("rounds",),
    "communication_rounds": ("rounds",),
    "random_state": ("seed",),
    "random_seed": ("seed",),
    "algorithm": ("method",),
    "algo": ("method",),
    "strategy": ("method",),
    "dataset": ("data", "name"),
    "path": ("name",),
    "file": ("name",),
    "model": ("models", "pool"),
    "network": ("models", "pool"),
    "net": ("models", "pool"),
    "architecture": ("models", "pool"),
    "target": ("label",),
    "labels": ("label",),
    "label_column": ("label",),
    "groups": ("group",),
    "owner": ("group",),
    "owners": ("group",),
    "site": ("group",),
    "exclude": ("drop",),
    "features": ("keep",),
    "imputation": ("missing",),
    "test_size": ("test_fraction", "test"),
    "test_split": ("test_fraction", "test"),
    "val_size": ("validation",),
    "validation_split": ("validation",),
    "holdout": ("unseen",),
    "dirichlet_alpha": ("alpha",),
    "concentration": ("alpha",),
    "beta": ("alpha",),
    "shards": ("classes", "pathological"),
    "classes_per_client": ("classes",),
    "gpu": ("device",),
    "cuda": ("device",),
    "use_cuda": ("device",),
    "accelerator": ("device",),
    "n_jobs": ("workers",),
    "num_workers": ("workers",),
    "backend": ("engine", "name"),
    "output": ("out",),
    "output_dir": ("out",),
    "save_dir": ("out",),
    "folder": ("out",),
    "callbacks": ("progress",),
    "noniid": ("dirichlet",),
    "non-iid": ("dirichlet",),
    "non_iid": ("dirichlet",),
    "niid": ("dirichlet",),
    "heterogeneous": ("dirichlet",),
    "label_skew": ("dirichlet",),
    "skewed": ("dirichlet",),
    "shard": ("pathological",),
    "random": ("iid",),
    "uniform": ("iid",),
    "homogeneous": ("iid",),
    "by_owner": ("natural",),
    "splitnn": ("split",),
    "split-learning": ("split",),
    "vfl": ("split",),
    "standalone": ("local",),
    "centralized": ("pooled",),
    "xgboost": ("fedboost", "boosting"),
    "lightgbm": ("fedboost", "boosting"),
    "randomforest": ("fedforest", "forest"),
    "random_forest": ("fedforest", "forest"),
}
"""A word of another library -> fedloom's words for the same, the likeliest first."""


def meant(word: str, known: Collection[str]) -> str:
    """The known name that a word of another library, or a misspelling of one, stands for; "" if
    there is none.
    """
    plain = word.lower().replace(" ", "_").replace("-", "_")
    for spelled in (word.lower(), plain, *difflib.get_close_matches(plain, SAME, n=1, cutoff=0.8)):
        for name in SAME.get(spelled, ()):
            if name in known:
                return name
    return ""
