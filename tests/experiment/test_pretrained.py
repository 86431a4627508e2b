"""The server's own model: trained on its own rows alone, kept, checked when it is read, and given
to nobody else.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fedloom
from fedloom import models
from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError, MethodError, ModelError, warn_once
from fedloom.experiment.config.pretrained import PretrainedConfig
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan import pretrained, pretraining, weights
from fedloom.experiment.plan.build import build, data_of, pretrained_of
from fedloom.experiment.plan.pretrained import training_of
from fedloom.experiment.plan.pretraining import Training, moved, train
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.session import fingerprint
from fedloom.methods import find
from fedloom.models.rescaled import Rescaled
from fedloom.support.paths import write_atomically

SERVER = 300


def a_run(seed: int = 0, method: str = "fedavg", server: int = SERVER, **section: Any) -> RunConfig:
    values = {
        "method": method,
        "seed": seed,
        "rounds": 1,
        "data": {"clients": 3, "server_rows": server},
    }
    return check({"run": {**values, "pretrained": section}}).run


def a_training(model: str = "mlp", name: str = "digits", **settings: Any) -> Training:
    """Of a model on the rows that a run's server has."""
    run = check(
        {"run": {"method": "fedavg", "data": {"name": name, "clients": 2, "server_rows": 60}}}
    ).run
    dataset, shares = data_of(run)
    usual: dict[str, Any] = {"norm": None, "epochs": 4, "lr": 0.05, "batch_size": 16, "seed": 0}
    return Training(dataset, shares.server, model, **usual | settings)


def quietly(*_: Any) -> None:
    """No progress."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept from another test, and every remark is made anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    warn_once.cache_clear()
    return tmp_path / "cache" / "fedloom" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A model of the server's rows, as `a_run` has them."""
    run = a_run(model="mlp", epochs=2)
    dataset, shares = data_of(run)
    path = tmp_path / "server.safetensors"
    train(training_of(run.pretrained, dataset, shares.server, "cpu"), path, quietly)
    return path


# --- training -----------------------------------------------------------------------------------


def test_it_learns_from_the_servers_rows_alone(tmp_path: Path) -> None:
    training = a_training("mlp", epochs=30)
    others = np.setdiff1d(np.arange(len(training.dataset.y)), training.rows)
    training.dataset.y[others] = 0  # were they looked at, the weights would be others
    once = train(training, tmp_path / "a.safetensors", quietly)
    again = train(a_training("mlp", epochs=30), tmp_path / "b.safetensors", quietly)
    assert once.weights_sha256 == again.weights_sha256
    assert again.accuracy > 0.6 and again.test_rows == 1797 - 60 and again.rows == 60


@pytest.mark.parametrize(("model", "name"), [("resnet8", "digits"), ("mlp", "wine")])
def test_a_stopped_training_ends_with_the_same_bits(model: str, name: str, tmp_path: Path) -> None:
    norm = "batch" if model == "resnet8" else None  # whose statistics must survive as well
    whole, stopped = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    seen = []

    def stop(epoch: int, epochs: int, loss: float) -> None:
        seen.append(epoch)
        if epoch == 3:
            raise KeyboardInterrupt

    train(a_training(model, name, norm=norm), whole, quietly)
    with pytest.raises(KeyboardInterrupt):
        train(a_training(model, name, norm=norm), stopped, stop)
    assert not stopped.exists() and stopped.with_name("stopped.safetensors.part").exists()
    train(a_training(model, name, norm=norm), stopped, lambda epoch, *_: seen.append(epoch))
    assert seen == [1, 2, 3, 4]
    assert whole.read_bytes() == stopped.read_bytes()
    assert not stopped.with_name("stopped.safetensors.part").exists()


def test_what_another_training_left_half_done_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, epochs = tmp_path / "x.safetensors", []

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(a_training(seed=1), file, stop)
    train(a_training(seed=2), file, lambda epoch, *_: epochs.append(epoch))
    assert epochs == [1, 2, 3, 4]
    file.with_name("x.safetensors.part").write_bytes(b"torn")
    train(a_training(seed=2), file, lambda epoch, *_: epochs.append(epoch))
    assert epochs == [1, 2, 3, 4] * 2
    messages = [r.message for r in caplog.records]
    assert (
        messages
        == [f"{file}.part is damaged or from another training; pretraining starts again"] * 2
    )


