"""What must not count as data: forged files, bombs, paths that lead out, interrupted downloads, full disks."""

import dataclasses
import errno
import gzip
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import textwrap
import types
import zipfile
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request

import numpy as np
import pytest
from PIL import Image
from test_sources import Web, deb, mirror, sha256, tgz, zipped
from typer.testing import CliRunner

from dissensus.cli.main import app
from dissensus.data import fetching, folders, formats, sources, unpacking
from dissensus.data.catalogue import DATASETS, DatasetInfo, Download, File, ImageTree, Mirror
from dissensus.data.fetching import fetch
from dissensus.data.formats import DataError
from dissensus.data.verifying import values_digest

ROOT = Path(__file__).parents[1]
FETCHED = [name for name, info in DATASETS.items() if info.mirrors]
posix = pytest.mark.skipif(os.name == "nt", reason="needs a POSIX system")


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


def letters(*mirrors, content=b"A 1\n", **options):
    """A data set of one file."""
    file = File("letters.txt", sha256=sha256(content))
    return DatasetInfo("letters", "table", "Letters", "mine", files=(file,), mirrors=mirrors, read=print, **options)


# The catalogue.


@pytest.mark.parametrize("name", FETCHED)
def test_whatever_is_fetched_has_a_checksum(name):
    info = DATASETS[name]
    for file in info.files:
        assert file.sha256 or file.values_sha256, file.name
        assert file.schema is None or file.sha256, file.name
    assert info.files or info.tree
    assert info.tree is None or info.tree.digest is not None
    unpacked_only = {"bioconcentration", "weather", "facebook", "waterbirds"}  # known by what is made from the download
    for item in (item for source in info.mirrors for item in source.downloads):
        scheme = item.address.partition(":")[0]
        assert scheme in ("https", "file", *fetching.CLIENTS)
        assert item.sha256 or scheme == "file" or name in unpacked_only, item.address


def forged_table(file):
    """A table with the rows, columns and sums of the real one, and other values."""
    columns = {"img_filename": "0", "y": "0", "split": "0", "place": "0"} if file.schema is None else {}
    targets = {} if file.schema is None else dict.fromkeys(file.schema.targets, "0")
    columns |= {**targets, **dict.fromkeys(file.sums, "0"), "feature": "1"}
    first = {**columns, **{name: str(total) for name, total in file.sums.items()}}
    return "\n".join([",".join(columns), ",".join(first.values()), *[",".join(columns.values())] * (file.rows - 1)])


@pytest.mark.slow(cases=["weather", "waterbirds"])
@pytest.mark.parametrize("name", [name for name, info in DATASETS.items() if info.files])
def test_a_forged_file_is_not_whole(name, data):
    info = DATASETS[name]
    file = min(info.files, key=lambda file: file.bytes or 0)
    path = data / name / file.name
    path.parent.mkdir(parents=True)
    if file.rows is not None:
        path.write_text(forged_table(file) + "\n")
    else:
        path.touch()
        os.truncate(path, file.bytes)
    alone = dataclasses.replace(info, files=(file,), mirrors=())
    if info.tree is None:
        ((_, ok, reason),) = sources.check(alone)
        assert not ok
        assert "SHA-256" in reason
    with pytest.raises(DataError, match=f"{file.name}` must be the expected file of {name}; got .*SHA-256"):
        sources.weights(alone) if info.kind == "weights" else sources.load(
            alone, file.part or next(iter(info.parts), None)
        )


def test_a_table_with_another_value_is_not_whole(tmp_path):
    content = "a,b\n1,0.101\n2,NaN\n"
    (tmp_path / "t.csv").write_text(content)
    values = values_digest({"a": ["1.0", "2"], "b": ["0.10099999999999999", ""]})
    file = File("t.csv", sha256="0" * 64, rows=2, values_sha256=values)
    assert sources.verify(tmp_path / "t.csv", file)[0]
    for old, new in [("0.101", "0.102"), ("a,b", "a,c"), ("1,0.101\n2,NaN", "2,NaN\n1,0.101"), ("NaN", "0")]:
        (tmp_path / "t.csv").write_text(content.replace(old, new))
        assert not sources.verify(tmp_path / "t.csv", file)[0], new


