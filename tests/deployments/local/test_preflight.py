"""What would fail minutes later fails before anything is started, with the remedy in one line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_models import DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, write_gguf_model
from native_library import needs_library
from tiny_adapters import write_adapter
from tiny_gguf import TOKENS
from tiny_models import write_model

from deployments.local import machine, preflight
from deployments.local.ports import LOOPBACK, check_port, free_port, free_ports
from deployments.local.weights import model_bytes, weights_line
from deployments.settings import AppSettings
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import gguf_folder
from engine.config import EngineConfig, LoraConfig
from engine.errors import ConfigError
from engine.lora.adapter_files import num_adapter_values

GIB = 1 << 30


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settings(**values: Any) -> AppSettings:
    return AppSettings.parse({"engine": {"model": "some/model"}} | values)


def test_a_busy_port_is_named_with_its_owner(cache: Path, busy_port: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"http_options\.port: 127\.0\.0\.1:{busy_port} is in use by .*pid {os.getpid()}"
    ):
        preflight.check_machine(settings(), LOOPBACK, busy_port)


def test_a_busy_metrics_port_is_named(cache: Path, busy_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"metrics_port: 127\.0\.0\.1:{busy_port} is in use"):
        preflight.check_machine(settings(metrics_port=busy_port), LOOPBACK, free_port())


def test_a_busy_direct_port_is_named(cache: Path, busy_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"direct_port: 127\.0\.0\.1:{busy_port} is in use"):
        preflight.check_machine(settings(direct_port=busy_port), LOOPBACK, free_port())


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:80 cannot be listened on: .*; use another"):
        check_port("port", "192.0.2.1", 80, "use another")


def test_internal_ports_move_on_and_never_meet(busy_port: int) -> None:
    ports = free_ports(busy_port, busy_port, *[0] * 300)
    assert busy_port not in ports
    assert len(set(ports)) == 302
    assert set(ports) <= set(range(24_000, 32_000)), "no outgoing connection gets one of them"
    wanted = free_port()
    assert free_port(wanted) == wanted


def learning(*keys: str, **values: Any) -> AppSettings:
    speculative = {"draft": "smollm2-eagle", "adaptation": {"enabled": True, "keys": list(keys)}}
    return settings(engine={"model": "some/model", "speculative": speculative}, **values)


def test_a_draft_that_learns_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_API_KEYS", raising=False)
    assert preflight.adaptation_line(settings()) is None
    assert "learns from every request" in (preflight.adaptation_line(learning()) or "")
    monkeypatch.setenv("PACELINE_API_KEYS", "a" * 20)
    assert "the requests of key-1" in (preflight.adaptation_line(learning("key-1")) or "")
    assert "of nobody" in (preflight.adaptation_line(learning()) or "")


def test_a_key_to_learn_from_must_exist(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEYS", "a" * 20)
    with pytest.raises(ConfigError, match=r"adaptation\.keys: no key has the name bob; the keys of .* are key-1"):
        preflight.check_machine(learning("key-1", "bob"), LOOPBACK, free_port())


def test_a_missing_key_file_is_named(cache: Path, tmp_path: Path) -> None:
    missing = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match=rf"api_keys_file: {missing}: No such file.*paceline key"):
        preflight.check_machine(settings(api_keys_file=str(missing)), LOOPBACK, free_port())


def test_a_trace_file_that_cannot_be_written_is_named(cache: Path, tmp_path: Path) -> None:
    preflight.check_machine(settings(trace_file=str(tmp_path / "made" / "trace")), LOOPBACK, free_port())
    wrong = tmp_path / "made" / "trace" / "trace"
    with pytest.raises(ConfigError, match=rf"trace_file: {wrong}: .*; choose another file"):
        preflight.check_machine(settings(trace_file=str(wrong)), LOOPBACK, free_port())


def test_a_cache_that_cannot_be_made_is_named(cache: Path) -> None:
    cache.touch()
    with pytest.raises(ConfigError, match=rf"cannot write to the cache {cache}: File exists; .*PACELINE_CACHE"):
        preflight.check_machine(settings(), LOOPBACK, free_port())


def test_all_is_well_on_a_machine_that_has_what_is_needed(cache: Path) -> None:
    preflight.check_machine(settings(), LOOPBACK, free_port())
    assert cache.is_dir()


def test_cuda_without_a_gpu_is_refused_before_torch_is_imported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    with pytest.raises(ConfigError, match=r"device: cuda with 1 shards given, this machine shows 0 NVIDIA GPUs"):
        preflight.check_machine(settings(engine={"model": "m", "device": "cuda"}), LOOPBACK, free_port())


def model_folder(folder: Path, num_bytes: int) -> Path:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    return folder


def test_a_plan_that_does_not_fit_into_memory_says_what_takes_how_much(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", 10 * GIB)
    plan = settings(engine={"model": str(folder), "kv_cache_tokens": 1 << 20})
    weights, cache = 10 * GIB, 2 * 4 * 2 * 16 * 2 * (1 << 20)
    needed = weights + cache + preflight.PROCESS_BYTES + preflight.SHARD_BYTES
    preflight.check_memory(plan, folder, None, free_bytes=needed)
    with pytest.raises(
        ConfigError, match=r"memory: 13\.3 GB are free, .* 13\.3 GB \(weights 10\.7 GB, KV cache 0\.5 GB, .*use a"
    ):
        preflight.check_memory(plan, folder, None, free_bytes=needed - 1)


def test_float32_doubles_the_weights_and_a_draft_counts(tmp_path: Path) -> None:
    folder, draft = model_folder(tmp_path / "model", 1 * GIB), model_folder(tmp_path / "draft", 1 * GIB)
    plan = settings(engine={"model": str(folder), "dtype": "float32", "kv_cache_tokens": 16})
    needed = 3 * GIB + 2 * 4 * 2 * 16 * 4 * 16 + preflight.PROCESS_BYTES + preflight.SHARD_BYTES
    preflight.check_memory(plan, folder, draft, free_bytes=needed)
    with pytest.raises(ConfigError, match="memory"):
        preflight.check_memory(plan, folder, draft, free_bytes=needed - 1)


def test_an_int8_cache_counts_its_codes_and_scales(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", 1 * GIB)
    plan = settings(engine={"model": str(folder), "kv_cache_tokens": 1 << 20, "kv_cache_dtype": "int8"})
    needed = 1 * GIB + 2 * 4 * 2 * (16 + 4) * (1 << 20) + preflight.PROCESS_BYTES + preflight.SHARD_BYTES
    preflight.check_memory(plan, folder, None, free_bytes=needed)
    with pytest.raises(ConfigError, match="memory"):
        preflight.check_memory(plan, folder, None, free_bytes=needed - 1)


def test_quantised_weights_count_as_they_are_in_memory(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", 1000)
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}
    (folder / "config.json").write_text(json.dumps(config | quantised))
    plan = settings(engine={"model": str(folder), "kv_cache_tokens": 16})
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    weights, cache = 2 * (4 * layer + 64 * 64 + 64), 2 * 4 * 2 * 16 * 2 * 16
    needed = weights + cache + preflight.PROCESS_BYTES + preflight.SHARD_BYTES
    preflight.check_memory(plan, folder, None, free_bytes=needed)
    with pytest.raises(ConfigError, match="memory"):
        preflight.check_memory(plan, folder, None, free_bytes=needed - 1)
    assert weights_line(plan.engine, folder) == (
        "Weights: awq 4-bit integers, 0 MB in the files, dequantised at load to bfloat16: 0 MB in memory"
    )
    (folder / "config.json").write_text(json.dumps(config))
    assert weights_line(plan.engine, folder) is None


@needs_library
def test_gguf_weights_count_as_they_stay(tmp_path: Path) -> None:
    file = write_gguf_model(tmp_path / "model.gguf", tmp_path / "plain", "Q4_1")
    folder = gguf_folder(file, tmp_path / "cache")
    packed = settings(engine={"model": str(file)}).engine
    dequantised = settings(engine={"model": str(file), "packed": "off"}).engine
    matrices = 2 * len(TOKENS) * HIDDEN + LAYERS * HIDDEN * (2 * HEADS * DIM + 2 * KV_HEADS * DIM + 3 * INNER)
    norms = HIDDEN * (2 * LAYERS + 1)
    assert model_bytes(packed, folder)[0] == matrices * 5 // 8 + 2 * norms  # 4 bits, and 2 float16 per 32
    assert model_bytes(dequantised, folder)[0] == 2 * (matrices + norms)
    line = "Weights: GGUF, 1 MB in the files, packed on the native kernel (Q4_1): 1 MB in memory"
    assert weights_line(packed, folder) == line
    line = "Weights: GGUF, 1 MB in the files, dequantised at load to bfloat16: 2 MB in memory"
    assert weights_line(dequantised, folder) == line


class Disk:
    """Free bytes by folder, in place of the machine's."""

    def __init__(self, **free: int) -> None:
        self.free = free

    def __call__(self, path: Path) -> Any:
        return type("Usage", (), {"free": self.free[path.name], "total": GIB})


