"""Tail probabilities that tests need: of quadratic forms in Gaussians, and of Student's t."""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

_REACH = 40.0
"""The integral is taken over exp(−40) to exp(40), in steps of equal ratio; beyond, the integrand is below 1e-17."""
_STEP = 0.2
"""The step of log u for few weights; with many the integrand turns faster."""


def below_zero(weights: Float[Tensor, "*S M"]) -> Float[Tensor, "*S"]:
    """P(Σ_i w_i z_i² ≤ 0) for independent standard Gaussian z_i, by Imhof's integral.

    P = 1/2 − (1/π) ∫ sin θ(u) / (u ρ(u)) du with θ(u) = ½ Σ_i arctan(w_i u) and ρ(u) = Π_i (1 + w_i² u²)^¼ (Imhof,
    1961). On a logarithmic grid u = exp(t) the integrand is smooth and falls off exponentially at both ends, so the
    trapezoidal rule is exact to about 1e-13. Weights that are all zero give 1.

    >>> round(float(below_zero(torch.tensor([-0.2, 1.8]))), 6)  # (2/π) arctan √(0.2/1.8)
    0.204833
    """
    weights = weights.double()
    scale = weights.abs().amax(-1, keepdim=True)
    steps = 2 * math.ceil(_REACH / _STEP * (1 + weights.shape[-1] / 16)) + 1
    t = torch.linspace(-_REACH, _REACH, steps, dtype=torch.float64, device=weights.device)
    scaled = (weights / scale.clamp_min(1e-300)).unsqueeze(-2) * t.exp().unsqueeze(-1)
    angle = 0.5 * scaled.atan().sum(-1)
    damping = 0.25 * scaled.square().log1p().sum(-1)
    integral = (angle.sin() * (-damping).exp()).sum(-1) * (t[1] - t[0])
    probability = (0.5 - integral / math.pi).clamp(0.0, 1.0)
    return torch.where(scale.squeeze(-1) > 0, probability, torch.ones_like(probability))


def student_tail(t: float, degrees: int) -> float:
    """P(T > t) for Student's T: half the regularised incomplete beta function at ν / (ν + t²).

    >>> round(student_tail(2.0930, 19), 4)
    0.025
    """
    if math.isnan(t) or degrees < 1:
        return math.nan
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    tail = incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2
    return tail if t >= 0 else 1.0 - tail


@functools.cache
def student_quantile(tail: float, degrees: int) -> float:
    """The t that Student's T exceeds with a probability of ``tail``, between 0 and 1/2, by bisection.

    >>> round(student_quantile(0.025, 1), 3), round(student_quantile(0.025, 19), 4)
    (12.706, 2.093)
    """
    low, high = 0.0, 1.0
    while student_tail(high, degrees) > tail:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > tail else (low, middle)
    return high


def binomial_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934) for a probability: it covers at least as often as it says.

    >>> [round(end, 4) for end in binomial_interval(0, 100)]
    [0.0, 0.0362]
    """
    tail = (1 - confidence) / 2

    def end(a: float, b: float, probability: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if incomplete_beta(middle, a, b) < probability else (low, middle)
        return (low + high) / 2

    low = end(successes, trials - successes + 1, tail) if successes > 0 else 0.0
    high = end(successes + 1, trials - successes, 1 - tail) if successes < trials else 1.0
    return low, high


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by its continued fraction, which converges fast for x < (a + 1) / (a + b + 2).

    >>> round(incomplete_beta(0.3, 2.0, 3.0), 4)
    0.3483
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    # Lentz's method: numerator and denominator of the fraction are kept as ratios of successive terms.
    fraction = ratio = 1.0
    inverse = 0.0
    for i in range(400):
        half = i // 2
        if i == 0:
            term = 1.0
        elif i % 2 == 0:
            term = half * (b - half) * x / ((a + i - 1) * (a + i))
        else:
            term = -(a + half) * (a + b + half) * x / ((a + i - 1) * (a + i))
        inverse = 1.0 / ((1.0 + term * inverse) or 1e-300)
        ratio = (1.0 + term / ratio) or 1e-300
        change = ratio * inverse
        fraction *= change
        if abs(change - 1.0) < 1e-15 and i > 0:
            break
    return front * (fraction - 1.0)


def rotation_test(gram: Float[Tensor, "*S M M"]) -> Float[Tensor, "*S"]:
    """The probability that members' errors cancel as much as they do if members are independent and alike.

    `gram` holds inner products of members' error vectors. If these vectors are independent draws from one Gaussian, the
    direction (1, …, 1)/√M of member space, along which the pool takes its mean, is as good as any other: given the
    eigenvalues λ of `gram`, it is uniform on the sphere. The p-value is P(Σ_i λ_i u_i² ≤ s) over uniform unit vectors
    u, with the pool's own s = 1ᵀG1/M; small values say that members cancel more than chance does. It holds for any
    number of examples and any dependence between examples. Errors that members have in common make it larger.

    >>> cancelling = torch.tensor([[2.0, -0.99, -0.99], [-0.99, 2.0, -0.99], [-0.99, -0.99, 2.0]])
    >>> float(rotation_test(cancelling)) < 0.01, float(rotation_test(torch.eye(3) + 1)) > 0.5
    (True, True)
    """
    gram = gram.double()
    members = gram.shape[-1]
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0.0)
    pooled = (gram.sum((-2, -1)) / members).clamp_min(0.0)
    p = below_zero(eigenvalues - pooled.unsqueeze(-1))
    # Without errors, or with errors of equal size in every direction, there is nothing to tell.
    span = eigenvalues[..., -1]
    return torch.where(span - eigenvalues[..., 0] <= 1e-12 * span, torch.ones_like(p), p)
