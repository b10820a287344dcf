"""Tail probabilities that need no table: of quadratic forms in Gaussians, and of Student's t, which is one."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

_REACH = 40.0
"""The integral is taken over exp(−40) to exp(40), in steps of equal ratio; beyond, the integrand is below 1e-17."""
_STEPS = 401


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
    t = torch.linspace(-_REACH, _REACH, _STEPS, dtype=torch.float64, device=weights.device)
    scaled = (weights / scale.clamp_min(1e-300)).unsqueeze(-2) * t.exp().unsqueeze(-1)
    angle = 0.5 * scaled.atan().sum(-1)
    damping = 0.25 * scaled.square().log1p().sum(-1)
    integral = (angle.sin() * (-damping).exp()).sum(-1) * (t[1] - t[0])
    probability = (0.5 - integral / math.pi).clamp(0.0, 1.0)
    return torch.where(scale.squeeze(-1) > 0, probability, torch.ones_like(probability))


def student_tail(t: float, degrees: int) -> float:
    """P(T > t) for Student's T: T² > t² says that Z² − (t²/ν) χ²_ν > 0.

    >>> round(student_tail(2.0930, 19), 4)
    0.025
    """
    if math.isnan(t) or degrees < 1:
        return math.nan
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    weights = torch.full((degrees + 1,), -t * t / degrees, dtype=torch.float64)
    weights[0] = 1.0
    both = 1.0 - float(below_zero(weights))
    return both / 2 if t >= 0 else 1.0 - both / 2


def rotation_test(gram: Float[Tensor, "M M"]) -> float:
    """The probability that members' errors cancel as much as they do if members are independent and alike.

    `gram` holds inner products of members' error vectors. If these vectors are independent draws from one Gaussian, the
    direction (1, …, 1)/√M of member space, along which the pool takes its mean, is as good as any other: given the
    eigenvalues λ of `gram`, it is uniform on the sphere. The p-value is P(Σ_i λ_i u_i² ≤ s) over uniform unit vectors u,
    with the pool's own s = 1ᵀG1/M; small values say that members cancel more than chance does. It holds for any number of
    examples and any dependence between examples. Errors that members have in common make it larger.

    >>> cancelling = torch.tensor([[2.0, -0.99, -0.99], [-0.99, 2.0, -0.99], [-0.99, -0.99, 2.0]])
    >>> rotation_test(cancelling) < 0.01, rotation_test(torch.eye(3) + 1) > 0.5
    (True, True)
    """
    gram = gram.double()
    members = len(gram)
    if members < 2:
        return 1.0
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0.0)
    pooled = (gram.sum() / members).clamp_min(0.0)
    span = eigenvalues[-1]
    if float(span) <= 0 or float(span - eigenvalues[0]) <= 1e-12 * float(span):
        return 1.0  # no errors, or errors of equal size in every direction: nothing to tell
    return float(below_zero(eigenvalues - pooled))
