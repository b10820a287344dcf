"""Readers of raw files, on small files written here: whole, cut short, tampered with, missing."""

import gzip
import io
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from dissensus.data import formats
from dissensus.data.formats import DataError

RANDOM = np.random.default_rng(0)


def idx_bytes(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.astype(np.uint8).tobytes()


def pictures(n, *shape):
    return RANDOM.integers(0, 256, (n, *shape), dtype=np.uint8)


def png(array, mode="RGB"):
    buffer = io.BytesIO()
    Image.fromarray(array, mode if mode == "L" else None).save(buffer, "PNG")
    return buffer.getvalue()


KEEL = """@relation small
@attribute Sex {M, F}
@attribute 'Body mass' real [0.0, 9.5]
@attribute Age integer[1,99]
% a comment
@inputs Sex, 'Body mass', Age
@data
M, 1.5, 30
F,2.5,40
"""


def written_files(folder):
    """A complete file of every format, the function that reads it, and what it must return."""
    images, labels = pictures(5, 28, 28), np.arange(5)
    pixels, sheet, digits = pictures(5, 3, 32, 32), pictures(5, 32, 32, 3), pictures(32, 32, 3, 5)
    cifar = np.concatenate([labels[:, None].astype(np.uint8), pixels.reshape(5, 3072)], 1)
    cifar100 = np.concatenate([labels[:, None].astype(np.uint8) + 10, cifar], 1)
    numbers = io.BytesIO()
    np.savez(numbers, x=images, y=labels)
    matlab = io.BytesIO()
    savemat(matlab, {"X": digits, "y": np.array([[10], [1], [2], [9], [10]])}, do_compression=True)
    columns = {"a": ["10"] * 3, "b": ["20"] * 3, "c": ["30"] * 3}
    keel = {"Sex": ["M", "F"], "Body mass": ["1.5", "2.5"], "Age": ["30", "40"]}
    svhn = (digits.transpose(3, 2, 0, 1), np.array([0, 1, 2, 9, 0]))
    arrays = {"x": images, "y": labels}
    files = {
        "a-idx3-ubyte": (idx_bytes(images), formats.idx, images),
        "a-idx3-ubyte.gz": (gzip.compress(idx_bytes(images)), formats.idx, images),
        "batch.bin": (cifar.tobytes(), formats.cifar10_batch, (pixels, labels)),
        "train.bin": (cifar100.tobytes(), formats.cifar100_batch, (pixels, labels, labels + 10)),
        "sheet.png": (png(sheet.reshape(5, 1024, 3)), formats.cifar_sheet, sheet.transpose(0, 3, 1, 2)),
        "labels.json": (json.dumps(labels.tolist()).encode(), formats.json_labels, labels),
        "train_32x32.mat": (matlab.getvalue(), formats.svhn, svhn),
        "table.csv": (b"a,b,c\n" + b"10,20,30\n" * 3, formats.csv_columns, columns),
        "table.dat": (KEEL.encode(), formats.keel_columns, keel),
        "arrays.npz": (numbers.getvalue(), lambda path: formats.npz(path, ["x", "y"]), arrays),
    }
    for name, (data, _, _) in files.items():
        (folder / name).write_bytes(data)
    return {name: (reader, expected) for name, (_, reader, expected) in files.items()}


NAMES = [
    "a-idx3-ubyte",
    "a-idx3-ubyte.gz",
    "batch.bin",
    "train.bin",
    "sheet.png",
    "labels.json",
    "train_32x32.mat",
    "table.csv",
    "table.dat",
    "arrays.npz",
]


def as_lists(content):
    """Tensors and arrays as lists, wherever they are."""
    if isinstance(content, dict):
        return {name: as_lists(value) for name, value in content.items()}
    if isinstance(content, tuple):
        return tuple(map(as_lists, content))
    return content if isinstance(content, list) else content.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_complete_file_is_read(name, tmp_path):
    reader, expected = written_files(tmp_path)[name]
    assert as_lists(reader(tmp_path / name)) == as_lists(reader(str(tmp_path / name))) == as_lists(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(name, tmp_path):
    reader, _ = written_files(tmp_path)[name]
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"`.*{name}` must be a file; got nothing of that name."):
        reader(tmp_path / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_no_file(name, tmp_path):
    reader, _ = written_files(tmp_path)[name]
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=f"`.*{name}` must be a readable file; got Is a directory."):
        reader(tmp_path / name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept_share", [0.0, 0.3, 0.9])
def test_a_file_that_is_cut_short_is_refused(name, kept_share, tmp_path):
    reader, _ = written_files(tmp_path)[name]
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(kept_share * len(data))])
    with pytest.raises(DataError, match=f"{name}` must "):
        reader(tmp_path / name)


