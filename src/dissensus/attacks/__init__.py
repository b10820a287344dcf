"""Adversarial attacks on ensembles ``x -> [M, B, C]`` and plain classifiers ``x -> [B, C]``.

| attack | ball or goal | needs |
|---|---|---|
| `fgsm`, `bim`, `pgd`, `mim`, `apgd` | within ε in L∞ or L2 | gradients |
| `square`, `random_noise` | within ε in L∞ or L2 | outputs |
| `carlini_wagner` | nearest in L2 | gradients |
| `elastic_net` | nearest in L1, or in L1 and L2 together | gradients |
| `jsma` | few features | gradients |

`ATTACKS` is the table of all of them. Each returns `Adversarial`: inputs, success and distance. Every success has been
tested in a separate forward pass: it lies exactly in the box of valid inputs and within ε, and the model predicts what
the attack wants. All other examples come back unchanged. The result of an example depends neither on its batch nor on
its position, as far as the model's arithmetic allows. On a GPU, steps are replayed from CUDA graphs.

`evaluate` runs a suite of attacks, gives the pointwise worst case with intervals, and checks whether the attacks can be
trusted. It takes attacks from outside the package as an argument.

`over` runs any attack over many examples and resumes where it was interrupted; `transfer_matrix` crafts on one member
and tests on the others; `perturbed` and `climbed` give the points after gradient steps, for transfer and for
adversarial training; `tried` tests points that were crafted by any means.
"""

from dissensus.attacks.apgd import apgd
from dissensus.attacks.autoattack import autoattack
from dissensus.attacks.bim import bim
from dissensus.attacks.carlini_wagner import carlini_wagner
from dissensus.attacks.catalogue import ATTACKS, AttackEntry
from dissensus.attacks.chunks import over
from dissensus.attacks.crafting import tried
from dissensus.attacks.elastic_net import elastic_net
from dissensus.attacks.evaluation import evaluate
from dissensus.attacks.fgsm import fgsm
from dissensus.attacks.flags import Flag
from dissensus.attacks.gradient import climbed, perturbed
from dissensus.attacks.jsma import jsma
from dissensus.attacks.mim import mim
from dissensus.attacks.norms import Ball
from dissensus.attacks.pgd import pgd
from dissensus.attacks.problem import Adversarial
from dissensus.attacks.random_noise import random_noise
from dissensus.attacks.robustness import Robustness
from dissensus.attacks.square import counted_square, square
from dissensus.attacks.suites import Setting, Suite, Terms
from dissensus.attacks.transfer import Transfer, transfer_matrix

__all__ = [
    "ATTACKS",
    "Adversarial",
    "AttackEntry",
    "Ball",
    "Flag",
    "Robustness",
    "Setting",
    "Suite",
    "Terms",
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
