"""A real deployment on Ray: the openai client, faults, and Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from serving import Server, serving

pytestmark = pytest.mark.ray

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
TOPICS = ("rivers", "birds", "bridges", "bread", "clouds", "trains", "islands", "paper")


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0)
    assert "Paris" in (completion.choices[0].message.content or "")
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_chat_streams_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0)
    stream = client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions(client: openai.OpenAI) -> None:
    arguments = {"model": "smollm2", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**arguments)  # type: ignore[call-overload]
    parts = client.completions.create(stream=True, **arguments)  # type: ignore[call-overload]
    assert "four" in whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_stop_string_and_seed(client: openai.OpenAI) -> None:
    stopped = client.completions.create(
        model="smollm2", prompt="One, two, three,", temperature=0, max_tokens=30, stop=[" five"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "five" not in stopped.choices[0].text
    texts = {
        client.chat.completions.create(
            model="smollm2", messages=FRANCE, temperature=1.0, seed=11, max_tokens=24, extra_body={"speculative": s}
        )
        .choices[0]
        .message.content
        for s in ({"enabled": False}, {"enabled": True}, {"max_k": 1})
    }
    assert len(texts) == 1, "equal seeds give equal text at every K"


def test_speculation_is_per_request(client: openai.OpenAI) -> None:
    def usage(options: dict[str, object]) -> dict[str, int]:
        completion = client.chat.completions.create(
            model="smollm2", messages=FRANCE, temperature=0, extra_body={"speculative": options}
        )
        assert completion.usage is not None
        counts: dict[str, int] = (completion.usage.model_extra or {})["speculative"]
        return counts

    assert usage({"enabled": False}) == {"drafted": 0, "accepted": 0}
    assert usage({"enabled": True})["drafted"] > 0


def test_errors_are_openai_shaped(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=FRANCE)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="smollm2", messages=FRANCE, extra_body={"no_such_option": 1})
    assert "no_such_option" in str(unknown.value)
    too_long = httpx.post(
        f"{server.url}/v1/completions", json={"model": "smollm2", "prompt": "word " * 9000}, timeout=60
    )
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_a_disconnect_frees_the_request(server: Server) -> None:
    """A client that disconnects 7,000 tokens early must not slow down the next one."""
    body = {"model": "smollm2", "prompt": "Count: 1 2 3", "max_tokens": 7000, "temperature": 0, "stream": True}
    alone = _seconds_for_40_tokens(server)
    with ThreadPoolExecutor(6) as pool:

        def leave_early(_: int) -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        break

        list(pool.map(leave_early, range(6)))
    time.sleep(0.5)
    assert _seconds_for_40_tokens(server) < 2.5 * alone + 0.5


def _seconds_for_40_tokens(server: Server) -> float:
    begin = time.monotonic()
    body = {"model": "smollm2", "prompt": "A list of words:", "max_tokens": 40, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    return time.monotonic() - begin


async def _ask_all(url: str, *, speculative: bool, tokens: int = 48) -> list[str]:
    async def one(client: httpx.AsyncClient, topic: str) -> str:
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": f"Write a short story about {topic}."}],
            "temperature": 0,
            "max_tokens": tokens,
            "stream": True,
            "speculative": {"enabled": speculative},
        }
        text = []
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    for choice in json.loads(line[5:])["choices"]:
                        text.append(choice["delta"].get("content") or "")
        return "".join(text)

    async with httpx.AsyncClient(timeout=120) as client:
        return await asyncio.gather(*(one(client, topic) for topic in TOPICS))


@pytest.fixture(scope="module")
def undrafted(server: Server) -> list[str]:
    """Responses of eight streams without a draft."""
    return asyncio.run(_ask_all(server.url, speculative=False))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_dead_draft_costs_speculation_only(server: Server, undrafted: list[str], number: signal.Signals) -> None:
    draft = server.actor("DraftActor")

    async def with_fault() -> list[str]:
        responses = asyncio.create_task(_ask_all(server.url, speculative=True))
        await asyncio.sleep(1.0)
        assert not responses.done()
        os.kill(draft.pid, number)
        return await responses

    assert asyncio.run(with_fault()) == undrafted
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/health").json() != {"status": "ok", "reason": "", "draft": "up"}:
        assert time.monotonic() < deadline, "speculation did not return within 30 s"
        time.sleep(0.2)
    # A stopped process cannot end itself: Ray gives it 5 s, then kills it. The new draft may be up before that.
    _, alive = psutil.wait_procs([draft], timeout=15)
    assert not alive, "the process of the old draft stays"
    assert server.actor("DraftActor").pid != draft.pid


def test_a_dead_controller_is_replaced_while_requests_go_on(server: Server) -> None:
    controller = server.actor("ControllerActor")
    controller.kill()
    assert asyncio.run(_ask_all(server.url, speculative=True, tokens=8))
    deadline = time.monotonic() + 30
    while True:
        try:
            assert server.actor("ControllerActor").pid != controller.pid
            break
        except ValueError:  # none yet
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_two_shards_give_the_same_text_and_nothing_is_left_after_ctrl_c(
    server: Server, client: openai.OpenAI, tmp_path: Path
) -> None:
    one = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=24)
    before = {folder.name for folder in Path("/tmp").glob("paceline-*")}
    with serving(tmp_path / "log", "--dtype", "float32", "--tp", "2", "--draft", "ngram") as running:
        assert len([p for p in running.processes() if "ray::ShardActor" in " ".join(p.cmdline())]) == 2
        both = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none").chat.completions.create(
            model="smollm2", messages=FRANCE, temperature=0, max_tokens=24
        )
        assert both.choices[0].message.content == one.choices[0].message.content
        assert running.stop() == []
        assert running.process.returncode == 0
    left = {folder.name for folder in Path("/tmp").glob("paceline-*")} - before
    assert not left


def test_a_dead_target_costs_time_only(server: Server, undrafted: list[str]) -> None:
    """Running streams continue on the next target, waiting ones start there: same tokens, no gap."""
    shard = server.actor("ShardActor")

    async def with_fault() -> list[str]:
        responses = asyncio.create_task(_ask_all(server.url, speculative=True))
        await asyncio.sleep(1.0)
        assert not responses.done()
        os.kill(shard.pid, signal.SIGKILL)
        late = asyncio.create_task(_ask_all(server.url, speculative=True))
        assert await late == undrafted, "requests that come while there is no target wait for it"
        return await responses

    assert asyncio.run(with_fault()) == undrafted
    assert server.actor("ShardActor").pid != shard.pid
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/health").json() != {"status": "ok", "reason": "", "draft": "up"}:
        assert time.monotonic() < deadline, "speculation did not return within 30 s"
        time.sleep(0.2)
