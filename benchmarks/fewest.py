"""A round of each family against the same work in the fewest PyTorch calls that we know.

The loops here are faster than those of the other benchmarks: they have no messages, checks, undo or
seeded draws, write the gradients of losses in the logits down, use fused optimizers, and gather
rows once a stage. The excess of a ratio over 1 is the cost of the rest.
"""

import copy
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks import afind, augfl, fedal, fedavg, vertical
from benchmarks.timing import compare
from benchmarks.toy import CLASSES, contexts
from fedloom import models
from fedloom.core.context import ClientContext
from fedloom.methods.distillation.fedal import mlp
from fedloom.methods.vertical import steps

Params = Sequence[Tensor]
FEWEST = "the fewest calls"


def wide(module: nn.Module) -> nn.Module:
    """The module in the memory order in which fedloom runs it on a CPU."""
    return (
        module.to(memory_format=torch.channels_last)
        if getattr(module, "channels_last", False)
        else module
    )


def inputs(context: ClientContext) -> Tensor:
    """All rows of a client, in the memory order of its network."""
    assert context.data is not None
    x = context.data.every
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def labels_of(context: ClientContext) -> Tensor:
    assert context.data is not None
    return context.data.y(torch.arange(len(context.data)))


class Adam:
    """Adam's state, and one fused call a step."""

    def __init__(self, params: Params, lr: float, decay: float = 0.0) -> None:
        self.params, self.lr, self.decay = list(params), lr, decay
        self.mean = [torch.zeros_like(p) for p in self.params]
        self.square = [torch.zeros_like(p) for p in self.params]
        self.steps = [torch.zeros(()) for _ in self.params]

    def step(self, gradients: Params) -> None:
        torch._foreach_add_(self.steps, 1.0)
        torch._fused_adamw_(
            self.params,
            list(gradients),
            self.mean,
            self.square,
            [],
            self.steps,
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self.decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def detached(module: nn.Module) -> list[Tensor]:
    """Views of a module's parameters that can be written to while autograd watches the module."""
    return [p.detach() for p in module.parameters()]


def averaging(architecture: str) -> Callable[[], None]:
    """FedAvg: `benchmarks.fedavg`."""
    places = contexts(fedavg.CLIENTS, fedavg.ROWS, architecture)
    net = wide(models.build(architecture, fedavg.SHAPE, CLASSES, seed=0))
    params, values = list(net.parameters()), detached(net)
    weights = [v.clone() for v in values]
    data = [(inputs(s), labels_of(s)) for s in places]

    def rounds() -> None:
        nonlocal weights
        for _ in range(fedavg.ROUNDS):
            total = [torch.zeros_like(w) for w in weights]
            for x, y in data:
                torch._foreach_copy_(values, weights)
                order = torch.randperm(fedavg.ROWS)
                order = torch.cat([order, order[: -fedavg.ROWS % fedavg.BATCH]])
                batches = zip(
                    x[order].split(fedavg.BATCH), y[order].split(fedavg.BATCH), strict=True
                )
                for rows, labels in batches:
                    gradients = torch.autograd.grad(F.cross_entropy(net(rows), labels), params)
                    torch._foreach_add_(values, gradients, alpha=-fedavg.LR)
                torch._foreach_add_(total, values, alpha=1 / fedavg.CLIENTS)
            weights = total

    return rounds


def distillation(architecture: str, rounds: int) -> Callable[[], None]:
    """FedAL: `benchmarks.fedal`, with the gradients of its losses in the logits written down."""
    n, batch, tau = fedal.CLIENTS, fedal.BATCH, fedal.TAU
    places = contexts(n, fedal.ROWS, architecture)
    nets = [wide(s.build()) for s in places]
    params = [list(net.parameters()) for net in nets]
    adams = [Adam(detached(net), 1e-3) for net in nets]
    data = [(inputs(s), F.one_hot(labels_of(s), CLASSES).float()) for s in places]
    assert places[0].public is not None
    public = places[0].public.rows.every
    judge = mlp(CLASSES, 32, 256, n)
    judge_params, judge_adam = list(judge.parameters()), Adam(detached(judge), 1e-4)
    author = torch.arange(n).repeat_interleave(batch)

    def descend(k: int, z: Tensor, slope: Tensor) -> None:
        adams[k].step(torch.autograd.grad(z, params[k], slope / batch))

    def local(k: int) -> None:
        x, y = (a[torch.randint(fedal.ROWS, (tau * batch,))] for a in data[k])
        with torch.no_grad():
            own = F.softmax(nets[k](x), -1).split(batch)
        for i, (rows, labels) in enumerate(zip(x.split(batch), y.split(batch), strict=True)):
            z = nets[k](rows)
            p = F.softmax(z.detach(), -1)
            descend(k, z, p - labels if i == 0 else 2 * p - labels - own[i])

    def run() -> None:
        for _ in range(rounds):
            for k in range(n):
                local(k)
            x = public[torch.randint(len(public), (tau * batch,))]
            with torch.no_grad():
                before = [F.softmax(net(x), -1).split(batch) for net in nets]
            for i, rows in enumerate(x.split(batch)):
                outputs = [net(rows) for net in nets]
                f = torch.stack([z.detach() for z in outputs])
                soft = F.softmax(f / 2, -1).flatten(0, 1)
                judge_adam.step(
                    torch.autograd.grad(F.cross_entropy(judge(soft), author), judge_params)
                )
                f.requires_grad_()
                loss = F.cross_entropy(
                    judge(F.softmax(f / 2, -1).flatten(0, 1)), author, reduction="sum"
                )
                (slope,) = torch.autograd.grad(loss, f)
                f = f.detach()
                others = F.softmax((f.sum(0) - f) / (n - 1), -1)
                norms = torch.linalg.vector_norm(slope, dim=-1, keepdim=True)
                slope = F.softmax(f, -1) - others - slope / norms.clamp_min(1)
                for k in range(n):
                    g = slope[k] if i == 0 else slope[k] + F.softmax(f[k], -1) - before[k][i]
                    descend(k, outputs[k], g)

    return run


def splitting(job: vertical.Job) -> Callable[[], None]:
    """A pass of split learning: `benchmarks.vertical`."""
    bottoms = [copy.deepcopy(job.party(m).net.module) for m in range(vertical.PARTIES)]
    top = copy.deepcopy(job.active.net.module)
    whole = nn.ModuleList([*bottoms, top]).train()
    params, adam = list(whole.parameters()), Adam(detached(whole), 1e-3, 1e-4)
    x, y = [inputs(s)[: job.place.aligned] for s in job.contexts], steps.labels(job.active)

    def one_pass() -> None:
        order = torch.randperm(job.place.aligned)
        batches = zip(*(a[order].split(vertical.BATCH) for a in (y, *x)), strict=True)
        for labels, *parts in batches:
            f = torch.stack([bottom(part) for bottom, part in zip(bottoms, parts, strict=True)], 1)
            adam.step(torch.autograd.grad(F.cross_entropy(top(f), labels), params))

    return one_pass


def adapting(job: augfl.Job) -> Callable[[], None]:
    """A round of AugFL: `benchmarks.augfl`, the exact product by a second gradient through the
    step.
    """
    module = wide(job.contexts[0].build())
    alpha = job.cfg.alpha
    rho = job.cfg.penalty(augfl.CLIENTS)
    names, theta = [k for k, _ in module.named_parameters()], detached(module)
    duals = [[torch.zeros_like(w) for w in theta] for _ in job.contexts]
    halves = [((s.support.x, s.support.y), (s.query.x, s.query.y)) for s in job.contexts]
    rows = [len(s.rows) for s in job.contexts]
    weights = [n / sum(rows) for n in rows]

    def loss(w: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, dict(zip(names, w, strict=True)), (x,)), y)

    def round() -> None:
        nonlocal theta
        sums = [torch.zeros_like(w) for w in theta]
        start = [w.requires_grad_() for w in theta]
        for dual, weight, (support, query) in zip(duals, weights, halves, strict=True):
            inner = torch.autograd.grad(loss(start, *support), start, create_graph=True)
            slopes = torch.autograd.grad(
                loss(torch._foreach_add(start, inner, alpha=-alpha), *query), start
            )
            # the local model is w - (dual + weight g) / ρ, so that the new dual is -weight g
            with torch.no_grad():
                torch._foreach_add_(sums, start, alpha=rho)
                torch._foreach_sub_(sums, dual)
                torch._foreach_copy_(dual, slopes)
                torch._foreach_mul_(dual, -weight)
                torch._foreach_add_(sums, dual, alpha=2)
        theta = [w.detach() for w in torch._foreach_div(sums, augfl.CLIENTS * rho)]

    return round


