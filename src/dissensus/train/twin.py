"""The independent twin of an ensemble: the same training without interaction, as a reference for an audit."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dissensus import checks, storage
from dissensus.axes import Objective
from dissensus.data.batches import refuse_iterator
from dissensus.diversity.decomposition import check_pool
from dissensus.ensemble import Ensemble
from dissensus.objectives import augmented
from dissensus.objectives.declaration import UNLABELLED, argument, declaration, takes, unwrapped
from dissensus.randomness import generators_kept
from dissensus.train.checkpoint import FORMATS, Checkpointer, checkpoints_in
from dissensus.train.history import History, OnProgress, TrainingDiverged, share_of
from dissensus.train.notification import Callbacks
from dissensus.train.python_state import PythonState, sources_at_beginning
from dissensus.train.recipe import ExistingMembers, Recipe
from dissensus.train.trained_loss import trained_loss

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


def twin_objective(twin: bool | Objective, ensemble: Ensemble, objective: Objective) -> Objective | None:
    """The objective of the twin that `fit` is asked for; None where no twin is wanted."""
    if twin is False:
        return None
    if twin is not True and not callable(twin):
        fix = "Pass twin=True, or partial(dissensus.objectives.independent, loss=...)."
        checks.refuse("twin", "be True, False, or an objective", repr(twin), fix, TypeError)
    _check_members(ensemble)
    return without_interaction(objective) if twin is True else twin


@dataclass
class Twin:
    """A twin that waits for its training: its recipe, and the generators at the beginning."""

    recipe: Recipe
    """Its ensemble is a copy of the members at their beginning."""
    progress: OnProgress | None
    siblings_progress: OnProgress | None
    """Progress of the ensemble whose twin is trained after it."""
    callbacks: Callbacks | None
    generators: list[torch.Generator]
    """Generators that the ensemble's training may draw from besides its seed: torch's, and those of loaders."""
    states: list[Tensor]
    """States of these generators at the beginning."""
    sources: PythonState | None
    """Sources of batches, with generators and counters of their own, at the beginning."""

    @classmethod
    def of(
        cls, recipe: Recipe, progress: OnProgress | None, callbacks: Callbacks | None, *, sequential: bool
    ) -> "Twin | None":
        """The twin of an ensemble that is about to be trained; None where the recipe has none.

        Settings that do not go together are refused here, before anything is trained.
        """
        if recipe.twin is None:
            return None
        refuse_iterator(recipe.data, "the twin")
        assert isinstance(recipe.initial, ExistingMembers)
        ensemble, checkpoint = recipe.initial.ensemble, recipe.checkpoint
        if sequential and checkpoint is not None:
            fix = "Leave one of the three out."
            checks.refuse("twin", "come without `checkpoint` where training is sequential", "both", fix)
        try:
            own_recipe = replace(
                recipe,
                initial=ExistingMembers(ensemble.subset(range(ensemble.members))),
                objective=recipe.twin,
                unlabelled=recipe.unlabelled if takes(recipe.twin, UNLABELLED) else None,
                checkpoint=None if checkpoint is None else replace(checkpoint, folder=checkpoint.folder / "twin"),
                twin=None,
            )
        except ValueError as reason:
            raise ValueError(f"`twin` does not go with this training: {reason}") from reason
        if own_recipe.checkpoint is not None:
            _ = own_recipe.fingerprint  # taken now, because the ensemble's training may change objects of the recipe
        generators = _generators(ensemble.device, recipe.data, own_recipe.unlabelled, recipe.validation)
        trainings = ensemble.members if sequential else 1
        return cls(
            own_recipe,
            None if progress is None else share_of(progress, trainings, 1, trainings + 1, twin=True),
            None if progress is None else share_of(progress, 0, trainings, trainings + 1),
            None if callbacks is None else callbacks.at(twin=True),
            generators,
            [generator.get_state() for generator in generators],
            sources_at_beginning(ensemble.device, recipe.data, own_recipe.unlabelled, recipe.validation),
        )

    @property
    def ensemble(self) -> Ensemble:
        """The twin itself."""
        assert isinstance(self.recipe.initial, ExistingMembers)
        return self.recipe.initial.ensemble

    def keep(self, checkpointer: object) -> None:
        """Store the beginning beside the ensemble's first checkpoint, or restore it from there.

        A training that resumes in the same process passes an ensemble that is partly trained, and another process has
        other generators.
        """
        if not isinstance(checkpointer, Checkpointer):
            return
        folder = checkpointer.folder / "twin"
        beginning = folder / "beginning"
        if not checkpointer.checkpoints():
            if checkpoints_in(folder):
                raise ValueError(f"{folder} holds a checkpoint already; give another folder.")
            storage.write_folder(beginning, KIND, self._tensors(), {"fingerprint": checkpointer.fingerprint}, FORMATS)
        elif checkpointer.settings.resume:
            try:
                stored, manifest = storage.read_folder(beginning, KIND, FORMATS)
            except storage.OtherFormat:
                raise
            except storage.StorageError as reason:
                raise storage.StorageError(
                    f"{checkpointer.folder} belongs to a training without a twin, or its twin is damaged: {reason} "
                    "Give another folder."
                ) from reason
            checkpointer.check(manifest.get("fingerprint"), beginning)
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

    def train(self, train: Callable[..., History], ensemble: Ensemble, history: History) -> History:
        """Train the twin after its sibling; both the sibling and its history get it."""
        self.ensemble.body.choices.update(ensemble.body.choices)  # of the same passes: measured once
        with self._from_the_beginning():
            try:
                history.twin_history = train(self.recipe, self.progress, callbacks=self.callbacks)
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
                if self.sources is not None:
                    self.sources.rewind()
                for generator, state in zip(self.generators, self.states, strict=True):
                    generator.set_state(state)
                yield
            finally:
                for generator, state in zip(self.generators, before, strict=True):
                    generator.set_state(state)


def _check_members(ensemble: Ensemble) -> None:
    network = getattr(ensemble.body, "network", None)
    masks = getattr(network, "members_inside", False)
    if ensemble.members == 1 and not masks:
        checks.refuse("twin", "come with two members or more", "one", "A single member has no other to interact with.")
    if masks and getattr(network, "assign", "all") == "split":
        got = "assign='split', where each example trains one mask"
        checks.refuse("twin", "come with masks that interact", got, "Use assign='all', or leave `twin` out.")


def _generators(device: torch.device, *sources: object) -> list[torch.Generator]:
    loaders = [source for source in sources if isinstance(source, DataLoader)]
    of_loaders = [g for loader in loaders for g in (loader.generator, getattr(loader.sampler, "generator", None))]
    on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *on_device, *(generator for generator in of_loaders if generator is not None)]
