"""Clients without a network beside clients with one: what they hear, what they are fitted to, on
every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom import methods
from fedloom.core.black_box import CHECKED_ROWS, BlackBoxModel
from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError, MethodError, ModelError, NotReady
from fedloom.core.evaluation import predictions
from fedloom.core.faults import Faults
from fedloom.core.losses import cap_rows
from fedloom.core.message import leaves
from fedloom.core.method import Method
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.evaluate import state_sha256
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.methods.distillation import steps
from fedloom.methods.distillation.fedal import FedALBlackBox
from fedloom.models.black_boxes import make
from tests.toy import CLASSES, FEATURES, Toy, contexts

ABLE = [m for m in methods.registry().values() if m.black_box]
FEDAL, FEDMD, LOCAL = (methods.find(n) for n in ("fedal", "fedmd", "local"))


class Still:
    """Answers with what it was made with, whatever it is fitted to."""

    def __init__(self, p: Any) -> None:
        self.p = p
        self.classes_ = np.arange(CLASSES)

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> None: ...

    def predict_proba(self, x: Any) -> Any:
        return np.tile(self.p, (len(x), 1))


P = np.array([0.4, 0.3, 0.2, 0.1])


def floored(p: Any) -> Any:
    return 1e-3 + (1 - CLASSES * 1e-3) * p


def boxed(names: Mapping[int, str], n: int = 4, **settings: Any) -> list[ClientContext]:
    """The toy's places, some of them with black boxes; `still` always answers P."""
    found = contexts(n)
    for i, name in names.items():
        made = (
            partial(Still, P) if name == "still" else partial(make, name, (FEATURES,), CLASSES, i)
        )
        found[i] = replace(
            found[i], network=None, black_box=BlackBoxModel(name, made, CLASSES, i, **settings)
        )
    return found


def state(toy: Toy, i: int) -> dict[str, Any]:
    return dict(toy.engine.states()[i])


