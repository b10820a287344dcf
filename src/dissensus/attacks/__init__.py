"""Adversarial attacks on ensembles ``x -> [M, B, C]`` and plain classifiers ``x -> [B, C]``.

| attack | ball or goal | needs |
|---|---|---|
| `fgsm`, `bim`, `pgd`, `mim`, `apgd` | within ε in L∞ or L2 | gradients |
| `square` | within ε in L∞ or L2 | outputs |
| `carlini_wagner` | nearest in L2 | gradients |
| `elastic_net` | nearest in L1, or L1 and L2 together | gradients |
| `jsma` | few features | gradients |

Each returns `Adversarial`: inputs, success and distance. Every example that counts as a success has been tried again in
a pass of its own: it lies in the box of valid inputs and within ε, exactly, and the model says what the attack wants.
All others come back as they were. What an example gets depends on nothing but itself: not on its batch, nor its place
in it, as far as the model's own arithmetic does not. Our own does not. On a GPU, steps are replayed from CUDA graphs.

`evaluate` runs a suite of them, gives the pointwise worst case with intervals, and checks by itself whether the attacks
can be believed.

`over` runs any of them over many examples and goes on where it was broken off; `transfer_matrix` crafts on one member
and tries on the others; `perturbed` and `climbed` give the points that gradient steps lead to, for transfer and for
adversarial training.
"""

from dissensus.attacks.apgd import apgd
from dissensus.attacks.autoattack import autoattack
from dissensus.attacks.case import Adversarial
from dissensus.attacks.chunks import over
from dissensus.attacks.evaluation import evaluate
from dissensus.attacks.flags import Flag
from dissensus.attacks.gradient import bim, climbed, fgsm, mim, perturbed, pgd
from dissensus.attacks.jsma import jsma
from dissensus.attacks.norms import Ball
from dissensus.attacks.optimisation import carlini_wagner, elastic_net
from dissensus.attacks.robustness import Robustness
from dissensus.attacks.square import counted_square, square
from dissensus.attacks.transfer import Transfer, transfer_matrix
from dissensus.attacks.trials import random_noise, tried

__all__ = [
    "Adversarial",
    "Ball",
    "Flag",
    "Robustness",
    "Transfer",
    "apgd",
    "autoattack",
    "bim",
    "carlini_wagner",
    "climbed",
    "counted_square",
    "elastic_net",
    "evaluate",
    "fgsm",
    "jsma",
    "mim",
    "over",
    "perturbed",
    "pgd",
    "random_noise",
    "square",
    "transfer_matrix",
    "tried",
]