def picture(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(path)


def birds(folder, names, labels=None):
    """A folder in the layout of Waterbirds; names that begin with "bird" become images."""
    rows = ["img_filename,y,split,place"]
    for i, name in enumerate(names):
        if name.startswith("bird/") and ".." not in name:
            picture(folder / name, i)
        rows.append(f'"{name}",{labels[i] if labels else i % 2},{i % 3},1')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")


def test_a_folder_of_images_is_verified_as_a_whole(data, tmp_path):
    names = [f"bird/{i}.png" for i in range(6)]
    birds(tmp_path / "made" / "top", names)
    top = tmp_path / "made" / "top"
    digest = folders.tree_digest(top, [*(top / name for name in names), top / "metadata.csv"])
    tree = ImageTree(folders.waterbirds, ("metadata.csv",), digest=digest)
    files = {f"top/{name}": (top / name).read_bytes() for name in [*names, "metadata.csv"]}
    archive = tmp_path / "made" / "birds.tar.gz"
    where = mirror("here", f"file:{archive}", unpack=unpacking.unpack_tree)
    info = dataclasses.replace(DATASETS["waterbirds"], name="birds", files=(), tree=tree, mirrors=(where,))
    info = dataclasses.replace(info, files=(File("metadata.csv"),))
    archive.write_bytes(tgz({**files, "top/bird/3.png": files["top/bird/4.png"]}))
    with pytest.raises(DataError, match="must be the expected files when they come from here; got 7 files"):
        sources.get(info)
    assert sources.state(info) == "absent"
    archive.write_bytes(tgz(files))
    assert len(sources.dataset(info, "train")) == 2
    assert sources.check(info)[-1] == ("all files", True, "7 files have the published digest")
    picture(data / "birds" / "bird" / "3.png", 77)
    assert not sources.check(info)[-1][1]
    with pytest.raises(DataError, match="must hold the expected files of birds; got 7 files of"):
        sources.dataset(info, "train")
    (data / "birds" / "bird" / "3.png").unlink()
    assert "cannot be read" in sources.check(info)[-1][2]


@pytest.mark.parametrize(
    "name", ["../bird.png", "/etc/hostname", "bird/../../bird.png", "", ".", "bird\0.png", "link.png", "links/x.png"]
)
def test_a_list_of_images_stays_in_its_folder(name, data, tmp_path):
    picture(tmp_path / "out" / "x.png")
    birds(data / "birds", ["bird/0.png", "bird/1.png", "bird/2.png", name])
    if os.name != "nt":
        (data / "birds" / "link.png").symlink_to(tmp_path / "out" / "x.png")
        (data / "birds" / "links").symlink_to(tmp_path / "out")
    with pytest.raises(DataError, match=r"metadata.csv` must name files within its own folder; got ") as caught:
        folders.waterbirds(data / "birds", "train")
    assert "\n" not in str(caught.value)


@posix
def test_links_within_the_folder_and_to_the_folder_hold(data, tmp_path):
    birds(tmp_path / "elsewhere", ["bird/0.png", "bird/1.png", "bird/2.png", "link.png"])
    (tmp_path / "elsewhere" / "link.png").symlink_to("bird/1.png")
    data.mkdir()
    (data / "birds").symlink_to(tmp_path / "elsewhere")
    x, _ = folders.waterbirds(data / "birds", "train", size=8).tensors()
    assert x[:, 0, 0, 0].tolist() == [0, 1]


def test_a_list_of_images_with_odd_labels_is_refused(data):
    birds(data / "birds", ["bird/0.png"], labels=["two"])
    with pytest.raises(DataError, match="must have 0 or 1 in the column y; got 'two'"):
        folders.waterbirds(data / "birds", "train")


# Registries.


def program(folder, name, script):
    (folder / name).write_text(f"#!/bin/sh\n{textwrap.dedent(script)}")
    (folder / name).chmod(0o755)


@posix
@pytest.mark.parametrize(
    ("address", "command", "variable"),
    [
        ("npm:@some/data@1.0.2", "npm pack --ignore-scripts --loglevel=error @some/data@1.0.2", "npm_config_registry"),
        ("apt:some-data=1.0~2-1", "apt-get download --quiet some-data=1.0~2-1", "APT_CONFIG"),
        ("pip:some-data==1.0", "pip download", "PIP_INDEX_URL"),
    ],
)
def test_packages_come_through_the_registrys_own_program(address, command, variable, tmp_path, monkeypatch):
    """The program gets the user's environment, and writes into a folder of its own."""
    name = command.split()[0]
    ending = {"npm": "tgz", "apt-get": "deb", "pip": "whl"}[name]
    program(tmp_path, name, f'echo {name} "$@" > "$LOG"\necho "${variable}" > some-file.{ending}\n')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv(variable, "as configured")
    monkeypatch.setattr(fetching, "find_spec", lambda name: None)  # the pip of the path, not that of this Python
    fetch(address, tmp_path / "data" / "a", sha256=sha256(b"as configured\n"))
    assert (tmp_path / "log").read_text().startswith(command)
    assert os.listdir(tmp_path / "data") == ["a"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("npm:a@1", "npm is not installed. Install npm, which comes with Node.js."),
        ("pip:a==1", "pip is not installed. Install pip: python -m ensurepip."),
        ("apt:a=1", "apt-get is not installed. It is part of Debian and Ubuntu"),
        ("npm:--registry=x", "`--registry=x` must be the name of a package; got an option"),
    ],
)
def test_a_missing_program_is_named(address, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(fetching, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=re.escape(message)):
        fetch(address, tmp_path / "a")
    assert os.listdir(tmp_path) == []


@posix
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("npm error code E404\nnpm error 404 Not Found - GET https://me:secret@example.org/a", "https://example.org/a"),
        ("npm error code X\nnpm error syscall connect\nnpm error no route\nnpm error A complete log", "error no route"),
        ("odd", "npm pack a@1: odd"),
        ("", "it gave no reason"),
    ],
)
def test_why_a_program_failed(said, shown, tmp_path, monkeypatch):
    program(tmp_path, "npm", f"cat >&2 <<END\n{said}\nEND\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DataError, match=re.escape(shown)) as caught:
        fetch("npm:a@1", tmp_path / "data" / "a")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "data") == []


