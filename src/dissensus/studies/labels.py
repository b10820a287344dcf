"""Names of measures, scores, attacks and classes as people say them."""

from dissensus.studies import datasets
from dissensus.studies.results import WORST_CASE, Measure

MEASURES = {
    "error": "ensemble's loss",
    "individual": "members' loss",
    "diversity": "diversity",
    "gap": "generalisation gap",
    "train_error": "training loss",
    "test_error": "test loss",
    "bias_share": "share that is bias",
    "relative_diversity": "diversity / loss",
    "train_individual": "members' training loss",
    "train_diversity": "training diversity",
    "test_individual": "members' test loss",
    "test_diversity": "test diversity",
    "member_accuracy": "members' accuracy",
    "error_rate": "ensemble's error rate",
    "member_error_rate": "members' error rate",
    "worst_member_error_rate": "worst member's error rate",
    "nonmaximal_volume": "ensemble diversity",
    "log_nonmaximal_volume": "log of ensemble diversity",
    "disagreement_inside": "disagreement, ID",
    "disagreement_outside": "disagreement, OOD",
    "disagreement_high_loss": "disagreement, high-loss examples",
    "disagreement_low_loss": "disagreement, other training examples",
    "outside_share": "share of high-loss examples that are OOD",
    "crps": "CRPS",
    "rmse": "RMSE",
    "interval_coverage": "coverage of 90% intervals",
    "interval_width": "width of 90% intervals",
    "parameters": "parameters, in networks",
    "inference_cost": "cost of inference, in networks",
    "training_cost": "cost of training, in networks",
    "features_similarity": "similarity of members' features (CKA)",
}
SCORES = {"predictive_diversity": "PDS", "model_average": "BMA", "nonmaximal_volume": "ED"}
"""Scores as papers abbreviate them; a measure of a score is the area under its ROC curve."""
ATTACKS = {
    "fgsm": "FGSM",
    "bim": "BIM",
    "pgd": "PGD",
    "mim": "MIM",
    "apgd": "APGD",
    "square": "Square",
    "jsma": "JSMA",
    "carlini_wagner": "C&W",
    "elastic_net": "EAD",
}
METHODS = {
    "a2d": "A2D",
    "ldr": "LDR",
    "lora": "LoRA",
    "batch-ensemble": "BatchEnsemble",
    "tabm": "TabM",
    "adp-2-0.5": "ADP(2, 0.5)",
}
_BEFORE_ATTACK = {"transfer": "transfer, ", "fooled": "fooled by "}
CLASSES = {
    "cifar10": ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "fashion-mnist": ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
}


def measure_label(name: str) -> str:
    """A measure's name as people say it.

    >>> measure_label("codependence_0.2"), measure_label("error"), measure_label("auroc_predictive_diversity_mnist")
    ('drop 20%', "ensemble's loss", 'PDS, mnist')
    >>> [measure_label(name) for name in ("accuracy_fgsm_0.02", "transfer_targeted_pgd_0.05", "standard_0.01")]
    ['FGSM 0.02', 'transfer, targeted PGD 0.05', 'worst case, standard 0.01']
    >>> measure_label("train_diversity@0.1")
    'training diversity after 10% of the epochs'
    """
    measure = Measure.parse(name)
    if measure.share:
        return f"{measure_label(measure.kind)} after {100 * float(measure.share):g}% of the epochs"
    score = SCORES.get(measure.score, measure.score.replace("_", " "))
    if measure.kind == WORST_CASE:
        return f"worst case, {measure.attack} {measure.parameter}"
    if measure.attack:
        before = f"{score}, " if score else _BEFORE_ATTACK.get(measure.kind, "")
        words = ("targeted" if measure.targeted else "", ATTACKS[measure.attack], measure.parameter)
        return before + " ".join(filter(None, words))
    if measure.dataset:
        return f"{score or measure_label(name.removesuffix(f'_{measure.dataset}'))}, {measure.dataset}"
    if measure.kind == "codependence":
        return f"drop {float(measure.parameter):.0%}"
    return MEASURES.get(name, name.replace("_", " "))


def method_label(name: str) -> str:
    """A method's name as people say it.

    >>> method_label("ldr"), method_label("independent")
    ('LDR', 'independent')
    """
    return METHODS.get(name, name)


def class_labels(data: str) -> tuple[str, ...]:
    """Names of a data set's classes; numbers where they have none."""
    return CLASSES.get(datasets.source_of(data), tuple(map(str, range(1000))))
