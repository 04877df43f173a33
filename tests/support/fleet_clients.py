"""Clients of a fleet in tests: steady load, a burst, and chats that come back.

Knows URLs only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

TIMEOUT_S = 150.0
CHATS, TURNS = 8, 4


@dataclass
class Answer:
    """What a client got."""

    begin_s: float
    end_s: float
    text: str
    """Of the response, or of the error."""
    is_success: bool


@dataclass
class Load:
    """Clients that send one request after the other while the context lasts."""

    url: str
    clients: int
    answers: list[Answer] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            if thread.is_alive():
                raise TimeoutError("a request hangs")

    def _ask(self) -> None:
        body = {"model": "tiny", "prompt": "one two", "temperature": 0, "max_tokens": 48, "ignore_eos": True}
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self._stop.is_set():
                begin_s = time.monotonic()
                try:
                    response = client.post(f"{self.url}/v1/completions", json=body)
                    ok = response.is_success
                    text = response.json()["choices"][0]["text"] if ok else f"{response.status_code} {response.text}"
                except httpx.HTTPError as error:
                    ok, text = False, repr(error)
                self.answers.append(Answer(begin_s, time.monotonic(), text, ok))

    @property
    def failures(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.is_success]

    @property
    def texts(self) -> set[str]:
        return {answer.text for answer in self.answers if answer.is_success}


def burst(url: str, num: int, **headers: str) -> Counter[int]:
    """Status codes of so many requests at once."""
    body = {"model": "tiny", "prompt": "one two", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    found: list[int] = []

    def ask() -> None:
        found.append(httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S).status_code)

    threads = [threading.Thread(target=ask) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(found)


def cached_share(url: str, name: str) -> float:
    """Share of the prompt tokens that the prefix cache had, in the later turns of chats that run side by side."""
    cached, total = [0] * CHATS, [0] * CHATS

    def chat(number: int) -> None:
        messages: list[dict[str, str]] = []
        with httpx.Client(timeout=TIMEOUT_S, headers={"x-session-id": f"{name}-{number}"}) as client:
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"{name} {number} {turn} " + "stop and go " * 8})
                body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
                response = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
                messages.append({"role": "assistant", "content": response["choices"][0]["message"]["content"]})
                if turn:
                    cached[number] += response["usage"]["prompt_tokens_details"]["cached_tokens"]
                    total[number] += response["usage"]["prompt_tokens"]

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(CHATS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(cached) / sum(total)
