"""The command `fedloom pretrain`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress

from fedloom.cli.options import Device, Force, Settings, out, written
from fedloom.core.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.experiment.plan.pretraining import Training
    from fedloom.experiment.plan.weights import Card


def pretrain(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG.toml|NAME]", help="The config with the data and the model."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A network: see fedloom list models, or package.module:factory."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the server's rows.  \\[default: 20]")
    ] = None,
    target: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path(
        "server.safetensors"
    ),
    settings: Settings = None,
    device: Device = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="CPU threads. More are faster, but change the last digits of weights."
        ),
    ] = 1,
    force: Force = False,
) -> None:
    """Train a model on the server's own rows, for methods with a pretrained server model.

    [bold]fedloom pretrain --model resnet8 -s data.name=digits -s data.server_rows=500[/]

    [bold]fedloom pretrain my.toml --model resnet8x4 --epochs 240 --out server.safetensors --device
    cuda[/]

    The server's rows are drawn before all others and are the same for every seed; no client or test
    set has them. The file stores their hash, and a run whose server has other rows refuses it.

    After a Ctrl-C the same command resumes after the last epoch, with the same final weights.

    Then: [bold]fedloom run my.toml -s pretrained.file=server.safetensors[/]

    Without a file, a run whose pretrained.model names a network trains it once and keeps it in
    ~/.cache/fedloom/models.
    """
    import tomli_w

    from fedloom.experiment.plan.build import data_of, pretrained_of
    from fedloom.experiment.plan.pretrained import training_of
    from fedloom.experiment.plan.reading import read

    if target.is_dir() or target.suffix != ".safetensors":
        raise ConfigError(f"--out must be a .safetensors file, not {target}")
    if target.exists() and not force:
        raise ConfigError(
            f"{target} already exists; add --force to replace it, or choose another --out"
        )
    given: dict[str, Any] = {"file": None}  # a config may name the file to write
    given |= {k: v for k, v in {"model": model, "epochs": epochs}.items() if v is not None}
    flags = {"pretrained": given, "engine": None if device is None else {"device": device}}
    run = read(config or "local", settings or (), flags).run
    if not run.pretrained.to_train:
        raise ConfigError(
            "no network to train: name one of fedloom list models, such as --model resnet8x4"
        )
    dataset, shares = data_of(run)
    training = training_of(
        pretrained_of(run, dataset.kind),
        dataset,
        shares.server,
        run.engine.device,
        run.models.variance,
    )
    parameters = sum(p.numel() for p in training.build().parameters())
    norm = f", norm {training.resolved_norm}" if training.resolved_norm else ""
    out.print(
        f"[bold]{escape(training.model)}[/]: {parameters:,} parameters{norm}; "
        f"{_rows(len(training.rows))} of {escape(dataset.name)}, held by the server only",
        soft_wrap=True,
    )
    card = _trained(training, target, threads)
    out.print(f"{card.score} on {_rows(card.test_rows)} not used for training")
    written("written", target)
    sections = {
        "data": {"name": run.data.name, "server_rows": len(shares.server)},
        "pretrained": {"file": str(target)},
    }
    out.print(
        f"Use it in a run on the same data:\n{tomli_w.dumps(sections)}",
        end="",
        markup=False,
        soft_wrap=True,
    )


def _trained(training: "Training", target: Path, threads: int) -> "Card":
    """Train with a progress bar in a terminal, or a line per epoch in a log; a stop waits for the
    end of an epoch.
    """
    import torch

    from fedloom.cli.progress import stop_on_signal
    from fedloom.experiment.plan.pretraining import train

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
