"""Robust rules on every page that averages weights or answers: what a liar, or too many of them, can move."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import methods
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.message import leaves
from fedloom.methods import robust
from fedloom.methods.distillation import trust
from fedloom.methods.vertical import fedhssl
from fedloom.models.parts import Classifier
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
NOTHING_TO_COMBINE = {"local", "alone", "kd-only", "server-ce-only", "local-only"}
"""Configurations of pages with rules in which nothing is averaged."""


def toy(name: str, rule: str, liars: tuple[int, ...] = (), n: int = 7, f: int = 1, **params: Any) -> Toy:
    """Parties with one network and like data, of which some multiply all that they send by a million."""
    places = contexts(n, make=common)
    server = {"public": places[0].public, "groups": [0] * n, "group_networks": [common]}
    faults = Faults(liars=liars, lie="huge")
    settings = {**{**SERVERS, **PEERS}[name], "robust": rule, "robust_f": f, **params}
    method = methods.find(name.split()[0])
    return Toy(method, client_contexts=places, server_side=server, faults=faults, **settings)


def told(toy: Toy) -> dict[str, Tensor]:
    """All that the server tells client 0 in two rounds."""
    found: dict[str, Tensor] = {}
    call, count = toy.fed.call, 0

    def recorded(parties: Any, method: str, **options: Any) -> Any:
        nonlocal count
        count += 1
        content = {**(options.get("shared") or {}), **(options.get("each") or {}).get(0, {})}
        floats = {k: x for k, x in leaves(content) if isinstance(x, Tensor) and x.is_floating_point()}
        found.update({f"{count} {method} {k}": x.detach().clone() for k, x in floats.items()})
        return call(parties, method, **options)

    toy.fed.call = recorded
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


@pytest.mark.parametrize("name", SERVERS)
def test_what_a_server_tells_withstands_f_liars_and_no_more(name: str) -> None:
    """The mean is ruined by one, a rule by more than its bound."""
    honest = told(toy(name, "none"))
    assert largest(honest) < 50
    assert largest(told(toy(name, "none", (2,)))) > 100 * largest(honest)
    for rule in ("median", "trimmed", "clip", "centered", "multikrum"):
        assert apart(told(toy(name, rule, (2,))), honest) < 0.5 * largest(honest), rule
    assert largest(told(toy(name, "trimmed", (2, 5)))) > 100 * largest(honest)
    assert apart(told(toy(name, "trimmed", (2, 5), f=2)), honest) < 0.5 * largest(honest)


@pytest.mark.parametrize("name", PEERS)
def test_peers_withstand_f_liars_and_no_more(name: str) -> None:
    honest = kept(toy(name, "none"))
    assert largest(honest) < 10
    assert largest(kept(toy(name, "none", (2,)))) > 1000
    for rule in ("clip", "centered") if name == "cobo" else ("clip", "centered", "median", "trimmed", "multikrum"):
        assert apart(kept(toy(name, rule, (2,))), honest) < largest(honest), rule
    if name != "cobo":
        assert largest(kept(toy(name, "trimmed", (2, 5)))) > 1000


def test_the_aggregator_of_fens_withstands_a_liar() -> None:
    """Its step is Adam's, so a liar cannot make it large: it turns it around."""

    def step(rule: str) -> Tensor:
        server: Any = Toy(methods.find("fens"), 7, aggregator="weights", robust=rule, make=common).server
        changes = [{k: torch.full_like(w, 0.01) for k, w in server.params.items()} for _ in range(7)]
        changes[2] = {k: torch.full_like(w, -1e6) for k, w in server.params.items()}
        before = {k: w.clone() for k, w in server.params.items()}
        server.step({i: {"change": c, "rows": torch.tensor(5)} for i, c in enumerate(changes)})
        return torch.cat([(server.params[k] - w).flatten() for k, w in before.items()])

    assert (step("none") > 0).all()
    for rule in ("median", "trimmed", "krum", "multikrum", "clip", "centered"):
        assert (step(rule) < 0).all(), rule


@pytest.mark.parametrize("logits", [True, False])
def test_the_target_of_cfd_withstands_a_liar_that_is_sure_of_another_class(logits: bool) -> None:
    """Means of probabilities give a liar 1 / n; a rule gives it nothing."""
    rng = torch.Generator().manual_seed(0)
    f = torch.randn(7, 5, 4, generator=rng) * 0.1
    f[2] = torch.tensor([0.0, 0.0, 0.0, 1e6])
    answers = f if logits else f.softmax(-1)
    good = torch.cat([answers[:2], answers[3:]])

    def target(rule: str) -> Tensor:
        server = toy("fedmd", rule).server
        return trust.average(server, range(7), lambda: torch.arange(5), answers, f if logits else f.log_softmax(-1))[0]

    assert float((target("none") - good.mean(0)).abs().max()) > 0.1
    for rule in ("median", "trimmed", "krum", "multikrum"):
        found = target(rule)
        assert float((found - good.mean(0)).abs().max()) < 0.1 * (3 if logits else 1), rule
        if not logits:
            assert torch.allclose(found.sum(-1), torch.ones(5))


