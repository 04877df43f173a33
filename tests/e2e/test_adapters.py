"""Adapters on a real deployment: the openai client chooses them, and the operator loads and drops one under load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import yaml
from safetensors.torch import save_file
from serving import Server, serving

from deployments.local.yaml_config import DEFAULT_FILE
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.store import resolve_model
from engine.lora.adapter_files import module_shapes
from engine.metrics.definitions import METRICS

pytestmark = pytest.mark.ray

KEY = "the operator's key"
QUESTION = [{"role": "user", "content": "Name three colours and say why you like them."}]
NUM_TOKENS = 24


def write_random(folder: Path, *, seed: int, rank: int, targets: list[str]) -> Path:
    """A random adapter of the default model that changes its texts and keeps them readable."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_out, num_in) in module_shapes(ModelConfig.load(resolve_model("smollm2"))).items():
        if name.split(".")[-1] in targets:
            for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                values = 0.03 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_random(home / "one", seed=1, rank=8, targets=["q_proj", "v_proj", "o_proj"]),
        "two": write_random(home / "two", seed=2, rank=4, targets=["k_proj", "up_proj", "down_proj"]),
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default deployment in float32, in which equal requests give equal texts in every batch, with two adapters."""
    home = tmp_path_factory.mktemp("server")
    values: dict[str, Any] = yaml.safe_load(DEFAULT_FILE.read_text())
    lora = {"adapters": {name: str(folder) for name, folder in folders.items()}, "max_loras": 3}
    values["applications"][0]["args"]["engine"] |= {"dtype": "float32", "lora": lora, "kv_cache_tokens": 8192}
    config = home / "deployment.yaml"
    config.write_text(yaml.safe_dump(values))
    with serving(home / "log", "--config", str(config), env={"PACELINE_ADMIN_KEY": KEY}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, model: str, *, drafts: bool = True) -> str:
    completion = client.chat.completions.create(
        model=model,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"speculative": {"enabled": drafts}},
    )
    assert completion.model == model
    return completion.choices[0].message.content or ""


def operate(server: Server, action: str, **body: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/v1/{action}_lora_adapter", json=body, headers=headers, timeout=60)


def test_adapters_are_models_that_share_batches(client: openai.OpenAI) -> None:
    listed = {model.id: getattr(model, "parent", None) for model in client.models.list().data}
    assert listed == {"smollm2": None, "one": "smollm2", "two": "smollm2"}
    alone = {model: ask(client, model, drafts=False) for model in listed}
    assert len(set(alone.values())) == 3
    names = list(listed) * 4
    with ThreadPoolExecutor(len(names)) as pool:
        texts = list(pool.map(lambda name: ask(client, name), names))
    assert texts == [alone[name] for name in names], "drafts and neighbours change nothing"


def test_an_adapter_comes_and_goes_under_load(server: Server, client: openai.OpenAI, folders: dict[str, Path]) -> None:
    expected = {name: ask(client, name) for name in ("smollm2", "one", "two")}
    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(ask, client, name) for name in expected for _ in range(6)]
        for _ in range(3):
            assert operate(server, "load", lora_name="extra", lora_path=str(folders["two"])).status_code == 200
            assert ask(client, "extra") == expected["two"]
            assert operate(server, "unload", lora_name="extra").status_code == 200
            with pytest.raises(openai.NotFoundError, match="'extra' does not exist"):
                ask(client, "extra")
        texts = [future.result() for future in load]
    assert texts == [expected[name] for name in expected for _ in range(6)]


def test_metrics_name_the_adapters(server: Server, client: openai.OpenAI) -> None:
    ask(client, "one")
    metrics = httpx.get(f"{server.url}/metrics", timeout=10).text
    for metric in METRICS:
        if metric.name.startswith("paceline_adapter_"):
            assert re.search(rf'^{metric.name}{{[^}}]*adapter="one"', metrics, re.MULTILINE), metric.name


def test_a_folder_that_does_not_fit_is_refused(server: Server, tmp_path: Path) -> None:
    response = operate(server, "load", lora_name="bad", lora_path=str(tmp_path))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_path"


def test_a_restarted_target_has_its_adapters_again(server: Server, client: openai.OpenAI) -> None:
    expected = ask(client, "one")
    server.actor("ShardActor").kill()
    assert ask(client, "one") == expected
