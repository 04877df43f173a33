"""From prompts to shards: chat templates around prompts, the mix of jobs, and the loop that fills a data folder.

Owns the way from conversations to generator jobs, and the resumable generation run. Knows nothing of training.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill.data.generate import Generator, Job, Segment
from distill.data.prompts import Prompt
from distill.data.shards import ShardWriter

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ChatFormat:
    """The parts of a tokenizer's chat template, so that conversations can be assembled from tokens."""

    opening: tuple[int, ...]
    """Tokens before the first user text, the default system turn included."""
    to_response: tuple[int, ...]
    """Tokens after the user's end-of-turn token, up to the response."""
    to_user: tuple[int, ...]
    """Tokens after the response's end-of-turn token, up to the next user turn."""
    stop: int
    """The end-of-turn token."""

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFormat:
        """Split the template around marker texts.

        Raises:
            ValueError: the template does not show user and assistant texts with the same end-of-turn token.
        """
        turns = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        parts = text.split(_MARK)
        stop = tokenizer.eos_token
        if len(parts) != 4 or not parts[1].startswith(stop) or not parts[2].startswith(stop):
            raise ValueError(f"chat template: turns must end with {stop!r}; given a template that renders {text!r}")
        opening, response, user = (encode(tokenizer, part) for part in parts[:3])
        return cls(opening, response[1:], user[1:], response[0])


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of plain text without special tokens."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def self_chat(chat: ChatFormat, seed: int, *, max_response: int = 300) -> Iterator[Job]:
    """Endless jobs in which the target generates both sides of a chat from the empty template."""
    rng = random.Random(seed)
    while True:
        segments = [Segment(1.0, 160, chat.to_response), Segment(rng.choice(TEMPERATURES), max_response)]
        if rng.random() < 0.25:
            first = Segment(segments[1].temperature, 160, chat.to_user)
            segments = [segments[0], first, *segments]
        yield Job("chat", chat.opening, tuple(segments))


def responses(
    chat: ChatFormat,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    seed: int,
    *,
    max_response: int = 240,
    temperatures: tuple[float, ...] = TEMPERATURES,
) -> Iterator[Job]:
    """Jobs in which the target responds to prompts. A second user turn follows its first response."""
    rng = random.Random(seed)
    for prompt in prompts:
        temperature = rng.choice(temperatures)
        ids = (*chat.opening, *encode(tokenizer, prompt.turns[0]), chat.stop, *chat.to_response)
        segments = []
        for turn in prompt.turns[1:]:
            segments.append(
                Segment(temperature, 160, (*chat.to_user, *encode(tokenizer, turn), chat.stop, *chat.to_response))
            )
        yield Job(prompt.kind, ids, (*segments, Segment(temperature, max_response)))


def logged(path: Path, chat: ChatFormat, tokenizer: Any, seed: int) -> Iterator[Job]:
    """Jobs from a JSONL file of logged traffic.

    Each line holds `prompt` (text), `turns` (user texts) or `messages` (OpenAI style). Assistant turns are dropped, and
    the target generates new ones, because the draft must imitate this target.

    Raises:
        ValueError: a line has none of these fields; the message gives its number.
    """

    def read() -> Iterator[Prompt]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            item = json.loads(line)
            if "prompt" in item:
                turns = [item["prompt"]]
            elif "turns" in item:
                turns = list(item["turns"])
            elif "messages" in item:
                turns = [message["content"] for message in item["messages"] if message["role"] == "user"]
            else:
                raise ValueError(f"{path}:{number}: fields {sorted(item)}; needs one of prompt, turns, messages")
            yield Prompt("logged", tuple(turns))

    yield from responses(chat, tokenizer, read(), seed)


def token_rows(rows: np.ndarray[Any, Any]) -> Iterator[Job]:
    """Jobs that read rows of token ids which the target generated earlier."""
    for row in rows:
        yield Job("earlier", tuple(row.tolist()), (), own=True)


def plain_text(paths: Iterable[Path], tokenizer: Any, length: int) -> Iterator[Job]:
    """Jobs that read plain text in chunks of `length` tokens, to learn the target's distributions over them."""
    for path in paths:
        ids = tokenizer.encode(path.read_text(), add_special_tokens=False)
        for start in range(0, len(ids) - 16, length):
            yield Job("text", tuple(ids[start : start + length]), ())


def mixed(streams: list[tuple[float, Iterator[Job]]], seed: int) -> Iterator[Job]:
    """Draw from several endless streams by weight."""
    rng = random.Random(seed)
    weights = [weight for weight, _ in streams]
    while True:
        yield next(rng.choices(streams, weights)[0][1])


def by_length(jobs: Iterator[Job], low: int, high: int) -> Iterator[Job]:
    """Jobs whose prompt has more than `low` and at most `high` tokens, so that slots have similar lengths."""
    return (job for job in jobs if low < len(job.prompt) <= high)


def fill(
    generator: Generator,
    jobs: Iterator[Job],
    writer: ShardWriter,
    *,
    num_tokens: int | None = None,
    time_s: float | None = None,
    report: Callable[[int, float], None] | None = None,
) -> int:
    """Generate until the budget is spent; returns the number of tokens in finished documents.

    `report` is called with (tokens, seconds) after each document. An interruption loses only unfinished documents.
    """
    started, total = time.monotonic(), 0
    try:
        for document in generator.run(jobs):
            if len(document.tokens) < 16:
                continue
            writer.add(document)
            total += len(document.tokens)
            elapsed = time.monotonic() - started
            if report is not None:
                report(total, elapsed)
            if (num_tokens is not None and total >= num_tokens) or (time_s is not None and elapsed >= time_s):
                break
    finally:
        writer.flush()
    return total


def repeated(make: Callable[[int], Iterator[Job]]) -> Iterator[Job]:
    """The jobs of make(0), make(1), and so on without end; stops where one of them is empty."""
    for number in itertools.count():
        first = True
        for job in make(number):
            first = False
            yield job
        if first:
            return
