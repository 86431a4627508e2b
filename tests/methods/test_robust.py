"""Robust rules on every page that averages weights or answers: what a liar, or too many of them,
can move.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import methods
from fedloom.core.aggregate import MEAN, Aggregator, Kind
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.engines import LocalEngine
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.methods.vertical import fedhssl
from fedloom.models.parts import Classifier
from fedloom.protect.aggregators import Robust
from tests.methods.columns import FEATURES, WIDTH, Columns
from tests.toy import Toy, common, contexts

SERVERS: dict[str, dict[str, Any]] = {
    "fedavg": {"batch_size": 16, "epochs": 1},
    "per-fedavg": {"hvp": "first_order"},
    "fedcp": {"batch_size": 40},
    "fedavg-adam": {"tau": 2},
    "feddf": {"tau": 2, "server_steps": 2},
    "feddf-al": {"tau": 1, "adv": 0.0},
    "augfl": {"lam": 0.0},
    "fedproto": {"batch_size": 40},
    "fedal": {"tau": 1, "adv": 0.0},
    "fedmd": {},
    "fd": {"tau": 4},
    "fccl": {"tau": 1, "pretrain_steps": 2},
    "fccl-plus": {"tau": 1},
    "fedproto-public": {},
}
"""The methods in which a server averages, with settings for a short run."""
PEERS: dict[str, dict[str, Any]] = {
    "gossip": {},
    "pens": {"top_m": 6},
    "ditto": {},
    "ditto-afind": {"aggregation": "uniform", "epochs": 2},
    "afind": {"epochs": 2},
    "afind cheap": {"mode": "cheap"},
    "cobo": {},
}
"""The methods in which each peer averages."""
RULES = ("median", "trimmed", "krum", "multikrum", "clip", "centered")
SUMS = {
    "fedsgd-dp",
    "fedboost",
    "fedboost-mix",
    "fedforest",
    "fedforest-mix",
    "fedextra",
    "fedglm",
    "fedcox",
    "stats",
}
"""Methods whose replies are integers that are added exactly, and refuse a rule."""
NOTHING_TO_COMBINE = {"local", "alone", "kd-only", "server-ce-only", "local-only"}
"""Configurations of pages with rules in which nothing is averaged."""


def by(rule: Any, f: int = 1) -> Aggregator:
    """The aggregator of this rule."""
    return MEAN if rule == "mean" else Robust(rule, f)


def toy(
    name: str, rule: str, liars: tuple[int, ...] = (), n: int = 7, f: int = 1, **params: Any
) -> Toy:
    """Parties with one network and like data, of which some multiply all that they send by a
    million.
    """
    places = contexts(n, make=common)
    server = {"public": places[0].public, "groups": [0] * n, "group_networks": [common]}
    faults = Faults(liars=liars, lie="huge")
    settings: dict[str, Any] = {**{**SERVERS, **PEERS}[name], **params, "means": by(rule, f)}
    method = methods.find(name.split()[0])
    return Toy(method, client_contexts=places, server_side=server, faults=faults, **settings)


def told(toy: Toy) -> dict[str, Tensor]:
    """All that the server tells client 0 in two rounds."""
    found: dict[str, Tensor] = {}
    call, count = toy.engine.call, 0

    def recorded(parties: Any, method: str, shared: Any, each: Any, number: Any) -> Any:
        nonlocal count
        count += 1
        content = {**shared, **(each or {}).get(0, {})}
        floats = {
            k: x for k, x in leaves(content) if isinstance(x, Tensor) and x.is_floating_point()
        }
        found.update({f"{count} {method} {k}": x.detach().clone() for k, x in floats.items()})
        return call(parties, method, shared, each, number)

    toy.engine.call = recorded
    toy.run(2)
    return found


def kept(toy: Toy) -> dict[str, Tensor]:
    """The weights of the peers that do not lie, after two rounds."""
    assert toy.engine._faults is not None
    liars = toy.engine._faults.liars
    return {k: v for k, v in toy.run(2).tensors().items() if int(k.split(".")[0]) not in liars}


def largest(found: dict[str, Tensor]) -> float:
    return max(float(x.abs().max()) for x in found.values() if x.numel())


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() <= b.keys()
    return largest({k: x - b[k] for k, x in a.items()})


@pytest.mark.each_time("fedavg", "augfl", "fedal", "fccl", "fedproto")
@pytest.mark.parametrize("name", SERVERS)
def test_what_a_server_tells_withstands_f_liars_and_no_more(name: str) -> None:
    """The mean is ruined by one, a rule by more than its bound."""
    honest = told(toy(name, "mean"))
    assert largest(honest) < 50
    assert largest(told(toy(name, "mean", (2,)))) > 100 * largest(honest)
    for rule in ("median", "trimmed", "clip", "centered", "multikrum"):
        assert apart(told(toy(name, rule, (2,))), honest) < 0.5 * largest(honest), rule
    assert largest(told(toy(name, "trimmed", (2, 5)))) > 100 * largest(honest)
    assert apart(told(toy(name, "trimmed", (2, 5), f=2)), honest) < 0.5 * largest(honest)


@pytest.mark.each_time("gossip", "afind", "cobo")
@pytest.mark.parametrize("name", PEERS)
def test_peers_withstand_f_liars_and_no_more(name: str) -> None:
    honest = kept(toy(name, "mean"))
    assert largest(honest) < 10
    assert largest(kept(toy(name, "mean", (2,)))) > 1000
    for rule in (
        ("clip", "centered")
        if name == "cobo"
        else ("clip", "centered", "median", "trimmed", "multikrum")
    ):
        assert apart(kept(toy(name, rule, (2,))), honest) < largest(honest), rule
    if name != "cobo":
        assert largest(kept(toy(name, "trimmed", (2, 5)))) > 1000


def test_the_aggregator_of_fens_withstands_a_liar() -> None:
    """Its step is Adam's, so a liar cannot make it large: it turns it around."""

    def step(rule: str) -> Tensor:
        server: Any = Toy(methods.find("fens"), 7, aggregator="weights", make=common).server
        changes = [
            {k: torch.full_like(w, 0.01) for k, w in server.params.items()} for _ in range(7)
        ]
        changes[2] = {k: torch.full_like(w, -1e6) for k, w in server.params.items()}
        before = {k: w.clone() for k, w in server.params.items()}
        still = {k: torch.zeros_like(w) for k, w in server.params.items()}
        server.step(by(rule).combine(changes, around=still))
        return torch.cat([(server.params[k] - w).flatten() for k, w in before.items()])

    assert (step("mean") > 0).all()
    for rule in RULES:
        assert (step(rule) < 0).all(), rule


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_a_mean_of_answers_withstands_a_liar_that_is_sure_of_another_class(kind: Kind) -> None:
    """Means of probabilities give a liar 1 / n; a rule gives it nothing."""
    rng = torch.Generator().manual_seed(0)
    f = torch.randn(7, 5, 4, generator=rng) * 0.1
    f[2] = torch.tensor([0.0, 0.0, 0.0, 1e6])
    answers = f if kind == "logits" else f.softmax(-1)
    good = torch.cat([answers[:2], answers[3:]]).mean(0)
    assert float((MEAN.combine([*answers], kind=kind) - good).abs().max()) > 0.1
    for rule in ("median", "trimmed", "krum", "multikrum"):
        found = by(rule).combine([*answers], kind=kind)
        assert float((found - good).abs().max()) < (0.3 if kind == "logits" else 0.1), rule
        if kind == "probabilities":
            assert torch.allclose(found.sum(-1), torch.ones(5))


