"""Secure sums: the mean of fixed-point numbers, with the same bits on every engine,
whoever fails.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.api import execute
from fedloom.core import fixed_point
from fedloom.core.aggregate import MEAN
from fedloom.core.engine import Engine
from fedloom.core.errors import ConfigError, MessageError
from fedloom.core.fixed_point import FRACTION, LARGEST, MOST_WEIGHT, decoded, encoded, totaled
from fedloom.core.message import Shape, Template, floats
from fedloom.experiment.plan.reading import check
from fedloom.methods import find, registry
from fedloom.methods.vertical import proto_evfl
from fedloom.protect.aggregators import Secure
from tests.methods.columns import Columns
from tests.toy import Toy, common, contexts

LIKE: Template = {"weights": {"a": floats(2, 3), "b": floats()}, "rows": Shape("int64")}


def reply(seed: int, rows: int, scale: float = 1.0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 3, generator=draw) * scale, torch.randn((), generator=draw) * scale
    return {"weights": {"a": a, "b": b}, "rows": torch.tensor(rows)}


def test_the_mean_is_that_of_rounded_numbers_to_the_bit() -> None:
    replies, rows = [reply(k, 10 + k) for k in range(5)], [10 + k for k in range(5)]
    xs = [encoded(r, "rows", 5) for r in replies]
    mean: Any
    again: Any
    whole, mean = decoded(sum(xs[1:], xs[0]), LIKE, "rows")
    other, again = decoded(sum(xs[-2::-1], xs[-1]), LIKE, "rows")
    assert whole == other == sum(rows) and torch.equal(mean["weights"]["a"], again["weights"]["a"])
    step = 2.0**FRACTION
    exact = sum(
        (r["weights"]["a"].double() * step).round() * n for r, n in zip(replies, rows, strict=True)
    )
    assert torch.equal(mean["weights"]["a"], (exact / (whole * step)).float())
    plain = sum(r["weights"]["b"].double() * n for r, n in zip(replies, rows, strict=True)) / whole
    assert abs(float(mean["weights"]["b"]) - float(plain)) < 2.0**-FRACTION
    assert list(mean) == ["weights"]


def test_no_sum_leaves_the_ring() -> None:
    huge = {
        "weights": {"a": torch.full((2, 3), -3e38), "b": torch.tensor(3e38)},
        "rows": torch.tensor(MOST_WEIGHT // 2),
    }
    mean: Any
    x = encoded(huge, "rows", 2)
    whole, mean = decoded(x + x, LIKE, "rows")
    assert whole == MOST_WEIGHT and mean["weights"]["a"].eq(-LARGEST).all()
    for rows in (-1, MOST_WEIGHT // 2 + 1):
        with pytest.raises(MessageError, match="a weight must be"):
            encoded({**huge, "rows": torch.tensor(rows)}, "rows", 2)
    with pytest.raises(MessageError, match="floats"):
        encoded({"x": torch.tensor([1, 2], dtype=torch.int32)}, None, 3)
    with pytest.raises(MessageError, match=r"fed\.total"):
        decoded(encoded({"x": torch.tensor([1, 2])}, None, 3), {"x": Shape("int64", 2)}, None)
    with pytest.raises(MessageError, match="every dimension"):
        fixed_point.size(floats(None, 3), None)
    with pytest.raises(MessageError, match="weight above 0"):
        decoded(np.zeros(8, np.uint64), LIKE, "rows")


def test_names_decide_what_a_number_of_a_sum_is_and_not_their_order() -> None:
    """A reply, whose order its sender chose, fits a template with the same names in any order."""
    counts: Template = {
        "rows": Shape("int64"),
        "cells": {"b": Shape("int64", 2), "a": Shape("int64", 2)},
    }
    one = {
        "rows": torch.tensor(7),
        "cells": {"b": torch.tensor([1, 2]), "a": torch.tensor([30, 40])},
    }
    other = {
        "cells": {"a": torch.tensor([5, 6]), "b": torch.tensor([100, 200])},
        "rows": torch.tensor(9),
    }
    total: Any = totaled(encoded(one, None, 2) + encoded(other, None, 2), counts)
    assert (
        int(total["rows"]) == 16
        and list(total) == ["rows", "cells"]
        and list(total["cells"]) == ["b", "a"]
    )
    assert total["cells"]["a"].tolist() == [35, 46] and total["cells"]["b"].tolist() == [101, 202]
    mean: Any
    flipped: Any = {
        "rows": torch.tensor(1),
        "weights": dict(reversed(reply(1, 1)["weights"].items())),
    }
    _, mean = decoded(encoded(reply(1, 1), "rows", 2) + encoded(flipped, "rows", 2), LIKE, "rows")
    assert torch.allclose(mean["weights"]["a"], flipped["weights"]["a"], atol=2.0**-FRACTION)


def test_integers_are_added_as_they_are_modulo_2_64() -> None:
    like = {"x": Shape("int64", 2), "y": Shape("int64")}
    replies = [{"x": torch.tensor([2**62, -(2**40)]), "y": torch.tensor(k)} for k in range(4)]
    total = totaled(sum(encoded(reply, None, 4) for reply in replies), like)  # type: ignore[arg-type]
    assert total["x"].tolist() == [0, -(2**42)] and int(total["y"]) == 6
    with pytest.raises(MessageError, match="int64 tensors alone"):
        totaled(encoded(reply(0, 1), None, 3), floats(7))
    with pytest.raises(MessageError, match="template's size"):
        totaled(np.zeros(3, np.uint64), like)


def run(engine: str = "local", method: str = "fedavg", **changes: Any) -> Any:
    values = {
        "method": method,
        "rounds": 2,
        "data": {"clients": 5, "public_rows": 40, "test_rows": 60, "own_test_rows": 10},
        "models": {"pool": ["linear"], "norm": "none"},
        "aggregate": {"secure": True},
        "engine": {"name": engine},
        **changes,
    }
    return execute(check({"run": values}).run)


def test_every_engine_gives_the_bits_of_the_loop_also_with_failures() -> None:
    faults: dict[str, Any] = {"faults": {"dropout": 0.15, "nan": 0.1}}
    results = {engine: run(engine, **faults) for engine in ("local", "isolated", "batched")}
    local = results["local"].summary
    assert local["failures"] > 0
    assert local["state_sha256"] == results["isolated"].summary["state_sha256"]
    assert abs(local["accuracy"]["mean"] - results["batched"].summary["accuracy"]["mean"]) < 0.02


def test_the_secure_mean_is_the_plain_one_up_to_its_steps() -> None:
    secure, plain = run(), run(aggregate={"secure": False})
    assert abs(secure.summary["accuracy"]["mean"] - plain.summary["accuracy"]["mean"]) < 0.01


def test_the_ledger_shows_masked_integers_and_nothing_else_going_up() -> None:
    found = run()
    assert found.summary["bytes"]["up"] > 0
    plain = run(aggregate={"secure": False})
    # 8 bytes a number, and masks
    assert 1.9 < found.summary["bytes"]["up"] / plain.summary["bytes"]["up"] < 2.6


PAGES: dict[str, dict[str, Any]] = {
    "fedavg": {"batch_size": 16, "epochs": 1},
    "fedavg-ft": {"batch_size": 16, "epochs": 1},
    "fedlp": {"batch_size": 16, "epochs": 1},
    "fedavg-dp": {"batch_size": 16, "epochs": 1},
    "fedlp-dp": {"batch_size": 16, "epochs": 1},
    "fedavg-adam": {"tau": 2},
    "feddf-al": {"tau": 2, "adv": 0.0},
    "per-fedavg": {},
    "fedcp": {"batch_size": 40},
    "fedproto": {"batch_size": 40},
    "augfl": {"lam": 0.0},
    "fedal": {"adv": 0.0, "tau": 2},
    "fedmd": {},
    "fedmd-lf": {"tau": 2},
    "cfd": {"tau": 2},
    "fccl": {"tau": 2, "pretrain_steps": 2},
    "fccl-plus": {"tau": 2},
    "fedproto-public": {},
    "proto-evfl": {},
    "proto-student": {"pca_dim": 0, "prior": "mixed"},
}
"""The methods with secure sums, with settings for a short run."""
EXACT: dict[str, dict[str, Any]] = {
    "fedboost": {"depth": 3, "bins": 8},
    "fedboost-mix": {"depth": 3, "bins": 8, "mix": 2},
    "fedforest": {"depth": 4, "bins": 8, "lot": 3},
    "fedforest-mix": {"depth": 4, "bins": 8, "lot": 3, "mix": 2},
    "fedextra": {"depth": 3, "bins": 8},
    "fedglm": {},
    "fedcox": {"time": "mean area", "event": "benign", "l2": 1.0, "times": 20},
    "stats": {},
}
"""The methods whose sums are of integers."""
SECURE_ALONE = {"fedsgd-dp"}
"""The methods that run in secure sums only; its sums are in tests/methods/test_shares.py."""
NOTHING_TO_SUM = {"local", "kd-only", "server-ce-only", "local-only"}
"""Configurations of these pages that send nothing."""
RULES_ONLY = {"fd", "feddf", "fedmosaic", "fens", "fedhssl"}
"""Methods whose server needs single replies besides their mean."""
BESIDE = {
    "augfl": {"int64[]"},
    "proto-evfl": {"float32[30,4]", "embedded float32[30,4]"},
    "proto-student": {"float32[30,4]", "embedded float32[30,4]"},
}
"""What else these methods send up; docs/secure-sums.md says so."""


def toy(name: str, *, secure: bool = True, **how: Any) -> Toy | Columns:
    method, params = find(name), PAGES[name]
    how["means"] = Secure() if secure else MEAN
    if method.setting == "vertical":
        return Columns(method, 5, **params, **how)
    places = contexts(4, make=common)
    groups = {
        "groups": [0] * 4,
        "group_networks": [common],
        "public": places[0].public,
        "pretrained": common,
    }
    return Toy(method, client_contexts=places, server_side=groups, **params, **how)


def numbers(toy: Toy | Columns) -> dict[str, torch.Tensor]:
    """All tensors of floats in everybody's state but the optimizers', after two rounds."""
    found = toy.run(2).tensors() if isinstance(toy, Toy) else toy.run(2).states()
    return {
        k: x
        for k, x in found.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point() and ".opt" not in k
    }


@pytest.mark.parametrize("name", PAGES)
def test_each_page_gives_nearly_the_plain_result_and_sends_sums_only(name: str) -> None:
    secure, plain, isolated = toy(name), toy(name, secure=False), toy(name, isolated=True)
    found, like, alike = numbers(secure), numbers(plain), numbers(isolated)
    assert all(torch.equal(x, alike[k]) for k, x in found.items())
    apart = {
        k: float((x - like[k]).abs().max())
        for k, x in found.items()
        if x.numel() and not k.endswith("priors")
    }
    assert 0 < max(apart.values()) < 0.01
    up = {(e.kind, e.what) for e in secure.fed.ledger if e.sender in ("client", "party")}
    assert {kind for kind, what in up if what.startswith("masked")} == {*find(name).client.MEANS}
    others = {what for kind, what in up if kind != "masks" and not what.startswith("masked")} - {
        "none"
    }
    assert others == BESIDE.get(name, set())


@pytest.mark.parametrize("name", ["stats", "fedavg"])
def test_a_sum_that_lacks_a_reply_is_none_where_it_must_be_of_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node adds zeros, with the weight 0, for a reply that it cannot send: a mean does without
    it.
    """
    honest = Engine._sum

    def lacking(self: Any, tasks: Any, *how: Any) -> Any:
        total, failures = honest(self, tasks[1:], *how)
        return total, [None, *failures]

    monkeypatch.setattr(Engine, "_sum", lacking)
    data = {"name": "breast_cancer", "clients": 5, "partition": "iid"}
    models: dict[str, Any] = {} if name == "stats" else {"models": {"pool": ["linear"]}}
    failures = run(method=name, data=data, rounds=1, **models).summary["failures"]
    assert failures == (name == "stats")