def test_with_a_rule_a_claim_of_rows_does_not_count() -> None:
    cfg: Any = methods.find("augfl").configure(params={"lam": 0.0, "robust": "median"})
    claims = torch.tensor([20, 30, 10**15, 40, 50])
    assert robust.all_rows(claims, cfg) == 5 * 40
    plain: Any = methods.find("augfl").configure(params={"lam": 0.0})
    assert robust.all_rows(claims, plain) == 10**15 + 140


def test_fd_gives_a_target_where_enough_clients_have_the_class() -> None:
    """Each class by its own clients; a liar's mask is one vote too."""
    server: Any = Toy(methods.find("fd"), 4, robust="median").server
    means = torch.arange(4.0)[:, None, None].expand(4, 4, 4).clone()
    present = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    means[3] = 1e6
    told = server.teach({i: {"means": means[i], "present": present[i]} for i in range(4)})
    assert told[0]["known"].tolist() == [True, True, False, False]  # of 4, 3, 1 and 2 clients
    assert torch.equal(told[0]["means"][:2].argmax(-1), torch.zeros(2, dtype=torch.int64))
    assert float(told[0]["means"].abs().max()) < 10 and all(
        torch.equal(told[0]["means"], x["means"]) for x in told.values()
    )


@pytest.mark.parametrize("name", ["fedmd", "cfd", "feddf", "fd", "fccl", "fens", "augfl", "fedproto", "fedavg-adam"])
def test_too_few_clients_for_a_rule_are_refused_before_any_work(name: str) -> None:
    params: dict[str, Any] = {"lam": 0.0} if name == "augfl" else {}
    places = contexts(4, make=common)
    server = {"public": places[0].public, "groups": [0] * 4, "group_networks": [common]}
    with pytest.raises(
        MethodError, match=r"'krum' with robust_f = 1 needs 5 participants in a round, not 4: add clients"
    ):
        Toy(methods.find(name), client_contexts=places, server_side=server, robust="krum", **params)


def test_a_group_of_one_architecture_must_be_large_enough() -> None:
    places = contexts(5, make=common)
    server = {"public": places[0].public, "groups": [0, 0, 0, 1, 1], "group_networks": [common, common]}
    with pytest.raises(MethodError, match="'median' with robust_f = 1 needs 3 participants in a round, not 2"):
        Toy(methods.find("feddf"), client_contexts=places, server_side=server, robust="median")


def test_a_peer_with_too_few_neighbours_is_refused() -> None:
    ring = {i: [(i - 1) % 6, (i + 1) % 6] for i in range(6)}
    gossip = methods.find("gossip")
    Toy(gossip, 6, graph=ring, robust="median").run(1)
    message = "'krum' with robust_f = 1 needs 5 models at a peer, its own among them, but peer 0 gets at most 3"
    with pytest.raises(MethodError, match=message):
        Toy(gossip, 6, graph=ring, robust="krum").run(1)
    with pytest.raises(MethodError, match="but peer 0 gets at most 2"):
        Toy(gossip, 6, graph=ring, neighbours=1, robust="median").run(1)
    with pytest.raises(MethodError, match="but peer 0 gets at most 1"):
        Toy(methods.find("alone"), 6, robust="median").run(1)


