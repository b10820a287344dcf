"""The independent twin of an ensemble: the same training without interaction, as a reference for an audit."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dissensus import checks, storage
from dissensus.axes import Objective
from dissensus.data.batches import as_pair
from dissensus.diversity.decomposition import check_pool
from dissensus.ensemble import Ensemble
from dissensus.objectives import augmented
from dissensus.objectives.declaration import UNLABELLED, argument, declaration, takes, unwrapped
from dissensus.randomness import generators_kept
from dissensus.train.checkpoint import Checkpointer
from dissensus.train.compatibility import check_adversarial, check_few, check_unlabelled
from dissensus.train.history import History, OnProgress, TrainingDiverged, share_of
from dissensus.train.trained_loss import Targets, trained_loss

KIND = "dissensus.twin"
_BY_OBJECTIVE = (
    "Pass twin=partial(dissensus.objectives.independent, loss=...), with the loss that `objective` trains on."
)


def without_interaction(objective: Objective) -> Objective:
    """The objective of a twin: `augmented` with β = 0, with the loss, the pool and the weights of an objective.

    Its gradients are those of `independent`. It also records the loss of the pooled prediction and the diversity, and
    on validation data its pooled loss is that of the objective itself.

    >>> from dissensus.objectives import ldr
    >>> without_interaction(functools.partial(ldr, strength=1.0)).keywords["loss"]
    'cross_entropy'
    """
    declared, known = declaration(objective), trained_loss(objective)
    name = getattr(unwrapped(objective)[0], "__name__", "the objective")
    if declared.separable:
        _refuse_copy(f"{name}, which trains every member by itself")
    if declared.neutral and all(_equals(argument(objective, key), value) for key, value in declared.neutral.items()):
        _refuse_copy(f"{name} with {', '.join(f'{key}={value}' for key, value in declared.neutral.items())}")
    if known is None:
        checks.refuse("twin", "be an objective if the loss of `objective` is unknown", "True", _BY_OBJECTIVE)
    check_pool(known.loss, known.pool)
    return functools.partial(augmented, beta=0.0, loss=known.loss, pool=known.pool, weights=known.weights)


def _refuse_copy(got: str) -> None:
    fix = "Its twin, from the same seeds, would be a copy. The ensemble is its own reference: leave `twin` out."
    checks.refuse("twin", "come with an objective in which members interact", got, fix)


def _equals(value: object, neutral: float) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and float(value) == neutral
    return isinstance(value, int | float) and value == neutral


@dataclass
class Twin:
    """A twin that waits for its training: its members before training, and the arguments of `fit` for them."""

    ensemble: Ensemble
    objective: Objective
    settings: dict[str, Any]
    """Arguments of `fit` besides the ensemble, the data and the objective."""
    data: Any
    generators: list[torch.Generator]
    """Generators that the ensemble's training may draw from besides its seed: torch's, and those of loaders."""
    states: list[Tensor]
    """States of these generators before training."""

    @classmethod
    def of(cls, twin: bool | Objective, ensemble: Ensemble, arguments: Mapping[str, Any]) -> "Twin | None":
        """The twin of an ensemble that `fit` is about to train with these arguments; None without a twin.

        All checks of the twin happen here, before anything is trained.
        """
        if twin is False:
            return None
        if twin is not True and not callable(twin):
            fix = "Pass twin=True, or partial(dissensus.objectives.independent, loss=...)."
            checks.refuse("twin", "be True, False, or an objective", repr(twin), fix, TypeError)
        _check_members(ensemble)
        if arguments["sequential"] and arguments["checkpoint"] is not None:
            fix = "Leave one of the three out."
            checks.refuse("twin", "come without `checkpoint` where training is sequential", "both", fix)
        objective = without_interaction(arguments["objective"]) if twin is True else twin
        settings = {**arguments, "sequential": False, "twin": False}
        data = settings.pop("data")
        for name in ("ensemble", "objective"):
            settings.pop(name)
        if not takes(objective, UNLABELLED):
            settings["unlabelled"] = None
        if arguments["checkpoint"] is not None:
            settings["checkpoint"] = Path(arguments["checkpoint"]) / "twin"
        _check(objective, data, settings)
        generators = _generators(ensemble.device, data, settings["unlabelled"], settings["validation"])
        states = [generator.get_state() for generator in generators]
        settings["progress"] = _share(arguments, twin=True)
        return cls(ensemble.subset(range(ensemble.members)), objective, settings, data, generators, states)

    def keep(self, checkpointer: Checkpointer, resume: bool) -> None:
        """Store the state before training beside the ensemble's first checkpoint, or restore it from there.

        A resumed training may pass an ensemble that is partly trained, and another process has other generators.
        """
        folder = checkpointer.folder / "twin"
        beginning = folder / "beginning"
        if not checkpointer.found():
            if any(folder.glob("step-*")):
                raise ValueError(f"{folder} holds a checkpoint already; give another folder.")
            storage.write_folder(beginning, KIND, self._tensors(), {})
        elif resume:
            try:
                stored, _ = storage.read_folder(beginning, KIND)
            except storage.StorageError as reason:
                raise storage.StorageError(
                    f"{checkpointer.folder} belongs to a training without a twin, or its twin is damaged: {reason} "
                    "Give another folder."
                ) from reason
            self._restore(beginning, stored)

    def _tensors(self) -> dict[str, Tensor]:
        members = {f"members/{name}": tensor for name, tensor in self.ensemble.body.tensors().items()}
        return members | {f"generator/{place}": state for place, state in enumerate(self.states)}

    def _restore(self, folder: Path, stored: Mapping[str, Tensor]) -> None:
        tensors = self._tensors()
        storage.check_match(folder, stored, {name: tensor.shape for name, tensor in tensors.items()})
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(stored[name])

    def train(self, fit: Callable[..., History], ensemble: Ensemble, history: History) -> History:
        """Train the twin after its sibling, and attach it to the sibling and to the sibling's history."""
        self.ensemble.body.choices.update(ensemble.body.choices)  # backends are measured once for both
        with self._from_the_beginning():
            try:
                history.twin_history = fit(self.ensemble, self.data, self.objective, **self.settings)
            except TrainingDiverged as reason:
                history.twin_history = reason.history
                raise TrainingDiverged(reason.failure, history, twin=True) from None
        history.twin = ensemble.twin = self.ensemble
        return history

    @contextmanager
    def _from_the_beginning(self) -> Iterator[None]:
        """A block that draws what the ensemble's training drew, and restores generators afterwards."""
        before = [generator.get_state() for generator in self.generators]
        with generators_kept(self.ensemble.device):
            try:
                for generator, state in zip(self.generators, self.states, strict=True):
                    generator.set_state(state)
                yield
            finally:
                for generator, state in zip(self.generators, before, strict=True):
                    generator.set_state(state)


