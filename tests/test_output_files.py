"""Files that a user names: regular files are replaced atomically, links are followed, anything else is written to."""

import os
import stat
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dissensus.output_files as output_files
from dissensus.cli import app
from dissensus.output_files import write_output
from dissensus.pages import style

CONTENT = b"x" * 200_000


def read_in_background(path):
    """What comes out of a pipe."""
    parts = []
    thread = threading.Thread(target=lambda: parts.append(path.read_bytes()))
    thread.start()
    return thread, parts


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    file = tmp_path / "o.json"
    write_output(file, b"old")

    def full(path, payload):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(output_files, "write_atomically", full)
        with pytest.raises(OSError, match="No space"):
            write_output(file, b"new")
    assert file.read_bytes() == b"old"
    write_output(str(file), b"new")
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["o.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link_and_its_file_is_written(exists, tmp_path):
    (tmp_path / "far").mkdir()
    target, link, second = tmp_path / "far" / "real.json", tmp_path / "link.json", tmp_path / "second.json"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("far/real.json")
    second.symlink_to(link)
    write_output(second, b"new")
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()
    assert link.is_symlink()
    assert second.is_symlink()


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread, parts = read_in_background(pipe)
    write_output(pipe, CONTENT)
    thread.join()
    assert parts == [CONTENT]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_to_a_pipe_is_written_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    thread, parts = read_in_background(tmp_path / "pipe")
    write_output(tmp_path / "link", b"new")
    thread.join()
    assert parts == [b"new"]
    assert (tmp_path / "link").is_symlink()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="it needs a file system in memory")
def test_a_file_in_memory_is_replaced_too(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for content in (b"a longer one", b"new"):
            write_output(f"{folder}/o.json", content)
        assert os.listdir(folder) == ["o.json"]
        assert Path(folder, "o.json").read_bytes() == b"new"


@pytest.mark.parametrize("option", ["--json", "--page", "--figure"])
def test_a_name_may_have_any_bytes(option, tmp_path):
    inputs, file = (tmp_path / os.fsdecode(name) for name in (b"caf\xe9.npz", b"caf\xe9.svg"))
    np.savez(inputs, outputs=np.random.default_rng(0).normal(size=(3, 40, 3)), targets=np.arange(40) % 3)
    words = (
        ["ood", inputs, "--outside", inputs, "--repeats", "5", option, file]
        if option == "--figure"
        else ["audit", inputs, "--task", "classification", "--kind", "logits", option, file]
    )
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert file.stat().st_size > 100
    result = CliRunner().invoke(app, ["audit", f"{inputs}x", "--task", "regression"])
    assert (result.exit_code, "caf\\udce9" in result.stderr) == (1, True)


@pytest.fixture
def device():
    """A device that the test has made, in which nothing of the machine can be damaged; and its other end."""
    reader, writer = os.openpty()
    yield os.ttyname(writer), reader
    os.close(reader)
    os.close(writer)


def test_a_device_is_written_to_and_stays(device, tmp_path):
    name, reader = device
    (tmp_path / "link").symlink_to(name)
    for place in (name, tmp_path / "link"):
        write_output(place, b"new")
        assert os.read(reader, 10) == b"new"
    assert stat.S_ISCHR(os.stat(name).st_mode)
    assert (tmp_path / "link").is_symlink()


def test_the_standard_output_is_written_to_where_it_is_a_file(tmp_path):
    file = tmp_path / "terminal.txt"
    with file.open("wb") as stream:
        stream.write(b"before ")
        stream.flush()
        before = file.stat().st_ino
        write_output(f"/dev/fd/{stream.fileno()}", b"result")
    assert file.read_bytes() == b"before result"
    assert file.stat().st_ino == before


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command with outputs and labels in its folder."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    np.save("in.npy", generator.standard_normal((3, 40, 4)))
    np.save("near.npy", generator.standard_normal((3, 30, 4)))
    np.save("labels.npy", np.arange(40) % 4)

    def run(words):
        result = CliRunner().invoke(app, words.split())
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, " ".join(result.stderr.split())

    return run


AUDIT = "audit in.npy --targets labels.npy --task classification --kind logits"
OOD = "ood in.npy --outside near=near.npy --repeats 5"


@pytest.mark.slow(fast=["audit*--json"])
@pytest.mark.parametrize("words", [f"{AUDIT} --json", f"{AUDIT} --page", f"{OOD} --json", f"{OOD} --figure"])
def test_commands_follow_links_and_never_replace_them(words, command, tmp_path):
    (tmp_path / "far").mkdir()
    os.mkfifo(tmp_path / "pipe.svg")
    for link, target in {"file-link.svg": "far/r.svg", "pipe-link.svg": "pipe.svg"}.items():
        (tmp_path / link).symlink_to(target)
    thread, parts = read_in_background(tmp_path / "pipe.svg")
    for link in ("file-link.svg", "pipe-link.svg"):
        code, message = command(f"{words} {link}")
        assert code == 0, message
        assert (tmp_path / link).is_symlink()
    thread.join()
    assert len(parts[0]) > 100
    assert (tmp_path / "far" / "r.svg").stat().st_size > 100
    assert stat.S_ISFIFO((tmp_path / "pipe.svg").stat().st_mode)


def test_what_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("absent/r.json")
    code, message = command(f"{OOD} --json circle")
    assert (code, "Too many levels of symbolic links" in message) == (2, True)
    with pytest.raises(OSError, match="Too many levels"):
        write_output("circle", b"new")
    assert (tmp_path / "circle").is_symlink()
    code, message = command(f"{OOD} --json nowhere")
    assert (code, "there is no folder" in message) == (2, True)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_figure_is_written_like_other_files(ending, tmp_path):
    (tmp_path / "far").mkdir()
    link = tmp_path / f"f.{ending}"
    link.symlink_to(f"far/f.{ending}")
    with style.figure_style():
        style.save(style.blank_figure(1, 1), link)
    assert link.is_symlink()
    assert link.stat().st_size > 100