def test_with_a_rule_a_claim_of_rows_does_not_count() -> None:
    """Clients of AugFL hear the number of all rows: by a rule the median claim times the number of
    claims.
    """

    def rows(rule: str) -> int:
        federation = toy("augfl", rule, n=5)
        claims = [20, 30, 10**15, 40, 50]
        federation.server.count({i: torch.tensor(n) for i, n in enumerate(claims)})
        heard: list[int] = []
        call = federation.engine.call

        def listen(ids: Any, method: str, shared: Any, *more: Any) -> Any:
            heard.append(shared.get("rows", -1))
            return call(ids, method, shared, *more)

        federation.engine.call = listen
        federation.run(1)
        return heard[-1]

    assert rows("median") == 5 * 40
    assert rows("mean") == 10**15 + 140


def test_fd_gives_a_target_where_enough_clients_have_the_class() -> None:
    """Each class by its own clients; a liar's mask is one vote too."""
    toy = Toy(methods.find("fd"), 4, means=Robust("median"))
    server: Any = toy.server
    means = torch.arange(4.0)[:, None, None].expand(4, 4, 4).clone()
    present = torch.tensor(
        [[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0]], dtype=torch.bool
    )
    means[3] = 1e6
    replies = {i: {"means": means[i], "present": present[i]} for i in range(4)}
    told = server.teach(toy.fed.combine(replies, weight="present", kind="logits", read=server.read))
    assert told[0]["known"].tolist() == [True, True, False, False]  # of 4, 3, 1 and 2 clients
    assert torch.equal(told[0]["means"][:2].argmax(-1), torch.zeros(2, dtype=torch.int64))
    assert float(told[0]["means"].abs().max()) < 10 and all(
        torch.equal(told[0]["means"], x["means"]) for x in told.values()
    )