def test_looking_for_pip_leaves_distutils_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "distutils", types.ModuleType("distutils"))
    before = sys.modules["distutils"]
    assert fetching._program("pip", "")[1:] == ["-P", "-m", "pip"]
    assert sys.modules["distutils"] is before


@pytest.mark.slow
def test_no_module_of_the_working_directory_is_taken_for_pip(tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match="pip download no-such-package==1: ERROR"):
        fetch("pip:no-such-package==1", tmp_path / "a")
    assert not list(tmp_path.rglob("ran"))


def test_no_registrys_host_is_named_anywhere():
    hosts = [("npmjs", "org"), ("npmjs", "com"), ("pypi", "org"), ("pythonhosted", "org"), ("deb", "debian", "org")]
    pattern = re.compile("|".join(r"\.".join(host) for host in hosts))
    tops = ("src", "tests", "docs", "benchmarks", "oracles", "README.md", "CONTRIBUTING.md", "requirements.lock")
    paths = [path for top in tops for path in [ROOT / top, *(ROOT / top).rglob("*")] if path.is_file()]
    texts = {path: path.read_bytes().decode("utf-8", "replace") for path in paths if path.stat().st_size < 1_000_000}
    assert len(texts) > 100
    assert [path for path, text in texts.items() if pattern.search(text)] == []


def test_the_instructions_name_the_command(data, monkeypatch):
    monkeypatch.setenv("PATH", "")
    info = letters(Mirror("npm", (Download("npm:letters@1.0.0", "a.tgz", "ab" * 32),), print))
    with pytest.raises(DataError, match=r"a.tgz \(npm pack letters@1.0.0, SHA-256 (ab)+\)"):
        sources.get(info)
    assert fetching.by_hand("pip:a==1") == "pip download --no-deps a==1"
    assert fetching.by_hand("apt:a=1") == "apt-get download a=1"


# Addresses and sizes.


def test_plain_http_needs_a_checksum(tmp_path):
    with pytest.raises(DataError, match="must begin with https: where no SHA-256 is known; got http:"):
        fetch("http://example.org/a", tmp_path / "a")
    redirect = fetching._SecureRedirects().redirect_request
    with pytest.raises(URLError, match="redirects from https: to another scheme"):
        redirect(Request("https://example.org/a"), io.BytesIO(), 302, "Found", {}, "http://example.org/a")
    assert redirect(Request("https://example.org/a"), io.BytesIO(), 302, "Found", {}, "https://example.org/b")


def test_a_download_that_is_too_long_is_refused(web, tmp_path):
    web.files["/a.bin"] = b"x" * 5_000_000
    with pytest.raises(DataError, match="has more than 1000 bytes"):
        fetch(f"{web.url}/a.bin", tmp_path / "a.bin", limit=1000)
    assert os.listdir(tmp_path) == []
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin", limit=5_000_000)


