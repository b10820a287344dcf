"""What all commands promise: errors in one line, places checked before the work, and a clean end when interrupted."""

import io
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import dissensus as ds
from dissensus import attacks, metrics
from dissensus.cli import app, ood, screen
from dissensus.studies import datasets, demo
from dissensus.studies import run as running
from dissensus.studies.registry import maker


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command's code, what it printed, and what it said of errors; it runs in a folder with a file `x.txt`."""
    monkeypatch.setenv("DISSENSUS_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("")
    torch.manual_seed(0)
    for name, shape in {"in": (3, 40, 4), "near": (3, 30, 4), "few": (2, 30, 4), "wide": (3, 30, 5)}.items():
        np.save(tmp_path / f"{name}.npy", torch.randn(shape).numpy())
    labels, logits = torch.arange(40) % 4, torch.randn(3, 40, 4)
    arrays = {
        "probs": logits.softmax(-1),
        "second": logits.softmax(-1)[..., 1],
        "examples-first": logits.transpose(0, 1),
        "network": logits[0],
        "labels": labels,
        "from-one": labels + 1,
        "floats": labels.double(),
        "one-hot": torch.eye(4).long()[labels],
        "column": labels.unsqueeze(1),
        "nothing": torch.zeros(3, 0, 4),
        "nan": logits / (logits < 1),
        "pictures": torch.rand(40, 8, 8, 3),
        "two-channels": torch.rand(40, 2, 8, 8),
        "nan-pictures": torch.full((40, 3, 8, 8), torch.nan),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array.numpy())
    np.save(tmp_path / "names.npy", np.array(["a", "b"] * 20))
    np.save(tmp_path / "letters.npy", np.full((40, 8, 8), "a"))
    np.savez(tmp_path / "other.npz", predictions=logits.numpy())
    np.savez(tmp_path / "held.npz", outputs=logits.numpy(), targets=labels[:30].numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of a newer format
        np.savez(tmp_path / "columns.npz", outputs=np.zeros(3, dtype=[("\u03b2", float)]))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe1,2")
    (tmp_path / "folder.npy").mkdir()
    np.savez(tmp_path / "scalar.npz", outputs=np.array(1.0), targets=labels.numpy())
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("outputs")
    np.savez_compressed(tmp_path / "flipped.npz", outputs=np.zeros((3, 40, 4)), targets=labels.numpy())
    content = bytearray((tmp_path / "flipped.npz").read_bytes())
    crc = content.index(b"PK\x01\x02") + 16  # of the first array, in the list of contents
    content[crc] ^= 1
    (tmp_path / "flipped.npz").write_bytes(content)
    header = b"{'descr': dict(), 'fortran_order': False, 'shape': (3,), }\n"
    (tmp_path / "expression.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    (tmp_path / "short.csv").write_text("1\n2\n3,4\n")
    (tmp_path / "words.csv").write_text("label\n1\n2\nthree\n")

    def run(arguments, **env):
        result = CliRunner().invoke(app, arguments.split() if isinstance(arguments, str) else arguments, env=env)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


ROBUST = "robust --ensemble absent --network cnn --data digits --epsilon 0.1"
STUDY = "study run collusion/figure-2 --scale smoke"
OOD = "ood in.npy --outside near=near.npy --repeats 5"
AUDIT = "audit in.npy --task classification --kind logits"
SAVED = "--task classification --kind logits"
SMALL = "study run collusion/figure-15 --scale smoke --set"
TWO = "numpy.stack([1 - p, p], -1)"
REFUSED = [
    (f"{STUDY} --device foo", 1, "there is no device 'foo' that torch can see; use --device cpu"),
    (f"{ROBUST} --device foo", 1, "there is no device 'foo' that torch can see; use --device cpu"),
    (f"{ROBUST} --trained-on 0", 2, "--trained-on"),
    (f"{ROBUST} --trained-on -3", 2, "--trained-on"),
    (f"{ROBUST} --json .", 2, "--json . is a folder; give a file"),
    (f"{ROBUST} --page x.txt/p.html", 2, "--page x.txt/p.html: x.txt is a file"),
    (f"{ROBUST} --folder x.txt", 2, "--folder x.txt is a file; give a folder"),
    (f"{ROBUST} --option foo=1", 1, "--option foo: there is no such option; cnn has widths, batch_norm."),
    (f"{ROBUST} --network resnet18 --option stemm=1", 1, "resnet18 has stem. Did you mean 'stem'?"),
    (f"{ROBUST} --network resnet20 --option channels=1", 1, "resnet20 has none."),
    ("masks --size -5", 2, "--size"),
    ("masks --network vanilla-cnn --size 8", 1, "--size must be at least 16"),
    ("masks --figure foo.xyz", 2, "--figure foo.xyz must end in .png, .pdf or .svg"),
    ("masks --figure x.txt/f.png", 2, "--figure x.txt/f.png: x.txt is a file"),
    (f"{OOD} --json .", 2, "--json . is a folder"),
    (f"{OOD} --figure f.gif", 2, "--figure f.gif must end in"),
    (f"{OOD} --gallery g", 2, "--gallery g must end in"),
    (f"{OOD} --gallery g.png", 1, "--gallery needs --pictures"),
    (f"{OOD} --gallery g.png --pictures near=a.npz", 1, "--pictures a.npz must be one array in a .npy file"),
    (f"{OOD} --gallery g.png --pictures far=a.npy", 1, "'far', which is no set here: within, near"),
    (f"{OOD} --gallery g.png --pictures near=in.npy", 1, "in.npy must hold 30 images"),
    (
        f"{OOD} --outside few=few.npy",
        1,
        "'few' must have the members and classes of the set within, [M=3, N=40, C=4]; got [M=2, N=30, C=4]",
    ),
    (f"{OOD} --outside wide=wide.npy", 1, "got [M=3, N=30, C=5] in wide.npy"),
    (f"{OOD} --outside near=in.npy", 1, "--outside names 'near' twice: near.npy and in.npy"),
    (f"{OOD} --outside within=near.npy", 1, "the name 'within' is taken"),
    (f"{OOD} --outside =near.npy", 1, "write it as NAME=FILE"),
    (f"{OOD} --kind probabilities", 1, "`in.npy` must be probabilities, which sum to one over classes"),
    (f"{OOD} --kind probabilities", 1, "Logits? Say --kind logits."),
    (f"{AUDIT} --json .", 2, "--json . is a folder"),
    (f"{AUDIT} --page x.txt/p.html", 2, "x.txt is a file"),
    (
        f"audit probs.npy --targets labels.npy {SAVED}",
        1,
        "`outputs` must be logits; got numbers of at least zero that "
        "sum to one over classes: probabilities. Use --kind probabilities.",
    ),
    (f"audit in.npy --targets labels.npy --reference probs.npy {SAVED}", 1, "--reference must be logits"),
    (f"audit in.npy --targets labels.npy --ood probs.npy {SAVED}", 1, "--ood must be logits"),
    ("audit in.npy --targets labels.npy --task classification --kind probabilities", 1, "--kind logits"),
    ("ood probs.npy --outside far=in.npy", 1, "`probs.npy` must be logits; got numbers of at least zero"),
    ("ood in.npy --outside far=probs.npy", 1, "`probs.npy` must be logits"),
    ("ood in.npy --outside far=probs.npy", 1, "Say --kind probabilities."),
    ("audit second.npy --targets labels.npy --task classification --kind probabilities", 1, TWO),
    (
        f"audit second.npy --targets labels.npy {SAVED}",
        1,
        "`outputs` must have two columns or more, one for each "
        "class, [M, N, C]; got [3, 40]. Probabilities p of the second class, as predict_proba(x)[:, 1] has them? Use "
        f"{TWO}",
    ),
    (f"audit labels.npy labels.npy --targets labels.npy {SAVED}", 1, "got [40] from each of 2 members"),
    ("ood second.npy --outside far=second.npy --kind probabilities", 1, TWO),
    ("ood second.npy --outside far=second.npy", 1, TWO),
    ("ood network.npy --outside far=network.npy", 1, "One network, [N, C]? Use outputs[None]."),
    (f"audit in.npy --targets from-one.npy {SAVED}", 1, "got 1 to 4. Do labels begin at 1? Use targets - 1."),
    (f"audit in.npy --targets floats.npy {SAVED}", 1, "got [40] float64. Use targets.astype(int)."),
    (f"audit in.npy --targets one-hot.npy {SAVED}", 1, "got [40, 4] int64. One-hot? Use targets.argmax(-1)."),
    (f"audit in.npy --targets column.npy {SAVED}", 1, "A column? Use targets[:, 0]."),
    (f"audit in.npy --targets names.npy {SAVED}", 1, "Name the label of every column"),
    (f"audit examples-first.npy --targets labels.npy {SAVED}", 1, "Are examples before members? Use numpy.swapaxes"),
    ("audit in.npy --targets labels.npy --task regression", 1, "--targets must have shape [N, 4]"),
    (
        f"audit in.npy --targets labels.npy --in-bag all {SAVED}",
        1,
        "--in-bag must come with --train; got no --train. Give --train FILE.",
    ),
    (f"audit held.npz {SAVED}", 1, "`targets` must hold N=40 examples"),
    (f"audit nothing.npy --targets labels.npy {SAVED}", 1, "got [3, 0, 4]"),
    (f"audit nan.npy --targets labels.npy {SAVED}", 1, "NaN or infinity at member 0"),
    (f"audit other.npz --targets labels.npy {SAVED}", 1, "has no array `outputs` [M, N, C]; it has predictions"),
    (f"audit columns.npz --targets labels.npy {SAVED}", 1, "columns.npz cannot be read"),
    (f"audit absent.npy --targets labels.npy {SAVED}", 1, "there is no file absent.npy"),
    (f"audit folder.npy --targets labels.npy {SAVED}", 1, "folder.npy is a folder; give a file"),
    (f"audit in.npy --targets binary.csv {SAVED}", 1, "binary.csv cannot be read as text"),
    (f"{OOD} --gallery g.png --pictures within=pictures.npy", 1, "Channels last? Use numpy.moveaxis(images, -1, 1)"),
    (f"{OOD} --gallery g.png --pictures within=two-channels.npy", 1, "of 1 or 3 channels"),
    (f"{OOD} --gallery g.png --pictures within=letters.npy", 1, "in numbers; got [40, 8, 8] <U1"),
    (f"{OOD} --gallery g.png --pictures within=nan-pictures.npy", 1, "NaN or infinity in image 0"),
    (f"{SMALL} members.network=foo", 1, "key 'members.network' is 'foo', which nothing is called"),
    (f"{SMALL} members.options.foo=1", 1, "It may be one of backbone, batch_norm, counts, initial, layers, widths."),
    (f"{SMALL} objective.options.beat=1", 1, "key 'objective.options' is 'beat'"),
    (f"{SMALL} objective.loss=foo", 1, "`loss` must be one of"),
    (f"{SMALL} objective.pool=vote", 1, "`loss` must be 'zero_one' for pool 'vote'"),
    (f"{SMALL} grid.beta=0.5", 1, "key 'grid.beta' must be a list; got a number 0.5."),
    (f"{SMALL} grid.seed=['a']", 1, "key 'grid.seed[0]' must be a whole number; got text 'a'."),
    (f"{SMALL} optimisation.momentum=0.5", 1, "key 'optimisation.momentum' does nothing with adam"),
    (
        "study run collusion/figure-9 --scale smoke --set grid.classes=[3]",
        1,
        "cannot be run: the axis 'classes' of 'grid' is none that this study can vary",
    ),
    (f"{SMALL} grid.gamma=[1]", 1, "the axis 'gamma' of 'grid' is none that this study can vary. It may be one of"),
    (f"{SMALL} grid.sead=[1]", 1, "'sead' of 'grid' is none that this study can vary. Did you mean 'seed'?"),
    (f"{SMALL} evaluation.measures=['accuracie']", 1, "is called 'accuracie'. Did you mean 'accuracy'?"),
    (f"{SMALL} grid.beta=[2]", 1, "collusion/figure-15 with --set grid.beta=[2]: `beta` must be at most 1"),
    (f"{SMALL} grid.beta=[2]", 1, "To study that, set objective.options.allow_pathological=true."),
    (f"{SMALL} grid={{}}", 1, "got augmented without `beta`. Set grid.beta, a list, or objective.options.beta."),
    (f"audit scalar.npz {SAVED}", 1, "`outputs` must be an array [M, N, C], or a list of M arrays [N, C]; dense"),
    (f"audit scalar.npz {SAVED}", 1, "got one number. One output"),
    ("ood scalar.npz --outside near=near.npy", 1, "got one number. One output"),
    (f"audit empty.npz {SAVED}", 1, "empty.npz cannot be read: it is empty. Make the file again, with numpy.savez."),
    (f"audit text.npz {SAVED}", 1, "damaged, cut short, or no .npz at all (File is not a zip file). Make the file"),
    (f"audit flipped.npz {SAVED}", 1, "it is damaged, cut short, or no .npz at all (Bad CRC-32"),
    (f"audit expression.npy --targets labels.npy {SAVED}", 1, "expression.npy cannot be read: it is no array of numpy"),
    (f"audit in.npy --targets short.csv {SAVED}", 1, "short.csv, line 3: it must hold 1 numbers; got 2"),
    (f"audit in.npy --targets words.csv {SAVED}", 1, "words.csv, line 4: it must hold numbers; got 'three'"),
    ("study run masksembles/figure-1 --scale smoke --set members.options.width=x", 1, "members.options.width"),
    ("study run masksembles/figure-1 --scale smoke --set grid.scale=[0.1]", 1, "'grid.scale[0]' must be at least 1"),
    ("study run masksembles/figure-2 --scale smoke --set grid={seed=[0]}", 1, "the network 'masksembles' needs"),
    ("demo --out x.txt/foo", 2, "--out x.txt/foo: x.txt is a file; give a folder"),
    ("study report --out .", 2, "--out . is a folder; give a file"),
    ("study report --figures x.txt", 2, "--figures x.txt is a file; give a folder"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED)
def test_invalid_commands_are_refused_on_stderr(arguments, code, message, command):
    exit_code, printed, errors = command(arguments)
    assert exit_code == code
    assert message in errors
    assert " at 0x" not in errors
    assert not printed


def test_a_folder_of_runs_that_is_a_file_is_refused(command):
    code, _, errors = command(STUDY, DISSENSUS_RUNS="x.txt")
    assert code == 2
    assert "DISSENSUS_RUNS" in errors
    assert "x.txt is a file" in errors


def test_devices_that_are_there_are_named_and_taken(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert screen.torch_device("cuda:1") == torch.device("cuda:1")
    assert screen.torch_device("cpu") == torch.device("cpu")
    with pytest.raises(screen.typer.Exit):
        screen.torch_device("cuda:2")
    assert "use --device cpu or cuda or cuda:0 or cuda:1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [f"{OOD} --figure", f"{AUDIT} --targets labels.npy --page"])
def test_folders_above_a_place_are_not_made(arguments, command, tmp_path):
    code, _, errors = command(f"{arguments} other/o.svg")
    assert (code, errors.count("error:")) == (2, 1)
    assert "other/o.svg: there is no folder other; make it first" in errors
    assert not (tmp_path / "other").exists()
    (tmp_path / "other").mkdir()
    assert command(f"{arguments} other/o.svg --json other/o.json")[0] == 0
    assert json.loads((tmp_path / "other/o.json").read_text())
    assert (tmp_path / "other/o.svg").stat().st_size > 1000


REPLACING = [
    (f"{AUDIT} --targets labels.npy --json in.npy", "--json in.npy is a file or folder that is read"),
    (f"{AUDIT} --targets labels.npy --json ./x/../labels.npy", "labels.npy is a file or folder that is read"),
    (f"{AUDIT} --targets labels.npy --page link.npy", "--page link.npy is a file or folder that is read"),
    (f"{AUDIT} --targets labels.npy --train held.npz --in-bag probs.npy --json probs.npy", "that is read"),
    (f"{AUDIT} --targets labels.npy --json both --page ./both", "--json both and --page both must be two places"),
    (f"{OOD} --json in.npy", "--json in.npy is a file or folder that is read"),
    (f"{OOD} --json near.npy", "--json near.npy is a file or folder that is read"),
    (f"{OOD} --pictures within=pictures.npy --gallery g.png --json pictures.npy", "that is read"),
    (f"{OOD} --figure f.png --json f.png", "must be two places"),
    ("robust --ensemble kept --json kept/manifest.json", "--json kept/manifest.json is a file or folder that is read"),
    ("robust --ensemble kept --folder kept", "--folder kept is a file or folder that is read"),
    ("robust --ensemble near.npy --surrogate kept --folder ./kept", "that is read"),
    ("robust --ensemble kept --folder new --json new", "--json new and --folder new must be two places"),
    ("robust --ensemble kept --folder new/a --page new", "--page new and --folder new/a must be two places"),
    ("study report a.toml --out a.toml", "--out a.toml is a file or folder that is read"),
    ("study report --out runs/studies/collusion/report.json", "is in runs/studies, which is read"),
    ("study report --figures runs/studies", "--figures runs/studies is in runs/studies, which is read"),
]


@pytest.mark.parametrize(("arguments", "message"), REPLACING)
def test_no_command_writes_over_what_it_reads(arguments, message, command, tmp_path):
    (tmp_path / "link.npy").symlink_to("in.npy")
    (tmp_path / "a.toml").write_text("title = 'a'")
    (tmp_path / "x").mkdir()
    (tmp_path / "runs/studies/collusion").mkdir(parents=True)
    ds.Ensemble(lambda: torch.nn.Linear(2, 2), 2).save(tmp_path / "kept")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    more = " --network mlp --data digits --epsilon 0.1" if arguments.startswith("robust") else ""
    code, printed, errors = command(arguments + more, DISSENSUS_RUNS="runs")
    assert (code, printed) == (2, "")
    assert message in errors
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_results_may_lie_beside_what_is_read(command, tmp_path):
    (tmp_path / "link.npy").symlink_to("in.npy")
    assert command("ood link.npy --outside near=near.npy --repeats 5 --json new.json --figure new.png")[0] == 0
    assert command(f"{AUDIT} --targets labels.npy --json /dev/null --page /dev/null")[0] == 0
    assert command("study report collusion/figure-2 --out page.html --figures .")[0] == 0


def test_a_tilde_is_the_home_folder(command, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    code, _, errors = command(f"{OOD} --json ~/o.json")
    assert code == 0, errors
    assert (tmp_path / "home" / "o.json").exists()
    assert not (tmp_path / "~").exists()


def test_a_call_that_is_refused_leaves_no_folder(command, tmp_path):
    code, _, _ = command("demo --out new --foo")
    assert code == 2
    assert not (tmp_path / "new").exists()


def test_write_errors_name_the_file_of_the_user(tmp_path, monkeypatch, capsys):
    def full(path, payload):
        raise OSError(28, "No space left on device", str(tmp_path / ".0123.unfinished"))

    monkeypatch.setattr(screen, "write_output", full)
    with pytest.raises(screen.typer.Exit):
        screen.write_file(tmp_path / "o.json", b"")
    errors = capsys.readouterr().err
    assert f"{tmp_path / 'o.json'} cannot be written: No space left on device" in errors
    assert "unfinished" not in errors


def test_arrays_with_examples_first_are_noticed(command):
    code, printed, errors = command("ood examples-first.npy --outside far=examples-first.npy --repeats 5")
    assert code == 0
    assert "40 members, 4 classes, examples: 3 within, 3 far" in printed
    assert "Are examples first? Use numpy.swapaxes(outputs, 0, 1)." in errors
    assert command(OOD)[2] == ""


def test_the_bar_of_scores_and_intervals_only_moves_ahead(command):
    sets, reports = ood._open_sets({"within": Path("in.npy"), "near": Path("near.npy"), "again": Path("near.npy")}), []
    ood._compare(sets, "logits", 0.05, 5, lambda label, share: reports.append((label, share)))
    shares = [share for _, share in reports]
    assert shares == sorted(set(shares))
    assert (shares[0], shares[-1] < 1) == (0, True)
    assert [label for label, _ in reports][:3] == ["scores of within", "scores of near", "scores of again"]
    assert "intervals of again: mutual information" in dict(reports)


def test_names_with_brackets_are_shown_as_they_are(command):
    code, printed, _ = command(["ood", "in.npy", "--repeats", "5", "--outside", "[bold]a[/bold] [x]=near.npy"])
    assert code == 0
    assert "[bold]a[/bold] [x]: how well" in printed


def test_numbers_stay_whole_on_a_narrow_terminal(monkeypatch):
    for width in (60, 30):
        narrow = Console(width=width, record=True, file=io.StringIO())
        monkeypatch.setattr(screen, "console", narrow)
        header = ("what", *(f"number-{i}" for i in range(6)))
        narrow.print(screen.table("", header, [["some words", *["0.1784"] * 6]], left=(0,)))
        text = narrow.export_text()
        assert text.count("0.1784") == (6 if width == 60 else 0)
        numbers = [line for line in text.splitlines() if "0.1" in line or "…" in line]
        assert len(numbers) == 2, "one line of heads, one of numbers"


def _stop(*args, **kwargs):
    raise KeyboardInterrupt


def test_an_interrupted_command_says_so_and_leaves_with_the_shells_code(command, monkeypatch):
    monkeypatch.setattr(demo, "run", _stop)
    monkeypatch.setattr(metrics, "threshold", _stop)
    monkeypatch.setattr(ds, "audit", _stop)
    np.save("labels.npy", np.arange(40) % 4)
    for arguments in ("demo --fast --out made", OOD, f"{AUDIT} --targets labels.npy"):
        code, _, errors = command(arguments)
        assert (code, errors) == (130, "interrupted"), arguments


def test_an_interrupted_study_goes_on_with_the_same_command(command, monkeypatch):
    monkeypatch.setattr(running, "run", _stop)
    code, _, errors = command(STUDY)
    assert (code, errors) == (130, "interrupted; the same command goes on where it stopped")


@pytest.fixture
def robust_arguments(tmp_path):
    """A call that attacks a stored ensemble."""

    def call(data):
        problem = datasets.load_unscaled(data)
        ds.Ensemble(maker("mlp", problem, {"width": 4}), members=2, seed=0).save(tmp_path / "kept")
        return f"robust --ensemble {tmp_path / 'kept'} --network mlp --option width=4 --data {data} --epsilon 0.1"

    return call


def test_interrupted_attacks_go_on_where_there_is_a_folder(command, robust_arguments, monkeypatch):
    monkeypatch.setattr(attacks, "evaluate", _stop)
    arguments = robust_arguments("made-images")
    assert command(arguments)[2] == "interrupted"
    assert command(f"{arguments} --folder f")[2] == "interrupted; the same command goes on where it stopped"


@pytest.mark.parametrize(
    ("data", "option", "line", "standardised"),
    [
        ("made-images", "", "standardised with the training data's mean and deviation (--no-standardise: as", True),
        ("made-images", " --no-standardise", "as they are, in [0, 1] (--standardise: with the training data's", False),
        ("digits", "", "as they are, in [0, 1]: those of digits are never standardised", False),
    ],
)
def test_attacks_say_how_images_are_given_to_the_ensemble(
    data, option, line, standardised, command, robust_arguments, tmp_path, unchecked
):
    code, printed, errors = command(f"{robust_arguments(data)}{option} --suite quick --examples 4 --json o.json")
    assert code == 0, errors
    assert line in " ".join(printed.split())
    assert json.loads((tmp_path / "o.json").read_text())["facts"]["standardised"] is standardised
    assert datasets.is_split_by_seed(data) == (data == "digits")


def test_the_help_mentions_batch_norm(command):
    assert "batch_norm=false" in "".join(command("robust --help", COLUMNS="300")[1].split())


def test_a_command_that_runs_out_of_memory_gives_advice_in_one_line(monkeypatch, tmp_path):
    from dissensus.execution.out_of_memory import OutOfMemory
    from dissensus.studies import run as runner

    def full(*_, **__):
        raise OutOfMemory("training ran out of memory on cpu. What helps: a smaller batch.")

    monkeypatch.setenv("DISSENSUS_RUNS", str(tmp_path))
    monkeypatch.setattr(runner, "run", full)
    result = CliRunner().invoke(app, ["study", "run", "collusion/figure-2", "--scale", "smoke"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "error: training ran out of memory on cpu. What helps: a smaller batch." in result.output


COMMANDS = (
    *("", "demo", "audit", "report", "tune", "ood", "robust", "masks", "convert"),
    *("study", "study list", "study show", "study run", "study report", "data", "data list", "data get", "data check"),
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_eighty_columns_and_cuts_nothing(name, command):
    code, printed, _ = command(f"{name} --help", COLUMNS="80")
    assert code == 0
    assert "…" not in printed
    assert "<bool>" not in printed, "a flag takes no value"
    assert max(map(len, printed.splitlines())) <= 80


def test_commands_stand_in_the_order_a_new_user_meets_them(command):
    lines = command("--help", COLUMNS="80")[1].partition("Commands")[2].splitlines()
    names = [line.split()[1] for line in lines if re.match(r"│ \w", line)]
    assert names[:3] == ["demo", "audit", "report"]
    assert names[-1] == "convert"


@pytest.mark.parametrize("arguments", ["--json audit.json", "--page audit.html"])
def test_files_are_there_when_nobody_reads_the_screen_to_its_end(arguments, command, tmp_path, monkeypatch):
    def closed(*_):
        raise SystemExit(141)  # as when `head` has ended

    monkeypatch.setattr("dissensus.cli.audit._print", closed)
    code, *_ = command(f"{AUDIT} --targets labels.npy {arguments}")
    assert code == 141
    assert (tmp_path / arguments.split()[1]).stat().st_size > 1000


def test_columns_are_explained_below_tables(command):
    printed = " ".join(command("ood in.npy --outside near.npy --repeats 5")[1].split())
    assert "FPR95: share of shifted examples that are missed where 95 % of the first set pass" in printed
    printed = " ".join(command("masks --network cnn --size 8 --budget 1")[1].split())
    assert "overlap: channels that two members share" in printed


def test_small_downloads_are_counted_in_kilobytes(command):
    printed = command("data list", COLUMNS="200")[1]
    assert re.search(r"facebook .* \d+ kB", printed)
    assert not re.search(r"\b0\.0 MB", printed)
