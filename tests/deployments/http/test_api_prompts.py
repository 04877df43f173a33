"""From texts and conversations to token ids over HTTP: what cannot be encoded, templates, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_harness import CODEC, COMPLETION, EOS, URLS, error_of, make_engine, post, talk

from deployments.text.tokenizer import TextCodec
from engine.checkpoint.store import resolve_model


def test_a_prompt_that_no_token_stands_for_is_refused() -> None:
    """A vocabulary may lack bytes; a prompt of only such bytes encodes to no tokens."""
    smollm2 = TextCodec.from_folder(resolve_model("smollm2", progress=False))
    engine = make_engine()

    async def send(client: httpx.AsyncClient) -> list[httpx.Response]:
        texts = ("\x04", "\x04\x06", "", "\x04a")
        return [await client.post("/v1/completions", json={**COMPLETION, "prompt": text}) for text in texts]

    *empty, kept = talk(engine, send, smollm2)
    for response in empty:
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
        assert "at least one token" in error_of(response)["message"]
    assert kept.status_code == 200
    assert len(engine.submitted) == 1


def test_a_conversation_can_be_continued_inside_its_last_turn() -> None:
    url, body = URLS["chat"]
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "one two"}]
    engine = make_engine()
    assert post(engine, url, {**body, "messages": turns, "continue_final_message": True}).status_code == 200
    assert CODEC.decode(engine.submitted[0].prompt).endswith("assistant\none two")
    post(engine, url, {**body, "messages": turns, "add_generation_prompt": False})
    assert engine.submitted[1].prompt[-2] == EOS


def test_template_options_reach_the_template_and_may_not_replace_it() -> None:
    url, body = URLS["chat"]
    assert post(make_engine(), url, {**body, "chat_template_kwargs": {"enable_thinking": False}}).status_code == 200
    for name in ("chat_template", "messages", "tokenize", "tools", "add_generation_prompt"):
        response = post(make_engine(), url, {**body, "chat_template_kwargs": {name: "x"}})
        assert (response.status_code, error_of(response)["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("text", ["", "go 🙂", "<|start|>user"])
def test_tokenize_and_detokenize_are_inverse(text: str) -> None:
    tokens = post(make_engine(), "/tokenize", {"model": "tiny", "prompt": text}).json()
    assert tokens == {"tokens": list(CODEC.encode(text)), "count": len(CODEC.encode(text)), "max_model_len": 256}
    document = post(make_engine(), "/detokenize", {"model": "tiny", "tokens": tokens["tokens"]}).json()
    assert document == {"prompt": CODEC.decode(CODEC.encode(text))}


def test_tokenize_shows_what_a_chat_would_send() -> None:
    engine = make_engine()
    post(engine, *URLS["chat"])
    tokens = post(engine, "/tokenize", {"model": "tiny", "messages": URLS["chat"][1]["messages"]}).json()
    assert tuple(tokens["tokens"]) == engine.submitted[0].prompt


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bad_tokenize_bodies_name_the_field(url: str, body: dict[str, Any], param: str) -> None:
    response = post(make_engine(), url, {"model": "tiny", **body})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert post(make_engine(), url, {"model": "other", "prompt": "a"}).status_code in (400, 404)