@pytest.mark.parametrize(
    ("shared", "temporary", "num_gpus", "message"),
    [
        (16 << 20, GIB, 0, None),  # Ray's object store goes to the temporary folder
        (16 << 20, 250 << 20, 0, r"disk: .* 0\.3 GB free, Ray needs 0\.3 GB there; .*--shm-size"),
        (GIB, 250 << 20, 0, None),
        (GIB, 1 << 20, 0, r"disk: .* has 1 MB free, Ray needs 0\.2 GB there; free some space there$"),
        (64 << 20, GIB, 1, None),
        (64 << 20, GIB, 2, r"shared memory: .* 67 MB free, NCCL needs 0\.1 GB for 2 GPUs; .*--shm-size=1g"),
        (128 << 20, GIB, 2, None),
    ],
)
def test_small_shared_memory_stops_only_what_has_no_other_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int, temporary: int, num_gpus: int, message: str | None
) -> None:
    folders = tmp_path / "shm", tmp_path / "tmp"
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(preflight.shutil, "disk_usage", Disk(shm=shared, tmp=temporary))
    device = "cuda" if num_gpus else "cpu"
    engine = EngineConfig.parse({"model": "m", "device": device, "tensor_parallel_size": max(1, num_gpus)})
    if message is None:
        preflight.check_shared_memory(engine, *folders)
    else:
        with pytest.raises(ConfigError, match=message):
            preflight.check_shared_memory(engine, *folders)