def test_a_peer_that_hears_too_few_keeps_its_own_model() -> None:
    """In a round in which nobody else answers."""
    gossip = methods.find("gossip")
    alone = Toy(methods.find("alone"), 5).run(1).tensors()
    silent = Toy(gossip, 5, robust="median")
    silent.fed.exchange = lambda links, **options: None
    assert all(torch.equal(alone[k], v) for k, v in silent.run(1).tensors().items())
    party = Toy(gossip, 5, robust="median").party(0)
    own = {k: v.clone() for k, v in party.params.items()}
    party.mix(t=0, inbox={"1": {"weights": {k: v + 1 for k, v in own.items() if not k.startswith("head.")}}})
    assert all(torch.equal(party.params[k], v) for k, v in own.items())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("fedmd", {"secure": True}, "secure sums hide the single messages that robust = 'median' needs: set one"),
        ("augfl", {"secure": True}, "secure sums hide the single messages"),
        ("cfd", {"trust": "kernel"}, "params.trust = 'kernel' weighs a client by what it knows, and params.robust"),
        ("fedmd", {"include_self": False}, "no client can remove its answer from a robust mean"),
        ("afind-plus", {}, "params.robust = 'median' counts all models alike, but params.aggregation"),
        ("ditto-afind", {}, 'set params.robust to "clip" or "centered", or params.aggregation to "uniform"'),
        ("cobo", {}, "CoBo weighs them by w"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        methods.find(name).configure(params={"robust": "median", **params})
    assert message in str(error.value)


def test_the_engines_agree_under_a_rule() -> None:
    engines: list[dict[str, Any]] = [{}, {"isolated": True}, {"batched": True}]
    for name in ("fedmd", "gossip"):
        plain, isolated, batched = (
            Toy(methods.find(name), 5, robust="centered", make=common, **how).run(2).tensors() for how in engines
        )
        assert all(torch.equal(plain[k], isolated[k]) for k in plain)
        assert all(torch.allclose(plain[k], batched[k], atol=1e-5) for k in plain)


def test_the_docs_say_for_each_method_whether_it_has_rules() -> None:
    """Both tables of docs/robust.md together name every method once, and the first those that have them."""
    text = (Path(__file__).parents[2] / "docs" / "robust.md").read_text()
    tables = re.findall(r"^\| methods(?: without a rule)? \|.*\n((?:\|.*\n)+)", text, re.M)
    have, lack = ([*re.findall(r"`([a-z-]+)`", " ".join(r.split("|")[1] for r in t.splitlines()))] for t in tables)
    assert sorted([*have, *lack]) == sorted(methods.registry())
    configured = {name for name in methods.registry() if "robust" in methods.find(name).config.model_fields}
    assert {*have} <= configured
    assert configured - {*have} == NOTHING_TO_COMBINE


RULES = ("median", "trimmed", "krum", "multikrum", "clip", "centered")


def test_the_mean_prior_of_proto_evfl_withstands_f_liars_and_no_more() -> None:
    """A prior is a distribution, so a liar moves their mean by 1 / n at most; a rule leaves it less."""
    honest = torch.softmax(0.1 * torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), -1)
    sure = torch.tensor([0.0, 0.0, 1.0])

    def moved(rule: str, liars: int, f: int = 1) -> float:
        active = Columns(methods.find("proto-evfl"), 7, robust=rule, robust_f=f).active
        active.store({}, {m: sure if m < liars else p for m, p in enumerate(honest)})
        active.move_prototypes()
        return float((active.prior - honest[liars:].mean(0)).abs().max())

    assert moved("none", 1) > 0.09
    for rule in RULES:
        assert moved(rule, 1) < 0.05, rule
    assert moved("trimmed", 2) > 0.09 > 0.05 > moved("trimmed", 2, f=2)


def test_a_liar_neither_adds_nor_removes_a_class_of_priors() -> None:
    """Parties leave out classes of which the prior is 0, and those without aligned rows have no prototype."""
    for rule in ("none", *RULES):
        active = Columns(methods.find("proto-evfl"), 7, rare=[2], robust=rule).active
        nobody = torch.tensor([1.0, 0.0, 0.0])
        active.store({}, {**dict.fromkeys(range(6), nobody), 6: torch.tensor([0.0, 0.0, 1.0])})
        assert ((active.mean_prior() > 0) == torch.tensor([True, True, False])).all(), rule


def test_the_mean_top_of_fedhssl_withstands_f_liars_and_no_more() -> None:
    tops = {m: {f"{fedhssl.HEAD}weight": torch.full((2, 3), 1 + 0.1 * m)} for m in range(8)}
    tops[7] = {f"{fedhssl.HEAD}weight": torch.ones(2, 4)}  # of another shape, alone

    def largest(rule: str, liars: int, f: int = 1) -> float:
        cfg: Any = methods.find("fedhssl").configure(params={"robust": rule, "robust_f": f})
        lies = {m: {k: 1e6 * x for k, x in tops[m].items()} for m in range(liars)}
        found: Any = fedhssl.top_means({**tops, **lies}, dict.fromkeys(tops, 10), cfg)
        assert {*found} == {*range(8 if rule == "none" else 7)}  # one alone is too few for a rule, and keeps its own
        return max(float(x.abs().max()) for m in found for x in found[m]["top"].values())

    assert largest("none", 1) > 1e5 < largest("trimmed", 2)
    for rule in RULES:
        assert largest(rule, 1) < 2, rule
    assert largest("trimmed", 2, f=2) < 2


def test_a_round_of_fedhssl_withstands_a_liar() -> None:
    def largest(rule: str, liars: tuple[int, ...]) -> float:
        faults = Faults(liars=liars, lie="huge")
        few: dict[str, Any] = {"steps": 2, "epochs": 1, "pretrain_rounds": 1, "projection_dim": 8}
        toy = Columns(methods.find("fedhssl"), 5, make=whole, faults=faults, robust=rule, **few).run(1)
        return max(float(x.abs().max()) for k, x in toy.party(0).params.items() if k.startswith(fedhssl.TOP))

    assert largest("none", ()) < 5 and largest("none", (2,)) > 1000
    assert largest("median", (2,)) < 5


def whole(m: int) -> nn.Module:
    """Party m's extractor, with a last layer `head`."""
    with torch.random.fork_rng():
        torch.manual_seed(300 + m)
        return Classifier(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh()), 6, WIDTH)
