"""Add golden tensors of torchattacks' momentum and saliency-map attacks to those of attacks_foolbox.py.

Usage: python oracles/attacks_torchattacks.py tests/golden/attacks.safetensors   (`make oracles` does it)
"""

import copy
import math
import sys

import torch
import torchattacks
from attacks_foolbox import Golden
from torch import Tensor, nn

DEFINITIONS = {
    "torchattacks.mifgsm": (
        "gradient of the batch's mean cross-entropy (minus it for a target), divided per example by its mean "
        "absolute value (the paper divides by the L1 norm: the same signs), plus decay * momentum; that sum is the "
        "new momentum. x += alpha * sign(momentum); clip x - x0 to eps; clip to [0, 1]. No guard against a zero "
        "gradient: 0 / 0 makes the momentum NaN for good, and sign(NaN) is 0 in torch, so the example stops where it "
        "is. Returned: the last iterate."
    ),
    "torchattacks.jsma": (
        "Papernot's pair version, one image at a time, always with a target. Features are all C*H*W values. Jacobian "
        "of the logits, not of the probabilities. Target = row t; others = sum of the other rows. Search domain: at "
        "the start the features < 0.99 (theta > 0) or > 0.01 (theta < 0); a pair leaves it once changed, saturated "
        "or not, so a feature changes at most once. For each pair i != j: alpha = target_i + target_j, beta = "
        "others_i + others_j; features outside the domain get alpha -= 2 max|target|, beta += 2 max|others|, which "
        "fails the conditions. Pairs with alpha > 0 and beta < 0 (theta < 0: signs reversed) score alpha * |beta|, "
        "all others 0; the first largest in row-major order wins. Both features += theta, then the image is clipped "
        "to [0, 1]. It stops when argmax is the target, after ceil(features * gamma / 2) iterations, or with an "
        "empty domain. When no pair satisfies the conditions argmax falls on (0, 0): feature 0 gets 2 * theta and "
        "the loop goes on, to the same end each time (KEY.stuck: where that happened). On failure it returns the "
        "changed image."
    ),
}


class LoggedJSMA(torchattacks.JSMA):
    """torchattacks' JSMA that notes the pairs it takes."""

    def perturbation_single(self, image: Tensor, target_label: Tensor) -> Tensor:
        """As torchattacks has it, with a fresh list of pairs."""
        self.pairs.append([])
        return super().perturbation_single(image, target_label)

    def saliency_map(self, *given: object) -> tuple[Tensor, Tensor]:
        """As torchattacks has it, with the pair noted."""
        p, q = super().saliency_map(*given)
        self.pairs[-1].append((p.item(), q.item()))
        return p, q


def jsma(golden: Golden, model: nn.Module, theta: float, gamma: float) -> tuple[Tensor, list[list[tuple[int, int]]]]:
    """What torchattacks' JSMA makes of the golden inputs and targets, and the pairs it took."""
    attack = LoggedJSMA(model, theta=theta, gamma=gamma)
    attack.pairs = []
    attack.set_mode_targeted_by_label(quiet=True)
    found = attack(golden.tensors["x"].to(next(model.parameters()).dtype), golden.tensors["targets"])
    return found.detach(), attack.pairs