def test_a_container_s_limit_bounds_the_free_memory(tmp_path: Path) -> None:
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 5\ninactive_file 50000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert machine.free_memory(tmp_path) == 350_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory(tmp_path) > 1_000_000
    assert machine.free_memory(tmp_path / "none") > 1_000_000


def test_rows_of_nvidia_smi_are_read() -> None:
    (gpu,) = machine.parse_gpus("NVIDIA H200, 580.1, 143771, 140000\nbroken, row\n, , [N/A], 0\n")
    assert gpu == machine.Gpu("NVIDIA H200", "580.1", 143771 << 20, 140000 << 20)


def test_the_torch_build_is_that_which_torch_says() -> None:
    import torch

    assert machine.torch_build() == machine.TorchBuild(torch.__version__, torch.version.cuda)


def test_adapters_are_named_checked_and_counted(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    adapter = write_adapter(tmp_path / "adapter", model, rank=2, ranks={"q_proj": 5}, targets=("q_proj", "v_proj"))
    lora = {"adapters": {"sql": str(adapter)}, "max_loras": 3, "max_lora_rank": 10}
    plan = settings(engine={"model": str(model), "kv_cache_tokens": 16, "lora": lora})
    assert preflight.adapter_lines(plan.engine, model) == ["Adapter: sql, rank up to 5, 6 layers"]
    # Inputs and outputs of q, k, v, o, gate, up and down of three layers, in bfloat16.
    values = 3 * ((48 + 48) + 2 * (48 + 24) + (48 + 48) + 3 * (48 + 80))
    with pytest.raises(ConfigError, match=r"adapters 0 MB"):
        preflight.check_memory(plan, model, None, free_bytes=0)
    assert num_adapter_values(LoraConfig.parse(lora), ModelConfig.load(model)) == values * 3 * 10
    bad = settings(engine={"model": str(model), "lora": {"adapters": {"sql": str(tmp_path / "none")}}})
    with pytest.raises(ConfigError, match=r"engine\.lora\.adapters\.sql: lora: .* is no folder"):
        preflight.adapter_lines(bad.engine, model)
    assert preflight.adapter_lines(settings(engine={"model": str(model)}).engine, model) == []
