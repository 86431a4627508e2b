"""Attacks by a party that does not follow the protocol, or by a thief: `python -m
benchmarks.crafted [SEED] [NAMES…]`.

It prints the table of docs/results/leaks.md. Each attack asks the party of a real run on
scikit-learn's data, as a node would be asked, and is measured beside what the same attacker gets
without it.

    embeddings  split learning: the coordinator knows the run's seed, so it knows a party's network
        before the first
                step, and searches rows whose embeddings are those that were sent.
    hijack      split learning: the coordinator sends gradients that make a party's network like one of its own, whose
                inverse it has (D. Pasquini, G. Ateniese, M. Bernaschi, "Unleashing the Tiger", CCS
                2021). Here it knows its own columns of each person as well, as it does in a run.
    tops        fedhssl: as a mean of tops the coordinator sends encoders of its own, whose embeddings are the columns.
    gradients   AFIND+: a peer asks at weights of its own, where a row alone makes a neuron active, so that the quotient
                of two gradients is that row (L. Fowl et al., "Robbing the Fed", ICLR 2022).
    time        whether the CPU time of a call with DP-SGD tells that rows are in a region.
    classes     fedproto: rows of a class that one node alone has, from its part of a sum.
    sums        fedglm: rows from sums over all owners, by coefficients that split the rows at a value of a column: the
                gradients of two questions differ by the rows between their values.
    trees       fedboost: rows from sums over all owners, by bins of two values and trees of which most leaves have one
                row; and by as many bins and levels as the run has.
    models      membership in the training rows by the confidence of an exported model.
    checkpoints a thief of the coordinator's checkpoints: membership by the newest one, and by the
    last two.
"""  # noqa: E501

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.audit_epsilon import FORM, USUAL, Node
from benchmarks.audit_epsilon import config as dp_config
from benchmarks.leaks import HORIZONTAL
from fedloom.api import execute
from fedloom.core.errors import MessageError
from fedloom.core.federation import Federation
from fedloom.core.scores import auc
from fedloom.deploy import export, load_model
from fedloom.experiment.plan.build import build, with_secret
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run import checkpoint
from fedloom.experiment.run.engine import start
from fedloom.methods import steps
from fedloom.methods.tables import newton
from fedloom.methods.tables import steps as table_steps
from fedloom.methods.tables.fedglm import rows_of
from fedloom.methods.vertical.fedhssl import TOP
from fedloom.methods.vertical.steps import batch_indices
from fedloom.protect.leaks import explained
from fedloom.trees import bins as binning
from fedloom.trees.bins import Bins, keys
from fedloom.trees.growth import Splits
from fedloom.trees.histograms import untwined

Line = tuple[str, str, str, float, float]
"""Method, attack, what is found, its success and that without the attack."""


def columns_of(data: str, seed: int, secret: int | None = None) -> tuple[Any, Tensor, Tensor]:
    """A party of split learning with the aligned people's columns (n, p), and those of other people
    (m, p), whom the attacker knows. With a secret it starts as a node with columns of its own.
    """
    run = check({"run": {"method": "split", "rounds": 1, "seed": seed, "data": {"name": data}}}).run
    plan = build(run)
    columns = run.columns.model_copy(update={"private": secret is not None})
    plan = with_secret(replace(plan, run=run.model_copy(update={"columns": columns})), secret)
    context = plan.contexts[1]
    party: Any = plan.method.party_at(plan.server_context)(plan.cfg, context)
    rows = context.data.every
    return party, rows[: context.aligned], rows[context.aligned :]


def of_variance(found: Tensor, rows: Tensor, known: Tensor) -> float:
    """The share of the variance of rows that is explained; 0 for the mean of the known rows, or for
    worse.
    """
    rows, mean = rows.flatten(1).double(), known.flatten(1).double().mean(0)
    error = (found.flatten(1).double() - rows).square().sum()
    return max(0.0, float(1 - error / (rows - mean).square().sum()))


# -- split learning --------------------------------------------------------------------------------