@pytest.mark.parametrize("name", EXACT)
def test_sums_of_integers_give_the_plain_bits_and_send_sums_only(name: str) -> None:
    data = {"name": "breast_cancer", "clients": 4, "partition": "iid"}
    secure, plain = (
        run(method=name, params=EXACT[name], data=data, aggregate={"secure": how}).summary
        for how in (True, False)
    )
    assert secure["state_sha256"] == plain["state_sha256"] and not secure["failures"]
    up = {
        line["kind"]
        for line in secure["bytes_by_kind"]
        if line["receiver"] == "server" and line["bytes"]
    }
    # columns of small numbers, and classes to predict
    unused = {"words_of", "reach", "rows", "wide", "effects"}
    assert up >= {*find(name).client.MEANS, "masks"} - unused and up <= {
        *find(name).client.MEANS,
        "masks",
    }


def test_no_class_disappears_by_the_rounding_of_a_sum_of_priors() -> None:
    federation: Any = toy("proto-evfl")
    rare = torch.tensor([1 - 1e-9, 1e-9, 0.0])
    for m in federation.engine.ids:
        federation.party(m).prior = rare
    federation.active.prior = torch.tensor([0.9, 0.1, 0.0])
    means = proto_evfl.mean_priors(federation.fed, federation.active, federation.engine.ids)
    assert torch.equal(means[0], rare)  # that of the active party's own columns
    federation.active.store({}, means)
    found = federation.active.mean_prior()
    assert float(found[1]) > 0 and float(found[2]) == 0