def test_the_catalogue_limits_downloads(web, data):
    web.files["/a.txt"] = b"x" * 2000
    where = Mirror("here", (Download(f"{web.url}/a.txt", "a.txt", bytes=100),), unpacking.unpack_files("a.txt"))
    with pytest.raises(DataError, match="a.txt: it has more than 100 bytes"):
        sources.get(letters(where))


ZEROS = bytes(3_000_000)


def sparse(size):
    """A tar file with a member that claims far more bytes than it has."""
    member = tarfile.TarInfo("a")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 512
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    head[386:410] = b"%011o\0%011o\0" % (size - 512, 512)
    head[483:495] = b"%011o\0" % size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return gzip.compress(bytes(head) + bytes(512) + bytes(1024))


def wide_header():
    """A tar file whose extended header is large."""
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
            member = tarfile.TarInfo("a")
            member.pax_headers = {"comment": "x" * 3_000_000}
            archive.addfile(member)
        return buffer.getvalue()


BOMBS = {
    "a.tgz": lambda: tgz({"a": ZEROS}),
    "skipped.tgz": lambda: tgz({"b": ZEROS, "a": b"1"}),
    "header.tgz": wide_header,
    "inner.tgz": lambda: tgz({"a.gz": gzip.compress(ZEROS)}),
    "a.deb": lambda: deb({"a": ZEROS}),
    "a.zip": lambda: zipped({"a": ZEROS}),
    "nested.zip": lambda: zipped({"x.zip": zipped({"a": ZEROS})}),
    "nested2.zip": lambda: zipped({"x.zip": ZEROS, "a": b"1"}),
    "a.gz": lambda: gzip.compress(ZEROS),
}


@pytest.mark.parametrize("name", BOMBS)
def test_archives_give_no_more_than_they_may(name, tmp_path):
    (tmp_path / name).write_bytes(BOMBS[name]())
    wanted = {"a.gz": "a"} if name == "inner.tgz" else {"a": "a"}
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DataError, match=f"`{name}` must give at most 1000000 bytes once unpacked; got more"):
        unpacking.unpack(unpacking.unpack_files(renamed=wanted), [tmp_path / name], out, limit=1_000_000)
    assert sum(file.stat().st_size for file in out.iterdir()) <= 1_000_000


def test_a_sparse_member_is_not_taken(tmp_path):
    (tmp_path / "a.tgz").write_bytes(sparse(1 << 33))
    with pytest.raises(DataError, match=r"`a.tgz` must (hold a|be whole)"):
        unpacking.unpack(unpacking.unpack_files("a"), [tmp_path / "a.tgz"], tmp_path)
    assert not (tmp_path / "a").exists()


def test_the_catalogue_limits_what_archives_give(web, data, monkeypatch):
    monkeypatch.setattr(sources, "_SPARE", 1000)
    how = unpacking.unpack_files("letters.txt")
    web.files["/a.tgz"] = tgz({"letters.txt": ZEROS})
    info = letters(mirror("here", f"{web.url}/a.tgz", unpack=how), content=ZEROS, download=10_000)
    with pytest.raises(DataError, match="must give at most 41000 bytes once unpacked; got more"):
        sources.get(info)
    assert not [entry for entry in os.listdir(data / "letters") if entry != ".lock"]
    sources.get(dataclasses.replace(info, download=2_000_000))


def entries(**members):
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, (kind, link) in members.items():
                member = tarfile.TarInfo(name.replace("__", "/"))
                member.type, member.linkname = kind, link
                archive.addfile(member)
            plain = tarfile.TarInfo("top/whole.txt")
            plain.size = 1
            archive.addfile(plain, io.BytesIO(b"1"))
        return buffer.getvalue()