def flat(states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{i}/{k}": v for i, s in states.items() for k, v in leaves(dict(s))}


def same(a: Toy, b: Toy) -> bool:
    x, y = flat(a.engine.states()), flat(b.engine.states())
    return x.keys() == y.keys() and all(
        torch.equal(v, y[k]) if isinstance(v, Tensor) else v == y[k] for k, v in x.items()
    )


# -- what is learned from a message ----------------------------------------------------------------


def test_the_target_is_the_mean_of_the_others() -> None:
    """FedMD by hand: three still boxes, so that what each should hear is known."""
    toy = Toy(
        FEDMD, client_contexts=boxed({0: "still", 1: "still", 2: "still"}, 3), batch_size=8
    ).run(1)
    rows = toy.party(0).public_rows(0, steps=1, size=8)[0]
    heard = state(toy, 0)["targets"]
    assert torch.allclose(
        heard[rows], torch.tensor(floored(P), dtype=torch.float32).expand(8, -1), atol=1e-6
    )
    assert int(heard.any(-1).sum()) == 8  # no other row was heard of


def test_the_others_are_those_without_oneself() -> None:
    client_contexts = boxed({0: "still", 1: "still", 2: "still"}, 3)
    other = np.array([0.1, 0.1, 0.1, 0.7])
    client_context = replace(
        client_contexts[2], black_box=BlackBoxModel("still", partial(Still, other), CLASSES)
    )
    toy = Toy(FEDMD, client_contexts=[*client_contexts[:2], client_context], batch_size=8).run(1)
    rows = toy.party(0).public_rows(0, steps=1, size=8)[0]
    product = np.sqrt(floored(P) * floored(other))
    for i, expected in (
        (0, product / product.sum()),
        (1, product / product.sum()),
        (2, floored(P)),
    ):
        assert np.abs(state(toy, i)["targets"][rows].numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize(("kd", "adv", "cap"), [(1.0, 1.0, 1.0), (2.0, 0.5, None), (0.0, 1.0, 0.1)])
def test_the_pseudo_target_is_a_closed_form(
    kd: float, adv: float, cap: float | None, average: Any
) -> None:
    """f* = T - G adv / kd, or the own answer less adv G without distillation; G capped."""
    client_context = boxed({0: "still"}, 1)[0]
    cfg = FEDAL.configure(
        params={
            "kd": kd,
            "adv": adv,
            "gradient_cap": cap or "none",
            "average": average,
            "batch_size": 8,
            "tau": 1,
        }
    )
    party = FedALBlackBox(cfg, client_context)
    party.local_train(t=0)
    f = steps.public_log_probs(party, 0, 0)
    assert torch.allclose(f, torch.tensor(floored(P)).log().float().expand(8, -1), atol=1e-6)
    rng = torch.Generator().manual_seed(0)
    answers = torch.stack(
        [f, torch.randn(8, CLASSES, generator=rng), torch.randn(8, CLASSES, generator=rng)]
    )
    mean = (answers if average == "logits" else answers.softmax(-1)).mean(0)
    g = torch.randn(8, CLASSES, generator=rng)
    party.distil(t=0, i=0, n=3, mean=mean, gradient=g)
    others = answers[1:].mean(0) if average == "logits" else answers[1:].softmax(-1).mean(0).log()
    capped = g if cap is None else cap_rows(g, cap)
    expected = (others - adv / kd * capped if kd else f - adv * capped).softmax(-1)
    rows = party.public_rows(0, steps=1, size=8)[0]
    assert torch.allclose(party.targets[rows], expected, atol=1e-5)


# -- when it is fitted, and to what ----------------------------------------------------------------


def test_refits_come_by_iterations_and_only_with_news() -> None:
    def fits(method: Method, rounds: int, refit: int, **params: Any) -> list[int]:
        toy = Toy(
            method, client_contexts=boxed({0: "knn"}, 3, refit_every=refit), batch_size=8, **params
        )
        found = [toy.run(1, start=t).party(0).fitted["iteration"] for t in range(rounds)]
        return sorted(set(found))

    assert fits(FEDMD, 7, 3) == [0, 3, 6]
    assert fits(FEDAL, 5, 4, tau=2) == [0, 4, 8]
    assert fits(FEDAL, 5, 3, tau=2) == [0, 4, 8]  # at the first round that is due
    assert fits(LOCAL, 5, 1) == [0]  # nothing is heard


def test_fits_are_made_of_what_was_heard_by_then_half_each() -> None:
    toy = Toy(FEDMD, client_contexts=boxed({0: "forest"}, 3, refit_every=2), batch_size=8).run(3)
    party = toy.party(0)
    rows, targets = party.public_set.rows, party.fitted["targets"]
    own, known = torch.arange(len(party.data)), targets.any(-1).nonzero()[:, 0]
    assert 8 < len(known) <= 16 and not torch.equal(targets, party.targets)
    halves = [known[known % 2 == 1], known[known % 2 == 0]]
    odd, even = (
        steps.black_box(party).fit(party.data.x(own), party.data.y(own), rows.x(h), targets[h])
        for h in halves
    )
    x = rows.x(torch.tensor([0, 1]))
    assert torch.equal(party.infer(x), ((odd.probs(x) + even.probs(x)) / 2).log())
    plan = party.public_rows(2, steps=1, size=8)[0]
    for number, row, answer in zip(
        plan, rows.x(plan), steps.public_log_probs(party, 2, 0), strict=True
    ):
        assert torch.equal(answer, (even if number % 2 else odd).probs(row[None])[0].log())


def test_a_black_box_does_not_echo_what_it_received() -> None:
    """Told that all public rows are of class 3, nearest neighbours say so of others' rows; not of
    these from memory.
    """
    client_context = boxed({0: "knn"}, 1, refit_every=1)[0]
    party = FedALBlackBox(FEDMD.configure(params={"batch_size": 2}), client_context)
    party.local_train(t=0)
    wrong = torch.zeros(2, CLASSES).index_fill(1, torch.tensor([3]), 1.0)
    before = steps.public_log_probs(party, 1, 0)
    steps.set_targets(party, wrong, 1, 0)
    party.local_train(t=1)
    numbers = party.public_rows(1, steps=1, size=2)[0]
    row = party.public_set.rows.x(numbers[:1])
    by_heart = (
        steps.current_fit(party).even if int(numbers[0]) % 2 == 0 else steps.current_fit(party).odd
    ).probs(row)
    assert by_heart[0].argmax() == 3 and by_heart[0, 3] > 0.99  # distance 0 decides
    assert (
        torch.allclose(steps.public_log_probs(party, 1, 0)[0].exp(), before[0].exp(), atol=0.5)
        and before[0].argmax() != 3
    )
    assert steps.public_log_probs(party, 1, 0)[0].exp()[3] < 0.9


def test_a_teacher_receives_nothing_and_is_fitted_once() -> None:
    toy = Toy(
        FEDMD, client_contexts=boxed({0: "forest"}, 3, learn=False, refit_every=1), batch_size=8
    ).run(3)
    assert (
        state(toy, 0)["targets"].shape == (0, CLASSES) and state(toy, 0)["fitted"]["iteration"] == 0
    )
    learner = Toy(FEDMD, client_contexts=boxed({0: "forest"}, 3, refit_every=1), batch_size=8).run(
        3
    )
    assert learner.party(0).fitted["iteration"] == 2


def test_before_its_first_fit_it_knows_nothing() -> None:
    party = FedALBlackBox(FEDAL.configure(), boxed({0: "forest"}, 1)[0])
    reply = predictions(party, on="test")
    assert torch.allclose(reply["loss"], torch.tensor(float(np.log(CLASSES))))
    party.local_train(t=0)
    assert predictions(party, on="test")["loss"] < reply["loss"]


def test_without_a_black_box_or_public_rows_an_error_says_what_is_missing() -> None:
    with pytest.raises(MethodError, match=r"has no black box: name one in models\.pool"):
        FedALBlackBox(FEDAL.configure(), contexts(1)[0])
    client_context = replace(boxed({0: "knn"}, 1)[0], public=None)
    with pytest.raises(MethodError, match=r"set data\.public"):
        FedALBlackBox(FEDAL.configure(), client_context)


# -- beside networks, on every engine --------------------------------------------------------------

MIXED = {1: "forest", 2: "boosting", 3: "knn"}


@pytest.mark.each_time("fedal", "fedmd")
@pytest.mark.parametrize("method", ABLE, ids=lambda m: m.name)
def test_engines_agree_to_the_bit(method: Method) -> None:
    client_contexts = boxed(MIXED, 5, refit_every=2)
    settings: dict[str, Any] = {
        "client_contexts": client_contexts,
        "batch_size": 8,
        "server_side": at_home(method, client_contexts),
    }
    if "tau" not in method.fixed:
        settings["tau"] = 2
    loop, strict = (Toy(method, isolated=isolated, **settings).run(3) for isolated in (False, True))
    assert same(loop, strict)
    assert loop.fed.ledger.state() == strict.fed.ledger.state()
    assert {e.sender for e in loop.fed.ledger if e.receiver == "server"} == {"client"}
    assert not loop.fed.failures


def at_home(method: Method, client_contexts: list[ClientContext]) -> dict[str, Any]:
    return (
        {"public": client_contexts[0].public} if "public rows at the server" in method.needs else {}
    )


def test_what_crosses_is_what_crosses_for_networks() -> None:
    toy = Toy(FEDAL, client_contexts=boxed(MIXED, 4), batch_size=8, tau=2).run(2)
    plain = Toy(FEDAL, 4, batch_size=8, tau=2).run(2)
    assert toy.fed.ledger.state() == plain.fed.ledger.state()


@pytest.mark.each_time("crash", "nan")
@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "shape", "late"])
def test_a_fault_poisons_nothing(fault: str) -> None:
    toy = Toy(
        FEDAL,
        client_contexts=boxed(MIXED, 5, refit_every=2),
        faults=Faults(**{fault: 0.3}),
        batch_size=8,
        tau=2,
    ).run(4)
    assert toy.fed.failures
    for i, s in toy.engine.states().items():
        assert all(torch.isfinite(v).all() for _, v in leaves(dict(s)) if isinstance(v, Tensor)), i