def siblings_progress(arguments: Mapping[str, Any]) -> OnProgress | None:
    """Progress of an ensemble whose twin is trained after it."""
    return _share(arguments, twin=False)


def _share(arguments: Mapping[str, Any], *, twin: bool) -> OnProgress | None:
    if arguments["progress"] is None:
        return None
    first = arguments["ensemble"].members if arguments["sequential"] else 1
    return share_of(arguments["progress"], first if twin else 0, 1 if twin else first, first + 1, twin=twin)


def _check_members(ensemble: Ensemble) -> None:
    network = getattr(ensemble.body, "network", None)
    masks = getattr(network, "members_inside", False)
    if ensemble.members == 1 and not masks:
        checks.refuse("twin", "come with two members or more", "one", "A single member has no other to interact with.")
    if masks and getattr(network, "assign", "all") == "split":
        got = "assign='split', where each example trains one mask"
        checks.refuse("twin", "come with masks that interact", got, "Use assign='all', or leave `twin` out.")


def _check(objective: Objective, data: Any, settings: Mapping[str, Any]) -> None:
    """Refuse an objective that does not go with the other settings."""
    unlabelled, active_members = settings["unlabelled"], settings["active_members"]
    try:
        check_unlabelled(objective, unlabelled)
        check_few(objective, active_members)
        check_adversarial(objective, settings["adversarial"], unlabelled, settings["augment"], active_members)
        pair = as_pair(data)
        if pair is not None:
            Targets.of(objective).check(pair[1])
    except ValueError as reason:
        raise ValueError(f"`twin` does not go with this training: {reason}") from reason


def _generators(device: torch.device, *sources: object) -> list[torch.Generator]:
    loaders = [source for source in sources if isinstance(source, DataLoader)]
    of_loaders = [g for loader in loaders for g in (loader.generator, getattr(loader.sampler, "generator", None))]
    on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *on_device, *(generator for generator in of_loaders if generator is not None)]
