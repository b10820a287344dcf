"""Tables and arrays that users bring: what is not there, or does not fit, is told."""

import numpy as np
import pytest

from dissensus.data.formats import DataError
from dissensus.data.user_files import read_data


def read(folder, text, **settings):
    file = folder / "table.csv"
    file.write_text(text)
    return read_data(file, target="kind", **settings)


@pytest.mark.parametrize("missing", ["", "NA", "?"])
@pytest.mark.parametrize("known", ["yes", "1", "1.5"])
def test_a_row_without_a_target_is_refused(known, missing, tmp_path):
    table = f"age,kind\n3,{known}\n4,{known}\n5,{missing}\n"
    with pytest.raises(DataError, match="must have a target in every row; got none in row 2. Leave such rows out"):
        read(tmp_path, table)
    assert read(tmp_path, table, labelled=False).inputs.flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize("y", [np.array([0.5, np.nan]), np.array([[0.5, 1], [np.nan, 1]])])
def test_an_array_of_targets_with_gaps_is_refused(y, tmp_path):
    np.savez(tmp_path / "arrays.npz", x=np.ones((2, 3)), y=y)
    with pytest.raises(DataError, match="none in row 1"):
        read_data(tmp_path / "arrays.npz")
    assert read_data(tmp_path / "arrays.npz", labelled=False).inputs.shape == (2, 3)


def test_long_whole_numbers_stay_apart(tmp_path):
    assert read(tmp_path, "age,kind\n3,9007199254740993\n4,9007199254740992\n").targets.tolist() == [2**53 + 1, 2**53]
    names = read(tmp_path, f"age,kind\n3,1{'0' * 30}\n4,1{'0' * 29}1\n").targets
    assert names.tolist() == [f"1{'0' * 30}", f"1{'0' * 29}1"]


def test_numbers_that_float32_does_not_hold_are_refused(tmp_path):
    with pytest.raises(DataError, match="must have numbers that fit into float32; got larger ones in 'age'"):
        read(tmp_path, "age,kind\n1e300,0\n4,1\n")