RUN: dict[str, Any] = {"data": {"clients": 4}, "rounds": 2}


def refusal(name: str, aggregate: dict[str, Any], **changes: Any) -> str:
    """The error of a run with this `[aggregate]`, before any work."""
    with pytest.raises(ConfigError) as error:
        check({"run": {**RUN, "method": name, "aggregate": aggregate, **changes}})
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["fedmd", "cfd", "feddf", "fd", "fccl", "augfl", "fedproto", "fedavg-adam"]
)
def test_too_few_clients_for_a_rule_are_refused_before_any_work(name: str) -> None:
    words = (
        "aggregate: rule = 'krum' with f = 1 needs 5 participants in a round, not 4: add clients"
    )
    assert refusal(name, {"rule": "krum"}) == words


def test_a_group_of_one_architecture_must_be_large_enough() -> None:
    each = ["linear", "linear", "linear", "mlp", "mlp"]
    values = {
        "method": "feddf",
        "data": {"clients": 5},
        "models": {"each": each},
        "aggregate": {"rule": "median"},
    }
    with pytest.raises(
        ConfigError, match="'median' with f = 1 needs 3 clients of each architecture, not 2: "
    ):
        build(check({"run": values}).run)


def test_a_peer_with_too_few_neighbours_is_refused() -> None:
    ring = {i: [(i - 1) % 6, (i + 1) % 6] for i in range(6)}
    gossip = methods.find("gossip")
    Toy(gossip, 6, graph=ring, means=by("median")).run(1)
    message = (
        "'krum' with f = 1 needs 5 models at a peer, its own among them, but peer 0 gets at most 3"
    )
    with pytest.raises(MethodError, match=message):
        Toy(gossip, 6, graph=ring, means=by("krum")).run(1)
    with pytest.raises(MethodError, match="but peer 0 gets at most 2"):
        Toy(gossip, 6, graph=ring, neighbours=1, means=by("median")).run(1)
    with pytest.raises(MethodError, match="but peer 0 gets at most 1"):
        Toy(methods.find("alone"), 6, means=by("median")).run(1)


def test_a_peer_that_hears_too_few_keeps_its_own_model() -> None:
    """In a round in which nobody else answers."""
    gossip = methods.find("gossip")
    alone = Toy(methods.find("alone"), 5).run(1).tensors()
    silent = Toy(gossip, 5, means=by("median"))
    silent.fed.exchange = lambda links, **options: None
    assert all(torch.equal(alone[k], v) for k, v in silent.run(1).tensors().items())
    party = Toy(gossip, 5, means=by("median")).party(0)
    own = {k: v.clone() for k, v in party.params.items()}
    party.mix(
        t=0,
        inbox={"1": {"weights": {k: v + 1 for k, v in own.items() if not k.startswith("head.")}}},
    )
    assert all(torch.equal(party.params[k], v) for k, v in own.items())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "cfd",
            {"trust": "kernel"},
            'params.trust = "kernel" weighs single answers by what their clients know',
        ),
        ("fedmd", {"include_self": False}, "no client can remove its own answer: leave"),
        (
            "afind-plus",
            {},
            'choose rule = "clip" or "centered", or set params.aggregation = "uniform"',
        ),
        ("ditto-afind", {}, "models are weighed by loss"),
        ("cobo", {}, "CoBo weighs models by w"),
        ("local", {}, "aggregate: local with these settings takes no mean"),
        ("alone", {}, "aggregate: alone with these settings takes no mean"),
        ("local-only", {}, "aggregate: local-only with these settings takes no mean"),
        ("dispfl", {}, "aggregate: dispfl takes no mean of clients' replies"),
    ],
)
def test_what_does_not_go_together_is_refused(
    name: str, params: dict[str, Any], message: str
) -> None:
    assert message in refusal(name, {"rule": "median"}, params=params)


def test_the_engines_agree_under_a_rule() -> None:
    engines: list[dict[str, Any]] = [{}, {"isolated": True}, {"batched": True}]
    for name in ("fedmd", "gossip"):
        plain, isolated, batched = (
            Toy(methods.find(name), 5, means=by("centered"), make=common, **how).run(2).tensors()
            for how in engines
        )
        assert all(torch.equal(plain[k], isolated[k]) for k in plain)
        assert all(torch.allclose(plain[k], batched[k], atol=1e-5) for k in plain)


