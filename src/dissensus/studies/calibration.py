"""The procedure "audit": ensembles whose state is known, and what the audit says of them.

Every case says what it is by how it was made: members trained alone, jointly, a forest, copies, biases that cancel, one
strong member among weak ones, members near chance under an ensemble that is right. Only for members trained at a β
between 0 and 1, or to disagree by LDR or ADP, nobody knows: what the audit says of them is told, and not called right
or wrong.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dissensus import masks, objectives
from dissensus.auditing import Audit, audit
from dissensus.axes import LossParts
from dissensus.studies.ingredients import build_of
from dissensus.studies.optimising import training_arguments
from dissensus.studies.problems import Problem, problem
from dissensus.studies.spec import Spec
from dissensus.train import sweep

FIGURES = ("error_correlation", "bias_share", "relative_diversity", "gain", "best_to_ensemble", "best_needed",
           "accuracy", "member_accuracy", "kappa", "member_kappa")  # fmt: skip


class Case(NamedTuple):
    """Outputs on test and training data, and how they are to be read."""

    test: Any
    train: Any
    kind: str | None
    pool: str
    targets: tuple[Any, Any] | None = None
    """Of test and training data, where they are not those of the problem."""


Make = Callable[["Trained"], Case]
Outputs = tuple[Tensor, Tensor]
"""Of members, on test and on training data."""
ALONE = "trained alone"
BETWEEN = {f"β = {beta:g}": beta for beta in (0.25, 0.5, 0.75, 0.9)}
"""Values of β whose ensembles are neither trained alone nor jointly, by the name of their case."""
BETAS = {ALONE: 0.0, **BETWEEN, "trained jointly": 1.0}
LDR = {f"LDR, λ = {strength:g}": strength for strength in (0.1, 5.0)}
ADP = {"ADP, α = 2, β = 0.5": 0.5}


class Trained(NamedTuple):
    """What cases are made from: networks' outputs, by the name of the case that they were trained for."""

    spec: Spec
    data: Problem
    seed: int
    of: dict[str, Outputs]

    @property
    def alone(self) -> Outputs:
        """Outputs of members trained alone."""
        return self.of[ALONE]

    @property
    def classes(self) -> int:
        """How many classes there are; none where numbers are predicted."""
        return _classes(self.data)

    def case(self, test: Tensor, train: Tensor, *, pool: str = "score") -> Case:
        """Outputs of networks; of classifiers, scores are averaged unless told otherwise."""
        return Case(test.numpy(), train.numpy(), "logits" if self.classes else None, pool)

    def generator(self) -> torch.Generator:
        """For what is drawn."""
        return torch.Generator().manual_seed(self.seed)


def _trained(spec: Spec, data: Problem, seed: int, members: int, cases: list[str]) -> Trained:
    augmented = partial(objectives.augmented, loss=_loss(data), pool="score")
    families = ((augmented, "beta", BETAS), (objectives.ldr, "strength", LDR),
                (partial(objectives.adp, alpha=2.0), "beta", ADP))  # fmt: skip
    of: dict[str, Outputs] = {}
    for objective, name, known in families:
        values = {case: value for case, value in known.items() if case in (ALONE, *cases)}
        if values:
            found = _outputs(spec, data, objective, {name: [*values.values()]}, members, seed)
            of |= zip(values, found, strict=True)
    return Trained(spec, data, seed, of)


def _outputs(
    spec: Spec, data: Problem, objective: Callable[..., LossParts], grid: dict[str, list[float]], members: int,
    seed: int, build: Callable[[], nn.Module] | None = None,
) -> list[Outputs]:  # fmt: skip
    """What the ensemble of every run of a grid says; of the study's network, unless another is built."""
    swept = sweep(
        build or build_of(spec, data), data.train, objective, grid=grid, members=members, seed=seed,
        **training_arguments(spec.optimisation),
    )  # fmt: skip
    failed = [outcome.reason for outcome in swept.outcomes if outcome.status == "failed"]
    if failed:  # what is left of a training that broke off is no case of anything
        raise RuntimeError(f"training failed on {data.name}, seed {seed}: {'; '.join(failed)}")
    return [(swept.run(i).predict(data.test[0]), swept.run(i).predict(data.train[0])) for i in range(len(swept))]


def _classes(data: Problem) -> int:
    return 0 if data.train[1].is_floating_point() else data.outputs


def _loss(data: Problem) -> Literal["mse", "cross_entropy"]:
    return "cross_entropy" if _classes(data) else "mse"


def _masksembles(made: Trained) -> Case:
    """As many masks as there are members, over a network whose members are as wide as those."""
    objective = partial(objectives.independent, loss=_loss(made.data))
    build = partial(_masked, build_of(made.spec, made.data), len(made.alone[0]))
    (found,) = _outputs(made.spec, made.data, objective, {"seed": [made.seed]}, 1, made.seed, build)
    return made.case(*found)


def _masked(build: Callable[[], nn.Module], count: int) -> nn.Module:
    return masks.convert(build(), count, 2.0, widen=True)


def _as_trained(case: str, pool: str, made: Trained) -> Case:
    return made.case(*made.of[case], pool=pool)


