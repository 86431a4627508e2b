"""Exchange: each owner's models are sent once, and all owners predict with their mean.

Papers: L. Breiman, "Bagging Predictors", Machine Learning 24, 1996, for the mean of models of parts
of the rows; N. Guha, A. Talwalkar, V. Smith, "One-Shot Federated Learning", arXiv 1902.11175, for
the mean of owners' models.

    round     owners: fit `kinds` of models to their own rows, and send them as arrays
              server: sends all models to all owners
    predict   the mean over kinds and owners; with `own`, mixed with models of the owner's own rows by `own_weight`

One message each way, however many rows there are. Nothing is agreed beside the names of columns and
words: each owner scales columns by its own rows.

What the others see: a linear model tells sums of an owner's rows. A forest's leaves are small, so
that splits and leaves tell values and labels of single rows: send forests to partners only whom you
would show rows.
"""  # noqa: E501

from collections.abc import Iterator, Sequence
from typing import Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import (
    EVERY_TASK,
    Aggregator,
    Federation,
    MessageError,
    Method,
    MethodConfig,
    Party,
)
from fedloom.methods.tables import own_models
from fedloom.methods.tables.steps import OwnModels, refusal


class ExchangeConfig(OwnModels, MethodConfig):
    """One round is all."""

    kinds: tuple[Literal["linear", "forest"], ...] = Field(("linear", "forest"), min_length=1)
    """The models that owners send."""

    @property
    def iterations_per_round(self) -> int:
        """One round unless the run says otherwise."""
        return 200

    @property
    def means_of(self) -> tuple[str, ...]:
        """See `MethodConfig.means_of`."""
        return self.kinds

    @property
    def predicts_alike(self) -> bool:
        """Each owner scales rows by its own."""
        return False

    def local_steps_of(self, rows: int) -> None:
        """None: models are fitted at once."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`."""
        return (
            refusal(aggregator)
            and "its models are sent one by one: leave aggregate.rule and aggregate.noise out"
        )


@final
class ExchangeClient(Party[ExchangeConfig]):
    """An owner of rows. `models` are those of all owners."""

    ROLE = "client"
    STATE = EXPORT = ("models",)
    CALLS = ("give", "take")
    TELLS = (("passed on", ("give",)), ("by class", ("give",)))

    def setup(self) -> None:
        """No models."""
        self.models: list[dict[str, Any]] = []

    def give(self) -> dict[str, Any]:
        """The models of the party's own rows, as arrays."""
        K = own_models.width(self)
        return {
            kind: own_models.sent(kind, own_models.fitted(self, kind), K) for kind in self.cfg.kinds
        }

    def take(self, *, models: Any) -> None:
        """Keep the models of all owners.

        Raises:
            MessageError: one cannot predict.
        """
        for one in models:
            check(self, one)
        self.models = list(models)

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K), or standardized numbers (n, 1), of rows x (n, ...); 0 before the models
        have come.
        """
        K = own_models.width(self)
        if not self.models or not len(x):
            return torch.zeros(len(x), K)
        found = torch.from_numpy(
            own_models.mean_of(self.cfg.kinds, self.models, own_models.columns(self, x))
        )
        return own_models.mixed(
            self, found if K == 1 else torch.log(found.clamp(min=own_models.LEAST)), x
        ).float()


@final
class ExchangeServer(Party[ExchangeConfig]):
    """The server, which passes models on."""

    ROLE = "server"

    def setup(self) -> None:
        """Nothing is kept."""


def check(party: Party[ExchangeConfig], models: Any) -> None:
    """Raise MessageError if models cannot predict."""
    for kind in party.cfg.kinds:
        if problem := own_models.problem(kind, models[kind], own_models.count(party)):
            raise MessageError(f"{kind}: {problem}")


def round(
    fed: Federation, server: ExchangeServer, clients: Sequence[int], cfg: ExchangeConfig, t: int
) -> Iterator[str]:
    """All models, once."""
    p, K = own_models.count(server), own_models.width(server)
    expect: dict[str, Any] = {kind: own_models.template(kind, p, K) for kind in cfg.kinds}
    models = fed.call(clients, "give", expect=expect, check=lambda i, one: check(server, one))
    if models:
        fed.call(clients, "take", shared={"models": list(models.values())}, expect=None)
    yield "round"


METHODS = (
    Method(
        name="exchange",
        title="Each owner's linear model and forest, sent once; all predict with their mean",
        paper="N. Guha, A. Talwalkar, V. Smith: One-Shot Federated Learning, 2019",
        family="tables",
        config=ExchangeConfig,
        tasks=EVERY_TASK,
        no_local="its models are fitted at once",
        round=round,
        client=ExchangeClient,
        server=ExchangeServer,
        needs=("raw rows",),
        trial_rank=4,
        trial_variants={"linear": {"kinds": ("linear",)}, "forest": {"kinds": ("forest",)}},
    ),
)