def test_links_and_devices_do_not_leave_an_archive(tmp_path):
    (tmp_path / "out").mkdir()
    odd = {
        "top__link": (tarfile.SYMTYPE, "/etc"),
        "top__hard": (tarfile.LNKTYPE, "/etc/hostname"),
        "top__pipe": (tarfile.FIFOTYPE, ""),
        "top__character": (tarfile.CHRTYPE, ""),
        "top__block": (tarfile.BLKTYPE, ""),
    }
    (tmp_path / "a.tgz").write_bytes(entries(**odd))
    unpacking.unpack(unpacking.unpack_tree, [tmp_path / "a.tgz"], tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["whole.txt"]
    with pytest.raises(DataError, match="must hold hard, link"):
        unpacking.unpack(unpacking.unpack_files("link", "hard"), [tmp_path / "a.tgz"], tmp_path)


@pytest.mark.parametrize("name", ["top/../../x", "..", "top", "top/..", "top/a\\..\\..\\x", "top/C:x"])
@pytest.mark.parametrize("pack", [tgz, zipped])
def test_names_that_lead_out_are_refused(name, pack, tmp_path):
    archive = tmp_path / ("a.zip" if pack is zipped else "a.tgz")
    archive.write_bytes(pack({name: b"1"}))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DataError, match="must keep its files within one folder; got"):
        unpacking.unpack(unpacking.unpack_tree, [archive], out)
    assert not os.listdir(out)


def test_hidden_files_and_absolute_names(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "a.tgz").write_bytes(tgz({"top/.lock": b"1", "top/._a": b"1", "/a/b.txt": b"1"}))
    unpacking.unpack(unpacking.unpack_tree, [tmp_path / "a.tgz"], out)
    assert [path.relative_to(out).as_posix() for path in out.rglob("*")] == ["a", "a/b.txt"]


# Files of the formats.


@posix
def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(DataError, match="a.csv` must be a regular file; got a pipe"):
        formats.csv_columns(tmp_path / "a.csv")
    assert sources.verify(tmp_path / "a.csv", File("a.csv")) == (False, "it is no regular file")


def test_compressed_files_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "DECOMPRESSED_LIMIT", 1_000_000)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(ZEROS))
    with pytest.raises(DataError, match="must hold at most 1000000 bytes once decompressed; got more"):
        formats.csv_columns(tmp_path / "a.csv.gz")
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(500_000))
    with pytest.raises(DataError, match="must hold at most 1000000 bytes once decompressed; got 4000128 bytes"):
        formats.npz(tmp_path / "a.npz", ["a"])
    np.savez(tmp_path / "b.npz", a=np.zeros(500_000))
    assert len(formats.npz(tmp_path / "b.npz", ["a"])["a"]) == 500_000


@pytest.mark.parametrize("shape", ["(9999999999999999,)", "(-3,)", "(1" + "0" * 40 + ",)"])
def test_arrays_with_odd_shapes_are_refused(shape, tmp_path):
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", head + bytes(64))
    with pytest.raises(DataError, match=r"a.npz` must be an? "):
        formats.npz(tmp_path / "a.npz", ["a"])


def test_an_image_of_too_many_pixels_is_refused(tmp_path, monkeypatch):
    picture(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match="a.png` must be a complete image; got Image size"):
        folders.read_image(tmp_path / "a.png")
    with pytest.raises(DataError, match="a.png` must be a whole PNG file; got Image size"):
        formats.cifar_sheet(tmp_path / "a.png")


# Interruptions.


def test_a_part_of_another_file_does_not_stay(web, tmp_path):
    web.files["/a.bin"] = b"right" * 1000
    (tmp_path / "a.bin.part").write_bytes(b"wrong" * 100)
    fetch(f"{web.url}/a.bin", tmp_path / "a.bin", sha256=sha256(web.files["/a.bin"]))
    assert [sent for _, sent in web.requests] == ["bytes=500-", None]
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_fetch_leaves_nothing_whole(stop, web, data):
    content = b"A 1\n" * 600_000
    web.files["/letters.txt"] = content
    how = unpacking.unpack_files("letters.txt")
    info = letters(mirror("here", f"{web.url}/letters.txt", unpack=how), content=content)

    def interrupt(name, done, total):
        raise stop

    with pytest.raises(stop):
        sources.get(info, progress=interrupt)
    assert not (data / "letters" / "letters.txt").exists()
    assert not sources.present(info)
    sources.get(info)
    assert web.requests[-1][1] == f"bytes={1 << 20}-"
    assert sources.check(info)[0][1]

    def interrupted_unpack(archives, folder, budget):
        (folder / "letters.txt").write_bytes(b"A")
        raise stop

    (data / "letters" / "letters.txt").unlink()
    where = mirror("here", f"{web.url}/letters.txt", unpack=interrupted_unpack)
    archived = dataclasses.replace(where, downloads=(dataclasses.replace(where.downloads[0], name="a.txt"),))
    with pytest.raises(stop):
        sources.get(dataclasses.replace(info, mirrors=(archived,)))
    assert not sources.present(info)
    assert os.listdir(data / "letters") == [".lock"]


