"""Attacks of other libraries, written out, for machines where the libraries cannot be installed.

Each function takes the same passes and tensor operations as the library's, on a classifier ``x -> [B, C]`` and inputs
in [0, 1]. Of each library it has the attacks in which that library is the fastest or the only one: torchattacks 3.5
(FGSM, BIM, PGD, MIM, C&W), foolbox 3.3 (EAD) and AutoAttack (APGD with cross-entropy, Square in L∞). Tests compare the
results with those of the libraries.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Network = Callable[[Tensor], Tensor]


def _slope(network: Network, point: Tensor, y: Tensor) -> Tensor:
    """Gradient of the mean cross-entropy at a point."""
    point.requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(network(point), y), point)
    return gradient


def fgsm(network: Network, x: Tensor, y: Tensor, epsilon: float) -> Tensor:
    """torchattacks' FGSM."""
    point = x.clone().detach()
    gradient = _slope(network, point, y)
    return (point + epsilon * gradient.sign()).clamp(0, 1).detach()


def bim(network: Network, x: Tensor, y: Tensor, epsilon: float, steps: int, step_size: float) -> Tensor:
    """torchattacks' BIM, which projects by masks."""
    point, clean = x.clone().detach(), x.clone().detach()
    for _ in range(steps):
        moved = point + step_size * _slope(network, point, y).sign()
        least = (clean - epsilon).clamp(min=0)
        raised = (moved >= least).float() * moved + (moved < least).float() * least
        above = raised > clean + epsilon
        lowered = above.float() * (clean + epsilon) + (raised <= clean + epsilon).float() * raised
        point = lowered.clamp(max=1).detach()
    return point


def _within(x: Tensor, moved: Tensor, epsilon: float) -> Tensor:
    change = (moved - x).clamp(-epsilon, epsilon)
    return (x + change).clamp(0, 1).detach()


def pgd(network: Network, x: Tensor, y: Tensor, epsilon: float, steps: int, step_size: float) -> Tensor:
    """torchattacks' PGD."""
    clean = x.clone().detach()
    point = clean + torch.empty_like(clean).uniform_(-epsilon, epsilon)
    point = point.clamp(0, 1).detach()
    for _ in range(steps):
        gradient = _slope(network, point, y)
        point = _within(clean, point.detach() + step_size * gradient.sign(), epsilon)
    return point


def mim(network: Network, x: Tensor, y: Tensor, epsilon: float, steps: int, step_size: float) -> Tensor:
    """torchattacks' MIM, whose gradients are divided by their mean absolute value."""
    clean, point, momentum = x.clone().detach(), x.clone().detach(), torch.zeros_like(x)
    for _ in range(steps):
        gradient = _slope(network, point, y)
        momentum = gradient / gradient.abs().mean((1, 2, 3), keepdim=True) + momentum * 1.0
        point = _within(clean, point.detach() + step_size * momentum.sign(), epsilon)
    return point


