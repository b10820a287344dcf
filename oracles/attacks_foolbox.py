"""Write golden tensors of foolbox's attacks, on two small networks that are trained here and stored with them.

Usage: python oracles/attacks_foolbox.py tests/golden/attacks.safetensors   (`make oracles` does it)

It starts the file anew; attacks_torchattacks.py and attacks_autoattack.py then add theirs. Beside it lies attacks.json:
what each tensor is, each library's definition as read in its source, and the defects measured on the way.
"""

import copy
import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import foolbox
import torch
from foolbox.attacks import (
    EADAttack,
    L2CarliniWagnerAttack,
    L2ProjectedGradientDescentAttack,
    LinfBasicIterativeAttack,
    LinfFastGradientAttack,
    LinfProjectedGradientDescentAttack,
)
from foolbox.criteria import Misclassification, TargetedMisclassification
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES, EXAMPLES = 5, 16
LAYERS = {"conv": 0, "linear": 3}
SLACK = 1e-6  # of a norm: x + delta - x in float32


def network() -> nn.Sequential:
    """The one architecture of this file."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, CLASSES))


class LogMeanProbability(nn.Module):
    """An ensemble whose logits are the logs of its members' mean probabilities."""

    def __init__(self, *members: nn.Module):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """``logsumexp_m(log_softmax z_m) - log M``."""
        scores = torch.stack([member(x).log_softmax(-1) for member in self.members])
        return scores.logsumexp(0) - math.log(len(self.members))


