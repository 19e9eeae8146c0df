"""manifest.json: every change of a sealed folder is seen."""

from pathlib import Path

import pytest

from flowalign.system import files, manifest
from flowalign.system.manifest import MANIFEST, Damaged


def sealed(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(256)))
    (folder / "inner" / "b.json").write_text('{"x": 1}')
    (folder / "empty").touch()
    manifest.write_manifest(folder, {"config": {"lr": 1e-4}, "processes": 2})
    return folder


def test_what_was_sealed_is_read_back(tmp_path: Path) -> None:
    found = manifest.check_manifest(sealed(tmp_path / "x"))
    assert found.about == {"config": {"lr": 1e-4}, "processes": 2}
    assert found.files["a.bin"] == (256, manifest.file_sha256(tmp_path / "x" / "a.bin"))
    assert set(found.files) == {"a.bin", "inner/b.json", "empty"}


@pytest.mark.parametrize("name", ["a.bin", "inner/b.json", "empty", MANIFEST])
@pytest.mark.parametrize("harm", ["delete", "cut", "empty", "head", "middle", "tail", "longer"])
def test_every_harm_to_every_file_is_seen(tmp_path: Path, name: str, harm: str) -> None:
    path = sealed(tmp_path / "x") / name
    content = bytearray(path.read_bytes())
    if not content and harm not in ("delete", "longer"):
        pytest.skip("nothing to take away from an empty file")
    place = {"head": 0, "middle": len(content) // 2, "tail": -1}.get(harm)
    if harm == "delete":
        path.unlink()
    elif place is not None:
        content[place] ^= 1
        path.write_bytes(content)
    else:
        left = {"cut": content[: len(content) // 2], "empty": b"", "longer": content + b"\n\n{"}
        path.write_bytes(left[harm])
    with pytest.raises(Damaged, match=name.split("/")[-1]):
        manifest.check_manifest(tmp_path / "x")


def test_a_manifest_of_another_folder_or_version_is_refused(tmp_path: Path) -> None:
    folder, other = sealed(tmp_path / "x"), tmp_path / "y"
    other.mkdir()
    (other / MANIFEST).write_bytes((folder / MANIFEST).read_bytes())
    with pytest.raises(Damaged, match=r"a\.bin is missing"):
        manifest.check_manifest(other)
    for content in ("[]", "{}", "null", '{"sha256": 1}', "[" * 100_000):
        (other / MANIFEST).write_text(content)
        with pytest.raises(Damaged, match=MANIFEST):
            manifest.check_manifest(other)
    with pytest.raises(Damaged, match="no folder"):
        manifest.check_manifest(tmp_path / "z")


def test_a_durable_folder_is_flushed_before_its_rename(tmp_path, monkeypatch) -> None:
    done: list[str] = []
    fsync, replace = files.os.fsync, files.os.replace
    monkeypatch.setattr(files.os, "fsync", lambda n: (done.append("flush"), fsync(n))[1])
    monkeypatch.setattr(files.os, "replace", lambda *p: (done.append("name"), replace(*p))[1])
    with files.replacing(tmp_path / "x", durable=True) as part:
        sealed(part)
    # the folder's three files, the manifest and two folders; then the rename; then its name
    assert done[-2:] == ["name", "flush"] and done[:-2].count("flush") >= 6
