"""The readers of model files, each on mutations of whole files that it can read. A case is a reader and a seed.

Promise of a case: `ConfigError`, or tensors whose two forms agree and that are not far larger than the file. Never
another exception, and soon.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_models import write_gguf_model
from quantised_models import FORMATS, quantise
from tiny_adapters import write_adapter
from tiny_models import write_model

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import WeightFiles
from engine.errors import ConfigError
from engine.gguf.convert import describe
from engine.gguf.tensors import GGUFTensors
from engine.lora.adapter_files import read_adapter
from engine.lora.adapter_set import AdapterSet
from engine.model.load import load_model

HANG_S = 20
"""CPU seconds of a case after which it counts as a hang."""
GGUF_TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
GGUF_HEADER = 4500
"""Bytes of metadata and tensor descriptions of the small GGUF models, about."""
MODULES = {
    "self_attn.q_proj": (48, 48),
    "self_attn.k_proj": (24, 48),
    "mlp.up_proj": (80, 48),
    "mlp.down_proj": (48, 80),
}
"""Some modules of the small quantised models, with their shapes."""
ODD_VALUES: tuple[Any, ...] = (None, 0, -1, 1, 3, 16, 2**40, "group", [1, 2], {}, True, 8.5, "", "all-linear", "(")

HEADER_VALUES: tuple[Any, ...] = (
    *ODD_VALUES,
    "F32",
    "F16",
    "BF16",
    "I8",
    "U8",
    "I32",
    "F8_E4M3",
    48,
    80,
    2304,
    [48, 48],
)
"""Values for the header of safetensors: types, sizes and offsets."""


@dataclass(frozen=True, slots=True)
class Case:
    """Mutated files, and what reads them."""

    files: dict[str, bytes]
    """By name."""
    read: Callable[[Path], list[Any]]
    """Reads the files out of a folder; returns arrays or tensors."""


Reader = Callable[[random.Random], Case]
"""Makes a case."""


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a tree with another value at a path."""
    if not path:
        return value
    changed = copy.deepcopy(tree)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def mutated(raw: bytes, rng: random.Random, *, header: int) -> bytes:
    """The bytes with a few of them changed, cut out or put in: in the data, in the header, or mostly there.

    Where only bytes are changed and none move, a reader gets further before it notices.
    """
    out = bytearray(raw)
    header = min(header, len(out))
    way = rng.random()
    for _ in range(rng.randint(1, 4)):
        if way < 0.2 and header < len(out):
            out[rng.randrange(header, len(out))] = rng.randrange(256)
        elif way < 0.5:
            out[rng.randrange(header)] = rng.choice([0, 1, 255, rng.randrange(256)])
        else:
            at = rng.randrange(min(header, len(out)) if rng.random() < 0.7 else len(out))
            out[at : at + rng.choice([0, 1, 1, 1, 8])] = rng.choice(
                [bytes([rng.randrange(256)]), b"", rng.randbytes(8)]
            )
    if way > 0.85:
        del out[rng.randrange(len(out)) :]
    return bytes(out) or b"\0"


def mutated_safetensors(raw: bytes, rng: random.Random) -> bytes:
    """The bytes mutated as by `mutated`, or with another value somewhere in the header, which stays JSON."""
    size = 8 + int(struct.unpack("<Q", raw[:8])[0])
    if rng.random() < 0.7:
        return mutated(raw, rng, header=size)
    header = json.loads(raw[8:size])
    for _ in range(rng.randint(1, 2)):
        header = put(header, rng.choice(places(header)), rng.choice(HEADER_VALUES))
        if not isinstance(header, dict):
            break
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[size:]


def refused_or_fine(call: Any, *arguments: Any, **options: Any) -> bool:
    """Whether it is fine; otherwise it must be a ConfigError, and soon, in seconds of this process's own."""
    begin = time.process_time()
    try:
        call(*arguments, **options)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - both outcomes are fine, another exception is not
        return False
    finally:
        assert time.process_time() - begin < HANG_S, "a hang"
    return True


def run_case(reader: Reader, folder: Path, seed: int | str) -> bool:
    """Whether the files of a case are read; False where they are refused.

    Raises:
        AssertionError: the promise is broken; or any other exception that the reader raises.
    """
    case = reader(random.Random(seed))
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    found: list[Any] = []
    is_read = refused_or_fine(lambda: found.extend(case.read(folder)))
    num_bytes = sum(len(content) for content in case.files.values())
    assert sum(tensor.nbytes for tensor in found) < 64 * num_bytes + (1 << 20), "too much memory"
    return is_read