def synthetic(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy copies of five fixed patterns, clipped to [0, 1]: some pixels are exactly 0 or 1."""
    patterns = 0.5 + 0.1 * torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return (patterns[labels] + 0.25 * torch.randn(count, 3, 8, 8, generator=generator)).clamp(0, 1), labels


def trained(seed: int) -> nn.Sequential:
    """A network after ten epochs on 1,024 synthetic examples."""
    torch.manual_seed(seed)
    net, (x, labels) = network(), synthetic(1024, 1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(10):
        for inputs, wanted in zip(x.split(128), labels.split(128), strict=True):
            optimiser.zero_grad()
            cross_entropy(net(inputs), wanted).backward()
            optimiser.step()
    return net.eval().requires_grad_(False)


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The label's logit above the best other one's."""
    others = logits.scatter(1, labels[:, None], -math.inf).amax(1)
    return logits.gather(1, labels[:, None])[:, 0] - others


class Golden:
    """The two golden files: tensors, and what is said of them."""

    def __init__(self, path: str, fresh: bool = False):
        self.path = Path(path)
        if fresh:
            self.tensors: dict[str, Tensor] = {}
            self.said: dict = {"network": {}, "inputs": {}, "definitions": {}, "entries": {}, "defects": []}
        else:
            self.tensors = load_file(self.path)
            self.said = json.loads(self.path.with_suffix(".json").read_text())

    def drop(self, library: str) -> None:
        """Forget all that is held of one library, so that a script can run twice."""
        self.tensors = {key: held for key, held in self.tensors.items() if not key.startswith(f"{library}.")}
        for part in ("definitions", "entries"):
            self.said[part] = {k: v for k, v in self.said[part].items() if not k.startswith(f"{library}.")}
        self.said["defects"] = [d for d in self.said["defects"] if d["library"] != library]

    def model(self, name: str) -> nn.Module:
        """``net``, ``net2``, or ``ensemble`` of both, in evaluation mode."""
        if name == "ensemble":
            return LogMeanProbability(self.model("net"), self.model("net2")).eval()
        net = network()
        for layer, at in LAYERS.items():
            for part in ("weight", "bias"):
                getattr(net[at], part).data = self.tensors[f"{name}.{layer}.{part}"].clone()
        return net.eval()

    def add(
        self,
        key: str,
        adversarial: Tensor,
        flags: dict[str, Tensor],
        *,
        model: str = "net",
        targeted: bool = False,
        norm: str,
        eps: float | None = None,
        double: Tensor | None = None,
        **about: object,
    ) -> None:
        """Check and keep one attack's result; ``flags["success"]`` as the library has it, ``found`` where that lies."""
        x, labels = self.tensors["x"], self.tensors["labels"]
        adversarial = adversarial.detach()
        assert (adversarial.shape, adversarial.dtype) == (x.shape, torch.float32), key
        assert ((adversarial >= 0) & (adversarial <= 1)).all(), key  # no NaN either
        found = flags.get("found", flags["success"])
        moved = (adversarial - x).flatten(1)[found if norm in ("L1", "L2") and eps is None else slice(None)]
        norms = {"L0": (moved != 0).sum(1).float(), "L1": moved.abs().sum(1), "L2": moved.norm(dim=1)}
        largest = (norms | {"Linf": moved.abs().amax(1)})[norm].max().item() if len(moved) else 0.0
        assert eps is None or largest <= eps + SLACK, (key, largest)
        with torch.no_grad():
            predicted = self.model(model)(adversarial).argmax(1)
        hit = predicted == self.tensors["targets"] if targeted else predicted != labels
        assert torch.equal(hit, flags["success"]), (key, "the library's flags are not what a fresh pass says")
        robust = (predicted == labels) | (~found if "found" in flags else torch.zeros_like(found))
        self.tensors |= {key: adversarial} | {f"{key}.{name}": held for name, held in flags.items()}
        entry: dict = about | {"norm": norm, "eps": eps, "targeted": targeted, "model": model, "x": "x"}
        entry |= {"labels": "labels", "targets": "targets" if targeted else None}
        entry |= {name: f"{int(held.sum())} of {len(x)}" for name, held in flags.items() if held.dtype == torch.bool}
        entry |= {"robust_accuracy": robust.float().mean().item(), "largest_norm": largest}
        if "found" in flags:
            entry["robust_accuracy_by_success_flags"] = (predicted == labels).float().mean().item()
        if double is not None:
            entry["largest_difference_to_float64"] = (adversarial - double).abs().max().item()
        self.said["entries"][key] = entry
        print(key, {k: v for k, v in entry.items() if k in ("success", "found", "robust_accuracy", "largest_norm")})
        print("   ", entry.get("largest_difference_to_float64"))

    def defect(self, library: str, what: str, **measured: object) -> None:
        """Keep one oddity, with its numbers."""
        self.said["defects"].append({"library": f"{library}", "what": what, "measured": measured})
        print("defect:", what, measured)

    def save(self) -> None:
        """Write both files."""
        self.said["versions"] = {name: version(name) for name in ("torch", "foolbox", "torchattacks", "pyautoattack")}
        save_file({key: held.contiguous() for key, held in sorted(self.tensors.items())}, self.path)
        text = json.dumps(self.said, indent=1, ensure_ascii=False)
        self.path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


def start(golden: Golden) -> None:
    """Train the networks and choose the inputs."""
    nets = {"net": trained(0), "net2": trained(1)}
    for name, net in nets.items():
        for layer, at in LAYERS.items():
            golden.tensors |= {f"{name}.{layer}.{part}": getattr(net[at], part).data for part in ("weight", "bias")}
    x, labels = synthetic(512, 2)
    with torch.no_grad():
        judges = (*nets.values(), LogMeanProbability(*nets.values()))
        held = torch.stack([margins(judge(x), labels) for judge in judges])
    right = (held > 0.05).all(0).nonzero()[:, 0]
    ranked = right[held[2, right].argsort()]
    chosen = ranked[torch.linspace(0, 0.6 * len(ranked), EXAMPLES).long()]
    x, labels = x[chosen], labels[chosen]
    golden.tensors |= {"x": x, "labels": labels, "targets": (labels + 1) % CLASSES}
    golden.said["network"] = {
        "build": "nn.Sequential(Conv2d(3, 6, 3, stride=2, padding=1), ReLU(), Flatten(), Linear(96, 5))",
        "weights": "net.conv.*, net.linear.*; a second such network: net2.*",
        "ensemble": "logits = logsumexp over (net, net2) of log_softmax(logits), minus log 2",
        "training": "Adam, lr 0.01, weight decay 1e-3, 10 epochs of 1,024 synthetic examples, batches of 128",
        "accuracy_on_512_others": {
            name: (net(synthetic(512, 3)[0]).argmax(1) == synthetic(512, 3)[1]).float().mean().item()
            for name, net in nets.items()
        },
    }
    golden.said["inputs"] = {
        "x": "16 inputs [3, 8, 8] in [0, 1]; net, net2 and the ensemble classify all of them right",
        "pixels_at_0_or_1": ((x == 0) | (x == 1)).float().mean().item(),
        "labels": "their classes",
        "targets": "(label + 1) % 5, of the targeted attacks",
        "names": "KEY: what the library returned; KEY.success: a fresh forward pass on that (foolbox: its own flags, "
        "equal); KEY.found: where it did find one (C&W, EAD), else it returns a black image",
        "float64": "largest_difference_to_float64: to the same attack on the same network in double, in any pixel",
    }


DEFINITIONS = {
    "foolbox.gradient-descent": (
        "FGSM, BIM and PGD are one loop (BaseGradientDescent.run): gradient of the summed cross-entropy; normalise; "
        "x += step (minus for a target: descent to the target's cross-entropy); project x - x0 onto the ball; then "
        "clip to the bounds. So the step comes first, the ball second, the box last, each iteration. L∞: "
        "sign(gradient), projection by clipping (sign(0) = 0). L2: gradient / max(its L2 norm, 1e-12) per example; "
        "projection (x - x0) * min(1, eps / max(norm, 1e-12)). BIM and PGD without random start differ in defaults "
        "only. Returned always: the last iterate, whether adversarial or not, no best-of-iterates; success = "
        "prediction of the returned one, clipped to the ball once more. FGSM = one step of size eps."
    ),
    "foolbox.carlini-wagner": (
        "Variables w = arctanh(0.999999 * (2x - 1)) + delta, image = (tanh(w) + 1) / 2. Loss summed over the batch: "
        "const * max(0, z_label - max_other z + confidence) + |image - reconstructed x|² (targeted: z best other - z "
        "target). Own Adam (0.9, 0.999, eps 1e-8 outside the root, bias-corrected), delta from 0 and Adam anew at "
        "each search step. In iteration k it judges the image BEFORE update k: with `steps` = n the images after "
        "0..n-1 updates are judged and the n-th update is lost. Adversarial: argmax after adding `confidence` to the "
        "label's logit (targeted: subtracting it from the target's). Kept: the smallest L2 distance to x over all "
        "iterations of all search steps (strictly smaller). const: float64, found -> upper = const, else lower = "
        "const; next = const * 10 while upper is infinite, else the middle; only with >= 10 search steps the last "
        "one uses upper. Failure: a black image (zeros), and `success` is then the black image's own prediction; "
        "`success` also ignores confidence."
    ),
    "foolbox.ead": (
        "FISTA: y_0 = x_0 = x; per iteration k = 0..steps-1: gradient at y_k of const * max(0, margin + confidence) "
        "+ |y_k - x|² (no L1 term); step size initial_stepsize * sqrt(1 - k / steps); z = y_k - step * gradient; "
        "shrinkage by `regularization` itself, not times the step size: z - x > beta -> min(z - beta, 1); z - x < "
        "-beta -> max(z + beta, 0); else x; y_{k+1} = x_{k+1} + k / (k + 3) * (x_{k+1} - x_k), which may leave the "
        "box (only x_k is ever returned). x_{k+1}, after the update, is judged in a second forward pass, as in C&W. "
        "Kept: smallest beta * L1 + L2² (EN) or L1 (L1), strictly smaller, over all search steps. const: float32, "
        "otherwise C&W's search. Failure: a black image, as in C&W."
    ),
}


def foolbox_attacks() -> list[tuple[str, object, dict]]:
    """Key, attack, and what is said of it."""
    descent = "foolbox.gradient-descent"
    fgsm = {"norm": "Linf", "eps": 0.03, "definition": descent}
    step = {"random_start": False}
    once = LinfBasicIterativeAttack(rel_stepsize=1.0, steps=1, **step)
    linf = LinfProjectedGradientDescentAttack(abs_stepsize=0.006, steps=10, **step)
    l2 = L2ProjectedGradientDescentAttack(abs_stepsize=0.1, steps=10, **step)
    found: list[tuple[str, object, dict]] = [
        ("foolbox.fgsm", LinfFastGradientAttack(), fgsm),
        ("foolbox.fgsm.targeted", once, fgsm | {"targeted": True}),
        ("foolbox.bim", LinfBasicIterativeAttack(abs_stepsize=0.003, steps=10, **step), fgsm),
        ("foolbox.pgd", linf, fgsm),
        ("foolbox.pgd.targeted", linf, fgsm | {"targeted": True}),
        ("foolbox.pgd-l2", l2, {"norm": "L2", "eps": 0.5, "definition": descent}),
        ("foolbox.fgsm.ensemble", LinfFastGradientAttack(), fgsm | {"model": "ensemble"}),
        ("foolbox.pgd.ensemble", linf, fgsm | {"model": "ensemble"}),
    ]
    carlini = {"norm": "L2", "definition": "foolbox.carlini-wagner"}
    for name, searches, confidence, const, more in (
        ("search-1", 1, 0.0, 1.0, {}),
        ("search-1.confidence", 1, 0.1, 1.0, {}),
        ("search-1.weak", 1, 0.0, 0.1, {}),
        ("search-5", 5, 0.0, 1.0, {}),
        ("search-5.confidence", 5, 0.1, 1.0, {}),
        ("search-5.weak", 5, 0.0, 0.01, {}),
        ("search-5.targeted", 5, 0.0, 1.0, {"targeted": True}),
        ("search-5.ensemble", 5, 0.0, 1.0, {"model": "ensemble"}),
    ):
        attack = L2CarliniWagnerAttack(
            searches, steps=50, stepsize=0.01, confidence=confidence, initial_const=const, abort_early=False
        )
        found.append((f"foolbox.cw.{name}", attack, carlini | more))
    for searches, const in ((1, 1.3), (3, 0.5)):
        for rule in ("EN", "L1"):
            attack = EADAttack(
                searches,
                steps=50,
                initial_stepsize=0.01,
                confidence=0.0,
                initial_const=const,
                regularization=0.01,
                decision_rule=rule,
                abort_early=False,
            )
            found.append((f"foolbox.ead.search-{searches}.{rule}", attack, {"norm": "L1", "definition": "foolbox.ead"}))
    return found


def attacked(golden: Golden, attack: Callable, model: nn.Module, said: dict) -> tuple[Tensor, Tensor]:
    """What a foolbox attack returns, and its success flags."""
    dtype = next(model.parameters()).dtype
    criterion = TargetedMisclassification if said.get("targeted") else Misclassification
    wanted = criterion(golden.tensors["targets" if said.get("targeted") else "labels"])
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    x = golden.tensors["x"].to(dtype)
    raw, clipped, success = attack(wrapped, x, wanted, epsilons=said.get("eps"))
    assert said.get("eps") is None or (raw - clipped).abs().max() <= SLACK  # the second clipping only rounds
    return raw.detach(), success


def main(path: str) -> None:
    """Write the files with foolbox's part."""
    golden = Golden(path, fresh=True)
    start(golden)
    golden.said["definitions"] |= DEFINITIONS
    for key, attack, said in foolbox_attacks():
        model = golden.model(said.get("model", "net"))
        raw, success = attacked(golden, attack, model, said)
        double, _ = attacked(golden, attack, copy.deepcopy(model).double(), said)
        flags = {"success": success}
        if said.get("eps") is None:
            flags["found"] = (raw != 0).flatten(1).any(1)
        about = {"library": "foolbox", "version": foolbox.__version__, "attack": type(attack).__name__}
        about["parameters"] = {name.strip("_"): held for name, held in vars(attack).items()}
        golden.add(key, raw, flags, double=double, **about, **said)
    golden.said["entries"]["foolbox.fgsm.targeted"]["note"] = (
        "LinfFastGradientAttack refuses targets, so this is one step of size eps of the same loop"
    )
    defects(golden)
    golden.save()


def defects(golden: Golden) -> None:
    """Measure what foolbox does oddly."""
    x, labels = golden.tensors["x"], golden.tensors["labels"]
    net = golden.model("net")
    try:
        attacked(golden, LinfFastGradientAttack(), net, {"targeted": True, "eps": 0.03})
    except ValueError as error:
        golden.defect("foolbox", "FGSM refuses a target, though the loop it inherits has it.", error=str(error))

    with torch.no_grad():
        black = net(torch.zeros_like(x[:1])).argmax(1).item()
    weak = L2CarliniWagnerAttack(1, steps=50, stepsize=0.01, initial_const=0.01, abort_early=False)
    raw, success = attacked(golden, weak, net, {})
    missed = (raw == 0).flatten(1).all(1)
    golden.defect(
        "foolbox",
        "C&W and EAD return a black image where they find nothing, and `success` is that image's prediction. "
        "Here with initial_const 0.01, one search step.",
        nothing_found=int(missed.sum()),
        of_those_flagged_success=int((missed & success).sum()),
        class_of_the_black_image=black,
        largest_l2=(raw - x).flatten(1).norm(dim=1).max().item(),
    )

    single = L2CarliniWagnerAttack(1, steps=1, stepsize=5.0, initial_const=1.0, abort_early=False)
    raw, _ = attacked(golden, single, net, {})
    golden.defect(
        "foolbox",
        "C&W judges the image before each update, so the last update is lost: with steps=1 it can find nothing.",
        found_with_one_step=int((raw != 0).flatten(1).any(1).sum()),
    )

    for name, kind in (("C&W", L2CarliniWagnerAttack), ("EAD", EADAttack)):
        aborting = kind(9, steps=100)
        together, _ = attacked(golden, aborting, net, {})
        wrapped = foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu")
        alone = torch.cat([aborting(wrapped, x[i : i + 1], labels[i : i + 1], epsilons=None)[0] for i in range(len(x))])
        apart = (together - alone).flatten(1).abs().amax(1)
        golden.defect(
            "foolbox",
            f"{name}'s abort_early (on by default) looks at the whole batch's loss, so a result depends on its batch; "
            "its documentation says that it stops once an adversarial example is found. Defaults, but 100 steps.",
            examples_that_differ_from_alone=int((apart > 1e-5).sum()),
            largest_pixel_difference=apart.max().item(),
        )

    seen: list[Tensor] = []
    hook = net.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    attacked(golden, foolbox_attacks()[-1][1], net, {})
    hook.remove()
    golden.defect(
        "foolbox",
        "EAD's extrapolated points leave the box, and the network is evaluated there.",
        smallest_input=min(given.min().item() for given in seen),
        largest_input=max(given.max().item() for given in seen),
    )

    edge = (x == 0) | (x == 1)
    raw = golden.tensors["foolbox.cw.search-5"]
    moved = (raw - x).abs()[golden.tensors["foolbox.cw.search-5.found"]]
    edge = edge[golden.tensors["foolbox.cw.search-5.found"]]
    golden.defect(
        "foolbox",
        "C&W hardly moves a pixel that is exactly 0 or 1: arctanh(0.999999) is 7.25, where 0.01 a step is nothing.",
        edge_pixels=int(edge.sum()),
        their_largest_move=moved[edge].max().item(),
        largest_move_of_others=moved[~edge].max().item(),
    )

    fresh = golden.model("net")
    attacked(golden, LinfFastGradientAttack(), fresh, {"eps": 0.03})
    golden.defect(
        "foolbox",
        "Gradients come by backward(), so the parameters' .grad is written to, and added to by each further step.",
        parameters_with_grad_after_fgsm=sum(p.grad is not None for p in fresh.parameters()),
        of=len(list(fresh.parameters())),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
