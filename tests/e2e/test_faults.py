"""Faults in a real server with two shards and API keys: processes killed and stopped under load, drain, the logs.

Promise: a request ends with its exact tokens, or with one clear error; nothing hangs; no key or prompt is logged.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from serving import Server, serving

from deployments.http.keys import add_key, hash_key
from deployments.local.yaml_config import DEFAULT_FILE

pytestmark = pytest.mark.ray

TOPICS = ("rivers", "birds", "bridges", "bread")
HANG_S = 6.0
ADMIN_KEY = "operator-81f0c2d7"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return add_key(tmp_path_factory.getbasetemp() / "keys.yaml", "tests")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, key: str) -> Iterator[Server]:
    """SmolLM2 in fp32 on two shards."""
    folder = tmp_path_factory.mktemp("faults")
    values = yaml.safe_load(DEFAULT_FILE.read_text())
    args = values["applications"][0]["args"]
    args |= {"hang_timeout_s": HANG_S, "log_format": "json"}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    keys = tmp_path_factory.getbasetemp() / "keys.yaml"
    options = ["--config", str(folder / "config.yaml"), "--api-keys", str(keys), "--tp", "2", "--dtype", "float32"]
    with serving(folder / "log", *options, "--draft", "ngram", env={"PACELINE_ADMIN_KEY": ADMIN_KEY}) as running:
        yield running


def body(topic: str, tokens: int) -> dict[str, object]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Write a short story about {topic}."}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
    }


async def stream(url: str, key: str, topic: str, tokens: int) -> AsyncIterator[str]:
    """Text of the chunks. Raises AssertionError at an error event or an end without [DONE]."""
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx.AsyncClient(timeout=120, headers=headers) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body(topic, tokens)) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data:"):
                event = json.loads(line[5:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
    raise AssertionError("the stream ended without [DONE]")


async def answer(url: str, key: str, topic: str, tokens: int = 48) -> str:
    return "".join([piece async for piece in stream(url, key, topic, tokens)])


async def answers(server: Server, key: str) -> list[str]:
    return list(await asyncio.gather(*(answer(server.url, key, topic) for topic in TOPICS)))


@pytest.fixture(scope="module")
def expected(faulty: Server, key: str) -> list[str]:
    return asyncio.run(answers(faulty, key))


def shards(server: Server) -> list[psutil.Process]:
    """The processes of the shards by rank, which start in order."""
    found = [p for p in server.processes() if p.cmdline() and p.cmdline()[0].startswith("ray::ShardActor")]
    return sorted(found, key=lambda process: process.pid)


def with_fault(server: Server, key: str, pid: int, number: signal.Signals) -> tuple[list[str], float]:
    """Responses of streams during which a process gets a signal, and their seconds after it."""

    async def run() -> tuple[list[str], float]:
        running = asyncio.create_task(answers(server, key))
        await asyncio.sleep(1.0)
        assert not running.done()
        os.kill(pid, number)
        begin = time.monotonic()
        return await running, time.monotonic() - begin

    return asyncio.run(run())


def test_a_key_opens_and_its_absence_does_not(faulty: Server, key: str) -> None:
    url = f"{faulty.url}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {key}x"}).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert httpx.get(f"{faulty.url}/admin/pace", headers={"authorization": f"Bearer {key}"}).status_code == 401
    assert httpx.get(f"{faulty.url}/health").status_code == 200


def test_sockets_and_folders_are_for_their_owner_only(faulty: Server) -> None:
    """Named files of Paceline; shared memory has no name (`engine.ipc.shared_memory`)."""
    mine = {process.pid for process in faulty.processes()}
    for folder in Path("/tmp").glob("paceline-*"):
        if folder.stat().st_uid == os.geteuid():
            assert folder.stat().st_mode & 0o077 == 0, folder
    assert mine


def test_a_dead_second_shard_costs_time_only(faulty: Server, key: str, expected: list[str]) -> None:
    before = shards(faulty)
    texts, recovery_s = with_fault(faulty, key, before[1].pid, signal.SIGKILL)
    assert texts == expected
    assert recovery_s < 60
    assert {process.pid for process in shards(faulty)}.isdisjoint({process.pid for process in before})


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hung_shard_costs_time_only(faulty: Server, key: str, expected: list[str], rank: int) -> None:
    texts, recovery_s = with_fault(faulty, key, shards(faulty)[rank].pid, signal.SIGSTOP)
    assert texts == expected
    assert HANG_S / 2 < recovery_s < 90


@pytest.mark.slow
def test_a_dead_replica_ends_its_streams_and_is_replaced(faulty: Server, key: str, expected: list[str]) -> None:
    """The streams of a killed replica end at once with an error, and the next requests are served."""
    (replica,) = [p for p in faulty.processes() if p.cmdline() and "ServeReplica" in p.cmdline()[0]]
    with pytest.raises((AssertionError, httpx.HTTPError)):
        with_fault(faulty, key, replica.pid, signal.SIGKILL)
    deadline = time.monotonic() + 90
    while True:
        try:
            assert asyncio.run(answers(faulty, key)) == expected
            break
        except (AssertionError, httpx.HTTPError):
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_a_client_that_never_reads_harms_nobody(faulty: Server, key: str, expected: list[str]) -> None:
    async def run() -> None:
        request = json.dumps(body("islands", 64)).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(request)}\r\n\r\n"
        )
        host, port = faulty.url.removeprefix("http://").split(":")
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection(host, int(port), limit=1)
            writer.write(head.encode() + request)
            writers.append(writer)
        assert await answers(faulty, key) == expected
        for writer in writers:
            writer.transport.abort()

    asyncio.run(run())


def test_keys_and_prompts_are_in_no_log(faulty: Server, key: str, expected: list[str]) -> None:
    """All log lines of Ray, Serve and Paceline so far."""
    assert expected
    folders = {
        Path(parts[index + 1])
        for process in faulty.processes()
        for parts in [process.cmdline()]
        for index, part in enumerate(parts[:-1])
        if part in ("--temp-dir", "--temp_dir")
    }
    folders |= {
        Path(part.split("=", 1)[1])
        for process in faulty.processes()
        for part in process.cmdline()
        if part.startswith(("--temp-dir=", "--temp_dir="))
    }
    logs = [faulty.log, *(file for folder in folders for file in folder.rglob("*") if file.is_file())]
    texts = {file: file.read_bytes() for file in logs if file.suffix in (".log", ".out", ".err", "", ".json", ".yaml")}
    assert any(b'"request_id"' in text for text in texts.values()), "our own request log is among them"
    for secret in (key, ADMIN_KEY, "Write a short story about", hash_key(key)):
        assert [file for file, text in texts.items() if secret.encode() in text] == []


def test_sigterm_lets_streams_finish_and_takes_no_new_ones(faulty: Server, key: str, expected: list[str]) -> None:
    """Runs last, because it stops the server."""

    async def run() -> list[str]:
        running = asyncio.create_task(answers(faulty, key))
        await asyncio.sleep(0.5)
        faulty.processes()
        faulty.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        async with httpx.AsyncClient(timeout=30, headers={"authorization": f"Bearer {key}"}) as client:
            while True:
                late = await client.post(f"{faulty.url}/v1/completions", json={"model": "smollm2", "prompt": "Hi"})
                if late.status_code == 503:
                    break
                assert late.status_code == 200
                assert time.monotonic() < deadline
        assert late.headers["retry-after"]
        assert "draining" in late.json()["error"]["message"]
        assert not running.done(), "the test proves nothing when they were done before"
        return await running

    assert asyncio.run(run()) == expected
    assert faulty.process.wait(40) == 0
    _, alive = psutil.wait_procs(list(faulty.seen), timeout=2.0)
    assert alive == []
