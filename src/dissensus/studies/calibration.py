"""The procedure "audit": ensembles whose state is known, and what the audit says of them.

Every case says what it is by how it was made: members trained alone, jointly, a forest, copies, biases that cancel, one
strong member among weak ones, members near chance under an ensemble that is right. Only for members trained at a β
between 0 and 1 nobody knows: what the audit says of them is told, and not called right or wrong.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dissensus import masks, nets, objectives
from dissensus.auditing import Audit, audit
from dissensus.studies.problems import Problem, problem
from dissensus.studies.spec import Spec
from dissensus.train import sweep

FIGURES = ("error_correlation", "bias_share", "relative_diversity", "gain", "best_to_ensemble", "best_needed")


class Case(NamedTuple):
    """Outputs on test and training data, and how they are to be read."""

    test: Any
    train: Any
    kind: str | None
    pool: str


Make = Callable[["Trained"], Case]


class Trained(NamedTuple):
    """What cases are made from: members trained at several β, their outputs on test and on training data."""

    data: Problem
    seed: int
    at: dict[float, tuple[Tensor, Tensor]]
    epochs: int

    @property
    def alone(self) -> tuple[Tensor, Tensor]:
        """Outputs of members trained alone."""
        return self.at[0.0]

    @property
    def classes(self) -> bool:
        """Whether the problem is one of classes."""
        return not self.data.train[1].is_floating_point()

    def case(self, test: Tensor, train: Tensor) -> Case:
        """Outputs of networks; of classifiers, scores are averaged."""
        return Case(test.numpy(), train.numpy(), "logits" if self.classes else None, "score")

    def generator(self) -> torch.Generator:
        """For what is drawn."""
        return torch.Generator().manual_seed(self.seed)


def _trained(data: Problem, seed: int, members: int, epochs: int, betas: list[float]) -> Trained:
    loss = "mse" if data.train[1].is_floating_point() else "cross_entropy"
    objective = partial(objectives.augmented, loss=loss, pool="score")
    flat = data.train[0].flatten(1), data.test[0].flatten(1)
    build = _network(data)
    swept = sweep(build, (flat[0], data.train[1]), objective, grid={"beta": betas}, members=members,
                     epochs=epochs, batch_size=32, lr=2e-3, seed=seed)  # fmt: skip
    outputs = [(swept.run(i).predict(flat[1]), swept.run(i).predict(flat[0])) for i in range(len(betas))]
    return Trained(data, seed, dict(zip(betas, outputs, strict=True)), epochs)


def _network(data: Problem) -> Callable[[], nn.Module]:
    return partial(nets.mlp, data.train[0].flatten(1).shape[1], data.outputs, (30, 30))


def _masksembles(made: Trained) -> Case:
    """As many masks as there are members, over a network whose members are as wide as those."""
    x, y, test = made.data.train[0].flatten(1), made.data.train[1], made.data.test[0].flatten(1)
    objective = partial(objectives.independent, loss="cross_entropy" if made.classes else "mse")
    build = partial(_masked, _network(made.data), len(made.alone[0]))
    held = sweep(build, (x, y), objective, grid={"seed": [made.seed]}, members=1, epochs=made.epochs, batch_size=32,
                 lr=2e-3).run(0)  # fmt: skip
    return made.case(held.predict(test), held.predict(x))


def _masked(build: Callable[[], nn.Module], count: int) -> nn.Module:
    return masks.convert(build(), count, 2.0, widen=True)


def _at(beta: float, made: Trained) -> Case:
    return made.case(*made.at[beta])


def _forest(trees: int, made: Trained) -> Case:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    x, y, test = made.data.train[0].flatten(1).numpy(), made.data.train[1].numpy(), made.data.test[0].flatten(1).numpy()
    if made.classes:
        forest = RandomForestClassifier(trees, random_state=made.seed).fit(x, y)
        each = [np.stack([tree.predict_proba(part) for tree in forest.estimators_]) for part in (test, x)]
        return Case(each[0], each[1], "probabilities", "probability")
    forest = RandomForestRegressor(trees, random_state=made.seed).fit(x, y.squeeze(-1) if y.shape[1] == 1 else y)
    each = [np.stack([tree.predict(part).reshape(len(part), -1) for tree in forest.estimators_]) for part in (test, x)]
    return Case(each[0], each[1], None, "score")


def _copies(made: Trained) -> Case:
    return made.case(*(part[:1].expand_as(part).contiguous() for part in made.alone))


def _constant_biases(made: Trained) -> Case:
    """Constants that cancel in the mean, as large as the outputs' own spread."""
    test, train = made.alone
    drawn = torch.randn(len(test), 1, test.shape[-1], generator=made.generator())
    shift = 2 * train.std() * (drawn - drawn.mean(0))
    return made.case(test + shift, train + shift)