@pytest.mark.parametrize("name", ["proto-evfl", "proto-student"])
def test_a_party_s_own_prior_stays_with_it(name: str) -> None:
    """Parties whose priors differ, but with one mean, look alike to the active party."""

    def told(priors: list[list[float]]) -> torch.Tensor:
        federation: Any = toy(name)
        for m, prior in enumerate(priors):
            federation.party(m + 1).prior = torch.tensor(prior)
        means = proto_evfl.mean_priors(federation.fed, federation.active, federation.engine.ids)
        return torch.stack([means[m] for m in range(1, 5)])

    a, b, c = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]
    found = told([a, a, b, c])
    assert torch.equal(found, told([c, a, b, a])) and torch.equal(found[0], found[3])
    assert torch.allclose(found[0], torch.tensor([0.375, 0.3125, 0.3125]))


def test_the_docs_say_for_each_method_whether_it_has_secure_sums() -> None:
    """Both tables of docs/secure-sums.md together name every method once, and the first those that
    have them.
    """
    text = (Path(__file__).parents[1] / "docs" / "secure-sums.md").read_text()
    tables = re.findall(
        r"^\| (methods|methods without secure sums) \|.*\n((?:\|.*\n)+)", text, re.M
    )
    named = [
        re.findall(r"`([a-z-]+)`", " ".join(row.split("|")[1] for row in rows.splitlines()))
        for _, rows in tables
    ]
    have, lack = named
    assert sorted([*have, *lack]) == sorted(registry())
    assert {*have} == {*PAGES, *EXACT, *SECURE_ALONE}
    configured = {
        name for name, one in registry().items() if one.client.MEANS and one.server is not None
    }
    assert configured - {*PAGES, *EXACT, *SECURE_ALONE} == {*NOTHING_TO_SUM, *RULES_ONLY}