def test_of_what_is_half_sound_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, file = tmp_path / "whole.safetensors", tmp_path / "x.safetensors"
    write = write_atomically

    def lose_momentum(part: Path, content: bytes) -> None:
        tree: Any = message.decode(content)
        write(part, message.encode({**tree, "opt": {}}))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pretraining, "write_atomically", lose_momentum)
        with pytest.raises(KeyboardInterrupt):
            train(a_training(), file, stop)
    assert train(a_training(), file, quietly) == train(a_training(), whole, quietly)


def test_the_rate_falls_where_the_papers_script_lets_it() -> None:
    training = a_training(epochs=240)
    rates = {
        epoch: pretraining._optimizer(training, epoch).lr
        for epoch in (0, 149, 150, 179, 180, 209, 210, 239)
    }
    assert list(rates.values()) == pytest.approx([0.05, 0.05, 0.005, 0.005, 5e-4, 5e-4, 5e-5, 5e-5])


def test_a_training_that_diverges_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"diverged in epoch 1: lower pretrained\.lr \(now 1e\+30\)"
    ):
        train(a_training(lr=1e30), tmp_path / "x.safetensors", quietly)


def test_a_place_that_cannot_be_written_to_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("a file")
    monkeypatch.setattr(pretraining, "_pass", None)  # before any work
    for folder in (tmp_path / "a", Path("/proc")):
        with pytest.raises(ConfigError, match="cannot write"):
            train(a_training(), folder / "x.safetensors", quietly)


def test_pictures_move_over_a_black_ground_and_only_color_is_mirrored() -> None:
    raw = torch.arange(1, 2 * 28 * 28 + 1).view(2, 1, 28, 28).repeat(40, 1, 1, 1)
    found = moved(raw, np.random.default_rng(0))
    shifts = set()
    for before, after in zip(raw[:, 0], found[:, 0], strict=True):
        wide = nn.functional.pad(before, [4] * 4)
        places = [
            (i, j)
            for i in range(9)
            for j in range(9)
            if torch.equal(wide[i : i + 28, j : j + 28], after)
        ]
        assert len(places) == 1  # so it was not mirrored
        shifts |= set(places)
    assert (
        len(shifts) > 40 and max(max(s) for s in shifts) == 8 and min(min(s) for s in shifts) == 0
    )
    color = torch.arange(3 * 6 * 6).view(1, 3, 6, 6).repeat(200, 1, 1, 1)  # too small to be moved
    found = moved(color, np.random.default_rng(0))
    mirrored = [torch.equal(x, color[0].flip(2)) for x in found]
    assert all(m or torch.equal(x, color[0]) for m, x in zip(mirrored, found, strict=True))
    assert 60 < sum(mirrored) < 140


# --- in a run ------------------------------------------------------------------------------------


def test_a_run_trains_its_servers_model_once_for_all_seeds(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedloom.pretraining")
    built = [build(a_run(seed, model="mlp", epochs=20)) for seed in (0, 1)]
    assert not own_cache.exists()  # nobody has asked for it yet
    first, second, again = (w.server.context.teacher() for w in (*built, built[0]))
    assert len(list(own_cache.glob("*.safetensors"))) == 1
    assert sum("pretraining mlp" in r.message for r in caplog.records) == 1
    for other in (second, again):
        assert all(
            torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True)
        )
    assert not first.training and not any(p.requires_grad for p in first.parameters())
    rows = built[0].server.context.rows
    x, y = rows.every, rows.y(torch.arange(len(rows)))
    assert (first(x).argmax(1) == y).float().mean() > 0.5


@pytest.mark.parametrize(
    ("models", "network", "norm"),
    [
        ({}, "cnn-small", None),
        ({"pool": ["mlp"]}, "mlp", None),
        ({"pool": ["resnet8"], "norm": "batch"}, "resnet8", "batch"),
        ({"pool": ["mlp", "linear"]}, "cnn-small", None),
    ],
)
def test_unless_one_is_named_it_is_the_clients_network(
    models: dict[str, Any], network: str, norm: str | None
) -> None:
    run = check({"run": {"method": "fedpcl", "models": models}}).run
    section = pretrained_of(run, "image")
    assert (section.model, section.norm) == (network, norm)
    named = run.pretrained.model_copy(update={"norm": "none"})
    assert pretrained_of(run.model_copy(update={"pretrained": named}), "image").norm == "none"