def test_the_docs_say_for_each_method_whether_it_has_rules() -> None:
    """Both tables of docs/robust.md together name every method once, and the first those that have
    them.
    """
    text = (Path(__file__).parents[2] / "docs" / "robust.md").read_text()
    tables = re.findall(r"^\| methods(?: without a rule)? \|.*\n((?:\|.*\n)+)", text, re.M)
    have, lack = (
        [*re.findall(r"`([a-z-]+)`", " ".join(r.split("|")[1] for r in t.splitlines()))]
        for t in tables
    )
    assert sorted([*have, *lack]) == sorted(methods.registry())
    configured = {name for name, method in methods.registry().items() if method.client.MEANS}
    assert {*have} <= configured
    assert configured - {*have} == NOTHING_TO_COMBINE | SUMS


def test_the_mean_prior_of_proto_evfl_withstands_f_liars_and_no_more() -> None:
    """A prior is a distribution, so a liar moves their mean by 1 / n at most; a rule leaves it
    less.
    """
    honest = torch.softmax(0.1 * torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), -1)
    sure = torch.tensor([0.0, 0.0, 1.0])

    def moved(rule: str, liars: int, f: int = 1) -> float:
        active = Columns(methods.find("proto-evfl"), 7, means=by(rule, f)).active
        active.store({}, {m: sure if m < liars else p for m, p in enumerate(honest)})
        active.move_prototypes()
        return float((active.prior - honest[liars:].mean(0)).abs().max())

    assert moved("mean", 1) > 0.09
    for rule in RULES:
        assert moved(rule, 1) < 0.05, rule
    assert moved("trimmed", 2) > 0.09 > 0.05 > moved("trimmed", 2, f=2)


def test_a_liar_neither_adds_nor_removes_a_class_of_priors() -> None:
    """Parties leave out classes of which the prior is 0, and those without aligned rows have no
    prototype.
    """
    for rule in ("mean", *RULES):
        active = Columns(methods.find("proto-evfl"), 7, rare=[2], means=by(rule)).active
        nobody = torch.tensor([1.0, 0.0, 0.0])
        active.store({}, {**dict.fromkeys(range(6), nobody), 6: torch.tensor([0.0, 0.0, 1.0])})
        assert ((active.mean_prior() > 0) == torch.tensor([True, True, False])).all(), rule


def test_the_mean_top_of_fedhssl_withstands_f_liars_and_no_more() -> None:
    tops = {m: {f"{fedhssl.HEAD}weight": torch.full((2, 3), 1 + 0.1 * m)} for m in range(8)}
    tops[7] = {f"{fedhssl.HEAD}weight": torch.ones(2, 4)}  # of another shape, alone

    def largest(rule: str, liars: int, f: int = 1) -> float:
        lies = {m: {k: 1e6 * x for k, x in tops[m].items()} for m in range(liars)}
        replies = {m: {"top": top, "rows": torch.tensor(10)} for m, top in {**tops, **lies}.items()}
        found: Any = fedhssl.top_means(Federation(LocalEngine([]), aggregator=by(rule, f)), replies)
        # one alone is too few for a rule, and keeps its own
        assert {*found} == {*range(8 if rule == "mean" else 7)}
        return max(float(x.abs().max()) for m in found for x in found[m]["top"].values())

    assert largest("mean", 1) > 1e5 < largest("trimmed", 2)
    for rule in RULES:
        assert largest(rule, 1) < 2, rule
    assert largest("trimmed", 2, f=2) < 2


def test_a_round_of_fedhssl_withstands_a_liar() -> None:
    def largest(rule: str, liars: tuple[int, ...]) -> float:
        faults = Faults(liars=liars, lie="huge")
        few: dict[str, Any] = {"steps": 2, "epochs": 1, "pretrain_rounds": 1, "projection_dim": 8}
        toy = Columns(
            methods.find("fedhssl"), 5, make=whole, faults=faults, means=by(rule), **few
        ).run(1)
        return max(
            float(x.abs().max())
            for k, x in toy.party(0).params.items()
            if k.startswith(fedhssl.TOP)
        )

    assert largest("mean", ()) < 5 and largest("mean", (2,)) > 1000
    assert largest("median", (2,)) < 5


def whole(m: int) -> nn.Module:
    """Party m's extractor, with a last layer `head`."""
    with torch.random.fork_rng():
        torch.manual_seed(300 + m)
        return Classifier(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh()), 6, WIDTH)
