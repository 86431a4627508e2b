"""The registration of a method: its name, config, parties, round, and requirements on a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedloom.core.aggregate import Aggregator
from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError, MethodError, did_you_mean
from fedloom.core.local import LocalSetting
from fedloom.core.party import Party
from fedloom.core.problems import problems
from fedloom.core.task import TaskKind

Round: TypeAlias = Callable[..., Iterator[str]]
"""`round(fed, server, clients, cfg, t)`: one pass of the algorithm's outer loop. It yields the name
of each completed stage. Data that must survive until the next round belongs in a party's state.
"""
Setting: TypeAlias = Literal["horizontal", "vertical"]
"""Whether parties hold different rows with the same columns, or different columns of the same rows.
In a vertical setting the server is the active party, which has the labels; its own columns are
client 0, colocated with it.
"""
Need: TypeAlias = Literal[
    "public rows",
    "public rows at the server",
    "one network",
    "architecture groups",
    "same feature dim",
    "server rows",
    "pretrained server model",
    "pretrained encoder",
    "pooled rows",
    "raw rows",
    "no network",
    "secure sums",
]
NEEDS: Final[Mapping[Need, tuple[Setting, str]]] = {
    "public rows": ("horizontal", "Every client holds the same unlabeled rows."),
    "public rows at the server": ("horizontal", "The server holds these rows, too."),
    "one network": (
        "horizontal",
        "All parties have one architecture and equal initial weights, as methods that average "
        "weights need.",
    ),
    "architecture groups": (
        "horizontal",
        "Weights are averaged among clients of one architecture: these have equal initial "
        "weights, and the server knows each client's group and can build each group's network.",
    ),
    "same feature dim": (
        "horizontal",
        "The features of all networks have one dimension, though architectures may differ: see "
        "`MethodConfig.FEATURE_DIM`. Without models.pool, all have one architecture.",
    ),
    "server rows": ("horizontal", "The server has labeled rows of its own."),
    "pretrained server model": ("horizontal", "The server has a pretrained model."),
    "pretrained encoder": (
        "horizontal",
        "The server has a pretrained model, and clients build its architecture to receive its "
        "weights.",
    ),
    "raw rows": (
        "horizontal",
        "Rows are as they were read: no column is scaled, and missing numbers are NaN.",
    ),
    "secure sums": (
        "horizontal",
        "What a client sends is protected by its noise in a sum alone: aggregate.secure is true.",
    ),
    "pooled rows": (
        "vertical",
        "All rows of all parties count as aligned and labeled, as in a simulation.",
    ),
    "no network": (
        "vertical",
        "Parties have no network. Contributions to a prediction have as many numbers as each "
        "party has columns.",
    ),
}
"""Each need that a method may declare, with its setting and meaning."""


@dataclass(frozen=True)
class Guarantee:
    """The differential privacy of a method's messages of one kind.

    Attributes:
        message: the covered content, such as "weights".
        adjacency: the difference between adjacent data sets.
        delta: δ.
        note: the clients' note of a round in which they release it.
        epsilon: ε of a client, from the values of this note in all rounds that have one.
        by_server: whether the server adds the noise.
        planned: the values of this note that a party has after so many rounds at most, for an ε
            before the run; None if they are not known before.
    """

    message: str
    adjacency: str
    delta: float
    note: str
    epsilon: Callable[[Sequence[float]], float]
    by_server: bool = False
    planned: Callable[[Party[object], int], Sequence[float]] | None = None


class MethodConfig(BaseModel):
    """Base of every method's config: frozen, and unknown names raise an error. A page defines the
    properties anew of which its method differs.

    Example:
        >>> class Config(MethodConfig):
        ...     epochs: int = 1
        ...     batch_size: int = 32
        ...     clients_per_round: int | None = None
        ...
        ...     @property
        ...     def iterations_per_round(self):
        ...         return self.epochs
        >>> cfg = Config(epochs=2, clients_per_round=5)
        >>> cfg.iterations_per_round, cfg.local_steps_of(100), cfg.participants(10)
        (2, 8, 5)

        What a page defines anew if its method differs has these defaults:

        >>> cfg.min_rounds, cfg.rates, cfg.eval_modes, cfg.guarantees, cfg.promises, cfg.warnings
        (0, (), (), (), False, {})
        >>> cfg.exchanges, cfg.rows_add_up, cfg.sums_stand_alone
        (True, True, False)
        >>> cfg.server_reads_public, cfg.keeps_batch_statistics
        (False, False)
        >>> party = ClientContext(id=0)
        >>> cfg.calls_in_round(party), cfg.least_in_sum(party), cfg.refuses(party.aggregator), cfg.refuses_local("clip")
        ({}, 0, '', '')
        >>> cfg.stages_in_round(3), cfg.charges(None, range(3))
        (1, ())
        >>> cfg.in_trial(16, None), cfg.mixing(), cfg.mixes, cfg.means_of
        ({'epochs': 2, 'clients_per_round': None, 'batch_size': 16}, None, False, ())
        >>> cfg.predicts_alike, cfg.on_pooled_rows() == (cfg, False), cfg.introduction["epochs"]
        (True, True, '2')
        >>> "declare" in cfg.exact_introduction
        True
    """  # noqa: E501

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    FEATURE_DIM: ClassVar[str] = ""
    """The name of the setting, if any, that projects all clients' features to one dimension."""
    TRIAL: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Settings with which `fedloom trial` trains the method, beside the usual ones."""

    @model_validator(mode="before")
    @classmethod
    def _none(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read "none" as None in optional settings, as TOML has no null."""
        fields = cls.model_fields
        optional = {
            k for k in values if k in fields and type(None) in get_args(fields[k].annotation)
        }
        return {k: None if v == "none" and k in optional else v for k, v in values.items()}

    @property
    def iterations_per_round(self) -> int:
        """Local optimizer steps in a round, by which runs of different methods are compared."""
        return 1

    def local_steps_of(self, rows: int) -> int | None:
        """Local optimizer steps in a round of a client with `rows` own rows, by which comparisons
        check that methods train equally long; None for methods without such steps, such as trees.

        The default reads the settings `epochs` and `batch_size`; without them it is
        `iterations_per_round`.
        """
        epochs, size = getattr(self, "epochs", None), getattr(self, "batch_size", None)
        if not isinstance(epochs, int) or not isinstance(size, int) or size < 1:
            return self.iterations_per_round
        return epochs * max(1, -(-rows // size))

    @property
    def rates(self) -> tuple[str, ...]:
        """The settings with the learning rate of clients, which a comparison with `--tune` scales
        together; () for a method without a rate. The default is `lr`, or `rate` of boosted trees.
        """
        return tuple(name for name in ("lr", "rate") if name in type(self).model_fields)

    @classmethod
    def in_trial(cls, batch_size: int, rate: float | None) -> dict[str, Any]:
        """The settings with which `fedloom trial` trains this method, alike with others: with the
        usual names two epochs in batches of this size, all clients in each round, and this learning
        rate of SGD, if it trains so; and `TRIAL`.
        """
        fields = cls.model_fields
        usual = {"epochs": 2, "clients_per_round": None, "batch_size": batch_size}
        found = {name: usual[name] for name in usual if name in fields} | dict(cls.TRIAL)
        return found | ({"lr": rate} if rate and {"lr", "momentum"} <= fields.keys() else {})

    @classmethod
    def mixing(cls, kinds: Sequence[str] = (), weight: Any = None) -> dict[str, Any] | None:
        """The settings with which each owner mixes the joint model with models of these kinds that
        its own rows alone made, or gives all its own models this weight, one for each owner. None,
        as by default, for a method that cannot.
        """
        return None

    @property
    def mixes(self) -> bool:
        """Whether each owner mixes the joint model with one of its own rows alone, of the method's
        own kind, with these settings.
        """
        return False

    @property
    def means_of(self) -> tuple[str, ...]:
        """The kinds of models that owners make of their own rows alone, if all predict with the
        mean of all owners' models.
        """
        return ()

    @property
    def predicts_alike(self) -> bool:
        """Whether all clients without a network predict alike from what they export."""
        return True

    def on_pooled_rows(self) -> tuple[Self, bool] | None:
        """The settings that give a pooled method's model on the rows of all owners at once, and
        whether these rows have their owner as a last column; None if there are none.
        """
        return self, False

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """Further ways to evaluate a party, such as after fine-tuning: see `Party.prepare`."""
        return ()

    @property
    def min_rounds(self) -> int:
        """Minimum useful number of rounds, such as one more than the preparatory rounds."""
        return 0

    def calls_in_round(self, context: ClientContext) -> Mapping[str, int]:
        """How often a round calls a method of the party with this context, for those that it calls
        more than once. A node refuses further calls; it answers a peer's question once for each
        peer.
        """
        return {}

    def stages_in_round(self, t: int) -> int:
        """How many stages round t yields in which all parties reply. After each of them the run may
        be evaluated, which a node counts (`looks`).
        """
        return 1

    def least_in_sum(self, context: ClientContext) -> int:
        """The fewest parties whose replies a secure sum must have with these settings, at a party
        with this context; 0 for those that every sum needs. A node signs no smaller sum. The
        default is all, if clients add noise: a page whose noise hides a client's reply by itself,
        or that knows how many shares of noise are enough, says so.
        """
        return context.parties if self.promises else 0

    @property
    def introduction(self) -> Mapping[str, str] | None:
        """What the replies of `Party.INTRODUCES` depend on with these settings, beside the own rows
        and the public ones; None if there are no such replies, or their ε covers them. The default
        is all settings.
        """
        return {name: str(value) for name, value in self}

    @property
    def exact_introduction(self) -> str:
        """Why the replies of `Party.INTRODUCES` tell exact distances with these settings, and what
        to set instead; "" if they do not. A node refuses them unless its owner has set
        `exact_distances`.
        """
        return (
            "its page may send exact distances to public rows: declare there INTRODUCES = () if it "
            "sends none, or the config's exact_introduction, or set exact_distances in node.toml"
        )

    @property
    def sums_stand_alone(self) -> bool:
        """Whether a reply that enters a secure sum depends on rows and arguments alone, and not on
        the arguments of sums in earlier rounds. If it does not, nodes that were asked differently
        in a sum, or missed one, have no sum together until all go back to a checkpoint.
        """
        return False

    @property
    def rows_add_up(self) -> bool:
        """Whether a page with `Party.ROWS` treats a row alike at each party, with
        these settings.
        """
        return True

    @property
    def exchanges(self) -> bool:
        """Whether clients exchange messages with these settings."""
        return True

    @property
    def server_reads_public(self) -> bool:
        """Whether the server needs the public rows with these settings, though not for the method
        as such.
        """
        return False

    @property
    def keeps_batch_statistics(self) -> bool:
        """Whether each client predicts with its own BatchNorm statistics (`batchnorm = "own"`),
        which a client that never trains does not have.
        """
        return getattr(self, "batchnorm", "") == "own"

    def participants(self, clients: int) -> int:
        """The number of participants of a round: `clients_per_round` if the config has it, else all
        clients.
        """
        return min(clients, getattr(self, "clients_per_round", None) or clients)

    def refuses(self, aggregator: Aggregator) -> str:
        """Why a run with these settings cannot take its means this way, and what to set instead; ""
        if it can.
        """
        return ""

    def refuses_local(self, setting: LocalSetting) -> str:
        """Why a run with these settings cannot take this setting of `[local]`, as a clause; "" if
        it can.
        """
        return ""

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """The differential privacy of the messages with these settings."""
        return ()

    def charges(self, party: Any, rounds: Sequence[int]) -> Sequence[tuple[float, ...]]:
        """The releases that a party charges to the budget of its rows in these rounds at most, each
        as `ClientContext.privacy_budget` gets it.
        """
        return ()

    @property
    def promises(self) -> bool:
        """Whether messages of clients have a guarantee that the clients' own noise gives."""
        return any(not one.by_server for one in self.guarantees)

    @property
    def warnings(self) -> Mapping[str, str]:
        """Warnings by the name of a note, logged while a party's note of that name is above 0."""
        return {}


@dataclass(frozen=True)
class Method:
    """A registered method. A page may register several.

    Example:
        >>> from fedloom.methods import named
        >>> fedavg = named("fedavg")
        >>> fedavg.configure(params={"epochs": 2}).epochs, fedavg.needs
        (2, ('one network',))
        >>> named("fedavg-ft").main_mode(named("fedavg-ft").configure())
        'tuned'
        >>> fedavg.party_at(ClientContext(id=0)).__name__
        'FedAvgClient'
        >>> fedavg.without_network, fedavg.reads_public
        (False, False)

    Attributes:
        name: its name on the command line.
        title: one line for lists.
        paper: the citation.
        family: the folder of the page, by communication pattern.
        config: the config class; its defaults, with `fixed` over them, are the `recommended`
            preset.
        round: one round.
        client: the party class of the clients.
        server: the party class that runs the round, or None without a server.
        black_box: the party class of clients with a black box instead of a network; None if the
            method does not support them.
        fixed: config values that define this method and override presets.
        presets: further named sets of config values.
        setting: horizontal or vertical.
        tasks: what it can predict. A method that takes losses and predictions from
            `self.context.task`, or handles labels (n,) float32 by itself, declares `EVERY_TASK`.
        only_classes: for another method why it cannot predict a number, as a clause.
        local: the settings of `[local]` that it takes. A method whose clients take their steps by
            `self.minimize`, `self.train` or `self.descend` declares `LOCAL_STEPS`; if they take the
            loss of their labels from `self.context.task`, too, `EVERY_LOCAL`.
        no_local: why it does not take the others, as a clause.
        needs: requirements on a run, from `NEEDS`.
        min_clients: the least number of participants of a round.
        contributors: in a vertical setting, the clients whose contributions predict jointly; () for
            all.
        any_contributor: in a vertical setting, whether the active party predicts from any of them,
            at least one.
        linear: whether it is of use with a network that has no hidden layer.
        pooled: whether the model has the same bits however rows are split over owners, so that a
            trial may train it on all rows at once. What clients export is then the same for all,
            and they predict from it and their own rows.
        at_once: for a pooled method, trains its one client on all rows in so many rounds, faster
            than by rounds and to rounding; None for by rounds.
        every_row: whether it describes rows, as a regression does: it uses all of them unless the
            run asks for test rows.
        extra_stages: stages that each round yields beyond those of its config.
        quadratic: whether the time of a round grows with the square of the number of clients.
        trial_rank: its place among the methods that `fedloom trial` tries by default, from 1; 0 if
            it tries the method only by name. At equal scores the lower rank wins. In a vertical
            setting the method that a trial of columns stands for.
        trial_alone: whether it is what `fedloom trial` compares networks with: training alone with
            the local training of the others.
        trial_variants: further settings that `fedloom trial` tries, by their name in its report.
    """

    name: str
    title: str
    paper: str
    family: str
    config: type[MethodConfig]
    round: Round
    client: type[Party[MethodConfig]]
    server: type[Party[MethodConfig]] | None = None
    black_box: type[Party[MethodConfig]] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    setting: Setting = "horizontal"
    tasks: tuple[TaskKind, ...] = ("classes",)
    only_classes: str = ""
    local: tuple[LocalSetting, ...] = ()
    no_local: str = ""
    needs: tuple[Need, ...] = ()
    min_clients: int = 1
    contributors: tuple[int, ...] = ()
    any_contributor: bool = False
    linear: bool = False
    pooled: bool = False
    at_once: Callable[..., None] | None = None
    every_row: bool = False
    quadratic: bool = False
    extra_stages: int = 0
    trial_rank: int = 0
    trial_alone: bool = False
    trial_variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in NEEDS:
                raise MethodError(
                    f"method {self.name} has an unknown need {need!r}.{did_you_mean(need, NEEDS)}"
                )
            if (setting := NEEDS[need][0]) != self.setting:
                raise MethodError(
                    f"method {self.name} is {self.setting}; only {setting} methods may need "
                    f"{need!r}"
                )

    @property
    def reads_public(self) -> bool:
        """Whether it learns from public rows, so that a run sets some aside."""
        return any("public" in need for need in self.needs)

    @property
    def without_network(self) -> bool:
        """Whether its parties have models of their own in place of a network. They compute on the
        CPU.
        """
        return not {"raw rows", "no network"}.isdisjoint(self.needs)

    def main_mode(self, cfg: MethodConfig) -> str:
        """The evaluation mode of the main metric; "" for the model as it is."""
        return next(iter(cfg.eval_modes), "") if self.setting == "horizontal" else ""

    def party_at(self, context: ClientContext) -> type[Party[MethodConfig]]:
        """The party class of the client with this context."""
        return (
            self.black_box
            if self.black_box is not None and context.black_box is not None
            else self.client
        )

    def configure(
        self, preset: str = "recommended", params: Mapping[str, Any] | None = None
    ) -> Any:
        """The config of a preset with `params` over it.

        Raises:
            ConfigError: an unknown preset or parameter, or a value out of range. All problems are
                reported together.
        """
        known = {"recommended": {}, **self.presets}
        if preset not in known:
            raise ConfigError(f"{self.name} has no preset {preset!r}.{did_you_mean(preset, known)}")
        values = {**known[preset], **self.fixed, **(params or {})}
        try:
            return self.config(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(problems(error, self.config, "params"))) from None