def first_embeddings(seed: int) -> Iterator[Line]:
    """Rows from the first batch of embeddings and the initial network; beside it, a linear probe of
    an attacker who knows the rows of half of the batch, and not the network.
    """
    for data, secret in (
        ("breast_cancer", None),
        ("breast_cancer", 7),
        ("digits", None),
        ("digits", 7),
    ):
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


def layers(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, with LeakyReLU between them."""
    found = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
    return nn.Sequential(*found[:-1])


def fitted(
    loss: Callable[[Tensor], Tensor], network: nn.Module, rows: int, steps: int, decay: float
) -> None:
    """Train a network on `loss` of drawn row numbers (B,), and freeze it."""
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randint(rows, (128,))).backward()
        optimizer.step()
    network.eval().requires_grad_(False)


def hijack(seed: int) -> Iterator[Line]:
    """Rows by the attacker's decoder; beside it, what its own columns of these people tell without
    any message.
    """
    for data, aligned in (("digits", 600), ("breast_cancer", 250)):
        found, without = hijacked(data, aligned, seed)
        yield "split", f"feature-space hijacking ({data})", "columns", found, without


def hijacked(data: str, aligned: int, seed: int, steps: int = 3000) -> tuple[float, float]:
    """The explained variance of the columns of so many aligned people, with the attack and without.

    The coordinator knows other people's columns of both parties. Its pilot and decoder are trained
    on these. Its gradients first draw each embedding to what its own columns suggest, and then,
    with equal weight, to embeddings that a critic (WGAN-GP), which sees its own columns too, takes
    for the pilot's.
    """
    torch.manual_seed(seed)
    kind = {"method": "split", "rounds": 1, "seed": seed, "data": {"name": data, "clients": 2}}
    plan = build(check({"run": {**kind, "columns": {"aligned": aligned}}}).run)
    columns = plan.run.columns.model_copy(update={"private": True})
    plan = with_secret(replace(plan, run=plan.run.model_copy(update={"columns": columns})), 7)
    mine, theirs = plan.contexts
    party: Any = plan.method.party_at(plan.server_context)(plan.cfg, theirs)
    rows, known = theirs.data.every[:aligned].flatten(1), theirs.tests["test"].every.flatten(1)
    own, own_known = mine.data.every[:aligned].flatten(1), mine.tests["test"].every.flatten(1)
    own, own_known = ((x - own_known.mean(0)) / (own_known.std(0) + 1e-3) for x in (own, own_known))
    p, q, d, size = known.shape[1], own.shape[1], party.cfg.embedding_dim, party.cfg.batch_size
    pilot = nn.Sequential(layers(p, 128, d), nn.BatchNorm1d(d, affine=False))
    decoder = layers(d, 256, p)

    def rebuilt(k: Tensor) -> Tensor:
        z = pilot(known[k])
        return F.mse_loss(decoder(z + 0.3 * torch.randn_like(z)), known[k])

    fitted(rebuilt, nn.ModuleList([pilot, decoder]), len(known), 1500, 1e-2)
    z_known, guess = pilot(known), layers(q, 128, d)
    fitted(lambda k: F.mse_loss(guess(own_known[k]), z_known[k]), guess, len(known), 800, 0.1)
    critic = layers(d + q, 256, 256, 1)
    judging = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.9))

    def judged(sent: Tensor, about: Tensor) -> Tensor:
        """A step of the critic; the gradient (B, d) by which it would take `sent` for
        the pilot's.
        """
        k, part = torch.randint(len(known), (len(sent),)), torch.rand(len(sent), 1)
        between = (part * z_known[k] + (1 - part) * sent).requires_grad_()
        mixed = part * own_known[k] + (1 - part) * about
        (slope,) = torch.autograd.grad(
            critic(torch.cat([between, mixed], 1)).sum(), between, create_graph=True
        )
        false = critic(torch.cat([sent, about], 1)).mean()
        real = critic(torch.cat([z_known[k], own_known[k]], 1)).mean()
        judging.zero_grad()
        (false - real + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
        judging.step()
        at = sent.clone().requires_grad_()
        return torch.autograd.grad(-critic(torch.cat([at, about], 1)).mean(), at)[0]

    per_pass = -(-aligned // size)
    for n in range(steps):
        where = {"number": n // per_pass, "step": n % per_pass}
        sent, about = party.embed(**where).detach(), own[batch_indices(party, **where)]
        cut = 2 * (sent - guess(about)) / sent.numel()
        if n >= steps // 3:
            more = judged(sent, about)
            cut = cut + more * cut.norm() / (more.norm() + 1e-9)
        party.update(**where, cut=cut * size)
    found = of_variance(decoder(party.contribution(on="aligned")).detach(), rows, known)
    return found, told_by(own, rows, own_known, known)


def told_by(own: Tensor, rows: Tensor, own_known: Tensor, known: Tensor) -> float:
    """The explained variance of rows (n, p) by ridge regression on own columns (n, q): of five
    penalties the best.
    """
    a = torch.cat([own_known, torch.ones(len(known), 1)], 1).double()
    b = torch.cat([own, torch.ones(len(rows), 1)], 1).double()
    square, with_rows = a.T @ a, a.T @ known.double()
    penalties = [x * torch.eye(len(square)).double() for x in (0.1, 1, 10, 100, 1000)]
    return max(
        of_variance(b @ torch.linalg.solve(square + one, with_rows), rows, known)
        for one in penalties
    )


def crafted_tops(seed: int) -> Iterator[Line]:
    """Columns of the first batch, from embeddings of encoders that the coordinator has sent as a
    mean of tops: their hidden numbers are each column and its negative. Beside it, a linear probe
        as in `first_embeddings`.
    """
    kind = {"method": "fedhssl", "rounds": 6, "seed": seed, "data": {"name": "breast_cancer"}}
    plan = build(check({"run": {**kind, "models": {"pool": ["mlp"]}}}).run)
    context = plan.contexts[1]
    party: Any = plan.method.party_at(plan.server_context)(plan.cfg, context)
    rows = context.data.every[: context.aligned].flatten(1)
    known = context.data.every[context.aligned :].flatten(1)
    x, honest = (
        context.aligned_batch(0, 0, size=party.cfg.batch_size).flatten(1),
        party.embed(number=0, step=0).detach(),
    )
    top, p = {name: party.params[name] for name in party.part(TOP)}, rows.shape[1]
    for name, w in party.params.items():
        if ".body." in name:
            made = torch.zeros_like(w)
            if w.dim() == 2 and name.endswith("head.weight"):
                made[:p, :p], made[:p, p : 2 * p] = torch.eye(p), -torch.eye(p)
            elif w.dim() == 2:
                made[:p], made[p : 2 * p] = torch.eye(p), -torch.eye(p)
            top[name] = made
    with contextlib.suppress(MessageError):
        party.share(top=top)
    sent, half = party.embed(number=0, step=0).detach()[:, :p], len(x) // 2
    found = of_variance(sent - sent.mean(0) + known.mean(0), x, known)
    probe = explained(honest[half:], x[half:], (honest[:half], x[:half]))
    yield "fedhssl", "encoders in place of tops (breast cancer)", "columns", found, max(0.0, probe)


# -- AFIND+ ----------------------------------------------------------------------------------------


def chosen_point(seed: int) -> Iterator[Line]:
    """The share of the probed rows that one answer gives to 0.01 of the columns' s.d.; beside it,
    at the weights of a run's start.
    """
    run = {
        "method": "afind-plus",
        "rounds": 1,
        "seed": seed,
        "models": {"pool": ["mlp"], "norm": "none"},
    }
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
            directions = torch.randn(
                weights[matrix].shape, generator=torch.Generator().manual_seed(seed)
            )
            projected = public @ directions.T
            weights[matrix] = directions
            # one row of so many is above
            weights[bias] = -torch.quantile(projected, 1 - 1 / len(rows), dim=0)
        phi = victim.probe(t=0, asked={"weights": weights}, by=torch.tensor(1))["phi"].detach()
        gradient = phi[: weights[matrix].numel()].view_as(weights[matrix])
        offset = phi[weights[matrix].numel() :]
        read = (gradient / offset[:, None])[offset.abs() > 1e-12]
        near = (
            ((read[:, None] - rows).abs() / spread).amax(-1) < 0.01
            if len(read)
            else torch.zeros(1, len(rows))
        )
        found.append(float(near.any(0).float().mean()))
    yield (
        "afind-plus",
        f"φ at chosen weights, one answer ({len(rows)} rows)",
        "rows",
        found[0],
        found[1],
    )


# -- what no mend removes: time, classes of one node -----------------------------------------------


def by_time(seed: int, calls: int = 200) -> Iterator[Line]:
    """W6: the AUC by which the CPU seconds of a node's call with DP-SGD tell whether all its rows
    make the network's hidden numbers active, or none; beside it, that of a guess.
    """
    run = dp_config(4.0, calls + 2, FORM)
    run = run.model_copy(update={"models": run.models.model_copy(update={"pool": ("mlp",)})})
    above, seconds = np.random.default_rng(seed).permutation(calls) % 2 == 0, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder) / "node", USUAL, run)
        try:
            for t, which in enumerate([True, False, *above]):
                weights = {k: torch.zeros_like(w) for k, w in node.weights.items()}
                first = next(k for k, w in weights.items() if w.dim() == 2)
                weights[first][:, 0], weights[first.replace("weight", "bias")][:] = (
                    1e-20,
                    9e-20 * (1 if which else -1),
                )
                weights.update(
                    {k: w.fill_(1e-21) for k, w in weights.items() if w.dim() == 2 and k != first}
                )
                begun = time.process_time()
                node.asked("update", t, {"t": 0, "weights": weights})
                seconds.append(time.process_time() - begun)
        finally:
            node.close()
    found = np.array(seconds[2:])
    told = auc(above.astype(int), np.stack([-found, found], 1))
    yield "fedavg", f"CPU time of {calls} calls with tiny numbers", "rows in a region", told, 0.5


def alone(seed: int) -> Iterator[Line]:
    """W7: rows of a class that one node alone has, from its part of a sum at a network that the
    coordinator knows; beside it, the mean of the other rows.
    """
    for count in (1, 10):
        run = {
            "method": "fedproto",
            "rounds": 1,
            "seed": seed,
            "models": {"pool": ["mlp"]},
            "params": {"lr": 1e-12},
        }
        plan = build(check({"run": {**run, "data": HORIZONTAL}}).run)
        context = plan.contexts[0]
        own = context.rows
        y = own.y(torch.arange(len(own)))
        rare = int(y.mode().values)
        rows = torch.nonzero(y == rare)[:count, 0]
        kept = replace(own, index=own.index[torch.cat([rows, torch.nonzero(y != rare)[:, 0]])])
        party: Any = plan.method.party_at(plan.server_context)(
            plan.cfg, replace(context, data=kept)
        )
        network, sent = party.net.module, party.update(t=0, received={})
        assert int(sent["counts"][rare]) == count
        target, others = sent["prototypes"][rare].detach(), own.x(torch.nonzero(y != rare)[:, 0])
        guess = others.mean(0, keepdim=True).clone().requires_grad_()
        optimizer = torch.optim.Adam([guess], 0.02)
        for _ in range(3000):
            optimizer.zero_grad()
            F.mse_loss(network(guess)[0], target).backward()
            optimizer.step()
        true = own.x(rows)
        yield (
            "fedproto",
            f"a class of one node, {count} rows",
            "rows",
            of_variance(guess.detach().expand(len(true), *guess.shape[1:]), true, others),
            0.0,
        )


# -- exported models and checkpoints ---------------------------------------------------------------


def from_sums(seed: int) -> Iterator[Line]:
    """W2: the share of all owners' rows that gradients of so many questions give to 0.01 s.d. of
    each column; beside it, by the questions of honest training. An interval with most rows is
    halved next, until each has one row.
    """
    values: dict[str, Any] = {
        "method": "fedglm",
        "rounds": 2,
        "seed": seed,
        "aggregate": {"secure": True},
    }
    values["data"] = {"name": "breast_cancer", "clients": 5, "partition": "iid"}
    plan = build(check({"run": values}).run)
    with start(plan) as engine:
        fed = Federation(engine, aggregator=plan.aggregator, means=plan.method.client.MEANS)
        server: Any = plan.server
        for _ in plan.method.round(fed, server, engine.ids, plan.cfg, 0):
            pass
    design = {name: server.design[name] for name in ("mean", "scale", "kept", "outcome", "rows")}
    parties: list[Any] = [plan.clients[k]() for k in engine.ids]
    rows = np.concatenate([rows_of(party, design)[0] for party in parties])
    p, bits = rows.shape[1], newton.bits_for(len(rows), 64)

    def gradient(value: float) -> np.ndarray:
        beta = torch.zeros(1, p, dtype=torch.float64)
        beta[0, 0], beta[0, 1] = -1e9 * value, 1e9
        sums = sum(
            party.derivatives(design=design, beta=beta, bits=bits)["sums"] for party in parties
        )
        return newton.opened(sums.numpy(), p, 1, bits)[1]

    told = {value: gradient(value) for value in (-9.0, 9.0)}
    for questions in (25, 100, 400):
        while len(told) < questions:
            between = {
                ends: round(told[ends[1]][0] - told[ends[0]][0]) for ends in pairwise(sorted(told))
            }
            several = {
                ends: rows
                for ends, rows in between.items()
                if rows > 1 and ends[1] - ends[0] > 1e-4
            }
            low, high = min(several, key=several.__getitem__)
            told[(low + high) / 2] = gradient((low + high) / 2)
        apart = np.array([told[high] - told[low] for low, high in pairwise(sorted(told))])
        found = apart[apart[:, 0].round() == 1]
        near = (np.abs(found[:, None] - rows).max(-1) < 0.01).any(0)
        yield "fedglm", f"{questions} crafted sums over 5 owners", "rows", float(near.mean()), 0.0


class Owners:
    """Five owners of breast cancer data in a run of `fedboost` with secure sums, who answer as
    often in a round as nodes do. What they answer is added up.
    """

    def __init__(self, seed: int) -> None:
        values: dict[str, Any] = {
            "method": "fedboost",
            "rounds": 100,
            "seed": seed,
            "aggregate": {"secure": True},
        }
        values["data"] = {"name": "breast_cancer", "clients": 5, "partition": "iid"}
        plan = build(check({"run": values}).run)
        self.parties: list[Any] = [plan.clients[k]() for k in range(5)]
        self.rows = np.concatenate([table_steps.own_columns(party) for party in self.parties])
        self.cfg: Any = plan.cfg
        self.calls = Counter[str]()

    def ask(self, method: str, **given: Any) -> dict[str, np.ndarray]:
        """The sums of a call's answers, by name.

        Raises:
            MessageError: the owners refuse it.
        """
        self.calls[method] += 1
        if self.calls[method] > self.cfg.calls_in_round(self.parties[0].context).get(method, 1):
            raise MessageError(f"a round has fewer calls of {method}")
        answers = [getattr(party, method)(**given) for party in self.parties]
        return {name: sum(one[name] for one in answers).numpy() for name in answers[0] or {}}

    def every_value(self) -> list[np.ndarray]:
        """The different keys of each column, ascending."""
        columns = np.arange(self.rows.shape[1])
        start, size, parts = np.zeros(len(columns), np.int64), 2**32 // binning.FIRST, binning.FIRST
        while size:
            which = table_steps.tensors(column=columns, start=start)
            at, part = np.nonzero(self.ask("segments", **which, size=size, parts=parts)["rows"])
            columns, start = columns[at], start[at] + size * part
            size, parts = size // binning.FINER, binning.FINER
        return [start[columns == f] for f in range(self.rows.shape[1])]

    def alone(
        self, layout: Bins, levels: list[tuple[int, np.ndarray]], at_once: int = 64
    ) -> list[np.ndarray]:
        """The bins (F,) of each row that is alone in its node, after levels of splits by a column
        and the bins (B,)
        that go left: all nodes of a level are split alike. So many nodes are asked about at once.
        """
        self.calls.clear()
        self.ask(
            "begin", layout=table_steps.layout_tree(layout), first=0, trees=table_steps.no_trees(1)
        )
        nothing = np.empty(0, np.int64)
        splits = Splits(
            nothing, nothing, nothing, np.empty((0, int(layout.widths.max())), bool), nothing
        )
        first, nodes, found = 0, 1, list[np.ndarray]()

        def rows(asked: np.ndarray) -> np.ndarray:
            """Those of the asked nodes by cell, (m, cells), after the splits."""
            given = table_steps.tensors(
                asked=asked.astype(np.int32), tree=np.zeros(len(asked), np.int32)
            )
            shared = {"t": 0, "bits": 10, "exponent": 0, "splits": table_steps.splits_tree(splits)}
            sums = self.ask("histograms", **shared, **given)["sums"]
            counts: np.ndarray = untwined(sums, 3 * len(asked) * layout.cells).reshape(
                3, len(asked), -1
            )[2]
            return counts

        for column, left in levels:
            rows(np.array([first]))  # by the splits before
            which, lefts = first + np.arange(nodes), np.repeat(left[None], nodes, 0)
            splits = Splits(
                which, 0 * which, 0 * which + column, lefts, first + nodes + 2 * np.arange(nodes)
            )
            first, nodes = first + nodes, 2 * nodes
        for begin in range(0, nodes, at_once):
            counts = rows(first + np.arange(begin, min(begin + at_once, nodes)))
            single = counts[:, layout.column == 0].sum(1) == 1
            found += [np.flatnonzero(one) - layout.starts for one in counts[single]]
            # a node without rows, as new trees begin where there are no splits
            nowhere = np.array([2**20])
            splits = Splits(nowhere, 0 * nowhere, 0 * nowhere, splits.left[:1], nowhere + 1)
        return found


def from_trees(seed: int) -> Iterator[Line]:
    """W2: the share of all owners' rows that crafted bins and trees give to 0.01 s.d. of each
    column in so many rounds; beside it, by the questions of honest training.
    """
    owners = Owners(seed)
    values, rows = owners.every_value(), owners.rows
    numbers = [dict(zip(keys(column).tolist(), column.tolist(), strict=True)) for column in rows.T]
    order = np.argsort([-len(own) for own in values], kind="stable")

    def candidates(layout: Bins, bins: np.ndarray) -> list[set[int]]:
        """The values of each column that a row with these bins may have."""
        place = [
            np.searchsorted(edges, own, side="right") + 1
            for edges, own in zip(layout.edges, values, strict=True)
        ]
        return [{*own[at == b].tolist()} for own, at, b in zip(values, place, bins, strict=True)]

    def near(guesses: list[np.ndarray]) -> float:
        """The share of rows (n, F) that a guess (F,) comes near to."""
        apart = [np.abs((rows - guess) / rows.std(0)).max(1) for guess in guesses]
        return float((np.array(apart) < 0.01).any(0).mean()) if apart else 0.0

    found: list[np.ndarray] = []
    with contextlib.suppress(MessageError):
        for first, second in order[:8].reshape(4, 2):
            both = []
            for shift in (0, 1):  # bins of two values, and of two others: together they have one
                edges = tuple(own[1 - shift :: 2][: binning.MOST_BINS - 2] for own in values)
                layout = Bins(edges, np.zeros(len(edges), bool))
                bits = [np.arange(layout.widths.max()) >> k & 1 == 0 for k in range(8)]
                levels = [
                    *((int(first), left) for left in bits),
                    *((int(second), left) for left in bits[:2]),
                ]
                alone = owners.alone(layout, levels)
                both.append([candidates(layout, bins) for bins in alone])
            for one, other in product(*both):
                common = [a & b for a, b in zip(one, other, strict=True)]
                if all(common):
                    found.append(
                        np.array([own[min(key)] for own, key in zip(numbers, common, strict=True)])
                    )
    yield "fedboost", "bins of two values, leaves of one row, 8 rounds", "rows", near(found), 0.0
    owners, rng = Owners(seed), np.random.default_rng(seed)
    ends = [np.arange(owners.cfg.bins - 1) * len(own) // (owners.cfg.bins - 1) for own in values]
    edges = tuple(
        own[np.unique(places[places > 0])] for own, places in zip(values, ends, strict=True)
    )
    layout, every = Bins(edges, np.zeros(len(edges), bool)), list[np.ndarray]()
    for _ in range(100):
        trunk, *others = rng.choice(order[: len(order) // 2], 3, replace=False)
        width = np.arange(layout.widths.max())
        levels = [(int(trunk), width * 8 // len(width) >> k & 1 == 0) for k in range(3)]
        levels += [(int(column), width == rng.integers(1, len(width))) for column in others]
        every += owners.alone(layout, levels)
    known = {tuple(bins.tolist()) for bins in every}
    guesses = [
        np.array([
            np.median([number[key] for key in keys_])
            for number, keys_ in zip(numbers, candidates(layout, np.array(bins)), strict=True)
        ])
        for bins in known
    ]  # fmt: skip
    yield (
        "fedboost",
        "the run's bins and levels, leaves of one row, 100 rounds",
        "rows",
        near(guesses),
        0.0,
    )
    whole = np.mean([tuple(bins) in known for bins in layout.of(rows).tolist()])
    yield "fedboost", "the same", "the 64 bins of a row's values", float(whole), 0.0


def known_by(scores: Tensor, members: int) -> float:
    """The AUC of scores (n,) for the first rows, which were trained on."""
    return auc(
        (np.arange(len(scores)) < members).astype(int),
        np.stack([-scores.numpy(), scores.numpy()], 1),
    )


def trained(method: str, seed: int, folder: Path, **more: Any) -> tuple[Any, Tensor, Tensor, int]:
    """A run of three clients on breast cancer data: its plan, training and other rows (n, F) with
    their classes (n,), and how many are training rows.
    """
    data = {
        "name": "breast_cancer",
        "clients": 3,
        "public_rows": 0,
        "test_rows": 200,
        "partition": "iid",
    }
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
            shown = torch.from_numpy(
                load_model(Path(folder) / "models" / "server", trust=["network.py"]).predict(rows)
            )
            found = known_by(shown.double().gather(1, y[:, None])[:, 0], members)
        yield method, "exported model, by confidence", "membership", found, 0.5


def stolen(seed: int) -> Iterator[Line]:
    """Membership by the server's weights in the coordinator's checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        plan, x, y, members = trained(
            "fedavg", seed, Path(folder) / "run", models={"pool": ["mlp"]}
        )
        states = []
        for path in sorted((Path(folder) / "run" / "checkpoints").glob("round-*.ckpt")):
            spans = checkpoint._spans(path)
            assert spans is not None
            head = checkpoint._message(path, *spans[0])
            state: Mapping[str, Any] = checkpoint._message(
                path, *spans[1 + head["parties"].index("server")]
            )
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
    yield (
        "fedavg",
        "coordinator's last two checkpoints",
        "membership",
        known_by(change, members),
        0.5,
    )


ATTACKS = {
    "embeddings": first_embeddings,
    "hijack": hijack,
    "tops": crafted_tops,
    "gradients": chosen_point,
    "time": by_time,
    "classes": alone,
    "sums": from_sums,
    "trees": from_trees,
    "models": exported,
    "checkpoints": stolen,
}


def main(seed: int, *names: str) -> None:
    """Print the table, in per cent."""
    print("| method | attack | finds | success | without it |\n|---|---|---|---|---|")
    for name in names or ATTACKS:
        for method, attack, what, success, without in ATTACKS[name](seed):
            print(
                f"| `{method}` | {attack} | {what} | {100 * success:.0f} | {100 * without:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(int((sys.argv[1:2] or ["0"])[0]), *sys.argv[2:])