def main(path: str) -> None:
    """Add torchattacks' part."""
    golden = Golden(path)
    golden.drop("torchattacks")
    golden.said["definitions"] |= DEFINITIONS
    x, labels, targets = (golden.tensors[name] for name in ("x", "labels", "targets"))
    net = golden.model("net")
    double = copy.deepcopy(net).double()
    about = {"library": "torchattacks", "version": torchattacks.__version__}

    for targeted in (False, True):
        found = []
        for model in (net, double):
            attack = torchattacks.MIFGSM(model, eps=0.03, alpha=0.003, steps=10, decay=1.0)
            if targeted:
                attack.set_mode_targeted_by_label(quiet=True)
            found.append(attack(x.to(next(model.parameters()).dtype), targets if targeted else labels))
        with torch.no_grad():
            predicted = net(found[0]).argmax(1)
        golden.add(
            "torchattacks.mifgsm" + ".targeted" * targeted,
            found[0],
            {"success": predicted == targets if targeted else predicted != labels},
            double=found[1],
            norm="Linf",
            eps=0.03,
            targeted=targeted,
            attack="MIFGSM",
            parameters={"eps": 0.03, "alpha": 0.003, "steps": 10, "decay": 1.0},
            definition="torchattacks.mifgsm",
            **about,
        )

    for name, theta, gamma in (("jsma", 1.0, 0.1), ("jsma.short", 1.0, 0.03), ("jsma.small", 0.25, 0.3)):
        found, pairs = jsma(golden, net, theta, gamma)
        other, other_pairs = jsma(golden, double, theta, gamma)
        assert pairs == other_pairs, "a tie, or near one: choose other inputs"
        flags = {"stuck": torch.tensor([(0, 0) in taken for taken in pairs])}
        with torch.no_grad():
            flags["success"] = net(found).argmax(1) == targets
        golden.add(
            f"torchattacks.{name}",
            found,
            flags,
            double=other,
            norm="L0",
            targeted=True,
            attack="JSMA",
            parameters={"theta": theta, "gamma": gamma, "most_iterations": math.ceil(192 * gamma / 2)},
            iterations=[len(taken) for taken in pairs],
            definition="torchattacks.jsma",
            **about,
        )
    defects(golden)
    golden.save()


def defects(golden: Golden) -> None:
    """Measure what torchattacks does oddly."""
    x, labels, targets = (golden.tensors[name] for name in ("x", "labels", "targets"))
    net = golden.model("net")
    confident = copy.deepcopy(net)
    for parameter in confident[3].parameters():
        parameter.data *= 1000
    found = torchattacks.MIFGSM(confident, eps=0.03, alpha=0.003, steps=10)(x, labels)
    golden.defect(
        "torchattacks",
        "MIFGSM divides a zero gradient by its zero mean: the momentum turns NaN for good, and since sign(NaN) is 0 "
        "the example stays as it is, silently, whatever its later gradients (a plain sign step would not move it at a "
        "zero gradient either). Here with the logits times 1000, where cross-entropy saturates.",
        examples_never_moved=int((found == x).flatten(1).all(1).sum()),
        of=len(x),
    )

    found, pairs = jsma(golden, net, -1.0, 0.1)
    changed = (found != x).flatten(1)
    golden.defect(
        "torchattacks",
        "JSMA that decreases (theta < 0) scores alpha * |beta| with alpha < 0, so every allowed pair scores below the "
        "forbidden ones' 0 and argmax takes pair (0, 0): only feature 0 is ever changed.",
        pairs_taken=sum(len(taken) for taken in pairs),
        of_those_0_0=sum(pair == (0, 0) for taken in pairs for pair in taken),
        most_features_changed=int(changed.sum(1).max()),
        reached_the_target=int((net(found).argmax(1) == targets).sum()),
    )

    found, pairs = jsma(golden, net, 1.0, 0.001)
    golden.defect(
        "torchattacks",
        "JSMA rounds its number of iterations up (the paper: down), so it changes more than gamma of the features. "
        "Here gamma 0.001 of 192.",
        allowed=0.192,
        changed=int((found != x).flatten(1).sum(1).max()),
    )

    found, pairs = jsma(golden, net, 0.02, 1.0)
    golden.defect(
        "torchattacks",
        "Where no pair is left JSMA changes feature 0 by 2 theta instead of stopping, in every further iteration (none "
        "of the tensors here is touched by it). Here theta 0.02, gamma 1.",
        examples=sum((0, 0) in taken for taken in pairs),
        wasted_iterations=sum(pair == (0, 0) for taken in pairs for pair in taken),
        largest_move=(found - x).abs().max().item(),
    )

    try:
        torchattacks.JSMA(golden.model("net"))(x, labels)
    except IndexError as error:
        what = "JSMA's default target is (label + 1) % 10 whatever the classes."
        golden.defect("torchattacks", what, error=str(error))

    fresh = golden.model("net")
    jsma(golden, fresh, 1.0, 0.1)
    golden.defect(
        "torchattacks",
        "JSMA's Jacobian comes by backward() for each class, so the parameters' .grad is written to and accumulates.",
        parameters_with_grad=sum(p.grad is not None for p in fresh.parameters()),
        of=len(list(fresh.parameters())),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
