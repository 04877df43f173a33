"""Bad files: deployment YAML, key files, model folders, drafts and safetensors with any content.

Promise: ConfigError that names the file or field, never another exception, and quickly.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fuzzing import sample
from gguf_models import write_gguf_model
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_library
from quantised_models import FORMATS, quantise
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
from engine.gguf.convert import describe
from engine.gguf.file import GGUFFile
from engine.gguf.tensors import GGUFTensors
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


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(tree)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def refused_or_fine(call: Any, *arguments: Any, **options: Any) -> bool:
    """Whether it is fine; otherwise it must be a ConfigError, and soon, in seconds of this process's own."""
    begin = time.process_time()
    try:
        call(*arguments, **options)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - both outcomes are fine, another exception is not
        return False
    finally:
        assert time.process_time() - begin < 20, "a hang"
    return True


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


def memory_bounded(read: Callable[[], list[Any]], *, num_bytes: int) -> None:
    """Run a reader on a mutated file: an error, or tensors that are not far larger than the file."""
    found: list[Any] = []
    if refused_or_fine(lambda: found.extend(read())):
        assert sum(tensor.nbytes for tensor in found) < 64 * num_bytes + (1 << 20)


def mutated(raw: bytes, rng: random.Random, *, header: int) -> bytes:
    """The bytes with a few of them changed, cut out or put in, more often in the header."""
    out = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(header, len(out)) if rng.random() < 0.7 else len(out))
        out[at : at + rng.choice([0, 1, 1, 1, 8])] = rng.choice([bytes([rng.randrange(256)]), b"", rng.randbytes(8)])
    if rng.random() < 0.2:
        del out[rng.randrange(len(out)) :]
    return bytes(out) or b"\0"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    plain = write_model(root / "plain", "llama", num_hidden_layers=1, vocab_size=16)
    return {name: quantise(plain, root / str(index), form)[0] for index, (name, form) in enumerate(FORMATS.items())}


MODULES = {
    "self_attn.q_proj": (48, 48),
    "self_attn.k_proj": (24, 48),
    "mlp.up_proj": (80, 48),
    "mlp.down_proj": (48, 80),
}


@sample(1500)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(FORMATS)))
def test_damaged_quantised_weights(quantised: dict[str, Path], seed: int, name: str) -> None:
    rng = random.Random(seed)
    whole = quantised[name]
    raw = (whole / "model.safetensors").read_bytes()
    damaged = whole.with_name("damaged")
    damaged.mkdir(exist_ok=True)
    mutation = mutated(raw, rng, header=8 + struct.unpack("<Q", raw[:8])[0])
    (damaged / "model.safetensors").write_bytes(mutation)
    config = json.loads((whole / "config.json").read_text())
    if rng.random() < 0.3:
        path = rng.choice(places(config["quantization_config"]))
        value = rng.choice([None, 0, -1, 1, 3, 16, 2**40, "group", [1, 2], {}, True, 8.5])
        config["quantization_config"] = put(config["quantization_config"], path, value)
    (damaged / "config.json").write_text(json.dumps(config))

    def read() -> list[Any]:
        files = WeightFiles(damaged, ModelConfig.load(damaged).quantization)
        module = rng.choice(list(MODULES))
        rows, cols = (slice(*sorted(rng.sample(range(size + 1), 2))) for size in MODULES[module])
        return [files.read_float(f"model.layers.0.{module}.weight", MODULES[module], rows=rows, cols=cols)]

    memory_bounded(read, num_bytes=len(mutation))


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    return write_gguf_model(root / "whole.gguf", root / "plain", "Q4_K", num_layers=1)


@sample(1000)
@given(seed=st.integers(0, 2**32))
def test_damaged_gguf_models(tmp_path_factory: pytest.TempPathFactory, gguf_model: Path, seed: int) -> None:
    """Config, tokenizer and tensors of a mutated file."""
    rng = random.Random(seed)
    folder = tmp_path_factory.getbasetemp() / "gguf-model"
    folder.mkdir(exist_ok=True)
    mutation = mutated(gguf_model.read_bytes(), rng, header=4500)
    (folder / "model.gguf").write_bytes(mutation)

    def read() -> list[Any]:
        describe(folder / "model.gguf", folder)
        ModelConfig.load(folder)
        file = GGUFTensors(folder / "model.gguf")
        return [file.get_tensor(name) for name in rng.sample(file.keys(), min(4, len(file.keys())))]

    memory_bounded(read, num_bytes=len(mutation))


@sample(600)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["Q4_0", "Q4_1", "Q5_1", "Q6_K"]))
def test_codes_of_damaged_gguf_models(tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str) -> None:
    """Blocks that stay as they are stand for the values that are read: both are an error, or equal."""
    rng = random.Random(seed)
    folder = tmp_path_factory.getbasetemp() / f"gguf-codes-{kind}"
    if not folder.exists():
        folder.mkdir()
        write_gguf_model(folder / "whole.gguf", folder / "plain", kind, num_layers=1)
    mutation = mutated((folder / "whole.gguf").read_bytes(), rng, header=4500)
    (folder / "model.gguf").write_bytes(mutation)

    def read() -> list[Any]:
        file = GGUFTensors(folder / "model.gguf")
        names = [name for name in file.keys() if file.is_quantised(name)]  # noqa: SIM118
        found = []
        for name in rng.sample(names, min(3, len(names))):
            rows = slice(*sorted(rng.sample(range(file.get_slice(name).get_shape()[0] + 1), 2)))
            found.append(file.get_slice(name).codes(rows).values())
            assert np.array_equal(found[-1], file.get_slice(name)[rows,].numpy())
        return found

    memory_bounded(read, num_bytes=len(mutation))


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
