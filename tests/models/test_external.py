"""Networks of other libraries, which are not installed here: stand-ins that answer as they do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.errors import ModelError
from fedloom.models import external

GRAY, COLOR = (1, 8, 8), (3, 8, 8)
DIGITS = ((8.0,), (8.0,))
PIXELS = ((127.5,) * 3, (127.5,) * 3)


class Net(nn.Module):
    """Mean colors, then an embedding of 5 and a classifier."""

    def __init__(self, outputs: int, *, odd: bool = False) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.embed = nn.Linear(3, 5)
        self.tail = nn.Sequential(
            nn.Linear(5, outputs), nn.Unflatten(1, (1, -1)) if odd else nn.Dropout(0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        out: Tensor = self.tail(self.embed(x.mean((2, 3))))
        return out


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`torchvision.models`, with a network "ten" of ten classes that takes 6x6 pictures."""
    weights = SimpleNamespace(
        transforms=lambda: SimpleNamespace(crop_size=[6], mean=[0.1, 0.2, 0.3], std=[1, 2, 4])
    )

    def get_model(name: str, weights: Any) -> nn.Module:
        if name not in ("ten", "odd"):
            raise ValueError(f"Unknown model {name}")
        net = Net(10, odd=name == "odd")
        if weights is not None:
            for i, p in enumerate(net.parameters()):
                nn.init.constant_(p, 0.1 * (i + 1))
        return net

    models = ModuleType("torchvision.models")
    models.get_model = get_model  # type: ignore[attr-defined]
    models.get_model_weights = lambda name: SimpleNamespace(DEFAULT=weights)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return models


@pytest.mark.usefixtures("torchvision")
def test_what_reaches_a_network_of_torchvision_is_what_it_was_trained_on() -> None:
    net = external.build("torchvision:ten", GRAY, 10, *DIGITS)
    raw = torch.full((2, 1, 8, 8), 4.0)  # a quarter of 16
    out = net((raw - 8) / 8)
    seen: Any = net.body
    assert seen.seen.shape == (2, 3, 6, 6)
    for channel, (mean, std) in enumerate(((0.1, 1), (0.2, 2), (0.3, 4))):
        assert torch.allclose(
            seen.seen[:, channel], torch.full((2, 6, 6), (0.25 - mean) / std), atol=1e-6
        )
    assert out.shape == (2, 10) and net.features(raw).shape == (2, 5)
    assert net.head is not None and torch.equal(out, net.head(net.features((raw - 8) / 8)))
    ramp = torch.arange(8.0).expand(1, 3, 8, 8) * 30
    color = external.build("torchvision:ten", COLOR, 10, *PIXELS)
    found = color.prepare((ramp - 127.5) / 127.5) * color.std + color.mean
    wanted = nn.functional.interpolate(ramp / 255, (6, 6), mode="bilinear", antialias=True)
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.usefixtures("torchvision")
def test_there_are_logits_only_for_as_many_classes_as_it_was_trained_for() -> None:
    net = external.build("torchvision:ten", COLOR, 3, *PIXELS)
    assert net.features(torch.zeros(2, *COLOR)).shape == (2, 5)
    assert not any(name.startswith("head") for name in net.state_dict())
    with pytest.raises(
        ModelError, match=r"torchvision:ten was not trained on this run's classes.*features alone"
    ):
        net(torch.zeros(2, *COLOR))