@pytest.mark.parametrize("training", [1797, 60_000])
def test_unless_a_number_is_named_its_server_has_a_quarter_of_the_rows(training: int) -> None:
    data = check({"run": {"method": "augfl"}}).run.data
    assert data.rows_at_server(training) == {1797: 449, 60_000: 10_000}[training]
    assert check({"run": {"method": "fedavg"}}).run.data.rows_at_server(training) == 0


def test_a_method_by_its_name_alone_trains_no_model_that_it_does_not_ask_for(
    own_cache: Path,
) -> None:
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {"clients": 2},
        "models": {"pool": ["linear"]},
        "evaluate": {"points": 1},
    }
    fedloom.run("augfl", params={"lam": 0.0}, **settings)
    assert not own_cache.exists()
    fedloom.run("fedlp", **settings)
    assert len(list(own_cache.glob("*.safetensors"))) == 1


def test_a_kept_model_that_is_damaged_is_trained_again(own_cache: Path) -> None:
    context = build(a_run(model="mlp", epochs=2)).server.context
    before = context.teacher()
    (kept,) = own_cache.glob("*.safetensors")
    whole = kept.read_bytes()
    for torn in (b"", whole[:-4], whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.write_bytes(torn)
        after = context.teacher()
        assert all(
            torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True)
        )
        assert kept.read_bytes() == whole


def test_what_moves_a_weight_moves_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"model": "linear"},
        {"norm": "batch"},
        {"epochs": 5},
        {"lr": 0.1},
        {"batch_size": 8},
        {"seed": 1},
    ]
    keys = [a_training(**change).key for change in changes] + [a_training("mlp", "wine").key]
    assert len(set(keys)) == len(keys)
    assert a_training(norm="none").key == a_training().key  # which is the default
    page = tmp_path / "keynets.py"
    monkeypatch.syspath_prepend(tmp_path)
    page.write_text("from torch import nn\n\ndef net(shape, classes):\n    return nn.Flatten()\n")
    first = a_training("keynets:net").key
    page.write_text(page.read_text() + "# other code\n")
    assert a_training("keynets:net").key != first


def test_only_the_server_is_given_the_model(file: Path) -> None:
    built = build(a_run(file=str(file)))
    assert built.server is not None and built.server.context.pretrained is not None
    for client in built.clients:
        context = client().context
        assert context.pretrained is None and context.encoder is None
        with pytest.raises(MethodError, match="has no pretrained model"):
            context.teacher()


def test_clients_of_a_method_that_hands_it_out_know_the_architecture_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = find("fedavg")
    monkeypatch.setattr(
        RunConfig, "resolve", lambda self: (_with_encoder(method), method.configure(), 1)
    )
    built = build(a_run(file=str(file)))
    own = built.server.context.teacher().state_dict()
    encoders = [client().context.encoder() for client in built.clients]
    first = encoders[0].state_dict()
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in own.items()}
    assert not any(torch.equal(first[k], own[k]) for k in own if k.endswith("weight"))
    assert all(torch.equal(first[k], e.state_dict()[k]) for e in encoders for k in first)
    assert all(client().context.pretrained is None for client in built.clients)


def _with_encoder(method: Any) -> Any:
    return replace(method, needs=(*method.needs, "pretrained encoder"))


def test_a_method_that_hands_it_out_needs_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^pretrained: fedavg needs a pretrained model.*pretrained\.model=resnet8x4",
    ):
        PretrainedConfig().check(_with_encoder(find("fedavg")), server=True)


def test_a_run_with_another_model_is_another_run(tmp_path: Path, file: Path) -> None:
    before = fingerprint(build(a_run(file=str(file))))
    assert fingerprint(build(a_run(file=str(file)))) == before
    dataset, shares = data_of(a_run())
    training = training_of(a_run(model="mlp", epochs=3).pretrained, dataset, shares.server, "cpu")
    train(training, file, quietly)
    assert fingerprint(build(a_run(file=str(file)))) != before


def test_a_run_with_another_plain_file_is_another_run(tmp_path: Path) -> None:
    plain, marks = tmp_path / "plain.safetensors", []
    for seed in (0, 0, 1):
        save_file(models.build("mlp", (1, 8, 8), 10, seed=seed).state_dict(), plain)
        marks.append(fingerprint(build(a_run(file=str(plain), model="mlp"))))
    assert marks[0] == marks[1] != marks[2]


