"""Bad files: deployment YAML, key files, model folders, drafts and safetensors with any content.

Promise: ConfigError that names the file or field, never another exception, and quickly.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any

import fuzz_files
import numpy as np
import pytest
import yaml
from fuzzing import sample
from gguf_models import write_gguf_model
from hypothesis import given
from hypothesis import strategies as st
from mutated_readers import READERS, Case, mutated, places, put, refused_or_fine
from native_library import needs_library
from tiny_gguf import write_gguf
from tiny_models import TokenRange, forward_input_of, write_model

from deployments.http.keys import KeyRing
from deployments.local.yaml_config import DEFAULT_FILE, check, load
from deployments.settings import LiveSettings
from engine.checkpoint.draft_check import check_draft
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import gguf_folder
from engine.checkpoint.weights import WeightFiles
from engine.errors import ConfigError
from engine.gguf.file import GGUFFile
from engine.model.load import load_model
from engine.model.runner import ModelRunner

VALUES = yaml.safe_load(DEFAULT_FILE.read_text())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["0.0.0.0", "auto", "eagle", "-1", "nan", "~", "/", "..", "deployments.app:build"]),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
)


@sample(150)
@given(data=st.data(), value=TREES)
def test_any_value_anywhere_in_a_deployment_file(data: st.DataObject, value: Any) -> None:
    path = data.draw(st.sampled_from(places(VALUES)))
    refused_or_fine(check, put(VALUES, path, value), environ={})


@sample(100)
@given(cuts=st.lists(st.tuples(st.integers(0, 2000), st.text(max_size=4)), min_size=1, max_size=3))
def test_damaged_yaml(tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, str]]) -> None:
    text = DEFAULT_FILE.read_text()
    for at, put_in in cuts:
        text = text[: at % len(text)] + put_in + text[at % len(text) + len(put_in) :]
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read in (load, lambda path: KeyRing.load(str(path), {})):
        refused_or_fine(read, file)


@sample(100)
@given(tree=TREES, name=st.sampled_from(sorted(LiveSettings.model_fields)))
def test_live_settings(tree: Any, name: str) -> None:
    refused_or_fine(LiveSettings.parse, {name: tree})
    refused_or_fine(LiveSettings.parse, tree)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama")


@sample(120)
@given(data=st.data(), value=TREES, is_draft=st.booleans())
def test_any_value_in_a_model_or_draft_config(model: Path, data: st.DataObject, value: Any, is_draft: bool) -> None:
    config = json.loads((model / "config.json").read_text())
    damaged = model.with_name("damaged")
    damaged.mkdir(exist_ok=True)
    path = data.draw(st.sampled_from(places(config)))
    (damaged / "config.json").write_text(json.dumps(put(config, path, value)))
    if is_draft:
        refused_or_fine(check_draft, damaged, model)
    else:
        refused_or_fine(ModelConfig.load, damaged)


@sample(60)
@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=30).map(str.encode)))
def test_a_config_of_any_bytes(model: Path, content: bytes) -> None:
    damaged = model.with_name("bytes")
    damaged.mkdir(exist_ok=True)
    (damaged / "config.json").write_bytes(content)
    assert not refused_or_fine(ModelConfig.load, damaged)
    assert not refused_or_fine(check_draft, damaged, model)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_files_nested_without_end(model: Path, opening: str) -> None:
    damaged = model.with_name("deep")
    damaged.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors.index.json"):
        (damaged / name).write_text(opening * 100_000)
    assert not refused_or_fine(ModelConfig.load, damaged)
    assert not refused_or_fine(WeightFiles, damaged)
    (damaged / "deep.yaml").write_text(opening * 3000)
    assert not refused_or_fine(load, damaged / "deep.yaml")
    assert not refused_or_fine(lambda: KeyRing.load(str(damaged / "deep.yaml"), {}))


@sample(120)
@given(seed=st.integers(0, 2**32), in_header=st.booleans())
def test_damaged_safetensors(model: Path, seed: int, in_header: bool) -> None:
    rng = random.Random(seed)
    raw = bytearray((model / "model.safetensors").read_bytes())
    header_len = struct.unpack("<Q", raw[:8])[0]
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(8 + header_len if in_header else len(raw))] = rng.randrange(256)
    if rng.random() < 0.3:
        del raw[rng.randrange(len(raw)) :]
    damaged = model.with_name("weights")
    damaged.mkdir(exist_ok=True)
    (damaged / "model.safetensors").write_bytes(raw)

    header = json.loads((model / "model.safetensors").read_bytes()[8 : 8 + header_len])

    def read() -> None:
        files = WeightFiles(damaged)
        for name, info in header.items():
            if name in files and name != "__metadata__":
                files.read_float(name, tuple(info["shape"]))

    refused_or_fine(read)


@sample(60)
@given(index=TREES)
def test_an_index_of_any_content_names_no_file_outside(model: Path, index: Any) -> None:
    damaged = model.with_name("index")
    damaged.mkdir(exist_ok=True)
    for content in (index, {"weight_map": index}, {"weight_map": {"a": "../model/model.safetensors"}}):
        (damaged / "model.safetensors.index.json").write_text(json.dumps(content))
        if isinstance(content, dict) and content.get("weight_map") in ({}, None):
            continue
        assert not refused_or_fine(WeightFiles, damaged)


@sample(80)
@given(seed=st.integers(0, 2**32))
def test_damaged_gguf(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "whole.gguf"
    if not whole.exists():
        write_gguf(whole)
    rng = random.Random(seed)
    raw = bytearray(whole.read_bytes())
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(raw))
        raw[at : at + 1] = rng.choice([bytes([rng.randrange(256)]), b"", rng.randbytes(8), b"\xff" * 8])
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(raw)

    def read() -> None:
        with GGUFFile(damaged) as file:
            for name in file.names:
                file.read(name)

    refused_or_fine(read)


def test_mutations_of_every_reader_of_model_files() -> None:
    """GGUF, quantised Hugging Face folders and adapters, in children whose memory is bounded: see `mutated_readers`."""
    num = 500 * max(1, int(os.environ.get("PACELINE_FUZZ", "0")))
    script = Path(fuzz_files.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--num", str(num)], capture_output=True, text=True, check=False, cwd=script.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line, name in zip(done.stdout.splitlines(), READERS, strict=True):
        found = re.fullmatch(rf"{name}: {num} files, (\d+) read, (\d+) refused, 0 failed, .*", line)
        assert found is not None, line
        assert min(map(int, found.groups())) > num // 50, line


def test_what_breaks_the_promise_is_reported_with_its_seed(tmp_path: Path) -> None:
    def broken(rng: random.Random) -> Case:
        value = rng.randrange(1 << 20)

        def read(folder: Path) -> list[Any]:
            content = int((folder / "file").read_bytes())
            assert content == value
            if content == values[3]:
                raise ValueError("no ConfigError")
            if content == values[5]:
                os.kill(os.getpid(), signal.SIGKILL)
            if content == values[7]:
                # Not from the heap: this process has freed memory there, which the child could use again.
                return [np.frombuffer(mmap(-1, 2 * fuzz_files.SPARE_BYTES, MAP_PRIVATE | MAP_ANONYMOUS), np.uint8)]
            if content == values[8]:
                return [np.ones(4 << 20, np.uint8)]
            if content == values[9]:
                raise ConfigError("refused")
            return []

        return Case({"file": str(value).encode()}, read)

    values = [random.Random(f"name {seed}").randrange(1 << 20) for seed in range(10)]
    outcome = fuzz_files.fuzz("name", broken, tmp_path, range(10))
    assert outcome.counts == {"read": 5, "refused": 1, "failed": 4}
    assert [failure.partition(":")[0] for failure in outcome.failures] == ["seed 3", "seed 5", "seed 7", "seed 8"]
    assert "ValueError: no ConfigError" in outcome.failures[0]
    assert f"ended with {-signal.SIGKILL}" in outcome.failures[1]
    assert "Cannot allocate memory" in outcome.failures[2]
    assert "too much memory" in outcome.failures[3]


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    return write_gguf_model(root / "whole.gguf", root / "plain", "Q4_K", num_layers=1)


@needs_library
@sample(100)
@given(seed=st.integers(0, 2**32))
def test_damaged_gguf_models_on_the_native_kernel(
    tmp_path_factory: pytest.TempPathFactory, gguf_model: Path, seed: int
) -> None:
    """A mutated file is an error, or a model that computes."""
    folder = tmp_path_factory.getbasetemp() / "gguf-native"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = folder / "mutated.gguf"
    file.write_bytes(mutated(gguf_model.read_bytes(), random.Random(seed), header=4500))

    def compute() -> None:
        model = load_model(gguf_folder(file, folder / "cache"), kernel="native", max_model_len=64)
        runner = ModelRunner(model, num_blocks=2, block_size=16)
        runner.forward(forward_input_of([TokenRange([3, 4, 5], 0, 3, [1])], block_size=16))

    refused_or_fine(compute)