def test_a_black_box_that_fails_changes_nothing_and_is_left_out() -> None:
    client_contexts = boxed({0: "still"}, 4)
    odd = replace(
        client_contexts[0],
        black_box=BlackBoxModel("odd", partial(Still, np.full(CLASSES, np.nan)), CLASSES),
    )
    toy = Toy(FEDMD, client_contexts=[odd, *client_contexts[1:]], batch_size=8).run(2)
    reasons = {("client-0", "local_train", "raised"), ("client-0", "predict", "not ready")}
    assert {(f.party, f.kind, f.reason) for f in toy.fed.failures} == reasons
    assert (
        "finite numbers from 0 to 1" in toy.fed.failures[0].trace and not toy.fed.failures[1].trace
    )
    assert sum(f.kind == "local_train" for f in toy.fed.failures) == 2  # it is tried again
    without = flat(
        Toy(FEDMD, client_contexts=client_contexts[1:], batch_size=8).run(2).engine.states()
    )
    beside = flat(toy.engine.states())
    assert all(torch.equal(v, beside[k]) for k, v in without.items() if "params" in k)


def test_boxes_that_were_away_when_they_should_have_begun_end_no_run() -> None:
    client_contexts = boxed({0: "still", 1: "still"}, 2)
    toy = Toy(FEDMD, client_contexts=client_contexts, batch_size=8)
    toy.fed.call([0, 1], "predict", shared={"t": 0, "i": 0})
    assert {f.reason for f in toy.fed.failures} == {"not ready"}
    away = Faults(dropout=0.8)
    assert all(away.draw(0, 0, 0, i) == "dropout" for i in (0, 1))  # from the first local training
    toy = Toy(FEDMD, client_contexts=client_contexts, faults=away, batch_size=8).run(6)
    assert {f.reason for f in toy.fed.failures} >= {"dropped out", "not ready"}


