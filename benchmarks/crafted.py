"""Attacks by a party that does not follow the protocol, or by a thief: `python -m benchmarks.crafted [SEED] [NAMES…]`.

It prints the table of docs/results/leaks.md. Each attack asks the party of a real run on scikit-learn's data, as a node
would be asked, and is measured beside what the same attacker gets without it.

    embeddings  split learning: the coordinator knows the run's seed, so it knows a party's network before the first
                step, and searches rows whose embeddings are those that were sent.
    hijack      split learning: the coordinator sends gradients that make a party's network like one of its own, whose
                inverse it has (D. Pasquini, G. Ateniese, M. Bernaschi, "Unleashing the Tiger", CCS 2021).
    gradients   AFIND+: a peer asks at weights of its own, where a row alone makes a neuron active, so that the quotient
                of two gradients is that row (L. Fowl et al., "Robbing the Fed", ICLR 2022).
    models      membership in the training rows by the confidence of an exported model.
    checkpoints a thief of the coordinator's checkpoints: membership by the newest one, and by the last two.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.leaks import HORIZONTAL
from fedloom.api import execute
from fedloom.core.scores import auc
from fedloom.deploy import export, load_model
from fedloom.experiment.plan.build import build, with_secret
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run import checkpoint
from fedloom.methods import steps
from fedloom.protect.leaks import explained

Line = tuple[str, str, str, float, float]
"""Method, attack, what is found, its success and that without the attack."""


def columns_of(data: str, seed: int, secret: int | None = None) -> tuple[Any, Tensor, Tensor]:
    """A party of split learning with the aligned people's columns (n, p), and those of other people (m, p), whom the
    attacker knows. With a secret it starts as a node with columns of its own."""
    run = check({"run": {"method": "split", "rounds": 1, "seed": seed, "data": {"name": data}}}).run
    plan = build(run)
    columns = run.columns.model_copy(update={"private": secret is not None})
    plan = with_secret(replace(plan, run=run.model_copy(update={"columns": columns})), secret)
    context = plan.contexts[1]
    party = plan.method.party_at(plan.server_context)(plan.cfg, context)
    rows = context.data.every
    return party, rows[: context.aligned], rows[context.aligned :]


def of_variance(found: Tensor, rows: Tensor, known: Tensor) -> float:
    """The share of the variance of rows that is explained; 0 for the mean of the known rows, or for worse."""
    rows, mean = rows.flatten(1).double(), known.flatten(1).double().mean(0)
    error = (found.flatten(1).double() - rows).square().sum()
    return max(0.0, float(1 - error / (rows - mean).square().sum()))


# -- split learning ------------------------------------------------------------------------------------------------


def first_embeddings(seed: int) -> Iterator[Line]:
    """Rows from the first batch of embeddings and the initial network; beside it, a linear probe of an attacker who
    knows the rows of half of the batch, and not the network."""
    for data, secret in (("breast_cancer", None), ("breast_cancer", 7), ("digits", None), ("digits", 7)):
        party, _, known = columns_of(data, seed, secret)
        x = party.context.aligned_batch(0, 0, size=party.cfg.batch_size)
        sent = party.embed(number=0, step=0).detach()
        model = columns_of(data, seed)[0].net.module.train().requires_grad_(False)
        with torch.no_grad():
            guess = known[torch.cdist(sent, model(known)).argmin(1)].clone().requires_grad_()
        optimizer = torch.optim.Adam([guess], 0.02)
        for step in range(3000):
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 3000)
            optimizer.zero_grad()
            F.mse_loss(model(guess), sent).backward()
            optimizer.step()
        half = len(x) // 2
        probe = explained(sent[half:], x[half:].flatten(1), (sent[:half], x[:half].flatten(1)))
        yield (
            "split",
            f"first embeddings, {'known' if secret is None else 'secret'} start ({data})",
            "columns",
            of_variance(guess.detach(), x, known),
            max(0.0, probe),
        )


def hijack(seed: int, steps: int = 3000) -> Iterator[Line]:
    """Rows by the attacker's decoder; without the gradients, the same decoder on the embeddings of honest training."""
    for data in ("breast_cancer", "digits"):
        torch.manual_seed(seed)
        party, aligned, known = columns_of(data, seed)
        p, d, size = known[0].numel(), party.cfg.embedding_dim, party.cfg.batch_size

        def layers(*widths: int) -> nn.Sequential:
            found: list[nn.Module] = []
            for a, b in pairwise(widths):
                found += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
            return nn.Sequential(*found[:-1])

        pilot = nn.Sequential(nn.Flatten(), layers(p, 128, d), nn.BatchNorm1d(d, affine=False))
        decoder, judge = layers(d, 256, 256, p), layers(d, 256, 256, 1)
        own = torch.optim.Adam([*pilot.parameters(), *decoder.parameters()], 1e-3)
        judging = torch.optim.Adam(judge.parameters(), 1e-4, betas=(0.5, 0.99))
        per_pass = -(-len(aligned) // size)
        one, other = torch.ones(size, 1), torch.zeros(size, 1)
        cross = F.binary_cross_entropy_with_logits
        for n in range(steps):
            where = {"number": n // per_pass, "step": n % per_pass}
            mine = known[torch.randint(len(known), (size,))]
            sent = party.embed(**where).detach().requires_grad_()
            cross(judge(sent), one).backward()
            assert sent.grad is not None
            party.update(**where, cut=sent.grad * size)
            own.zero_grad()
            F.mse_loss(decoder(pilot(mine)), mine.flatten(1)).backward()
            own.step()
            judging.zero_grad()
            (cross(judge(sent.detach()), other) + cross(judge(pilot(mine).detach()), one)).backward()
            judging.step()
        honest, *_ = columns_of(data, seed)
        found = []
        with torch.no_grad():
            for whom in (party, honest):
                found.append(of_variance(decoder(whom.contribution(on="aligned")), aligned, known))
        yield "split", f"feature-space hijacking ({data})", "columns", found[0], found[1]


# -- AFIND+ --------------------------------------------------------------------------------------------------------


def chosen_point(seed: int) -> Iterator[Line]:
    """The share of the probed rows that one answer gives to 0.01 of the columns' s.d.; beside it, at the weights of a
    run's start."""
    run = {"method": "afind-plus", "rounds": 1, "seed": seed, "models": {"pool": ["mlp"], "norm": "none"}}
    plan = build(check({"run": {**run, "data": HORIZONTAL}}).run)
    victim: Any = plan.method.party_at(plan.server_context)(plan.cfg, plan.contexts[0])
    public = plan.contexts[1].data.every.flatten(1)
    x, _ = victim.sample_batch(0, size=plan.cfg.probe_rows)
    rows, spread = x.flatten(1), public.std(0).clamp_min(1e-3)
    found = []
    for crafted in (True, False):
        weights = {k: v.detach().clone() for k, v in steps.shared_weights(victim).items()}
        matrix, bias = (k for k in weights if k.startswith("body."))
        if crafted:
            directions = torch.randn(weights[matrix].shape, generator=torch.Generator().manual_seed(seed))
            projected = public @ directions.T
            weights[matrix] = directions
            weights[bias] = -torch.quantile(projected, 1 - 1 / len(rows), dim=0)  # one row of so many is above
        phi = victim.probe(t=0, asked={"weights": weights}, by=torch.tensor(1))["phi"].detach()
        gradient, offset = phi[: weights[matrix].numel()].view_as(weights[matrix]), phi[weights[matrix].numel() :]
        read = (gradient / offset[:, None])[offset.abs() > 1e-12]
        near = ((read[:, None] - rows).abs() / spread).amax(-1) < 0.01 if len(read) else torch.zeros(1, len(rows))
        found.append(float(near.any(0).float().mean()))
    yield "afind-plus", f"φ at chosen weights, one answer ({len(rows)} rows)", "rows", found[0], found[1]


# -- exported models and checkpoints -------------------------------------------------------------------------------


def known_by(scores: Tensor, members: int) -> float:
    """The AUC of scores (n,) for the first rows, which were trained on."""
    return auc((np.arange(len(scores)) < members).astype(int), np.stack([-scores.numpy(), scores.numpy()], 1))


def trained(method: str, seed: int, folder: Path, **more: Any) -> tuple[Any, Tensor, Tensor, int]:
    """A run of three clients on breast cancer data: its plan, training and other rows (n, F) with their classes (n,),
    and how many are training rows."""
    data = {"name": "breast_cancer", "clients": 3, "public_rows": 0, "test_rows": 200, "partition": "iid"}
    values = {"method": method, "rounds": 50, "seed": seed, "evaluate": {"points": 2}, **more}
    run = check({"run": {**values, "data": data}}).run
    execute(run, folder)
    plan = build(run)
    own = [plan.contexts[i].data for i in range(3)]
    test = plan.contexts[0].tests["test"]
    parts = [*own, test]
    x = torch.cat([part.pool[part.index] for part in parts])
    y = torch.cat([part.y(torch.arange(len(part))) for part in parts])
    return plan, x, y, sum(map(len, own))


def exported(seed: int) -> Iterator[Line]:
    """Membership by what a model that everybody gets says of a row's class."""
    for method in ("fedavg", "fedboost", "fedforest"):
        with tempfile.TemporaryDirectory() as folder:
            more = {"models": {"pool": ["mlp"]}} if method == "fedavg" else {}
            plan, x, y, members = trained(method, seed, Path(folder) / "run", **more)
            rows = dict(zip(plan.data.dataset.columns, x.T.numpy(), strict=True))
            export(Path(folder) / "run", Path(folder) / "models")
            shown = torch.from_numpy(load_model(Path(folder) / "models" / "server", trust=["network.py"]).predict(rows))
            found = known_by(shown.double().gather(1, y[:, None])[:, 0], members)
        yield method, "exported model, by confidence", "membership", found, 0.5


def stolen(seed: int) -> Iterator[Line]:
    """Membership by the server's weights in the coordinator's checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        plan, x, y, members = trained("fedavg", seed, Path(folder) / "run", models={"pool": ["mlp"]})
        states = []
        for path in sorted((Path(folder) / "run" / "checkpoints").glob("round-*.ckpt")):
            spans = checkpoint._spans(path)
            assert spans is not None
            head = checkpoint._message(path, *spans[0])
            state: Mapping[str, Any] = checkpoint._message(path, *spans[1 + head["parties"].index("server")])
            states.append(state["weights"])
    rows = plan.contexts[0].data
    x = (x - rows.shift) / rows.scale

    def confidence(weights: Mapping[str, Tensor]) -> Tensor:
        network = plan.contexts[0].build()
        network.load_state_dict({**network.state_dict(), **weights})
        with torch.no_grad():
            return network.eval()(x).log_softmax(-1).double().gather(1, y[:, None])[:, 0]

    newest = confidence(states[-1])
    yield "fedavg", "coordinator's newest checkpoint", "membership", known_by(newest, members), 0.5
    change = newest - confidence(states[-2])
    yield "fedavg", "coordinator's last two checkpoints", "membership", known_by(change, members), 0.5


ATTACKS = {
    "embeddings": first_embeddings,
    "hijack": hijack,
    "gradients": chosen_point,
    "models": exported,
    "checkpoints": stolen,
}


def main(seed: int, *names: str) -> None:
    """Print the table, in per cent."""
    print("| method | attack | finds | success | without it |\n|---|---|---|---|---|")
    for name in names or ATTACKS:
        for method, attack, what, success, without in ATTACKS[name](seed):
            print(f"| `{method}` | {attack} | {what} | {100 * success:.0f} | {100 * without:.0f} |", flush=True)


if __name__ == "__main__":
    main(int((sys.argv[1:2] or ["0"])[0]), *sys.argv[2:])