@pytest.mark.usefixtures("torchvision")
def test_other_weights_are_the_same_ones_each_time_in_the_same_architecture() -> None:
    before = torch.get_rng_state()
    own, a, b = (
        external.build("torchvision:ten", COLOR, 3, *PIXELS, seed=seed).state_dict()
        for seed in (None, 1, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert list(own) == list(a) == list(b)
    assert all(torch.equal(a[k], b[k]) for k in a) and not all(torch.equal(a[k], own[k]) for k in a)
    assert torch.equal(own["body.embed.bias"], torch.full((5,), 0.2))


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        (
            "torchvision:eleven",
            COLOR,
            "cannot be loaded .ValueError: Unknown model eleven.; check its name",
        ),
        ("torchvision:odd", COLOR, "gives features of shape"),
        ("torchvision:ten", (30,), "takes gray or color images"),
        ("torchvision:ten", (4, 8, 8), "takes gray or color images"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, shape: tuple[int, ...], why: str) -> None:
    levels = (0.5,) * shape[0]
    with pytest.raises(ModelError, match=why):
        external.build(name, shape, 3, levels, levels)


@pytest.mark.parametrize(
    ("name", "library"), [("torchvision:resnet50", "torchvision"), ("hf:some/vit", "transformers")]
)
def test_a_missing_library_names_its_extra(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.models.external.find_spec", lambda needed: None)
    with pytest.raises(ModelError, match=rf"needs {library}.*pip install -e '.\[vision\]'"):
        external.build(name, COLOR, 3, *PIXELS)


class Hub(nn.Module):
    """As transformers has them: with a config, and answers with names."""

    def __init__(self, classes: int | None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.classifier = nn.Sequential(nn.Linear(5, classes)) if classes else None

    def forward(self, pixel_values: Tensor) -> Any:
        tokens = self.embed(pixel_values.mean((2, 3)))[:, None].repeat(1, 2, 1)
        if self.classifier is not None:
            return SimpleNamespace(logits=self.classifier(tokens[:, 0]))
        return SimpleNamespace(last_hidden_state=tokens, pooler_output=None)


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The parts of transformers that are used. `told` is what was asked of it; `missing`, weights
    that files lack.
    """
    said = SimpleNamespace(
        told=[], missing=[], config=SimpleNamespace(architectures=["NetModel"], image_size=12)
    )

    def loader(classes: int | None) -> Any:
        def from_pretrained(where: str, **options: Any) -> Any:
            said.told.append((where, options))
            return Hub(classes).double(), {"missing_keys": said.missing}

        return SimpleNamespace(
            from_pretrained=from_pretrained, from_config=lambda config, **options: Hub(classes)
        )

    def config(where: str, **options: Any) -> Any:
        said.told.append((where, options))
        return said.config

    def takes(where: str) -> Any:
        if not hasattr(said, "takes"):
            raise OSError("no preprocessor_config.json")
        return said.takes, {}

    top, base = ModuleType("transformers"), ModuleType("transformers.image_processing_base")
    top.AutoConfig = SimpleNamespace(from_pretrained=config)  # type: ignore[attr-defined]
    top.AutoModel, top.AutoModelForImageClassification = loader(None), loader(4)  # type: ignore[attr-defined]
    base.ImageProcessingMixin = SimpleNamespace(get_image_processor_dict=takes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", top)
    monkeypatch.setitem(sys.modules, "transformers.image_processing_base", base)
    return said


def test_a_network_of_the_hub_is_read_as_safetensors_and_runs_no_code(
    transformers: SimpleNamespace, tmp_path: Path
) -> None:
    net = external.build(f"hf:{tmp_path}", COLOR, 4, *PIXELS)
    assert net.head is None and net.size == (12, 12)
    assert net.features(torch.zeros(2, *COLOR)).shape == (2, 5)
    assert net.features(torch.zeros(2, *COLOR)).dtype == torch.float32  # whatever the file has
    asked = dict(transformers.told[1][1])
    assert transformers.told[1][0] == str(tmp_path) and asked["use_safetensors"] is True
    assert all(options["trust_remote_code"] is False for _, options in transformers.told)


def test_a_classifier_of_the_hub_has_its_logits(transformers: SimpleNamespace) -> None:
    transformers.config.architectures = ["NetForImageClassification"]
    transformers.takes = {
        "size": {"height": 6, "width": 10},
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
    }
    net = external.build("hf:some/net", COLOR, 4, *PIXELS)
    x = torch.rand(2, *COLOR) * 2 - 1
    assert net.size == (6, 10) and net.head is not None
    assert torch.allclose(net.prepare(x).mean(), ((x + 1) / 2).mean(), atol=0.02)
    assert torch.equal(net(x), net.head(net.features(x))) and net(x).shape == (2, 4)


@pytest.mark.parametrize("size", [{"shortest_edge": 9}, 9])
def test_its_size_may_be_said_in_several_forms(size: Any, transformers: SimpleNamespace) -> None:
    transformers.takes = {"size": {"shortest_edge": 20}, "crop_size": size}
    assert external.build("hf:some/net", COLOR, 4, *PIXELS).size == (9, 9)


def test_a_file_without_all_weights_is_refused(transformers: SimpleNamespace) -> None:
    transformers.missing = ["pooler.bias"]
    with pytest.raises(
        ModelError, match=r"lacks 1 weights of the network, such as pooler\.bias.*random"
    ):
        external.build("hf:some/net", COLOR, 4, *PIXELS)
