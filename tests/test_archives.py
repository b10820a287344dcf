"""Files of outputs that are damaged, hostile or odd: one sentence each, no verdict on changed bits, bounded memory."""

import io
import os
import random
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import dissensus as ds
from dissensus.auditing import archives, reading
from dissensus.auditing.streaming import OutputReader, as_tensor
from dissensus.cli import app

CLASSES = {"task": "classification", "kind": "logits"}


def outputs_and_labels(members=3, examples=60, classes=4, seed=0):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(members, examples, classes)).astype(np.float32)
    return logits, generator.integers(0, classes, examples)


def audited(file, **settings):
    arrays = reading.read_files([file], **settings)
    return ds.audit(arrays["outputs"], arrays["targets"], **CLASSES)


def npy(descr, shape, data=b"", fortran=False):
    """A ``.npy`` file with any header."""
    header = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(entries, method=zipfile.ZIP_STORED):
    """An archive of files by their names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def flipped(content, place, bit=0):
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray], ids=["rows", "columns"])
def test_no_verdict_on_a_changed_bit(tmp_path, save, layout):
    logits, labels = outputs_and_labels()
    file = tmp_path / "a.npz"
    save(file, outputs=layout(logits), targets=labels)
    assert audited(file).test == ds.audit(logits, labels, **CLASSES).test
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        entry = archive.getinfo("outputs.npy")
        start, end = entry.header_offset + 128, entry.header_offset + entry.compress_size
    draw = random.Random(0)
    for _ in range(25):
        file.write_bytes(flipped(content, draw.randrange(start, end), draw.randrange(8)))
        with pytest.raises(reading.ReadingError, match=r"a\.npz"):
            audited(file)


def test_checksums_are_compared_while_slices_are_read(tmp_path, monkeypatch):
    """Slices in order are read once; anything else is read after the whole array was."""
    logits, labels = outputs_and_labels()
    file = tmp_path / "a.npz"
    np.savez(file, outputs=logits, targets=labels)
    passes = []
    check = archives.CheckedArray.check
    monkeypatch.setattr(archives.CheckedArray, "check", lambda self: passes.append(1) or check(self))
    stored = reading.read_files([file])["outputs"]
    parts = [stored[:, start : start + 7] for start in range(0, 60, 7)]
    assert not passes
    assert stored.is_checked
    assert np.array_equal(np.concatenate(parts, 1), logits)
    stored = reading.read_files([file])["outputs"]
    assert np.array_equal(stored[:, :30], logits[:, :30])
    assert np.array_equal(stored[:, :60], logits), "a reader may begin again"
    assert stored.is_checked
    assert not passes
    for index in (1, slice(0, 2), (slice(None), slice(5, 9)), (slice(None), slice(0, 9, 2)), (0, 0, 0)):
        stored = reading.read_files([file])["outputs"]
        assert np.array_equal(stored[index], logits[index])
        assert stored.is_checked
    assert len(passes) == 5
    assert np.array_equal(np.asarray(reading.read_files([file])["outputs"]), logits)
    labels = (logits.argmax(-1), logits[0].argmax(-1))
    np.savez(file, outputs=labels[0], targets=labels[1])
    arrays = reading.read_files([file])
    votes = ds.audit(arrays["outputs"], arrays["targets"], task="classification", kind="labels")
    assert votes.test == ds.audit(labels[0], labels[1], task="classification", kind="labels").test


def test_checksums_of_dense_outputs(tmp_path):
    """Lines of an image that is too large for a slice are scattered over the file."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(2, 3, 4, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "a.npz", outputs=logits)
    reader = OutputReader(reading.read_files([tmp_path / "a.npz"])["outputs"])
    read = torch.cat([part for _, part in reader.parts(700)])
    assert torch.equal(read, torch.cat([part for _, part in OutputReader(logits).parts()]))
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(flipped(content, 2000))
    reader = OutputReader(reading.read_files([tmp_path / "a.npz"])["outputs"])
    with pytest.raises(reading.ReadingError, match="is damaged"):
        next(reader.parts(700))


