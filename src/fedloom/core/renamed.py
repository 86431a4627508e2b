"""Settings and command options that were renamed, so that an old name gets an error with the new
one.
"""

from collections.abc import Mapping
from typing import Final

RENAMED: Final[Mapping[str, str]] = {
    "most_rounds": "max_rounds",
    "least_batch": "min_batch_size",
    "least_rows": "min_rows",
    "most_runs": "max_runs",
    "most_ids": "max_ids",
    "largest_mb": "max_message_mb",
    "set": "dataset",
    "least": "min",
    "most": "max",
    "measure": "metric",
    "measures": "metrics",
    "--gpus": "--gpus-per-run",
    "--log": "--log-format",
    "params.adaptor": "params.adapter (in fedproto-public params.feature_dim)",
    "params.bank_momentum": "params.crd_momentum",
    "params.centred": "params.centered",
    "params.corrupt": "params.corruption_rate",
    "params.delta": "params.delta_coding",
    "params.crd_width": "params.crd_dim",
    "params.embed_decay": "params.crd_weight_decay",
    "params.embed_lr": "params.crd_lr",
    "params.first_rounds": "params.stage1_rounds",
    "params.friends": "params.neighbour_selection",
    "params.kt_batch_size": "params.server_batch_size",
    "params.kt_batches": "params.server_batches",
    "params.ld": "params.lam",
    "params.memory": "params.loss_momentum",
    "params.negatives": "params.crd_negatives",
    "params.open_by": "params.explore_by",
    "params.open_every": "params.explore_every",
    "params.open_k": "params.explore_neighbours",
    "params.optimiser": "params.optimizer",
    "params.pretrain": "params.pretrain_rounds (in fccl params.pretrain_steps)",
    "params.principal": "params.pca_dim",
    "params.projection": "params.projection_dim",
    "params.robust": "aggregate.rule",
    "params.robust_f": "aggregate.f",
    "params.secure": "aggregate.secure",
    "params.selection": "params.transport",
    "params.sure": "params.confident_share",
    "params.top": "params.top_model (in pens params.top_m)",
    "params.when_empty": "params.empty_coreset",
    "params.width": "params.embedding_dim (in fedpcl params.projection_dim)",
    "data.server": "data.server_rows",
    "data.public": "data.public_rows",
    "data.form": "data.row_schema",
    "data.row_schema.columns.words": "data.row_schema.columns.categories",
    "columns.held": "columns.blocks_per_party",
    "columns.ratio": "columns.imbalance_ratio",
    "columns.majority": "columns.majority_classes",
    "columns.rare": "columns.rare_classes",
    "columns.own": "columns.private",
    "columns.size": "columns.image_size",
    "models.black_box.refit": "models.black_box.refit_every",
    "models.black_box.floor": "models.black_box.min_probability",
    "evaluate.attacks": "evaluate.attack_labels",
    "sweep.measure": "sweep.metric",
    "topology.number": "topology.groups",
}
"""The new name of each old one: of a setting by its whole path, such as `params.optimiser` or
`churn.away.client` (without the numbers of a list's entries), and of an option with its dashes,
such as `--set`.
"""

NO_RELAY: Final = (
    "nodes dial the coordinator and need no open port; set listen in federation.toml, and in "
    "node.toml "
    'callers = { coordinator = "host:port" }'
)
REMOVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("listen", "relay", "relay_name", "nodes.address", "--relay", "--behind", "--via-relay"),
        NO_RELAY,
    ),
    "--port": "give --address HOST:PORT of the coordinator",
    "sweep.confirm": "run the sweep's best.toml with further seeds, -s seed=10",
}
"""The replacement of each removed setting and option, as an instruction."""


def renamed(path: str) -> str | None:
    """The sentence for a renamed or removed setting or option, also inside other tables; None for
    any other.
    """
    parts = [part for part in path.split(".") if not part.isdigit()]
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if new := RENAMED.get(name):
            return f"{path} was renamed: write {new}."
        if instead := REMOVED.get(name):
            return f"{path} was removed: {instead}."
    return None