def _biases_per_example(made: Trained) -> Case:
    """Another direction for every example, cancelling in the mean: no constant bias is left."""
    generator = made.generator()
    size = 6 * made.alone[1].std()

    def shifted(outputs: Tensor) -> Tensor:
        drawn = torch.randn(outputs.shape, generator=generator)
        return outputs + size * (drawn - drawn.mean(0))

    return made.case(*(shifted(part) for part in made.alone))


def _one_strong(made: Trained) -> Case:
    """One trained member; the others guess."""
    generator = made.generator()

    def among_guesses(outputs: Tensor) -> Tensor:
        guesses = 0.1 * torch.randn(outputs.shape, generator=generator)
        return torch.cat([outputs[:1], guesses[1:]])

    return made.case(*(among_guesses(part) for part in made.alone))


class Known(NamedTuple):
    """A case, and which verdicts are right for it."""

    make: Make
    right: tuple[str, ...]
    """Empty where nobody knows."""


BETWEEN = (0.25, 0.5, 0.75, 0.9)
"""Values of β whose ensembles are neither trained alone nor jointly."""
CASES: dict[str, Known] = {
    "trained alone": Known(partial(_at, 0.0), ("healthy", "redundant")),
    **{f"β = {beta:g}": Known(partial(_at, beta), ()) for beta in BETWEEN},
    "masksembles": Known(_masksembles, ("healthy", "redundant")),
    "forest of 50": Known(partial(_forest, 50), ("healthy",)),
    "forest of 5": Known(partial(_forest, 5), ("healthy",)),
    "trained jointly": Known(partial(_at, 1.0), ("collusive",)),
    "constant biases": Known(_constant_biases, ("collusive",)),
    "biases per example": Known(_biases_per_example, ("collusive",)),
    "copies": Known(_copies, ("redundant",)),
    "one strong member": Known(_one_strong, ("dominated",)),
}
"""Cases by name."""


def rows(spec: Spec, say: Callable[[str, float], None]) -> list[dict[str, Any]]:
    """One row per data set, seed, number of members and case: the verdict, and whether it is right."""
    assert spec.members is not None
    found: list[dict[str, Any]] = []
    counts = [int(count) for count in spec.grid.get("members", [spec.members.count])]
    seeds = [int(seed) for seed in spec.grid["seed"]]
    cases = list(spec.grid["case"])
    betas = [0.0, *(beta for beta in BETWEEN if f"β = {beta:g}" in cases), 1.0]
    work = [(name, seed, count) for name in spec.data for seed in seeds for count in counts]
    for done, (name, seed, members) in enumerate(work):
        say(f"{name}, seed {seed}, {members} members", done / len(work))
        made = _trained(problem(name, seed, spec), seed, members, spec.optimisation.epochs, betas)
        again = members != counts[0]
        for case in [name for name in cases if not (again and name.startswith("forest"))]:
            told = _audited(made, CASES[case].make(made))
            right = CASES[case].right
            found.append({
                "data": name, "case": case, "members": members, "seed": seed, "verdict": told.verdict,
                "measures": {**({"right": float(told.verdict in right)} if right else {}),
                             "collusive": float(told.verdict == "collusive"),
                             **{figure: told.test[figure].value for figure in FIGURES}},
            })  # fmt: skip
    return found


def _audited(made: Trained, case: Case) -> Audit:
    task = "classification" if made.classes else "regression"
    targets = made.data.test[1].numpy(), made.data.train[1].numpy()
    told: Any = {"task": task, "kind": case.kind, "pool": case.pool}
    return audit(case.test, targets[0], train=(case.train, targets[1]), **told)