def test_a_run_with_another_folder_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.models.external.check_name", lambda name: None)
    (tmp_path / "in").mkdir()
    inner, run = tmp_path / "in" / "model.safetensors", a_run(model=f"hf:{tmp_path}")
    inner.write_bytes(b"one")
    before = fingerprint(build(run))
    assert fingerprint(build(run)) == before
    inner.write_bytes(b"other")
    assert fingerprint(build(run)) != before


# --- files ---------------------------------------------------------------------------------------


def test_a_file_says_what_it_is(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        said = json.loads(opened.metadata()["fedloom"])
    assert (said["model"], said["norm"], said["shape"], said["classes"]) == (
        "mlp",
        "none",
        [1, 8, 8],
        10,
    )
    assert (said["dataset"], said["rows"], said["epochs"], said["seed"]) == ("digits", SERVER, 2, 0)
    assert said["shift"] == said["scale"] == [8.0] and said["test_rows"] == 1797 - SERVER


def test_one_file_serves_all_seeds_and_numbers_of_clients(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (0, 5):
        build(a_run(seed, file=str(file)))
    assert not caplog.records


@pytest.mark.parametrize("server", [0, 200, 301])
def test_a_model_that_may_have_seen_other_parties_rows_is_refused(server: int, file: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"300 rows of digits which are not the {server} rows.*: set data\.server_rows=300, "
        r"or",
    ):
        build(a_run(server=server, file=str(file)))


def test_of_other_data_nothing_is_known(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset, shares = data_of(a_run())
    other = replace(dataset, y=dataset.y[::-1].copy(), name="sdigits")
    cfg = PretrainedConfig(file=str(file))
    for _ in range(2):
        pretrained.server_pretrained(cfg, other, shares.server[:5], "cpu")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "trained on digits, whose content differs from this run's sdigits" in caplog.text


def test_a_plain_file_is_read_when_its_network_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tmp_path / "plain.safetensors"
    net = models.build("resnet8", (1, 8, 8), 10, norm="batch", seed=4)
    save_file(net.state_dict(), plain)
    with pytest.raises(ConfigError, match=r"does not name its network: set pretrained\.model"):
        build(a_run(file=str(plain)))
    built = [build(a_run(file=str(plain), model="resnet8", norm="batch")) for _ in range(2)]
    found = built[0].server.context.teacher()
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), net.parameters(), strict=True))
    assert [r.message for r in caplog.records if "are unknown" in r.message] == [
        f"pretrained: the training data of {plain} are unknown: they may include client or test "
        "rows"
    ]
    with pytest.raises(
        CheckpointError, match=r"does not have the weights of resnet8: body\.1\.num_batches"
    ):
        build(a_run(file=str(plain), model="resnet8", norm="group"))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (
            {"model": "linear"},
            r"pretrained\.model: .* was made with mlp, not linear: leave the setting out",
        ),
        ({"norm": "batch"}, r"pretrained\.norm: .* was made with none, not batch"),
        (
            {"model": "mlp", "epochs": 7},
            r"pretrained\.epochs: .* was made with 2, not 7.*pretrain a new model",
        ),
    ],
)
def test_what_the_config_says_of_a_file_must_be_so(
    section: dict[str, Any], why: str, file: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        build(a_run(file=str(file), **section))
    build(a_run(file=str(file), model="mlp", norm="none", epochs=2))


def test_a_file_for_other_inputs_is_refused(file: Path) -> None:
    run = check({"run": {"method": "fedavg", "data": {"name": "wine", "clients": 2}}}).run
    run = run.model_copy(update={"pretrained": PretrainedConfig(file=str(file))})
    with pytest.raises(
        ConfigError,
        match=r"inputs of shape \(1, 8, 8\) and 10 classes \(digits\), not \(13,\) and 3",
    ):
        build(run)


def changed(file: Path, change: Any) -> None:
    """The same card over changed tensors."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors, metadata)
    save_file(tensors, file, metadata)


def _card(tensors: Any, metadata: Any, **values: Any) -> None:
    metadata["fedloom"] = json.dumps({**json.loads(metadata["fedloom"]), **values})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t, m: t.pop("head.bias"), r"head\.bias is missing; set the model and norm"),
        (lambda t, m: t.update(more=torch.ones(1)), "more is not in that network"),
        (
            lambda t, m: t.update({"head.bias": torch.ones(3)}),
            r"head\.bias is F32 of shape \(3,\), not F32 of shape \(10,",
        ),
        (
            lambda t, m: t.update({"head.bias": t["head.bias"].half()}),
            r"bias is F16 .* not F32 .*; save it as float32",
        ),
        (
            lambda t, m: _card(t, m, classes=1),
            "has an invalid card.*classes.*write it again with fedloom pretrain",
        ),
        (lambda t, m: _card(t, m, scale=[0.0]), "scale above 0"),
        # 0 in the type that it is used in
        (lambda t, m: _card(t, m, scale=[1e-60]), "scale above 0"),
        (lambda t, m: _card(t, m, scale=[float("inf")]), "a finite number for each channel"),
        (lambda t, m: _card(t, m, shift=[float("nan")]), "a finite number for each channel"),
        (lambda t, m: _card(t, m, shift=[1.0, 2.0]), "a finite number for each channel"),
        (lambda t, m: _card(t, m, format="fedloom-pretrained/9"), "has an invalid card.*format"),
        (lambda t, m: m.update(fedloom="[" * 10_000), "has an invalid card"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_any_work(
    change: Any, why: str, file: Path
) -> None:
    changed(file, change)
    with pytest.raises(CheckpointError, match=why):
        build(a_run(file=str(file)))


def test_altered_weights_are_refused_when_they_are_read(file: Path) -> None:
    changed(file, lambda t, m: t["head.bias"].add_(1))
    context = build(a_run(file=str(file))).server.context
    with pytest.raises(CheckpointError, match="is damaged"):
        context.teacher()


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain.safetensors"
    tensors = models.build("mlp", (1, 8, 8), 10, seed=0).state_dict()
    tensors["head.bias"][2] = float("nan")
    save_file(tensors, plain)
    context = build(a_run(file=str(plain), model="mlp")).server.context
    with pytest.raises(CheckpointError, match=r"non-finite values in head\.bias"):
        context.teacher()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04" + bytes(200), b"\xff" * 64]
)
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    wrong = tmp_path / "weights.pt"
    wrong.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"is not a safetensors file .*safetensors\.torch\.save_file"
    ):
        build(a_run(file=str(wrong), model="mlp"))


def test_a_missing_file_and_a_huge_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file .*fedloom pretrain"):
        build(a_run(file=str(tmp_path / "nothing.safetensors")))
    monkeypatch.setattr(weights, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match="larger than 100 bytes"):
        build(a_run(file=str(file)))


# --- levels --------------------------------------------------------------------------------------


def test_a_model_sees_what_it_was_trained_on_whatever_the_run_scales_by() -> None:
    net = models.build("mlp", (3,), 2, seed=0)
    raw = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, -1.0]])
    given, wanted = ((1.0, 2.0, 0.0), (2.0, 1.0, 4.0)), ((0.0, 1.0, 1.0), (1.0, 3.0, 2.0))

    def at(level: Any) -> torch.Tensor:
        shift, scale = map(torch.tensor, level)
        return (raw - shift) / scale

    found: Any = Rescaled(net, given, wanted, dims=1)
    assert torch.allclose(found(at(given)), net(at(wanted)), atol=1e-6)
    assert torch.allclose(found.head(found.features(at(given))), found(at(given)))
    image = models.build("cnn-small", (2, 4, 4), 3, seed=0)
    x = torch.randn(2, 2, 4, 4)
    shifted: Any = Rescaled(image, ((0.0, 0.0), (1.0, 1.0)), ((1.0, -1.0), (2.0, 4.0)), dims=3)
    expected = (x - torch.tensor([1.0, -1.0]).view(2, 1, 1)) / torch.tensor([2.0, 4.0]).view(
        2, 1, 1
    )
    assert torch.allclose(shifted(x), image(expected), atol=1e-6)


def test_a_model_of_another_table_keeps_its_own_scale(tmp_path: Path) -> None:
    run = check(
        {"run": {"method": "fedavg", "data": {"name": "wine", "clients": 2, "server_rows": 60}}}
    ).run
    dataset, shares = data_of(run)
    path = tmp_path / "wine.safetensors"
    train(a_training("mlp", "wine"), path, quietly)
    cfg = PretrainedConfig(file=str(path))
    own = pretrained.server_pretrained(cfg, dataset, shares.server, "cpu")
    other = replace(
        dataset, y=dataset.y[::-1].copy(), shift=dataset.shift + 1, scale=dataset.scale * 2
    )
    far = pretrained.server_pretrained(cfg, other, shares.server, "cpu")
    assert own is not None and far is not None
    raw = torch.from_numpy(dataset.x[:5])
    near_x, far_x = (pretraining.standardized(d, raw) for d in (dataset, other))
    assert torch.allclose(own.teacher()(near_x), far.teacher()(far_x), atol=1e-5)
    assert far.encoder().state_dict().keys() == far.teacher().state_dict().keys()


# --- the section ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (
            {"model": "resnet9"},
            r"pretrained\.model: there is no model 'resnet9'\. Did you mean 'resnet8'",
        ),
        ({"model": "nowhere:net"}, r"pretrained\.model: .*cannot import nowhere"),
        ({"norm": "batch"}, "^pretrained\\.norm needs a model"),
        ({"model": "my.nets:net", "norm": "batch"}, "norm does not apply to my.nets:net, which"),
        ({"epochs": 3, "lr": 0.1}, "^pretrained: epochs, lr apply to training: set model"),
        (
            {"model": "hf:some/vit", "norm": "batch"},
            "hf:some/vit is a published model, so file and norm do not apply",
        ),
        ({"model": "torchvision:resnet50", "epochs": 3}, "epochs apply to training"),
        ({"model": "mlp", "lr": 0}, r"pretrained\.lr: "),
    ],
)
def test_a_section_that_cannot_be_is_refused_at_once(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        a_run(**section)


def test_what_is_reported_of_a_model_that_is_chosen_by_itself_is_heard() -> None:
    section = check(
        {"run": {"method": "augfl", "pretrained": {"epochs": 7, "norm": "batch"}}}
    ).run.pretrained
    assert (section.model, section.epochs, section.like("mlp", "group").norm) == (
        "auto",
        7,
        "batch",
    )
    with pytest.raises(ConfigError, match=r"^pretrained\.norm does not apply to nets:tiny"):
        section.like("nets:tiny", None)
    assert section.model_copy(update={"norm": None}).like("nets:tiny", None).model == "nets:tiny"


def test_a_model_to_train_needs_rows_of_the_server() -> None:
    with pytest.raises(
        ConfigError,
        match=r"pretrained\.model: mlp is trained .* but the server has "
        r"none.*data\.server_rows=1000",
    ):
        a_run(server=0, model="mlp")


def test_methods_that_share_columns_have_no_such_model() -> None:
    with pytest.raises(
        ConfigError, match="pretrained: split shares columns, not rows: leave the section out"
    ):
        a_run(method="split", server=0, file="x.safetensors")


def test_a_network_that_does_not_fit_the_rows_is_refused_before_any_work() -> None:
    run = check(
        {"run": {"method": "fedavg", "data": {"name": "wine", "clients": 2, "server_rows": 30}}}
    ).run
    run = run.model_copy(update={"pretrained": PretrainedConfig(model="resnet8")})
    with pytest.raises(ModelError, match="resnet8 takes images"):
        build(run)


def test_paths_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit").mkdir()
    assert PretrainedConfig(file="a.safetensors").file == str(tmp_path / "a.safetensors")
    assert PretrainedConfig(model="hf:vit").model == f"hf:{tmp_path / 'vit'}"
    assert PretrainedConfig(model="hf:some/vit").model == "hf:some/vit"
    assert PretrainedConfig(file="~nobodyx/a.safetensors").file == str(
        tmp_path / "~nobodyx" / "a.safetensors"
    )
    assert PretrainedConfig(model="hf:~nobodyx/vit").model == "hf:~nobodyx/vit"


def test_a_published_model_is_made_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def published(*arguments: Any, seed: int | None = None) -> nn.Module:
        calls.append((arguments, seed))
        return models.build("mlp", (1, 8, 8), 10, seed=seed or 0)

    monkeypatch.setattr("fedloom.models.external.check_name", lambda name: None)
    monkeypatch.setattr("fedloom.models.external.build", published)
    built = build(a_run(server=0, model="hf:some/vit"))
    assert not calls and "the training data of hf:some/vit are unknown" in caplog.text
    built.server.context.teacher()
    assert calls == [(("hf:some/vit", (1, 8, 8), 10, (8.0,), (8.0,)), None)]