FORKED = """
import os, signal, sys
from dissensus.data import sources, unpacking
from dissensus.data.catalogue import DatasetInfo, Download, File, Mirror

url, checksum = sys.argv[1:]


def fetched(moment):
    def progress(name, done, total):
        if moment == "download" and done > 1_500_000:
            os.kill(os.getpid(), signal.SIGKILL)

    def unpack(archives, folder, budget):
        unpacking.unpack_files("letters.txt")(archives, folder, budget)
        if moment == "unpack":
            os.kill(os.getpid(), signal.SIGKILL)

    where = Mirror("here", (Download(url, "letters.txt.gz"),), unpack)
    file = File("letters.txt", sha256=checksum)
    sources.get(DatasetInfo("letters", "table", "", "", files=(file,), mirrors=(where,), read=print), progress=progress)


def run(*moments):
    processes = []
    for moment in moments:
        processes.append(os.fork())
        if not processes[-1]:
            fetched(moment)
            os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    folder = sources.data_folder() / "letters"
    names = [name for name in sorted(os.listdir(folder)) if not name.startswith(".unfinished-")]
    print(codes, names, flush=True)
    return folder


run("download")
folder = run("unpack")
(folder / "letters.txt.gz").unlink()
run("never", "never", "never")
"""


@posix
@pytest.mark.slow
def test_killed_and_parallel_processes(web, data):
    """A process killed in its download, one killed after it unpacked, then three at once."""
    content = np.random.default_rng(0).bytes(3_000_000)
    web.files["/a.gz"] = gzip.compress(content)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    answer = subprocess.run(
        [sys.executable, "-c", FORKED, f"{web.url}/a.gz", sha256(content)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stdout.splitlines() == [
        f"[{-signal.SIGKILL}] ['.lock', 'letters.txt.gz.part']",
        f"[{-signal.SIGKILL}] ['.lock', 'letters.txt.gz']",
        "[0, 0, 0] ['.lock', 'letters.txt']",
    ], answer.stderr
    ranges = [sent for _, sent in web.requests]
    assert (ranges[0], ranges[2:]) == (None, [None])
    assert ranges[1].startswith("bytes=")
    assert sorted(os.listdir(data / "letters")) == [".lock", "letters.txt"]
    assert (data / "letters" / "letters.txt").read_bytes() == content


# Full disks and wrong names.


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_sentence(web, data):
    web.files["/letters.txt"] = b"A 1\n"
    how = unpacking.unpack_files("letters.txt")
    first = mirror("first", f"{web.url}/letters.txt", unpack=how)
    second = mirror("second", f"{web.url}/letters.txt", unpack=how)
    for info, progress in [
        (letters(first, second), full_disk),
        (letters(dataclasses.replace(first, unpack=full_disk), second), None),
    ]:
        web.requests.clear()
        with pytest.raises(DataError, match=r"letters does not fit into .*letters: No space left on device") as caught:
            sources.get(info, progress=progress)
        assert "\n" not in str(caught.value)
        assert len(web.requests) == 1, "no other mirror helps"
        assert not sources.present(info)


@posix
def test_a_program_on_a_full_disk(data, tmp_path, monkeypatch):
    program(tmp_path, "npm", "echo npm error nospc ENOSPC: no space left on device, write >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    info = letters(Mirror("npm", (Download("npm:letters@1.0.0", "a.tgz"),), print))
    with pytest.raises(DataError, match="letters does not fit into .*: No space left on device"):
        sources.get(info)


def test_commands_end_in_a_sentence(data, monkeypatch):
    runner = CliRunner()
    for command in (["get", "mnits"], ["check", "mnits"]):
        result = runner.invoke(app, ["data", *command])
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code != 0
        assert "Did you mean 'mnist'" in " ".join(result.output.split())
    monkeypatch.setattr(sources, "fetch", lambda *_, **__: full_disk())
    result = runner.invoke(app, ["data", "get", "mnist"])
    assert isinstance(result.exception, SystemExit)
    assert "mnist does not fit into" in result.output
    assert len(result.output.strip().splitlines()) == 1
    monkeypatch.setattr(Path, "is_file", full_disk)
    result = runner.invoke(app, ["data", "check", "mnist"])
    assert isinstance(result.exception, SystemExit)
    assert "it cannot be read" in " ".join(result.output.split())