def choosing(sites: list[ClientContext]) -> Callable[[], None]:
    """A round of AFIND+ in which everybody asks everybody: `benchmarks.afind`."""
    net = wide(models.build("mlp", afind.IMAGE, CLASSES, seed=0))
    parts = {
        part: [p for k, p in net.named_parameters() if k.startswith("head.") == part]
        for part in (True, False)
    }
    values = {part: [p.detach() for p in parts[part]] for part in parts}
    states = [{part: [v.clone() for v in values[part]] for part in parts} for _ in sites]
    data = [(inputs(s), labels_of(s)) for s in sites]
    layer = list(net.body.parameters())[-2:]  # type: ignore[union-attr]

    def epoch(part: bool, x: Tensor, y: Tensor) -> None:
        velocity = [torch.zeros_like(v) for v in values[part]]
        order = torch.randperm(afind.ROWS)
        for rows, labels in zip(
            x[order].split(afind.BATCH), y[order].split(afind.BATCH), strict=True
        ):
            gradients = torch.autograd.grad(F.cross_entropy(net(rows), labels), parts[part])
            torch._foreach_mul_(velocity, 0.9)
            torch._foreach_add_(velocity, gradients)
            torch._foreach_add_(values[part], velocity, alpha=-afind.LR)

    def ask(i: int, j: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        (x, y), some = data[j], torch.randint(afind.ROWS, (100,))
        torch._foreach_copy_(values[False], states[i][False])
        torch._foreach_copy_(values[True], states[j][True])
        probe = x[some], y[some]
        before = F.cross_entropy(net(probe[0]), probe[1])
        phi = torch.cat([g.flatten() for g in torch.autograd.grad(before, layer)])
        epoch(True, x, y)
        epoch(False, x, y)
        with torch.no_grad():
            after = F.cross_entropy(net(probe[0]), probe[1])
        return phi, 0.1 * after + 0.9 * before.detach(), torch._foreach_mul(values[False], 1.0)

    def round() -> None:
        nonlocal states
        new = []
        for i in range(len(data)):
            found = []
            for j in range(len(data)):
                found.append(ask(i, j))
                if j == i:
                    head = torch._foreach_mul(values[True], 1.0)
            phis = torch.stack([phi for phi, _, _ in found])
            F.cosine_similarity(phis, phis[i][None])
            shares = torch.softmax(torch.stack([-loss for _, loss, _ in found]), 0).tolist()
            mixed = [torch.zeros_like(v) for v in values[False]]
            for share, (_, _, body) in zip(shares, found, strict=True):
                torch._foreach_add_(mixed, body, alpha=share)
            new.append({True: head, False: mixed})
        states = new

    return round


def main(pairs: int) -> None:
    """Print a line for each family and network."""
    torch.set_num_threads(1)
    split, cnn = vertical.Job("split", 1024, epochs=1), augfl.Job("cnn-strided")
    same = afind.places(afind.PEERS, "mlp", afind.IMAGE)
    everybody = afind.Job(same, tau=1e-12)
    lines: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("FedAvg, lenet5", fedavg.ours("lenet5"), averaging("lenet5")),
        ("FedAvg, mlp-large", fedavg.ours("mlp-large"), averaging("mlp-large")),
        ("FedAL, lenet5", fedal.ours("lenet5", 2), distillation("lenet5", 2)),
        ("FedAL, mlp", fedal.ours("mlp", 10), distillation("mlp", 10)),
        ("split learning, lenet5", split.round, splitting(split)),
        ("AugFL, cnn-strided", cnn.round, adapting(cnn)),
        ("AFIND+, mlp", everybody.round, choosing(same)),
    ]
    for name, ours, bar in lines:
        compare(name, FEWEST, ours, bar, pairs)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