def test_nothing_is_reported_before_the_first_fit() -> None:
    party = FedALBlackBox(FEDAL.configure(), boxed({0: "forest"}, 1)[0])
    with pytest.raises(NotReady, match="is not fitted yet"):
        party.predict(t=0, i=0)
    party.local_train(t=0)
    party.predict(t=0, i=0)


class Moody(Still):
    """Answers well at first."""

    def predict_proba(self, x: Any) -> Any:
        if len(x) > CHECKED_ROWS:
            raise OSError("the service is gone")
        return super().predict_proba(x)


def test_one_that_fails_only_at_the_evaluation_ends_no_run() -> None:
    client_context = replace(
        boxed({0: "still"}, 1)[0], black_box=BlackBoxModel("moody", partial(Moody, P), CLASSES)
    )
    party = FedALBlackBox(LOCAL.configure(), client_context)
    assert not party.take_notes()
    party.local_train(t=0)
    reply = predictions(party, on="test")
    assert reply["predicted"].tolist() == [0] * 50
    assert float(reply["loss"]) == pytest.approx(np.log(CLASSES))
    (note,) = party.take_notes()
    assert note in party.cfg.warnings


class Counts(Still):
    """Counts how often it is asked."""

    asked: ClassVar[list[int]] = []

    def predict_proba(self, x: Any) -> Any:
        self.asked.append(len(x))
        return super().predict_proba(x)


def test_test_rows_are_asked_for_once_a_fit() -> None:
    box = BlackBoxModel("counts", partial(Counts, P), CLASSES, refit_every=2)
    party = FedALBlackBox(
        FEDMD.configure(params={"batch_size": 8}), replace(boxed({0: "still"}, 1)[0], black_box=box)
    )
    Counts.asked.clear()
    first = [predictions(party, on="test") for _ in (0, 1)]
    party.local_train(t=0)
    replies = [predictions(party, on="test") for _ in (0, 1, 2)]
    assert Counts.asked == [CHECKED_ROWS, 50]
    assert all(r["loss"] == replies[0]["loss"] != first[0]["loss"] for r in replies)
    steps.set_targets(party, torch.full((8, CLASSES), 0.25), 0, 0)
    party.local_train(t=2)
    Counts.asked.clear()
    assert len([predictions(party, on="test") for _ in (0, 1)]) == 2
    assert Counts.asked == [50, 50]  # of each of two fits


def test_boxes_and_networks_teach_each_other() -> None:
    """Each holds two of four classes; together all learn the others'."""
    client_contexts = boxed({1: "forest", 2: "boosting", 3: "knn"}, 6, refit_every=20)
    for i, client_context in enumerate(client_contexts):
        few = client_context.rows.index[
            (client_context.rows.labels[client_context.rows.index] // 2) == i % 2
        ]
        client_contexts[i] = replace(client_context, data=replace(client_context.rows, index=few))
    found = {}
    for method in (LOCAL, FEDMD):
        toy = Toy(method, client_contexts=client_contexts, batch_size=16, lr=0.02).run(
            60 if method is FEDMD else 12
        )
        y = client_contexts[0].tests["test"].y(torch.arange(50))
        replies = toy.engine.call(toy.engine.ids, "predictions", {"on": "test"}, None, None)
        found[method.name] = [float((r["predicted"] == y).float().mean()) for r in replies]
    gains = np.array(found["fedmd"]) - np.array(found["local"])
    assert gains.min() > 0 and gains.mean() > 0.15, found


# -- runs ------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "rounds": 4,
    "params": {"batch_size": 8},
    "data": {
        "clients": 6,
        "public_rows": 60,
        "own_test_rows": 20,
        "test_rows": 60,
        "options": {"alpha": 0.3, "rows": 30},
    },
    "models": {"pool": ["forest", "knn", "mlp"], "black_box": {"refit_every": 3}},
    "evaluate": {"points": 2},
    "faults": {"nan": 0.05, "crash": 0.05},
}