@pytest.mark.parametrize(
    ("method", "params", "message"),
    [
        ("fedal", {}, "the adversary compares single answers: set params.adv = 0"),
        ("feddf-al", {}, "the adversary compares single answers: set params.adv = 0"),
        (
            "fedmd",
            {"trust": "distance", "average": "logits"},
            'params.trust = "distance" weighs single answers',
        ),
        ("fedmd", {"coding": "int8"}, 'set params.coding = "float32", not "int8"'),
        ("fedmd", {"average": "probabilities"}, 'set params.average = "logits"'),
        ("fedal", {"adv": 0.0, "coding": "float16"}, 'set params.coding = "float32"'),
        ("fccl", {"coding": "top-k", "top_k": 2}, 'set params.coding = "float32"'),
        ("cfd", {"bits": 1}, "leave params.bits out"),
        ("cfd", {"trust": "kernel"}, 'params.trust = "kernel" weighs single answers'),
        ("augfl", {"clients_per_round": 4}, 'set params.clients_per_round to "none": u_i are kept'),
        ("fd", {}, "each client gets the mean of the others"),
        ("feddf", {}, "use fedavg-adam, which only averages"),
        ("fens", {}, "each client's model is sent to all clients"),
        ("fedhssl", {}, "embeddings are sent one by one"),
        ("gossip", {}, "the peers of gossip take means themselves"),
        ("fedpcl", {}, "fedpcl takes no mean of clients' replies"),
    ],
)
def test_what_needs_single_contributions_is_refused(
    method: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(
            {
                "run": {
                    "method": method,
                    "data": {"clients": 5},
                    "params": params,
                    "aggregate": {"secure": True},
                }
            }
        )
    assert message in str(error.value)


def test_too_few_participants_are_refused() -> None:
    message = "aggregate: secure = true needs 3 participants in a round, not 2: add clients"
    with pytest.raises(ConfigError, match=message):
        run(params={"clients_per_round": 2})
