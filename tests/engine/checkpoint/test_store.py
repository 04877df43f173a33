"""Finding a model: folders, the embedded model, the hub; a conversion that is complete and safe between processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gguf import write_gguf

from engine.checkpoint.store import convert_embedded, gguf_folder, resolve_model
from engine.errors import ConfigError
from engine.model.load import load_model


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_folder_is_taken_as_it_is(tmp_path: Path, tiny_gguf: Path) -> None:
    folder = convert_embedded(tiny_gguf, tmp_path, progress=False)
    assert resolve_model(str(folder)) == folder
    assert load_model(folder).config.num_layers == 1


def test_converted_once_and_verified(tmp_path: Path, tiny_gguf: Path) -> None:
    folder = convert_embedded(tiny_gguf, tmp_path, progress=False)
    weights = folder / "model.safetensors"
    made, whole = weights.stat().st_ino, weights.read_bytes()
    assert convert_embedded(tiny_gguf, tmp_path, progress=False) == folder
    assert weights.stat().st_ino == made
    weights.write_bytes(whole)  # Touched, but unchanged: the checksum says so.
    convert_embedded(tiny_gguf, tmp_path, progress=False)
    assert weights.stat().st_ino == made
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        weights.write_bytes(damaged)
        convert_embedded(tiny_gguf, tmp_path, progress=False)
        assert weights.read_bytes() == whole
    (folder / "checksum.json").unlink()
    convert_embedded(tiny_gguf, tmp_path, progress=False)
    assert json.loads((folder / "checksum.json").read_text())["size"] == len(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, f"{folder.name}.lock"])


def test_processes_may_race(tmp_path: Path, tiny_gguf: Path) -> None:
    script = (
        "import sys, pathlib; from engine.checkpoint.store import convert_embedded; "
        "from engine.model.load import load_model; "
        "load_model(convert_embedded(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), progress=False))"
    )
    command = [sys.executable, "-c", script, str(tiny_gguf), str(tmp_path)]
    root = Path(__file__).parents[3]
    children = [subprocess.Popen(command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, tiny_gguf: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to the cache .*PACELINE_CACHE"):
        convert_embedded(tiny_gguf, blocked, progress=False)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, tiny_gguf: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot write to the cache .*free some space"):
            convert_embedded(tiny_gguf, tmp_path, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert load_model(convert_embedded(tiny_gguf, tmp_path, progress=False)).config.num_layers == 1


@pytest.mark.parametrize("name", ["no/such/folder", "", "./gone", "a b", "gpt2", "../x", "/nowhere"])
def test_names_of_nothing_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="model: "):
        resolve_model(name, progress=False)


def test_an_id_that_cannot_be_fetched_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot download 'no-such-org-x/no-such-model-y'"):
        resolve_model("no-such-org-x/no-such-model-y", progress=False)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"found only pytorch_model\.bin, which would have to be unpickled"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="found none"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_missing_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.gguf"):
        convert_embedded(tmp_path / "gone.gguf", tmp_path, progress=False)


def test_the_folder_of_a_gguf_file_is_made_once_for_each_state_of_it(tmp_path: Path, tiny_gguf: Path) -> None:
    source = tmp_path / "models" / "own.gguf"
    source.parent.mkdir()
    source.write_bytes(tiny_gguf.read_bytes())
    cache = tmp_path / "cache"
    folder = gguf_folder(source, cache)
    assert (folder / "model.gguf").resolve() == source
    assert gguf_folder(source, cache) == folder
    assert load_model(folder).config.num_layers == 1
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]
    stat = source.stat()
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert gguf_folder(source, cache) != folder
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.gguf: No such file"):
        gguf_folder(tmp_path / "gone.gguf", cache)
    with pytest.raises(ConfigError, match=r"cannot write to the cache .*PACELINE_CACHE"):
        gguf_folder(source, source)


def test_a_folder_that_has_only_a_gguf_file_names_it(tmp_path: Path, tiny_gguf: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(tiny_gguf.read_bytes())
    with pytest.raises(ConfigError, match=r"has no config\.json; .*; give the file itself: --model .*own\.gguf"):
        resolve_model(str(tmp_path))