def run(**changes: Any) -> Any:
    return check({"run": {**RUN, "params": {"batch_size": 8, "tau": 2}, **changes}}).run


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return execute(run()).summary


@pytest.mark.each_time("*workers*", "*batched*")
@pytest.mark.parametrize(
    "engine", [{"workers": 2}, {"name": "isolated"}, {"name": "batched"}], ids=str
)
def test_a_run_is_the_same_on_every_engine(engine: dict[str, Any], whole: dict[str, Any]) -> None:
    done = execute(run(engine=engine)).summary
    if engine.get("name") != "batched":
        assert done["state_sha256"] == whole["state_sha256"]
        assert done["accuracy"] == whole["accuracy"]
        return
    assert done["accuracy"]["mean"] == pytest.approx(whole["accuracy"]["mean"], abs=0.05)
    # the networks, while boxes go in turn
    assert any("together" in remark for remark in done["engine"]["remarks"])


@pytest.mark.slow
def test_ray_gives_the_same(whole: dict[str, Any]) -> None:
    ray = pytest.importorskip("ray")
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        assert (
            execute(run(engine={"name": "ray", "workers": 2})).summary["state_sha256"]
            == whole["state_sha256"]
        )
    finally:
        ray.shutdown()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_stopped_run_resumes_to_the_same_bits(
    after: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    calls = iter(range(100))
    with pytest.raises(Stopped):
        execute(run(), tmp_path, stop=lambda: next(calls) + 1 == after)
    done = execute(run(), tmp_path, resume=True).summary
    assert done["state_sha256"] == whole["state_sha256"] and done["accuracy"] == whole["accuracy"]


def test_a_federation_whose_clients_are_all_black_boxes() -> None:
    done = execute(run(models={"pool": ["forest"]}, faults={})).summary
    assert done["accuracy"]["mean"] > 0.2 and done["failures"] == 0
    assert done["architectures"] == ["forest"] * 6


def test_clients_draw_black_boxes_as_networks_and_the_rest_stays_as_it_was() -> None:
    small = build(run())
    mixed = {a: small.clients[i].args[1] for i, a in enumerate(small.architectures)}
    assert (
        mixed["forest"].black_box is not None
        and mixed["forest"].network is None
        and mixed["mlp"].black_box is None
    )
    same = build(run(models={"pool": ["linear", "cnn-small", "mlp"]}))
    i = small.architectures.index("mlp")
    weights = [w.clients[i]().params for w in (small, same)]
    assert all(torch.equal(v, weights[1][k]) for k, v in weights[0].items())
    with start(small) as there:
        assert {there.name(i).partition("-")[0] for i in there.ids} == {"client"}
        assert len(state_sha256((str(i), s) for i, s in there.digests().items())) == 64


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "gossip", "split", "fedproto"])
def test_methods_that_need_networks_refuse_black_boxes_before_any_work(method: str) -> None:
    with pytest.raises(ConfigError) as error:
        check({"run": {"method": method, "models": {"pool": ["forest"]}}})
    text = str(error.value)
    assert f"{method} does not support the black box forest" in text
    assert all(m.name in text for m in ABLE) and {"fedal", "fedmd", "local"} <= {
        m.name for m in ABLE
    }


def own(shape: tuple[int, ...], classes: int) -> Any:
    from sklearn.naive_bayes import GaussianNB

    return GaussianNB()


