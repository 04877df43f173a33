"""From prompts to shards: chat templates around prompts, the job mix, and the loop that fills a data folder.

Owns turning conversations into generator jobs for a tokenizer, and the resumable generation run. Knows nothing of
training.
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

from distill.data import ShardWriter
from distill.generate import Generator, Job, Segment
from distill.prompts import Prompt

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer's chat template, taken apart once so that conversations are spliced from tokens."""

    opening: tuple[int, ...]
    """Everything before the first user's words (the default system turn included)."""
    to_answer: tuple[int, ...]
    """From the user's end-of-turn token (excluded) to where the answer starts."""
    to_user: tuple[int, ...]
    """From the answer's end-of-turn token (excluded) to where the next user turn starts."""
    stop: int
    """The end-of-turn token."""

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFormat:
        """Take the template apart around marker texts.

        Raises:
            ValueError: the template does not show user and assistant texts with the same end-of-turn token.
        """
        turns = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        pieces = text.split(_MARK)
        stop = tokenizer.eos_token
        if len(pieces) != 4 or not pieces[1].startswith(stop) or not pieces[2].startswith(stop):
            raise ValueError(f"chat template: turns must end with {stop!r}; given a template that renders {text!r}")
        opening, answer, user = (encode(tokenizer, piece) for piece in pieces[:3])
        return cls(opening, answer[1:], user[1:], answer[0])


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of plain text, no special tokens added."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def self_chat(chat: ChatFormat, seed: int, *, max_answer: int = 300) -> Iterator[Job]:
    """Endless jobs in which the target writes both sides from the bare template."""
    rng = random.Random(seed)
    while True:
        segments = [Segment(1.0, 160, chat.to_answer), Segment(rng.choice(TEMPERATURES), max_answer)]
        if rng.random() < 0.25:
            first = Segment(segments[1].temperature, 160, chat.to_user)
            segments = [segments[0], first, *segments]
        yield Job("chat", chat.opening, tuple(segments))


def answers(
    chat: ChatFormat,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    seed: int,
    *,
    max_answer: int = 240,
    temperatures: tuple[float, ...] = TEMPERATURES,
) -> Iterator[Job]:
    """Jobs in which the target answers given prompts; a second turn is given after its first answer."""
    rng = random.Random(seed)
    for prompt in prompts:
        temperature = rng.choice(temperatures)
        ids = (*chat.opening, *encode(tokenizer, prompt.turns[0]), chat.stop, *chat.to_answer)
        segments = []
        for turn in prompt.turns[1:]:
            segments.append(
                Segment(temperature, 160, (*chat.to_user, *encode(tokenizer, turn), chat.stop, *chat.to_answer))
            )
        yield Job(prompt.kind, ids, (*segments, Segment(temperature, max_answer)))


def logged(path: Path, chat: ChatFormat, tokenizer: Any, seed: int) -> Iterator[Job]:
    """Jobs from a JSONL of the operator's own traffic.

    Each line holds `prompt` (text), `turns` (user texts) or `messages` (OpenAI style; assistant turns are dropped and
    written anew by the target, because the draft must imitate this target).

    Raises:
        ValueError: a line with none of these fields, with its number.
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

    yield from answers(chat, tokenizer, read(), seed)


def token_rows(rows: np.ndarray[Any, Any]) -> Iterator[Job]:
    """Read rows of token ids that the target wrote earlier."""
    for row in rows:
        yield Job("earlier", tuple(row.tolist()), (), own=True)


def plain_text(paths: Iterable[Path], tokenizer: Any, length: int) -> Iterator[Job]:
    """Read plain text files in chunks of `length` tokens; only the target's laws over them are learned."""
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
    """Only jobs whose prompt has low < n <= high tokens: slots of one run then have alike lengths."""
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
    """Generate until the budget is spent; returns the tokens of finished documents.

    `report` is called with (tokens, seconds) after each document. Interrupting loses only what is not yet in a shard.
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
    """make(0), then make(1), ... without end; stops if one of them is empty."""
    for number in itertools.count():
        first = True
        for job in make(number):
            first = False
            yield job
        if first:
            return