def test_checksums_of_pieces_join():
    draw = random.Random(0)
    for _ in range(20):
        first, second = draw.randbytes(draw.randrange(40)), draw.randbytes(draw.randrange(5000))
        joined = archives.joined_checksum(zlib.crc32(first), zlib.crc32(second), len(second))
        assert joined == zlib.crc32(first + second)


ROW = np.zeros((2, 3, 4), np.float32).tobytes()
HEADERS = {
    "negative": (npy("<f4", (2, -3, 4), ROW), "header is damaged"),
    "negative pair": (npy("<f4", (-2, -3, 4), ROW), "header is damaged"),
    "huge": (npy("<f4", (2, 10**15, 4), ROW), "cut short|size is wrong"),
    "beyond counting": (npy("<f4", (2**70, 2**70), ROW), "cut short|size is wrong"),
    "huge and empty": (npy("<f4", (0, 2**70)), "header is damaged"),
    "many axes": (npy("<f4", (1,) * 70, bytes(4)), "is damaged"),
    "truncated": (npy("<f4", (2, 3, 4), ROW[:-1]), "cut short|size is wrong"),
    "bfloat16": (npy("<V2", (2, 3, 4), ROW), "bfloat16 and float8"),
    "float8": (npy("|V1", (2, 3, 4), ROW), "bfloat16 and float8"),
    "unknown type": (npy("float8_e4m3fn", (2, 3, 4), ROW), "no array of numpy|raw bytes"),  # ml_dtypes may know it
    "complex": (npy("<c8", (2, 3, 2), ROW), "complex numbers"),
    "dates": (npy("<M8[s]", (2, 3, 2), ROW), "dates"),
    "objects": (npy("|O", (2, 3, 4), ROW), "pickles are not opened"),
    "columns": (npy([("a", "<f4")], (2, 3, 4), ROW), "columns with names"),
    "nested": (npy([("a", "|O")], (2, 3, 4), ROW), "pickles are not opened"),
    "no size": (npy("|S0", (2, 3, 4)), "header is damaged"),
    "header of code": (b"\x93NUMPY\x01\x00\x14\x00__import__('os').x()\n", "no array of numpy"),
    "deep header": (b"\x93NUMPY\x02\x00\xe0\x2e\x00\x00" + b"(" * 12000, "no array of numpy"),
    "end of header": (npy("<f4", (2, 3, 4), ROW)[:20], "no array of numpy"),
    "another version": (b"\x93NUMPY\x09\x00" + npy("<f4", (2, 3, 4), ROW)[8:], "columns with names|no array"),
    "nothing": (b"", "no array of numpy"),
    "a pickle": (b"\x80\x04]\x94.", "pickles are not opened"),
    "text": (b"outputs\n" * 30, "no array of numpy"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_arrays(tmp_path, name):
    """The same sentence in a ``.npy`` file and in an archive, stored or compressed."""
    content, message = HEADERS[name]
    (tmp_path / "a.npy").write_bytes(content)
    (tmp_path / "stored.npz").write_bytes(npz({"outputs.npy": content}))
    (tmp_path / "packed.npz").write_bytes(npz({"outputs.npy": content}, zipfile.ZIP_DEFLATED))
    (tmp_path / "beside.npz").write_bytes(npz({"outputs.npy": npy("<f4", (2, 3, 4), ROW), "targets.npy": content}))
    for file in ("a.npy", "stored.npz", "packed.npz", "beside.npz"):
        with pytest.raises(reading.ReadingError, match=rf"{file} cannot be read: .*({message})") as refused:
            reading.read_files([tmp_path / file])
        assert "\n" not in str(refused.value)


def with_central(content, name, **changes):
    """An archive with changed fields in the central directory's entry of a name."""
    offsets = {"flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<I"), "packed": (20, "<I"), "size": (24, "<I")}
    offsets["offset"] = (42, "<I")
    place = content.rindex(b"PK\x01\x02", 0, content.rindex(name))
    changed = bytearray(content)
    for field, value in changes.items():
        at, form = offsets[field]
        struct.pack_into(form, changed, place + at, value)
    return bytes(changed)


GOOD = npy("<f4", (2, 3, 4), ROW)
PLAIN = npz({"outputs.npy": GOOD, "targets.npy": npy("<i8", (3,), bytes(24))})
PACKED = npz({"outputs.npy": GOOD}, zipfile.ZIP_DEFLATED)
ARCHIVES = {
    "overlap": (with_central(PLAIN, b"targets.npy", offset=4), "overlap"),
    "same entry twice": (with_central(PLAIN, b"targets.npy", offset=0), "overlap"),
    "names outside": (npz({"../outputs.npy": GOOD, "outputs.npy": GOOD}), "named outside"),
    "absolute name": (npz({"/etc/outputs.npy": GOOD, "outputs.npy": GOOD}), "named outside"),
    "encrypted": (with_central(PLAIN, b"outputs.npy", flags=1), "encrypted"),
    "unknown compression": (with_central(PLAIN, b"outputs.npy", method=97), "not supported"),
    "wrong checksum": (with_central(PACKED, b"outputs.npy", crc=1), "CRC"),
    "sizes that differ": (with_central(PLAIN, b"outputs.npy", size=10), "sizes differ"),
    "beyond the end": (with_central(PLAIN, b"targets.npy", packed=10**6, size=10**6), "cut short"),
    "no local header": (flipped(PLAIN, 0), "does not begin"),
    "size that lies": (with_central(PACKED, b"outputs.npy", size=10**6), "size is wrong"),
    "damaged stream": (flipped(PACKED, 60, 5), "it is damaged"),
    "cut": (PLAIN[:-30], "not a zip file"),
    "cut in the middle": (PLAIN[: len(PLAIN) // 2], "not a zip file"),
    "nothing": (b"", "it is empty. Make the file again"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(tmp_path, name):
    content, message = ARCHIVES[name]
    file = tmp_path / "a.npz"
    file.write_bytes(content)
    with pytest.raises(reading.ReadingError, match=rf"a\.npz cannot be read: .*({message})") as refused:
        reading.read_files([file])
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_arrays_of_one_name(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("outputs.npy", GOOD)
        archive.writestr("outputs.npy", GOOD)
    (tmp_path / "a.npz").write_bytes(buffer.getvalue())
    with pytest.raises(reading.ReadingError, match="two arrays 'outputs'"):
        reading.read_files([tmp_path / "a.npz"])


@pytest.mark.slow
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_random_damage_gives_a_sentence_or_the_same_verdict(tmp_path, save):
    """Bits anywhere in the file, and cuts: what is not refused has changed nothing that is read."""
    logits, labels = outputs_and_labels(examples=30)
    file = tmp_path / "a.npz"
    save(file, outputs=logits, targets=labels)
    content, whole = file.read_bytes(), audited(file).test
    draw = random.Random(1)
    sentences, renamed = [], 0
    for i in range(150):
        damaged = content[: draw.randrange(len(content))] if i % 10 == 0 else content
        for _ in range(draw.randrange(1, 4) if damaged is content else 0):
            damaged = flipped(damaged, draw.randrange(len(damaged)), draw.randrange(8))
        file.write_bytes(damaged)
        try:
            assert audited(file).test == whole
        except reading.ReadingError as reason:
            sentences.append(str(reason))
        except KeyError:
            renamed += 1
    assert not [sentence for sentence in sentences if "\n" in sentence]
    assert renamed < 10
    assert len(sentences) > 100


def test_compressed_archives_have_a_limit(tmp_path):
    file = tmp_path / "big.npz"
    zeros = np.zeros((2, 500_000, 4), np.float32)
    np.savez_compressed(file, outputs=zeros, targets=np.zeros(500_000, np.int64))
    assert file.stat().st_size < 100_000
    with pytest.raises(reading.ReadingError, match=r"`unpack_limit` must be at least 0.03; got 0.01, .*0.02 GB"):
        reading.read_files([file], unpack_limit=0.01)
    with pytest.raises(ValueError, match="`unpack_limit` must be a number"):
        reading.read_files([file], unpack_limit=-1)
    assert reading.read_files([file], unpack_limit=0.03)["outputs"].shape == zeros.shape
    stored = tmp_path / "stored.npz"
    np.savez(stored, outputs=zeros)
    assert reading.read_files([stored], unpack_limit=0)["outputs"].shape == zeros.shape, "nothing is unpacked"
    assert archives.default_unpack_limit() > 0.1
    for command in (["audit", str(file), "--task", "regression"], ["ood", str(file), "--outside", f"far={file}"]):
        done = CliRunner().invoke(app, [*command, "--unpack-limit", "0.01"])
        assert done.exit_code == 1, done.output
        assert "--unpack-limit must be at least 0.03" in done.output.replace("\n", " ")


def test_large_compressed_arrays_are_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_IN_MEMORY", 2**20)
    monkeypatch.setattr(archives, "_AT_ONCE", 2**16)
    logits = np.zeros((2, 400_000, 4), np.float32)
    logits[1, 7] = 3.0
    np.savez_compressed(tmp_path / "a.npz", outputs=logits)
    tracemalloc.start()
    stored = reading.read_files([tmp_path / "a.npz"])["outputs"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20 < logits.nbytes
    assert isinstance(stored, np.memmap)
    assert np.array_equal(stored, logits)
    monkeypatch.setattr(archives.shutil, "copyfileobj", no_space)
    with pytest.raises(reading.ReadingError, match="No space left on device in .*TMPDIR"):
        reading.read_files([tmp_path / "a.npz"])


def no_space(*_):
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".safetensors", ".csv"])
def test_pipes_devices_and_folders_are_refused(tmp_path, suffix):
    pipe, device, folder = (tmp_path / f"{name}{suffix}" for name in ("pipe", "device", "folder"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    folder.mkdir()
    readers = [lambda file: reading.read_files([file]), lambda file: reading.read_files([file, file])]
    for read in [*readers, reading.read_array]:
        for file in (pipe, device):
            with pytest.raises(reading.ReadingError, match="is a pipe, a socket or a device; copy"):
                read(file)
        with pytest.raises(reading.ReadingError, match="is a folder; give a file"):
            read(folder)
        with pytest.raises(reading.ReadingError, match="there is no file"):
            read(tmp_path / f"absent{suffix}")
    (tmp_path / f"loop{suffix}").symlink_to(tmp_path / f"loop{suffix}")
    with pytest.raises(reading.ReadingError, match="symbolic links"):
        reading.read_array(tmp_path / f"loop{suffix}")


def test_commands_refuse_pipes_wherever_a_file_is_taken(tmp_path):
    logits, labels = outputs_and_labels()
    good, pipe, loose = tmp_path / "a.npz", tmp_path / "pipe.npz", tmp_path / "pipe.npy"
    np.savez(good, outputs=logits, targets=labels)
    os.mkfifo(pipe)
    os.mkfifo(loose)
    audit = ["audit", str(good), "--task", "classification", "--kind", "logits"]
    ood = ["ood", str(good), "--outside"]
    for command in (
        ["audit", str(pipe), *audit[2:]],
        *([*audit, option, str(pipe)] for option in ("--train", "--reference", "--ood")),
        *([*audit, option, str(loose)] for option in ("--targets", "--groups", "--in-bag")),
        ["ood", str(pipe), "--outside", f"far={good}"],
        [*ood, f"far={pipe}"],
        [*ood, f"far={good}", "--pictures", f"far={loose}", "--gallery", str(tmp_path / "g.png")],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1, done.output
        assert "is a pipe" in done.output.replace("\n", " "), command


def test_a_damaged_archive_at_the_command_line(tmp_path):
    logits, labels = outputs_and_labels()
    np.savez(tmp_path / "a.npz", outputs=logits, targets=labels)
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "b.npz").write_bytes(flipped(content, 900, 3))
    for command in (
        ["audit", str(tmp_path / "b.npz"), "--task", "classification", "--kind", "logits"],
        ["ood", str(tmp_path / "a.npz"), "--outside", f"far={tmp_path / 'b.npz'}", "--repeats", "10"],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1, done.output
        assert "b.npz is damaged: the checksum" in done.output.replace("\n", " ")


def test_tensors(tmp_path):
    """Safetensors: eight-bit floats are read, complex numbers and damage are refused."""
    logits, labels = (torch.from_numpy(part) for part in outputs_and_labels())
    file = tmp_path / "a.safetensors"
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        save_file({"outputs": logits.to(dtype), "targets": labels}, file)
        assert audited(file).test == ds.audit(logits.to(dtype).float(), labels, **CLASSES).test
    for arrays in ({"outputs": logits.to(torch.complex64)}, {"outputs": logits, "targets": labels.to(torch.complex64)}):
        save_file(arrays, file)
        with pytest.raises(reading.ReadingError, match=r"a\.safetensors cannot be read: `\w+` holds complex numbers"):
            reading.read_files([file])
    save_file({"outputs": torch.tensor(1.0)}, file)
    with pytest.raises(ValueError, match="a.safetensors cannot be read|must be an array"):
        ds.audit(reading.read_files([file])["outputs"], labels, **CLASSES)
    save_file({"outputs": logits, "targets": labels}, file)
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length]
    for damaged in (
        content[:-1],
        content[:4],
        b"",
        struct.pack("<Q", 2**60) + content[8:],
        content[:8] + header.replace(b"[3,60,4]", b"[3,60,5]") + content[8 + length :],
        content[:8] + header.replace(b'"F32"', b'"F99"') + content[8 + length :],
        content[:8] + header.replace(b"60,4", b"-0,4") + content[8 + length :],
        content[:8] + b"[" * length + content[8 + length :],
    ):
        file.write_bytes(damaged)
        with pytest.raises(reading.ReadingError, match=r"a\.safetensors cannot be read") as refused:
            reading.read_files([file])
        assert "\n" not in str(refused.value)


def test_text(tmp_path):
    """CSV: a byte-order mark is no header, infinities are no labels, and damage is a sentence."""
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbf1,2\n3,4\n")
    assert np.array_equal(reading.read_array(file), [[1.0, 2.0], [3.0, 4.0]])
    file.write_text("label\n1\ninf\n")
    assert np.array_equal(reading.read_array(file), [1.0, np.inf])
    file.write_text("1\n1e300\n")
    assert reading.read_array(file).dtype == np.float64
    for content, message in (
        (b"1,2\n3\n", "line 2: it must hold 2 numbers; got 1"),
        (b"1,2\n\n3,x\n", "line 3: it must hold numbers; got 'x'"),
        (b"\xff\xfe1,2\n", "cannot be read as text"),
        (b"a" * 200_000 + b",1\n", "cannot be read as text"),
        (b"\n\n", "holds no lines"),
        (b"", "holds no lines"),
    ):
        file.write_bytes(content)
        with pytest.raises(reading.ReadingError, match=message):
            reading.read_array(file)
    assert issubclass(reading.ReadingError, ValueError)


def test_numbers_that_torch_does_not_have(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.longdouble).reshape(2, 3))
    assert as_tensor(reading.read_array(tmp_path / "a.npy"), "outputs").dtype == torch.float64
    for kind in ("u2", "u4", "u8", ">f4", ">i2", "f2", "?"):
        values = np.arange(6).astype(kind)
        assert as_tensor(values, "outputs").to(torch.float64).tolist() == values.astype(float).tolist()
    with pytest.raises(TypeError, match="must be numbers; got complex128"):
        as_tensor(np.zeros(3, complex), "outputs")
