"""Where models come from: folders, the embedded default, the hub; conversion that is whole, exact and raced safely."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_gguf import write_gguf

from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import convert_embedded, embedded_file, resolve_model
from engine.errors import ConfigError
from engine.model.load import load_model

CHARACTERS = st.characters(codec="utf-8", max_codepoint=0x1FFFF, categories=("L", "N", "P", "Z", "S"))
"""Without control characters and code points nobody uses: the model's vocabulary lacks a few of their bytes."""


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_folder_is_taken_as_it_is(tmp_path: Path, tiny_gguf: Path) -> None:
    folder = convert_embedded(tiny_gguf, tmp_path, progress=False)
    assert resolve_model(str(folder)) == folder
    assert load_model(folder).config.num_layers == 1


def test_smollm2_weights_are_those_that_transformers_reads_from_the_gguf() -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = resolve_model("smollm2", progress=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(embedded_file()), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name


def test_smollm2_config() -> None:
    config = ModelConfig.load(resolve_model("smollm2", progress=False))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps) == (49152, 100000.0, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.max_model_len == 8192


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(resolve_model("smollm2", progress=False))


@settings(max_examples=200)
@given(text=st.text(alphabet=CHARACTERS, max_size=40))
def test_smollm2_tokenizer_round_trips(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_smollm2_tokenizer_details(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    pieces = [tokenizer.decode([token]) for token in tokenizer("It was 12345 km/h in 1969.")["input_ids"]]
    assert pieces == ["It", " was", " ", *"12345", " km", "/", "h", " in", " ", *"1969", "."]
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == 49152
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    theirs = transformers.AutoTokenizer.from_pretrained(embedded_file().parent, gguf_file=embedded_file().name)
    for text in ("Hello  world\n\tfoo_bar(42)", "naïve café — 日本語 🎉", "don't  stop", " 3.14159 "):
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]


def test_smollm2_chat_template(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


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


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "other.gguf", architecture="falcon")
    with pytest.raises(ConfigError, match=r"general\.architecture = 'falcon'; allowed: llama"):
        convert_embedded(source, tmp_path / "cache", progress=False)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00", b"PK\x03\x04" * 20, b"GGUF" + b"\xff" * 99])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "bad.gguf"
    source.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.gguf"):
        convert_embedded(source, tmp_path / "cache", progress=False)


def test_a_missing_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.gguf"):
        convert_embedded(tmp_path / "gone.gguf", tmp_path, progress=False)


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


def test_more_layers_than_tensors_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    where = content.index(b"llama.block_count") + len(b"llama.block_count") + 4  # behind the value's type
    content[where : where + 4] = struct.pack("<I", 2**31 - 1)
    source = tmp_path / "many.gguf"
    source.write_bytes(content)
    with pytest.raises(ConfigError, match=r"llama\.block_count = 2147483647"):
        convert_embedded(source, tmp_path / "cache", progress=False)


def test_reading_beyond_the_metadata_is_refused(tiny_gguf: Path) -> None:
    with GGUFFile(tiny_gguf) as file:
        with pytest.raises(ConfigError, match="lacks tensor nothing"):
            file.read("nothing")
        with pytest.raises(ConfigError, match=r"general\.architecture = 'llama'; expected int"):
            file.get("general.architecture", int)
