"""Adapted weights on disk.

Promises: a version is there completely or not at all; a damaged one is refused and the one before is taken; their
number is bounded; another target or draft has other versions; only their owner can read them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distill_fakes import write_target
from tiny_eagle import write_eagle

from engine.adaptation.versions import FACTS, KEPT, Versions, damage, versions_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle(target, tmp_path_factory.mktemp("draft") / "eagle")


def add(versions: Versions, draft: Path) -> Path:
    def write(folder: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_bytes((draft / name).read_bytes())

    return versions.add(write, {"served": 1.0})


def test_the_newest_version_is_found(draft: Path, tmp_path: Path) -> None:
    versions = Versions(tmp_path / "v")
    assert versions.newest() is None
    made = [add(versions, draft) for _ in range(2)]
    assert versions.all() == made
    assert versions.newest() == made[1]
    assert json.loads((made[1] / FACTS).read_text())["served"] == 1.0
    assert versions.root.stat().st_mode & 0o077 == 0
    versions.remove(made[1])
    versions.remove(made[1])
    assert versions.newest() == made[0]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_version_is_refused_and_the_one_before_is_taken(draft: Path, tmp_path: Path, name: str) -> None:
    versions = Versions(tmp_path / "v")
    good, bad = add(versions, draft), add(versions, draft)
    content = bytearray((bad / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bad / name).write_bytes(content)
    assert damage(bad) == f"{name} is damaged"
    assert versions.newest() == good


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": 3}', '{"sha256": {}}'])
def test_a_version_with_damaged_facts_is_refused(draft: Path, tmp_path: Path, text: str) -> None:
    versions = Versions(tmp_path / "v")
    (add(versions, draft) / FACTS).write_text(text)
    assert versions.newest() is None


def test_a_version_without_weights_is_refused(draft: Path, tmp_path: Path) -> None:
    versions = Versions(tmp_path / "v")
    folder = add(versions, draft)
    (folder / "model.safetensors").unlink()
    assert versions.newest() is None


def test_an_interrupted_write_leaves_no_version(draft: Path, tmp_path: Path) -> None:
    versions = Versions(tmp_path / "v")

    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        versions.add(fail, {})
    assert versions.all() == []
    assert list(versions.root.iterdir()) == []


def test_only_the_newest_versions_are_kept(draft: Path, tmp_path: Path) -> None:
    versions = Versions(tmp_path / "v")
    made = [add(versions, draft) for _ in range(KEPT + 2)]
    assert versions.all() == made[-KEPT:]
    assert sorted(versions.root.iterdir()) == made[-KEPT:]


def test_another_target_or_draft_has_other_versions(draft: Path, target: Path, tmp_path: Path) -> None:
    before = versions_folder(tmp_path, target, draft)
    assert before == versions_folder(tmp_path, target, draft)
    other_draft = write_eagle(target, tmp_path / "eagle", int8=True)
    other_target = write_target(tmp_path / "model", seed=1, vocab_size=128)
    assert (
        len({before, versions_folder(tmp_path, target, other_draft), versions_folder(tmp_path, other_target, draft)})
        == 3
    )