@pytest.mark.parametrize("name", ["a-idx3-ubyte", "a-idx3-ubyte.gz", "batch.bin", "train.bin", "labels.json"])
def test_a_file_with_something_added_is_refused(name, tmp_path):
    reader, _ = written_files(tmp_path)[name]
    with (tmp_path / name).open("ab") as file:
        file.write(b"xyz")
    with pytest.raises(DataError, match=f"{name}` must "):
        reader(tmp_path / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_noise_is_refused(name, tmp_path):
    reader, _ = written_files(tmp_path)[name]
    (tmp_path / name).write_bytes(RANDOM.bytes(3073 * 3074))
    with pytest.raises(DataError, match=f"{name}` must "):
        reader(tmp_path / name)


@pytest.mark.parametrize("name", ["a-idx3-ubyte.gz", "sheet.png", "train_32x32.mat", "arrays.npz"])
def test_formats_with_a_checksum_notice_a_changed_byte(name, tmp_path):
    reader, _ = written_files(tmp_path)[name]
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}` must "):
        reader(tmp_path / name)


def test_keel_names_its_columns(tmp_path):
    (tmp_path / "a.dat").write_text(KEEL)
    assert formats.keel_columns(tmp_path / "a.dat") == {
        "Sex": ["M", "F"],
        "Body mass": ["1.5", "2.5"],
        "Age": ["30", "40"],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@data\n1,2\n", "must name its columns in lines '@attribute NAME TYPE'; got none"),
        ("@attribute a real\n1,2\n", "must have a line '@data' before its rows"),
        ("@attribute a real\n@attribute a real\n@data\n1,2\n", "must name its columns differently"),
        ("@attribute a real\n@data\n1\n1,2\n", "must have 1 fields in row 2; got 2"),
    ],
)
def test_odd_keel_files_are_refused(text, message, tmp_path):
    (tmp_path / "a.dat").write_text(text)
    with pytest.raises(DataError, match=message):
        formats.keel_columns(tmp_path / "a.dat")


def test_blanks_separate_columns(tmp_path):
    (tmp_path / "a.txt").write_text("1  2.5\tx \n\n 3 4 y\n")
    assert formats.spaced_columns(tmp_path / "a.txt", ("a", "b", "c")) == {
        "a": ["1", "3"],
        "b": ["2.5", "4"],
        "c": ["x", "y"],
    }
    with pytest.raises(DataError, match="must have 2 fields in row 1; got 3"):
        formats.spaced_columns(tmp_path / "a.txt", ("a", "b"))


def test_idx_of_any_shape(tmp_path):
    for shape in [(4,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (0,)]:
        array = pictures(*shape)
        (tmp_path / "file").write_bytes(idx_bytes(array))
        arrays = formats.idx(tmp_path / "file")
        assert arrays.dtype == torch.uint8
        np.testing.assert_array_equal(arrays, array)


def test_idx_says_what_is_wrong(tmp_path):
    file = tmp_path / "images"
    file.write_bytes(idx_bytes(pictures(3, 4, 5))[:-1])
    with pytest.raises(DataError, match=r"must have 76 bytes for \[3, 4, 5\]; got 75 bytes. It is cut short. Fetch"):
        formats.idx(file)
    file.write_bytes(bytes([0, 0, 13, 1, 0, 0, 0, 0]))
    with pytest.raises(DataError, match="must be an idx file of bytes, .* got 00 00 0d 01"):
        formats.idx(file)
    file.write_bytes(bytes([0, 0, 8, 4]) + b"\xff" * 16)
    with pytest.raises(DataError, match="cut short"):
        formats.idx(file)
    file.write_bytes(bytes([0, 0, 8, 3, 0]))
    with pytest.raises(DataError, match="cut short"):
        formats.idx(file)


def test_pairs_of_idx_files(tmp_path):
    images, labels = pictures(6, 28, 20), RANDOM.integers(0, 10, 6)
    (tmp_path / "images").write_bytes(idx_bytes(images))
    (tmp_path / "labels").write_bytes(idx_bytes(labels))
    x, y = formats.idx_pair(tmp_path / "images", tmp_path / "labels")
    assert (x.shape, x.dtype, y.dtype) == ((6, 1, 28, 20), torch.uint8, torch.int64)
    np.testing.assert_array_equal(x[:, 0], images)
    np.testing.assert_array_equal(y, labels)
    with pytest.raises(DataError, match=r"images \[N, H, W\]; got \[6\]. Are images and labels swapped?"):
        formats.idx_pair(tmp_path / "labels", tmp_path / "images")
    with pytest.raises(DataError, match=r"labels \[N\]; got \[6, 28, 20\]. Are images and labels swapped?"):
        formats.idx_pair(tmp_path / "images", tmp_path / "images")
    (tmp_path / "labels").write_bytes(idx_bytes(labels[:-1]))
    with pytest.raises(DataError, match="must hold as many labels as images has images, 6; got 5"):
        formats.idx_pair(tmp_path / "images", tmp_path / "labels")
    (tmp_path / "labels").write_bytes(idx_bytes(np.array([0, 1, 12, 3, 4, 5])))
    with pytest.raises(DataError, match="must hold labels 0 to 9; got 12 in example 2"):
        formats.idx_pair(tmp_path / "images", tmp_path / "labels")


def test_cifar_batches(tmp_path):
    pixels, labels = pictures(4, 3, 32, 32), np.array([3, 9, 0, 1], np.uint8)
    flat = pixels.reshape(4, -1)
    (tmp_path / "10").write_bytes(np.concatenate([labels[:, None], flat], 1).tobytes())
    x, y = formats.cifar10_batch(tmp_path / "10")
    np.testing.assert_array_equal(x, pixels)
    assert y.tolist() == [3, 9, 0, 1]
    assert y.dtype == torch.int64
    fine = np.array([99, 0, 50, 7], np.uint8)
    (tmp_path / "100").write_bytes(np.concatenate([labels[:, None], fine[:, None], flat], 1).tobytes())
    x, y, coarse = formats.cifar100_batch(tmp_path / "100")
    np.testing.assert_array_equal(x, pixels)
    assert (y.tolist(), coarse.tolist()) == ([99, 0, 50, 7], [3, 9, 0, 1])
    with pytest.raises(DataError, match="must hold records of 3073 bytes; got 12296 bytes"):
        formats.cifar10_batch(tmp_path / "100")
    (tmp_path / "10").write_bytes(b"")
    with pytest.raises(DataError, match="must hold records of 3073 bytes; got 0 bytes"):
        formats.cifar10_batch(tmp_path / "10")


def test_a_sheet_holds_the_pixels_of_a_batch(tmp_path):
    pixels = pictures(4, 3, 32, 32)
    (tmp_path / "a.png").write_bytes(png(pixels.transpose(0, 2, 3, 1).reshape(4, 1024, 3)))
    arrays = formats.cifar_sheet(tmp_path / "a.png")
    assert arrays.dtype == torch.uint8
    assert arrays.is_contiguous()
    np.testing.assert_array_equal(arrays, pixels)


def test_other_pictures_are_no_sheets(tmp_path):
    (tmp_path / "a.png").write_bytes(png(pictures(4, 1000, 3)))
    with pytest.raises(DataError, match="must be an RGB sheet, 1024 pixels wide; got RGB, 1000 pixels wide"):
        formats.cifar_sheet(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png(pictures(4, 1024)))
    with pytest.raises(DataError, match="got L, 1024 pixels wide"):
        formats.cifar_sheet(tmp_path / "a.png")


@pytest.mark.parametrize("text", ["{}", "[1.5]", "[true]", '["1"]', "3", "[[1]]"])
def test_labels_are_a_list_of_whole_numbers(text, tmp_path):
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(DataError, match="must hold a list of whole numbers"):
        formats.json_labels(tmp_path / "labels.json")


def test_labels_outside_the_classes_are_refused(tmp_path):
    (tmp_path / "labels.json").write_text("[0, 9, -1]")
    with pytest.raises(DataError, match="must hold labels 0 to 9; got -1 in example 2"):
        formats.json_labels(tmp_path / "labels.json")
    (tmp_path / "labels.json").write_text("[0, 9, 99]")
    assert formats.json_labels(tmp_path / "labels.json", 100).tolist() == [0, 9, 99]


def test_svhn(tmp_path):
    pixels = pictures(32, 32, 3, 3)
    savemat(tmp_path / "a.mat", {"X": pixels, "y": np.array([[10], [1], [9]], np.uint8)})
    x, y = formats.svhn(tmp_path / "a.mat")
    assert y.tolist() == [0, 1, 9]
    np.testing.assert_array_equal(x, pixels.transpose(3, 2, 0, 1))
    savemat(tmp_path / "a.mat", {"X": pixels})
    with pytest.raises(DataError, match=r"must hold X and y; got \['X'\]"):
        formats.svhn(tmp_path / "a.mat")
    savemat(tmp_path / "a.mat", {"X": pixels, "y": np.array([[1], [2]], np.uint8)})
    with pytest.raises(DataError, match="must hold 3 labels y; got 2"):
        formats.svhn(tmp_path / "a.mat")
    savemat(tmp_path / "a.mat", {"X": pixels.astype(float), "y": np.ones((3, 1))})
    with pytest.raises(DataError, match=r"must hold X, bytes \[32, 32, 3, N\]; got float64 \[32, 32, 3, 3\]"):
        formats.svhn(tmp_path / "a.mat")


def test_csv_columns(tmp_path):
    file = tmp_path / "table.csv"
    file.write_bytes('\ufeffa,"b, c",d\r\n1,"x\ny",\r\n\r\n2,é,3\r\n'.encode())
    assert formats.csv_columns(file) == {"a": ["1", "2"], "b, c": ["x\ny", "é"], "d": ["", "3"]}
    file.write_text("M;1\nF;2\n")
    assert formats.csv_columns(file, delimiter=";", names=["sex", "n"]) == {"sex": ["M", "F"], "n": ["1", "2"]}
    file.write_text("a,b\n1,2\n3\n")
    with pytest.raises(DataError, match="must have 2 fields in row 2; got 1. It may be cut short"):
        formats.csv_columns(file)
    file.write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match="must name its columns differently"):
        formats.csv_columns(file)
    file.write_bytes(b"a,b\n\xff,2\n")
    with pytest.raises(DataError, match="must be a CSV file in UTF-8"):
        formats.csv_columns(file)


def test_npz(tmp_path):
    file = tmp_path / "arrays.npz"
    np.savez_compressed(file, x=np.eye(3), y=np.arange(3), z=np.zeros(0))
    arrays = formats.npz(file, ["y", "x"])
    assert list(arrays) == ["y", "x"]
    assert torch.equal(arrays["x"], torch.eye(3, dtype=torch.float64))
    with pytest.raises(DataError, match=r"must hold 'x', 'labels'; got \['x', 'y', 'z'\]"):
        formats.npz(file, ["x", "labels"])
    np.save(tmp_path / "one.npy", np.eye(3))
    with pytest.raises(DataError, match="must be a whole npz file of plain arrays"):
        formats.npz(tmp_path / "one.npy", ["x"])


def test_npz_never_unpickles(tmp_path):
    file = tmp_path / "arrays.npz"
    np.savez(file, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="must be a whole npz file of plain arrays; got Object arrays cannot be loaded"):
        formats.npz(file, ["x"])
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"not an array")
    with pytest.raises(DataError, match="must be a whole npz file of plain arrays"):
        formats.npz(file, ["x"])
    np.savez(file, x=np.array(["words"]))
    with pytest.raises(DataError, match="must be a whole npz file of plain arrays"):
        formats.npz(file, ["x"])
