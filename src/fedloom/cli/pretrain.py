"""The command `fedloom pretrain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from fedloom.cli.progress import stop_on_signal
from fedloom.core.errors import ConfigError
from fedloom.experiment.build import data_of, pretrained_of
from fedloom.experiment.pretraining import Training, train
from fedloom.experiment.reading import read
from fedloom.experiment.weights import Card


def pretrain(
    config: str | None,
    model: str | None,
    epochs: int | None,
    target: Path,
    settings: Sequence[str],
    device: str | None,
    threads: int,
    force: bool,
    out: Console,
) -> None:
    """Train a model on a config's server rows, write it, and print its accuracy and the settings to use it."""
    if target.is_dir() or target.suffix != ".safetensors":
        raise ConfigError(f"--out must be a .safetensors file, not {target}")
    if target.exists() and not force:
        raise ConfigError(f"{target} already exists; add --force to replace it, or choose another --out")
    given: dict[str, Any] = {"file": None}  # a config may name the file to write
    given |= {k: v for k, v in {"model": model, "epochs": epochs}.items() if v is not None}
    flags = {"pretrained": given, "engine": None if device is None else {"device": device}}
    run = read(config or "local", settings, flags).run
    if not run.pretrained.to_train:
        raise ConfigError("no network to train: name one of fedloom list models, such as --model resnet8x4")
    dataset, shares = data_of(run)
    training = pretrained_of(run, dataset.kind).training(dataset, shares.server, run.engine.device)
    parameters = sum(p.numel() for p in training.build().parameters())
    norm = f", norm {training.resolved_norm}" if training.resolved_norm else ""
    out.print(
        f"[bold]{escape(training.model)}[/]: {parameters:,} parameters{norm}; {_rows(len(training.rows))} of "
        f"{escape(dataset.name)}, held by the server only",
        soft_wrap=True,
    )
    card = _trained(training, target, threads, out)
    out.print(f"accuracy {card.accuracy:.1%} on {_rows(card.test_rows)} held out from training")
    out.print(f"written  {target}", soft_wrap=True)
    sections = {"data": {"name": run.data.name, "server": len(shares.server)}, "pretrained": {"file": str(target)}}
    out.print(f"Use it in a run on the same data:\n{tomli_w.dumps(sections)}", end="", markup=False, soft_wrap=True)


def _trained(training: Training, target: Path, threads: int, out: Console) -> Card:
    """Train with a progress bar in a terminal, or a line per epoch in a log; a stop waits for the end of an epoch."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            stop_on_signal("this epoch") as stop,
            Progress(console=out, disable=not out.is_terminal, transient=True) as bars,
        ):
            task = bars.add_task("pretraining", total=training.epochs)

            def show(epoch: int, epochs: int, loss: float) -> None:
                bars.update(task, completed=epoch, description=f"loss {loss:.3f}")
                if not out.is_terminal:
                    out.print(f"epoch {epoch}/{epochs}  loss {loss:.3f}")
                if stop() and epoch < epochs:
                    out.print(f"the same command resumes after epoch {epoch}")
                    raise KeyboardInterrupt

            return train(training, target, show)
    finally:
        torch.set_num_threads(before)


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"
