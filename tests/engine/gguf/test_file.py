"""Reading GGUF: what is no GGUF file or is damaged anywhere raises ConfigError, and missing values are named."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import TOKENS, write_gguf

from engine.checkpoint.store import convert_embedded
from engine.errors import ConfigError
from engine.gguf.file import GGUFFile
from engine.model.load import load_model


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(tiny_gguf: Path) -> None:
    expected = {tensor.name: tensor for tensor in GGUFReader(tiny_gguf).tensors}
    with GGUFFile(tiny_gguf) as file:
        assert set(file.names) == set(expected)
        for name in file.names:
            values = np.asarray(expected[name].data)
            assert file.shape(name) == values.shape
            assert np.array_equal(file.read(name), values)
        assert file.get("tokenizer.ggml.tokens", list) == TOKENS
        assert file.get("llama.context_length", int) == 64
        assert file.get("llama.rope.freq_base", float) == 10000.0


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00", b"PK\x03\x04" * 20, b"GGUF" + b"\xff" * 99])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "bad.gguf"
    source.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.gguf"):
        convert_embedded(source, tmp_path / "cache", progress=False)


@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_end_in_config_error(data: st.DataObject, tiny_gguf: Path, tmp_path: Path) -> None:
    """Cut, flipped, or with a huge number written anywhere: refused or read, never a crash."""
    content = bytearray(tiny_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(content) - 9))
        kind = data.draw(st.sampled_from(["byte", "u64", "cut"]))
        if kind == "byte":
            content[where] = data.draw(st.integers(0, 255))
        elif kind == "u64":
            content[where : where + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 2**31, 2**62, 2**64 - 1])))
        elif where > 100:
            del content[where:]
            break
    source, cache = tmp_path / "fuzzed.gguf", tmp_path / "cache"
    source.write_bytes(content)
    try:
        load_model(convert_embedded(source, cache, progress=False))
    except ConfigError:
        pass
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def test_reading_beyond_the_metadata_is_refused(tiny_gguf: Path) -> None:
    with GGUFFile(tiny_gguf) as file:
        with pytest.raises(ConfigError, match="lacks tensor nothing"):
            file.read("nothing")
        with pytest.raises(ConfigError, match=r"general\.architecture = 'llama'; expected int"):
            file.get("general.architecture", int)


def metadata_file(path: Path, *values: tuple[str, int, bytes]) -> Path:
    """A file of version 3 without tensors, with values of (name, type, bytes)."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for name, kind, raw in values:
        content += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + raw
    path.write_bytes(content)
    return path


SCALARS = [
    *((0, "B", 250), (1, "b", -5), (2, "H", 65_000), (3, "h", -300), (4, "I", 4_000_000_000), (5, "i", -70_000)),
    *((6, "f", 0.5), (7, "?", True), (10, "Q", 2**63), (11, "q", -(2**40)), (12, "d", 0.1)),
]


def test_metadata_of_every_type(tmp_path: Path) -> None:
    values = [(f"of.{kind}", kind, struct.pack("<" + code, value)) for kind, code, value in SCALARS]
    with GGUFFile(metadata_file(tmp_path / "a.gguf", *values)) as file:
        assert file.metadata == {f"of.{kind}": value for kind, _, value in SCALARS}
        assert all(type(file.metadata[f"of.{kind}"]) is type(value) for kind, _, value in SCALARS)


def array(kind: int, *items: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def test_arrays_of_arrays_are_read_and_no_deeper_ones(tmp_path: Path) -> None:
    bytes_of = [bytes([value]) for value in range(4)]
    pair = array(9, array(0, *bytes_of[:2]), array(0, *bytes_of[2:]))
    with GGUFFile(metadata_file(tmp_path / "a.gguf", ("pairs", 9, pair))) as file:
        assert file.metadata == {"pairs": [[0, 1], [2, 3]]}
    with pytest.raises(ConfigError, match="is damaged: metadata of unknown type 9"):
        GGUFFile(metadata_file(tmp_path / "b.gguf", ("deep", 9, array(9, pair))))
    with pytest.raises(ConfigError, match="is damaged: metadata of unknown type 13"):
        GGUFFile(metadata_file(tmp_path / "c.gguf", ("new", 13, b"")))