def carlini_wagner(network: Network, x: Tensor, y: Tensor, constant: float, steps: int, step_size: float) -> Tensor:
    """torchattacks' C&W, which ends when the cost of the whole batch rises."""
    clean = x.clone().detach()
    place = _arc_tanh((2 * clean - 1).clamp(-1, 1)).detach().requires_grad_()
    best, nearest, last_cost = clean.clone(), 1e10 * torch.ones(len(x), device=x.device), 1e10
    adam = torch.optim.Adam([place], lr=step_size)
    for step in range(steps):
        point = 0.5 * (place.tanh() + 1)
        distance = F.mse_loss(point.flatten(1), clean.flatten(1), reduction="none").sum(1)
        outputs = network(point)
        one_hot = torch.eye(outputs.shape[1], device=x.device)[y]
        other, own = ((1 - one_hot) * outputs).max(1)[0], (one_hot * outputs).max(1)[0]
        cost = distance.sum() + constant * (own - other).clamp(min=0).sum()
        adam.zero_grad()
        cost.backward()
        adam.step()
        nearer = (outputs.detach().argmax(1) != y).float() * (nearest > distance.detach())
        nearest = nearer * distance.detach() + (1 - nearer) * nearest
        wide = nearer.view(-1, *[1] * (x.ndim - 1))
        best = wide * point.detach() + (1 - wide) * best
        if step % max(steps // 10, 1) == 0:
            if cost.item() > last_cost:
                break
            last_cost = cost.item()
    return best


def _arc_tanh(value: Tensor) -> Tensor:
    return 0.5 * ((1 + value) / (1 - value)).log()


def elastic_net(network: Network, x: Tensor, y: Tensor, constant: float, steps: int, step_size: float) -> Tensor:
    """foolbox's EAD with one constant, no early end and the rule EN."""
    weight, rows = 0.01, torch.arange(len(x), device=x.device)
    constants = constant * torch.ones(len(x), device=x.device)
    point, extrapolated = x, x
    best, shortest = torch.zeros_like(x), torch.full((len(x),), math.inf, device=x.device)
    for step in range(steps):
        length = step_size * (1 - step / steps) ** 0.5
        at = extrapolated.clone().requires_grad_()
        logits = network(at)
        other = (logits - F.one_hot(y, logits.shape[1]) * 1e30).argmax(-1)
        lead = (logits[rows, y] - logits[rows, other] + 0.0).clamp(min=0) * constants
        cost = lead.sum() + (at - x).flatten(1).square().sum(-1).sum()
        cost.backward()
        gradient = at.grad
        assert gradient is not None
        before, moved = point, extrapolated - length * gradient
        up, down = moved - x > weight, moved - x < -weight
        point = torch.where(up, (moved - weight).clamp(max=1), x)
        point = torch.where(down, (moved + weight).clamp(min=0), point)
        extrapolated = point + step / (step + 3.0) * (point - before)
        with torch.no_grad():
            found = network(point).argmax(-1) != y
        norm = weight * (point - x).flatten(1).abs().sum(-1) + (point - x).flatten(1).square().sum(-1)
        nearer = (norm < shortest) & found
        best = torch.where(nearer.view(-1, *[1] * (x.ndim - 1)), point, best)
        shortest = torch.where(nearer, norm, shortest)
    return best


def apgd(network: Network, x: Tensor, y: Tensor, epsilon: float, steps: int, seed: int = 0) -> Tensor:
    """AutoAttack's APGD on cross-entropy, with one start, on the inputs that the network gets right."""
    with torch.no_grad():
        standing = (network(x).max(1)[1] == y).nonzero().squeeze(1)
    torch.manual_seed(seed)
    result = x.clone()
    if len(standing):
        broken, points = _apgd_run(network, x[standing].clone(), y[standing].clone(), epsilon, steps)
        result[standing[broken]] = points[broken]
    return result


def _apgd_run(network: Network, x: Tensor, y: Tensor, epsilon: float, steps: int) -> tuple[Tensor, Tensor]:
    """Which inputs a run breaks, and the last point at which each was broken."""

    def climb(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        point.requires_grad_()
        total = torch.zeros_like(x)
        with torch.enable_grad():
            logits = network(point)
            loss = F.cross_entropy(logits, y, reduction="none")
        total += torch.autograd.grad(loss.sum(), [point])[0].detach()
        total /= 1.0
        return logits.detach().max(1)[1] == y, loss.detach().clone(), total

    noise = 2 * torch.rand(x.shape).to(x.device) - 1
    noise = noise / (noise.abs().flatten(1).max(1)[0].view(-1, *[1] * (x.ndim - 1)) + 1e-12)
    point = (x + epsilon * torch.ones_like(x) * noise).clamp(0.0, 1.0)
    best, broken_at = point.clone(), point.clone()
    losses, bests = torch.zeros(steps, len(x), device=x.device), torch.zeros(steps + 1, len(x), device=x.device)
    rights = torch.zeros_like(bests)
    right, loss, gradient = climb(point)
    best_gradient, best_loss, standing = gradient.clone(), loss.clone(), right
    rights[0] = right + 0
    length = 2.0 * epsilon * torch.ones(len(x), *[1] * (x.ndim - 1), device=x.device)
    before, window, since = point.detach().clone(), max(int(0.22 * steps), 1), 0
    last_best, halved_last = best_loss.clone(), torch.ones_like(best_loss)
    for step in range(steps):
        with torch.no_grad():
            point = point.detach()
            momentum, before, weight = point - before, point.clone(), 0.75 if step else 1.0
            least, most = x - epsilon, x + epsilon
            straight = torch.min(torch.max(point + length * gradient.sign(), least), most).clamp(0.0, 1.0)
            mean = point + (straight - point) * weight + momentum * (1 - weight)
            point = torch.min(torch.max(mean, x - epsilon), x + epsilon).clamp(0.0, 1.0) + 0.0
        right, loss, gradient = climb(point)
        with torch.no_grad():
            standing = torch.min(standing, right)
            rights[step + 1] = standing + 0
            wrong = (~right).nonzero().squeeze(1)
            broken_at[wrong] = point[wrong] + 0.0
            losses[step] = loss + 0
            higher = (loss > best_loss).nonzero().squeeze(1)
            best[higher], best_gradient[higher] = point[higher].clone(), gradient[higher].clone()
            best_loss[higher] = loss[higher] + 0
            bests[step + 1] = best_loss + 0
            since += 1
            if since == window:
                rises = torch.zeros(len(x), device=x.device)
                for back in range(window):
                    rises += (losses[step - back] > losses[step - back - 1]).float()
                few = (rises <= window * 0.75 * torch.ones_like(rises)).float()
                halved = torch.max(few, (1 - halved_last) * (last_best >= best_loss).float())
                halved_last, last_best = halved.clone(), best_loss.clone()
                if halved.sum() > 0:
                    rows = (halved > 0).nonzero().squeeze(1)
                    length[rows] /= 2.0
                    point[rows], gradient[rows] = best[rows].clone(), best_gradient[rows].clone()
                window, since = max(window - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1)), 0
    return ~standing, broken_at


HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


@torch.no_grad()
def square(network: Network, x: Tensor, y: Tensor, epsilon: float, queries: int, seed: int = 0) -> Tensor:
    """AutoAttack's Square on the margin in L∞: one square for all inputs at each query."""
    standing = (network(x).max(1)[1] == y).nonzero().squeeze(1)
    torch.manual_seed(seed)
    result = x.clone()
    if len(standing):
        points = _square_run(network, x[standing].clone(), y[standing].clone(), epsilon, queries)
        broken = network(points).max(1)[1] != y[standing]
        result[standing[broken]] = points[broken].clone()
    return result


def _square_run(network: Network, x: Tensor, y: Tensor, epsilon: float, queries: int) -> Tensor:
    """The best points after a run."""
    channels, height, width = x.shape[1:]

    def margins(point: Tensor, labels: Tensor) -> Tensor:
        logits = network(point)
        F.cross_entropy(logits, labels, reduction="none")
        rows = torch.arange(len(point), device=x.device)
        own = logits[rows, labels].clone()
        logits[rows, labels] = -math.inf
        return own - logits.max(-1)[0]

    def signs(*shape: int) -> Tensor:
        return torch.sign(2 * torch.rand(shape).to(x.device) - 1)

    def position(limit: int) -> Tensor:
        return (limit * torch.rand([1]).to(x.device)).long()

    best = (x + epsilon * signs(len(x), channels, 1, width)).clamp(0.0, 1.0)
    margin = margins(best, y)
    loss, count = margin.clone(), torch.ones(len(x), device=x.device)
    if (margin < 0.0).all():
        return best
    for query in range(queries):
        rows = (margin > 0.0).nonzero().squeeze(1)
        clean, point, labels, own_margin, own_loss = x[rows], best[rows], y[rows], margin[rows], loss[rows]
        halvings = sum(int(query / queries * 10_000) > after for after in HALVED_AFTER)
        side = min(max(round(math.sqrt(0.8 / 2**halvings * height * width)), 1), height, width)
        top, left = position(height - side), position(width - side)
        change = torch.zeros(channels, height, width, device=x.device)
        change[:, top : top + side, left : left + side] = 2.0 * epsilon * signs(channels, 1, 1)
        moved = torch.min(torch.max(point + change, clean - epsilon), clean + epsilon).clamp(0.0, 1.0)
        new = margins(moved, labels)
        better = (new < own_loss).float()
        loss[rows] = better * new + (1.0 - better) * own_loss
        better = torch.max(better, (new <= 0.0).float())
        margin[rows] = better * new + (1.0 - better) * own_margin
        wide = better.view(-1, 1, 1, 1)
        best[rows] = wide * moved + (1.0 - wide) * point
        count[rows] += 1.0
        broken = (margin <= 0.0).nonzero().squeeze(1)
        assert (moved != moved).sum() == 0
        assert (best != best).sum() == 0
        if len(broken) == len(x):
            break
    return best
