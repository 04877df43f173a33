"""The `openai` client and raw sockets against the application under uvicorn, on loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import pydantic
import pytest
import uvicorn
from fake_engine import FakeEngine
from tiny_tokenizer import byte_level

from deployments.engine_client import Health
from deployments.http.app import ApiDependencies, ApiLimits, build_api
from deployments.text.tokenizer import TextCodec
from engine.errors import EngineError, EngineUnavailable, QueueFull
from engine.messages import Delta, Submit
from engine.sampling.grammar import checked

TOKENIZER = byte_level()
CODEC = TextCodec(TOKENIZER, eos_token_ids=[TOKENIZER.eos_token_id])
TEXT = "the quick 🙂 brown fox"
MESSAGES = [{"role": "user", "content": "go"}]


@dataclass
class Served:
    """A running server. `engine` may be replaced between requests."""

    url: str
    engine: FakeEngine
    client: openai.OpenAI

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        return self.engine.generate(submit)

    async def health(self) -> Health:
        return await self.engine.health()


@pytest.fixture(scope="module")
def running_server() -> Iterator[Served]:
    served = Served("", make_engine(), None)
    app = build_api(
        ApiDependencies(
            engine=served,
            codec=CODEC,
            check_grammar=checked,
            model_name="tiny",
            created=7,
            limits=ApiLimits(max_model_len=2048, vocab_size=CODEC.vocab_size),
        )
    )
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    served.url = f"http://127.0.0.1:{port}"
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as served.client:
        yield served
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def served(running_server: Served) -> Served:
    running_server.engine = make_engine()
    return running_server


def make_engine(**options: object) -> FakeEngine:
    return FakeEngine(**{"script": CODEC.encode(TEXT), "eos_token_id": TOKENIZER.eos_token_id, **options})


def wait_until(is_so: Callable[[], bool], timeout_s: float = 5) -> float:
    """Seconds until the condition held."""
    start = time.perf_counter()
    while not is_so():
        assert time.perf_counter() - start < timeout_s, "not so in time"
        time.sleep(0.002)
    return time.perf_counter() - start


def test_chat_streaming_and_not(served: Served) -> None:
    whole = served.client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        served.client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == whole.usage.speculative["accepted"]


def test_completions_streaming_and_not(served: Served) -> None:
    options = {"model": "tiny", "prompt": "go", "max_tokens": 100, "stop": ["fox"]}
    whole = served.client.completions.create(**options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (TEXT.removesuffix("fox"), "stop")
    assert whole.id.startswith("cmpl-")
    chunks = list(served.client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_choices_with_logprobs_streaming_and_not(served: Served) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "n": 3, "seed": 1, "logprobs": True, "top_logprobs": 2}
    whole = served.client.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3
    assert all(len(token.top_logprobs) == 2 for choice in whole.choices for token in choice.logprobs.content)
    streamed: dict[int, str] = {}
    num_tokens = 0
    for chunk in served.client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
        num_tokens += len(choice.logprobs.content) if choice.logprobs else 0
    assert streamed == texts
    assert num_tokens == whole.usage.completion_tokens


def test_several_prompts_with_echo(served: Served) -> None:
    completion = served.client.completions.create(
        model="tiny", prompt=["go", "now"], echo=True, logprobs=1, max_tokens=2
    )
    assert [choice.text[:3] for choice in completion.choices] == ["got", "now"]
    assert [choice.logprobs.token_logprobs[0] for choice in completion.choices] == [None, None]


class Place(pydantic.BaseModel):
    city: str
    days: int


def test_structured_output_is_parsed_by_the_client(served: Served) -> None:
    served.engine = make_engine(script=CODEC.encode('{"city": "Paris", "days": 3}'))
    completion = served.client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Place)
    assert completion.choices[0].message.parsed == Place(city="Paris", days=3)
    grammar = served.engine.submitted[0].sampling.grammar
    assert (grammar.kind, "city" in grammar.text) == ("json_schema", True)


def test_an_answer_can_be_sent_back_and_speculation_capped(served: Served) -> None:
    first = served.client.chat.completions.create(model="tiny", messages=MESSAGES)
    served.client.chat.completions.create(
        model="tiny",
        messages=[*MESSAGES, first.choices[0].message, *MESSAGES],
        extra_body={"speculative": {"enabled": True, "max_k": 3}},
    )
    assert served.engine.submitted[-1].speculative.max_k == 3


def test_models(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").created == 7
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "refusal", "raised"),
    [
        ({"model": "other"}, None, openai.NotFoundError),
        ({"temperature": 5}, None, openai.BadRequestError),
        ({"max_tokens": 0}, None, openai.BadRequestError),
        ({"extra_body": {"top_k": -5}}, None, openai.BadRequestError),
        ({}, QueueFull("full", retry_after_s=1), openai.RateLimitError),
        ({}, EngineUnavailable("starting"), openai.InternalServerError),
        ({}, EngineError("broken"), openai.InternalServerError),
    ],
)
def test_errors_are_raised_as_openai_classes(
    served: Served, options: dict[str, object], refusal: Exception | None, raised: type[Exception], stream: bool
) -> None:
    served.engine.refusal = refusal
    with pytest.raises(raised) as caught:
        served.client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "stream": stream, **options})
    assert caught.value.body["message"]
    assert caught.value.request_id


def test_an_error_in_mid_stream_is_raised(served: Served) -> None:
    served.engine = make_engine(fail_after=8, failure=EngineError("the step failed"))
    stream = served.client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        list(stream)


def test_a_client_that_leaves_a_stream_frees_its_request_at_once(served: Served) -> None:
    served.engine = make_engine(script=CODEC.encode("go " * 200), step_s=0.01, max_step=1)
    stream = served.client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    next(iter(stream))
    assert served.engine.running
    stream.close()
    assert wait_until(lambda: not served.engine.running) < 0.5
    assert len(served.engine.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gives_up_waiting_frees_its_request_at_once(served: Served, stream: bool) -> None:
    served.engine = make_engine(step_s=3600)
    with pytest.raises(openai.APITimeoutError):
        served.client.completions.create(model="tiny", prompt="go", stream=stream, timeout=0.2)
    assert wait_until(lambda: not served.engine.running) < 0.5
    assert len(served.engine.aborted) == 1


def test_each_step_arrives_when_it_is_made(served: Served) -> None:
    """Nothing between the engine and the socket buffers events: the first arrives long before the last."""
    served.engine = make_engine(step_s=0.1, max_step=3)
    start = time.perf_counter()
    arrivals = []
    for _ in served.client.completions.create(model="tiny", prompt="go", max_tokens=9, stream=True):
        arrivals.append(time.perf_counter() - start)
    assert len(arrivals) >= 3
    assert arrivals[-1] - arrivals[0] > 0.1 * (len(arrivals) - 1) * 0.7


def test_a_long_prompt_does_not_hold_up_running_streams(served: Served) -> None:
    """Long prompts are tokenised in a thread, so a stream with 5 ms steps goes on."""
    served.engine = make_engine(script=CODEC.encode("go " * 300), step_s=0.005, max_step=1)
    gaps, durations, is_done = [], [], threading.Event()

    def send_long() -> None:
        for _ in range(2):
            begin = time.perf_counter()
            response = httpx.post(
                f"{served.url}/v1/completions", json={"model": "tiny", "prompt": "go " * 400_000}, timeout=60
            )
            durations.append(time.perf_counter() - begin)
            assert response.status_code == 400
        is_done.set()

    with ThreadPoolExecutor() as pool:
        stream = served.client.completions.create(model="tiny", prompt="go", max_tokens=600, stream=True)
        next(iter(stream))
        sending = pool.submit(send_long)
        before = time.perf_counter()
        for _ in stream:
            now = time.perf_counter()
            gaps.append(now - before)
            before = now
            if is_done.is_set() or sending.done():
                break
        stream.close()
        sending.result()
    assert len(gaps) > 5
    assert max(gaps) < 0.5 * min(durations), "the stream stood still while a prompt was tokenised"


def test_32_streams_at_once(served: Served) -> None:
    served.engine = make_engine(step_s=0.01)

    def run(index: int) -> str:
        chunks = served.client.completions.create(model="tiny", prompt="go", max_tokens=4 + index % 8, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(run, range(32)))
    assert texts == [CODEC.decode(served.engine.script[: 4 + index % 8]).rstrip("\ufffd") for index in range(32)]
    assert served.engine.peak_running > 4
    assert not served.engine.running
