"""Whatever is wrong with a saved file or folder is found, and named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlightning import checksums
from rlightning.checksums import (
    MANIFEST,
    DamagedError,
    checksum,
    seal_file,
    verify_file,
    verify_manifest,
    write_manifest,
)


def save(path: Path, *, is_sealed: bool = True) -> bytes:
    torch.save({"step": 3, "weight": torch.arange(9.0)}, path)
    if is_sealed:
        seal_file(path)
    return path.read_bytes()


def test_sealed_file_is_read_as_before(tmp_path: Path) -> None:
    save(path := tmp_path / "a.ckpt")
    verify_file(path)
    for is_mapped in (True, False):
        loaded = torch.load(path, mmap=is_mapped, weights_only=True)
        assert loaded["step"] == 3 and loaded["weight"].tolist() == list(range(9))


@pytest.mark.long
def test_flipped_bit_at_any_byte_is_found(tmp_path: Path) -> None:
    whole = save(path := tmp_path / "a.ckpt")
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"a\.ckpt is damaged: it is "):
            verify_file(path)


def test_file_cut_at_any_byte_is_found(tmp_path: Path) -> None:
    whole = save(path := tmp_path / "a.ckpt")
    for size in [0, *range(1, len(whole), 53), *range(len(whole) - 60, len(whole))]:
        path.write_bytes(whole[:size])
        reason = "it is empty" if size == 0 else "it is (cut short|not what was written)"
        with pytest.raises(DamagedError, match=reason):
            verify_file(path)


def test_file_of_another_program_is_compared_with_its_records(tmp_path: Path) -> None:
    whole = save(path := tmp_path / "a.ckpt", is_sealed=False)
    verify_file(path)
    place = whole.index(torch.arange(9.0).numpy().tobytes())
    path.write_bytes(whole[:place] + b"\1" + whole[place + 1 :])
    with pytest.raises(DamagedError, match="is not what was written, by its checksum"):
        verify_file(path)
    path.write_text("a text")
    with pytest.raises(DamagedError, match="is cut short, or no checkpoint"):
        verify_file(path)


def test_checksum_depends_on_order_and_number_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 4)
    found = set()
    for number, content in enumerate([b"aaaabbbb", b"bbbbaaaa", b"aaaabbbbc", b"aaaabbbb\0", b""]):
        (path := tmp_path / str(number)).write_bytes(content)
        found.add(checksum(path))
        assert checksum(path, len(content)) == checksum(path)
    assert len(found) == 5


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda path: path.write_bytes(b"wei7hts"), "'sub/b' is not what was written, by its checksum"),
    "cut": (lambda path: path.write_bytes(b"wei"), "'sub/b' has 3 bytes of 7"),
    "empty": (lambda path: path.write_bytes(b""), "'sub/b' has 0 bytes of 7"),
    "missing": (lambda path: path.unlink(), "'sub/b' is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_of_folder_is_named(damage: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"config")
    (tmp_path / "sub/b").write_bytes(b"weights")
    write_manifest(tmp_path)
    verify_manifest(tmp_path)
    (tmp_path / "more").write_text("a user's notes")
    verify_manifest(tmp_path)
    change, reason = DAMAGES[damage]
    change(tmp_path / "sub/b")
    with pytest.raises(DamagedError, match=reason):
        verify_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"x": {"a": 1}}', '{"x": [1]}', "{}"])
def test_damaged_manifest_is_named(text: str, tmp_path: Path) -> None:
    write_manifest(tmp_path)
    assert json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DamagedError, match=rf"'{MANIFEST}' is not what was written"):
        verify_manifest(tmp_path)


def test_folder_without_manifest_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    verify_manifest(tmp_path)