def test_a_black_box_of_the_user_takes_part_or_is_refused() -> None:
    models = {"pool": [f"{__name__}:own", "mlp"]}
    done = execute(run(models=models, faults={})).summary
    assert done["failures"] == 0
    with pytest.raises(ConfigError, match=r"fedavg does not support the black box .*:own"):
        build(run(method="fedavg", params={}, models={"pool": [f"{__name__}:own"]}))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"min_probability": 0}, r"models\.black_box\.min_probability"),
        ({"refit_every": 0}, r"models\.black_box\.refit_every"),
        ({"public_weight": 0}, r"models\.black_box\.public_weight"),
        (25, r"models\.black_box: must be a table, not 25"),
        (
            {"lern": True},
            r"models\.black_box\.lern: there is no such setting. Did you mean 'learn'",
        ),
    ],
)
def test_settings_are_checked(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(models={"pool": ["forest"], "black_box": settings})


@pytest.mark.parametrize("pool", [None, ["mlp"]])
def test_settings_of_black_boxes_that_do_not_exist_are_refused(pool: Any) -> None:
    models = {"pool": pool, "black_box": {"refit_every": 3}}
    with pytest.raises(
        ConfigError, match=r"models\.black_box: models\.pool has no black box: add one \(forest, "
    ):
        run(models=models)
    run(models={**models, "black_box": {"refit_every": 25}})  # as in the config.toml of any run


def own_network(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), classes))


def test_so_are_they_beside_a_factory_of_networks() -> None:
    asked = run(models={"pool": [f"{__name__}:own_network"], "black_box": {"refit_every": 3}})
    with pytest.raises(ConfigError, match=r"models\.pool has no black box"):
        build(asked)


def test_a_floor_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    rows = [f"{i / 2},{i % 12}" for i in range(600)]
    (tmp_path / "twelve.csv").write_text("\n".join(["x,label", *rows]))
    asked = run(
        models={"pool": ["forest"], "black_box": {"min_probability": 0.09}},
        data={"name": str(tmp_path / "twelve.csv")},
    )
    with pytest.raises(
        ConfigError,
        match=r"black_box\.min_probability: 0\.09 times 12 classes is 1 or more: set less than "
        r"0\.0833",
    ):
        build(asked)


def test_a_run_too_short_to_receive_anything_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def said(**changes: Any) -> str:
        caplog.clear()
        build(run(**{"faults": {}, **changes}))
        return caplog.text

    pool = {"pool": ["forest", "mlp"]}
    text = said(models={**pool, "black_box": {"refit_every": 7}})  # four rounds of two
    assert (
        "last round of fedal begins after 6 iterations" in text
        and "set refit_every to at most 6" in text
    )
    assert "has only one round" in said(models={**pool, "black_box": {"refit_every": 1}}, rounds=1)
    for fine in ({"refit_every": 6}, {"refit_every": 8, "learn": False}):
        assert not said(models={**pool, "black_box": fine})
    assert not said(models={**pool, "black_box": {"refit_every": 9}}, method="local")
    assert not said(models={"pool": ["mlp"]})


def test_alone_needs_no_public_rows() -> None:
    data = {**RUN["data"], "public_rows": 0}
    done = execute(
        run(method="local", data=data, faults={}, models={"pool": ["forest", "mlp"]})
    ).summary
    assert done["failures"] == 0 and done["accuracy"]["mean"] > 0.2
    with pytest.raises(
        ConfigError, match=r"data\.public_rows: fedmd learns from public rows, and there are none"
    ):
        build(run(method="fedmd", data=data, params={"batch_size": 8}))


def test_an_unknown_name_is_suggested_the_black_box_and_no_server_has_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'boosting'"):
        run(models={"pool": ["bosting"]})
    with pytest.raises(
        (ConfigError, ModelError), match="forest is a black box, but a network is needed here"
    ):
        check({"run": {"method": "augfl", "pretrained": {"model": "forest"}}})


def test_cfd_s_labels_in_few_bits_are_what_a_black_box_learns() -> None:
    cfd = methods.find("cfd")
    client_contexts = boxed({1: "forest", 2: "knn"}, 4, refit_every=2)
    settings: dict[str, Any] = {"batch_size": 8, "tau": 2, "preset": "paper", "bits_down": 2}
    toy, strict = (
        Toy(
            cfd,
            client_contexts=client_contexts,
            server_side=at_home(cfd, client_contexts),
            isolated=isolated,
            **settings,
        ).run(3)
        for isolated in (False, True)
    )
    assert same(toy, strict) and not toy.fed.failures
    heard = state(toy, 1)["targets"]
    assert set(torch.unique(heard * 3).round(decimals=4).tolist()) <= {0.0, 1.0, 2.0, 3.0}
    assert torch.allclose(heard.sum(-1)[heard.any(-1)], torch.ones(int(heard.any(-1).sum())))