def gguf_reader(root: Path) -> Reader:
    """Config, tokenizer and tensors of GGUF models of every type."""
    whole = {}
    for kind in GGUF_TYPES:
        file = root / f"{kind}.gguf"
        whole[kind] = write_gguf_model(file, root / f"plain-{kind}", kind, num_layers=1).read_bytes()

    def make(rng: random.Random) -> Case:
        raw = mutated(whole[rng.choice(GGUF_TYPES)], rng, header=GGUF_HEADER)
        return Case({"model.gguf": raw}, partial(_read_gguf, rng))

    return make


def _read_gguf(rng: random.Random, folder: Path) -> list[Any]:
    describe(folder / "model.gguf", folder)
    ModelConfig.load(folder)
    file = GGUFTensors(folder / "model.gguf")
    names = file.keys()
    found: list[Any] = [file.get_tensor(name) for name in rng.sample(names, min(2, len(names)))]
    packed = [name for name in names if file.is_quantised(name)]
    for name in rng.sample(packed, min(2, len(packed))):
        rows = slice(*sorted(rng.sample(range(file.get_slice(name).get_shape()[0] + 1), 2)))
        found.append(file.get_slice(name).codes(rows).values())
        assert np.array_equal(found[-1], file.get_slice(name)[rows,].numpy(), equal_nan=True), name
    return found


def quantised_reader(prefix: str, root: Path) -> Reader:
    """Weights and config of the quantised Hugging Face folders whose format begins with `prefix`."""
    plain = write_model(root / "plain", "llama", num_hidden_layers=1, vocab_size=16)
    names = [name for name in FORMATS if name.startswith(prefix)]
    folders = [quantise(plain, root / str(index), FORMATS[name])[0] for index, name in enumerate(names)]
    whole = [(read_bytes(folder), json.loads((folder / "config.json").read_text())) for folder in folders]

    def make(rng: random.Random) -> Case:
        raw, config = rng.choice(whole)
        if rng.random() < 0.3:
            settings = config["quantization_config"]
            changed = put(settings, rng.choice(places(settings)), rng.choice(ODD_VALUES))
            config = config | {"quantization_config": changed}
        mutation = mutated_safetensors(raw, rng)
        files = {"model.safetensors": mutation, "config.json": json.dumps(config).encode()}
        return Case(files, partial(_read_quantised, rng))

    return make


def _read_quantised(rng: random.Random, folder: Path) -> list[Any]:
    files = WeightFiles(folder, ModelConfig.load(folder).quantization)
    module = rng.choice(list(MODULES))
    name, shape = f"model.layers.0.{module}.weight", MODULES[module]
    rows, cols = (slice(*sorted(rng.sample(range(size + 1), 2))) for size in shape)
    read = files.read_float(name, shape, rows=rows, cols=cols)
    stored = files.quantised(name, shape, rows)
    if stored is not None:
        values = stored.codes().values()[:, cols]
        assert np.array_equal(values, read.float().numpy(), equal_nan=True), name
    return [read]


def adapter_reader(root: Path) -> Reader:
    """Weights and config of LoRA adapters, into the layers of a target."""
    plain = write_model(root / "plain", "llama", num_hidden_layers=1, vocab_size=16)
    adapters = AdapterSet(dtype=torch.float32, device=torch.device("cpu"))
    config = load_model(plain, dtype=torch.float32, kernel="torch", adapt=adapters.wrap).config
    ranks = {"q_proj": 5, "down_proj": 1}
    folders = [write_adapter(root / "all", plain), write_adapter(root / "ranks", plain, ranks=ranks, use_rslora=True)]
    whole = [(read_bytes(each, "adapter_model"), (each / "adapter_config.json").read_bytes()) for each in folders]

    def read(folder: Path) -> list[Any]:
        adapters.load(1, read_adapter(folder, config, max_rank=8))
        adapters.drop(1)
        return []

    def make(rng: random.Random) -> Case:
        raw, settings = rng.choice(whole)
        where = rng.random()
        if where < 0.3:
            values = json.loads(settings)
            settings = json.dumps(put(values, rng.choice(places(values)), rng.choice(ODD_VALUES))).encode()
        elif where < 0.5:
            settings = mutated(settings, rng, header=len(settings))
        if where > 0.4:
            raw = mutated_safetensors(raw, rng)
        return Case({"adapter_model.safetensors": raw, "adapter_config.json": settings}, read)

    return make


def read_bytes(folder: Path, stem: str = "model") -> bytes:
    """The safetensors file of a folder."""
    return (folder / f"{stem}.safetensors").read_bytes()


READERS: dict[str, Callable[[Path], Reader]] = {
    "gguf": gguf_reader,
    "compressed-tensors": partial(quantised_reader, "compressed-tensors"),
    "awq": partial(quantised_reader, "AWQ"),
    "gptq": partial(quantised_reader, "GPTQ"),
    "fp8": partial(quantised_reader, "FP8"),
    "adapters": adapter_reader,
}
