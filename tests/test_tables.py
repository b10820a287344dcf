"""Preprocessing of the collusion paper's tables: on small ones written here, and on the real ones where they are."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from dissensus.data import formats, tables
from dissensus.data.catalogue import DATASETS
from dissensus.data.common_datasets import TABLES
from dissensus.data.splits import split_rows
from dissensus.data.tables import Table, TableScaler, scaled, table

UCI = Path(__file__).parents[1] / ".." / "shared" / "data" / "uci"
SCHEMAS = {name: DATASETS[name].files[0].schema for name in ("abalone", "bioconcentration", "weather", "facebook")}
real = pytest.mark.skipif(not UCI.is_dir(), reason="needs the UCI tables in ../shared/data/uci")


def facebook(**changed):
    columns = {
        "Type": ["Photo", "Link", "Photo", "Video"],
        "Category": ["2", "10", "1", "2.0"],
        "Paid": ["0", "1", "0", "0"],
        "comment": ["4", "5", "0", "1"],
        "like": ["79", "130", "66", "1"],
        "share": ["17", "29", "14", "0"],
        "Total Interactions": ["100", "164", "80", "2"],
    }
    return {**columns, **changed}


def test_categories_become_columns_in_order():
    parsed = table(SCHEMAS["facebook"], facebook())
    names = ("Type=Link", "Type=Photo", "Type=Video", "Category=1", "Category=2", "Category=10", "Paid")
    assert parsed.features == names
    assert parsed.x.tolist() == [
        [0, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1],
        [0, 1, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 1, 0, 0],
    ]
    assert parsed.y.tolist() == [[100], [164], [80], [2]]
    assert (parsed.x.dtype, parsed.y.dtype, parsed.targets) == (torch.float64, torch.float64, ("Total Interactions",))


def test_the_leaky_variant_keeps_the_parts_of_the_target():
    clean, leaky = table(SCHEMAS["facebook"], facebook()), table(SCHEMAS["facebook"], facebook(), leaky=True)
    assert leaky.features == (*clean.features, "comment", "like", "share")
    assert torch.equal(leaky.x[:, -3:].sum(1, keepdim=True), leaky.y)
    assert torch.equal(leaky.x[:, :-3], clean.x)


@pytest.mark.parametrize("empty", ["", " ", "NA", "nan", "NaN", "?"])
@pytest.mark.parametrize("column", ["like", "Paid", "Type", "Total Interactions"])
def test_rows_with_a_missing_value_are_dropped_in_both_variants(column, empty):
    columns = facebook()
    columns[column] = [columns[column][0], empty, *columns[column][2:]]
    for leaky in (False, True):
        assert table(SCHEMAS["facebook"], columns, leaky=leaky).y.flatten().tolist() == [100, 80, 2]


def test_words_become_categories_and_classes_become_numbers():
    columns = {"Buying": ["low", "high", "low"], "Doors": ["2", "4", "2"], "Acceptability": ["unacc", "acc", "?"]}
    parsed = table(TABLES["car"].schema, columns)
    assert parsed.features == ("Buying=high", "Buying=low", "Doors")
    assert parsed.x.tolist() == [[0, 1, 2], [1, 0, 4]]
    assert (parsed.y.tolist(), parsed.y.dtype) == ([1, 0], torch.int64)


def test_classes_that_are_numbers_keep_their_order():
    columns = {"Class": ["10", "2", "2.0", "0"], "F": ["1", "2", "3", "4"]}
    assert table(TABLES["vowel"].schema, columns).y.tolist() == [2, 1, 1, 0]


def test_odd_tables_are_refused():
    with pytest.raises(
        ValueError, match=r"`facebook` must have the columns 'Total Interactions', 'Type', 'Category'; got \['a'\]"
    ):
        table(SCHEMAS["facebook"], {"a": ["1"]}, name="facebook")
    with pytest.raises(ValueError, match="`Paid` must be a column of numbers; got 'yes'. A category?"):
        table(SCHEMAS["facebook"], facebook(Paid=["0", "1", "yes", "0"]))
    with pytest.raises(ValueError, match="`Paid` must be finite; got infinity"):
        table(SCHEMAS["facebook"], facebook(Paid=["0", "1", "inf", "0"]))


def oracle(train, test_rows):
    """Standardisation and logs, column by column, by numpy and scipy."""
    out = []
    for column, values in zip(train.T, test_rows.T, strict=True):
        log = column.min() >= 0 and np.ptp(column) > 0 and stats.skew(column) > 1
        a, b = (np.log1p(column), np.sign(values) * np.log1p(np.abs(values))) if log else (column, values)
        std = a.std() if np.ptp(column) > 0 else 1.0
        out.append((b - a.mean()) / std)
    return np.stack(out, 1)


def rows(n, seed=0):
    random = np.random.default_rng(seed)
    columns = [
        random.normal(5, 2, n),
        random.lognormal(0, 1.5, n),
        -random.lognormal(0, 1.5, n),
        random.integers(0, 2, n),
        np.full(n, 3.1),
        random.lognormal(0, 1.5, n) - 0.5,
    ]
    x = torch.from_numpy(np.stack(columns, 1).astype(float))
    return x, torch.from_numpy(random.lognormal(0, 2, (n, 2)))


def test_scaling_equals_numpys():
    x, y = rows(300)
    test_x, test_y = rows(50, seed=1)
    scaler = TableScaler.fit(x, y)
    assert scaler.logged.tolist() == [False, True, False, False, False, False]
    np.testing.assert_allclose(scaler.transform(test_x, test_y)[0], oracle(x.numpy(), test_x.numpy()), atol=1e-9)
    expected = (test_y.numpy() - y.numpy().mean(0)) / y.numpy().std(0)
    np.testing.assert_allclose(scaler.transform(test_x, test_y)[1], expected, atol=1e-9)


def test_training_rows_get_mean_zero_and_deviation_one():
    x, y = rows(300)
    scaled_x, scaled_y = TableScaler.fit(x, y).transform(x, y)
    for values in (scaled_x[:, [0, 1, 2, 3, 5]], scaled_y):
        torch.testing.assert_close(values.mean(0), torch.zeros_like(values[0]), atol=1e-9, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones_like(values[0]))
    assert (scaled_x[:, 4].abs() < 1e-9).all(), "a constant column stays at zero"


def test_only_training_rows_are_learnt_from():
    x, y = rows(300)
    data = Table(x, y, tuple("abcdef"), ("y", "z"))
    train, test = torch.arange(200), torch.arange(200, 300)
    before = scaled(data.x, data.y, train, test)
    spoiled = Table(x.clone(), y.clone(), data.features, data.targets)
    spoiled.x[200:], spoiled.y[200:] = -1e6, 1e6
    after = scaled(spoiled.x, spoiled.y, train, test)
    assert torch.equal(before[0][0], after[0][0])
    assert torch.equal(before[0][1], after[0][1])
    assert before[0][0].dtype == before[0][1].dtype == torch.float32
    assert after[1][0].isfinite().all(), "the log goes on below zero"


def test_scaled_targets_are_restored():
    x, y = rows(100)
    scaler = TableScaler.fit(x, y)
    torch.testing.assert_close(scaler.inverse_transform(scaler.transform(x, y)[1]), y)
    members = scaler.transform(x, y)[1].expand(5, -1, -1)
    torch.testing.assert_close(scaler.inverse_transform(members)[3], y)


def test_the_threshold_can_be_moved():
    x, y = rows(300)
    assert not TableScaler.fit(x, y, skew=math.inf).logged.any()
    assert TableScaler.fit(x, y, skew=-math.inf).logged.tolist() == (x >= 0).all(0).tolist()


def test_one_row_and_odd_shapes(unchecked):
    x, y = rows(1)
    assert not any(part.abs().sum() for part in TableScaler.fit(x, y).transform(x, y))
    x, y = rows(10)
    with pytest.raises(ValueError, match=r"shapes \[N, F\] and \[N, T\]; got \[10, 6\] and \[10\]. One target\?"):
        TableScaler.fit(x, y[:, 0])
    with pytest.raises(ValueError, match=r"shapes \[N, F\] and \[N, T\]; got \[0, 6\] and \[0, 2\]"):
        TableScaler.fit(x[:0], y[:0])
    with pytest.raises(ValueError, match=r"must have 6 features and 2 targets, .* got \[10, 5\] and \[10, 2\]"):
        TableScaler.fit(x, y).transform(x[:, 1:], y)


REAL = {
    "abalone": (4177, 10, 1, ["height"]),
    "bioconcentration": (779, 9, 1, ["nHM", "X2Av", "ON1V", "N-072", "F04[C-O]"]),
    "weather": (7588, 46, 2, ["LDAPS_WS", "LDAPS_PPT1", "LDAPS_PPT2", "LDAPS_PPT3", "LDAPS_PPT4", "DEM", "Slope"]),
    "facebook": (495, 20, 1, None),
}


@real
@pytest.mark.parametrize("name", REAL)
def test_the_real_tables(name):
    rows, features, targets, logged = REAL[name]
    data = table(SCHEMAS[name], formats.csv_columns(UCI / f"{name}.csv"))
    assert (data.x.shape, data.y.shape) == ((rows, features), (rows, targets))
    assert len(set(data.features)) == features
    assert data.targets == SCHEMAS[name].targets
    train, test = split_rows(rows, 0.2, seed=0)
    pairs = scaled(data.x, data.y, train, test)
    assert all(part.isfinite().all() for pair in pairs for part in pair)
    torch.testing.assert_close(pairs[0][0].mean(0), torch.zeros(features), atol=1e-4, rtol=0)
    skewed = TableScaler.fit(data.x, data.y).logged
    numeric = [f for f, log in zip(data.features, skewed, strict=True) if log and "=" not in f]
    assert logged is None or numeric == logged


@real
def test_the_real_facebook_leaks_in_one_variant_only():
    columns = formats.csv_columns(UCI / "facebook.csv")
    clean, leaky = table(SCHEMAS["facebook"], columns), table(SCHEMAS["facebook"], columns, leaky=True)
    like = leaky.x[:, leaky.features.index("like")]
    assert round(float(torch.corrcoef(torch.stack([like, leaky.y[:, 0]]))[0, 1]), 3) == 0.998
    assert not {"comment", "like", "share"} & set(clean.features)
    assert torch.equal(clean.y, leaky.y)


@real
def test_pandas_reads_the_same_numbers():
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(UCI / "weather.csv").dropna()
    data = table(SCHEMAS["weather"], formats.csv_columns(UCI / "weather.csv"))
    np.testing.assert_allclose(data.y, frame[["Next_Tmax", "Next_Tmin"]])
    np.testing.assert_allclose(data.x[:, data.features.index("Slope")], frame["Slope"])
    np.testing.assert_array_equal(data.x[:, data.features.index("station=7")], frame["station"] == 7)
    assert tables.SKEW == 1.0