def _forest(trees: int, made: Trained) -> Case:
    try:
        from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    except ImportError as reason:
        raise ImportError("forests need scikit-learn: pip install 'dissensus[sklearn]'") from reason
    x, y, test = made.data.train[0].flatten(1).numpy(), made.data.train[1].numpy(), made.data.test[0].flatten(1).numpy()
    if made.classes:
        forest = RandomForestClassifier(trees, random_state=made.seed).fit(x, y)
        each = [np.stack([tree.predict_proba(part) for tree in forest.estimators_]) for part in (test, x)]
        return Case(each[0], each[1], "probabilities", "probability")
    forest = RandomForestRegressor(trees, random_state=made.seed).fit(x, y.squeeze(-1) if y.shape[1] == 1 else y)
    each = [np.stack([tree.predict(part).reshape(len(part), -1) for tree in forest.estimators_]) for part in (test, x)]
    return Case(each[0], each[1], None, "score")


def _balanced(trees: int, made: Trained) -> Case:
    """Weak trees that tell one class from the rest, each from as many examples of either: below what always saying
    "the rest" gets right, and sound."""
    try:
        from sklearn.tree import ExtraTreeClassifier
    except ImportError as reason:
        raise ImportError("trees need scikit-learn: pip install 'dissensus[sklearn]'") from reason
    (x, y), (test, y_test) = ((part.flatten(1).numpy(), labels.numpy() == 0) for part, labels in
                              (made.data.train, made.data.test))  # fmt: skip
    draw = np.random.default_rng(made.seed)
    few = min(80, int(y.sum()))
    weak: Any = {"max_features": 1}
    each: list[list[Any]] = []
    for _ in range(trees):
        chosen = np.concatenate([draw.choice(np.flatnonzero(y == kind), few) for kind in (True, False)])
        tree = ExtraTreeClassifier(random_state=int(draw.integers(2**31)), **weak).fit(x[chosen], y[chosen])
        each.append([tree.predict_proba(part) for part in (test, x)])
    of_test, of_train = (np.stack(parts) for parts in zip(*each, strict=True))
    return Case(of_test, of_train, "probabilities", "probability", (y_test.astype(np.int64), y.astype(np.int64)))


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
    classes: int = 0
    """How many the data must have, at least."""
    trees: bool = False
    """Whether its members are trees of a number of its own, however many members the others have."""


def _swept(case: str, *right: str, pool: str = "score", classes: int = 0) -> Known:
    return Known(partial(_as_trained, case, pool), right, classes)


CASES: dict[str, Known] = {
    ALONE: _swept(ALONE, "healthy", "redundant"),
    **{case: _swept(case) for case in BETWEEN},
    **{case: _swept(case, classes=2) for case in LDR},
    **{case: _swept(case, pool="probability", classes=3) for case in ADP},
    "masksembles": Known(_masksembles, ("healthy", "redundant")),
    "forest of 50": Known(partial(_forest, 50), ("healthy",), trees=True),
    "forest of 5": Known(partial(_forest, 5), ("healthy",), trees=True),
    "balanced trees": Known(partial(_balanced, 20), ("healthy",), classes=3, trees=True),
    "trained jointly": _swept("trained jointly", "collusive"),
    "constant biases": Known(_constant_biases, ("collusive",)),
    "biases per example": Known(_biases_per_example, ("collusive",)),
    "copies": Known(_copies, ("redundant",)),
    "one strong member": Known(_one_strong, ("dominated",)),
}
"""Cases by name."""


class Unit(NamedTuple):
    """Work that depends on nothing else."""

    data: str
    seed: int
    members: int
    trees: bool
    """Whether cases of trees are among its own."""

    def __str__(self) -> str:
        return f"{self.data}, seed {self.seed}, {self.members} members"


def units(spec: Spec) -> list[Unit]:
    """All of a study's work."""
    assert spec.members is not None
    counts = [int(count) for count in spec.grid.get("members", [spec.members.count])]
    seeds = [int(seed) for seed in spec.grid["seed"]]
    return [Unit(name, seed, m, m == counts[0]) for name in spec.data for seed in seeds for m in counts]


def rows(spec: Spec, unit: Unit) -> list[dict[str, Any]]:
    """One row per case: the verdict, and whether it is right."""
    data = problem(unit.data, unit.seed, spec)
    cases = [case for case in spec.grid["case"] if CASES[case].classes <= _classes(data)]
    made = _trained(spec, data, unit.seed, unit.members, cases)
    found: list[dict[str, Any]] = []
    for case in [case for case in cases if unit.trees or not CASES[case].trees]:
        told = _audited(made, CASES[case].make(made))
        right = CASES[case].right
        found.append({
            "data": unit.data, "case": case, "members": unit.members, "seed": unit.seed, "verdict": told.verdict,
            "measures": {**({"right": float(told.verdict in right)} if right else {}),
                         "collusive": float(told.verdict == "collusive"),
                         **{figure: told.test[figure].value for figure in FIGURES if figure in told.test}},
        })  # fmt: skip
    return found


def _audited(made: Trained, case: Case) -> Audit:
    task = "classification" if made.classes else "regression"
    targets = case.targets or (made.data.test[1].numpy(), made.data.train[1].numpy())
    told: Any = {"task": task, "kind": case.kind, "pool": case.pool}
    return audit(case.test, targets[0], train=(case.train, targets[1]), **told)
