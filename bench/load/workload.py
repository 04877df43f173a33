"""Workloads of a benchmark: prompts, and the request options that go with them.

Owns a small set of built-in prompts, so that a benchmark runs without any file, and the reading of prompt files (JSON
lines with `turns` or `prompt`, and optionally `category`).
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

_TOPICS = (
    "the water cycle",
    "how bridges carry load",
    "why bread rises",
    "the history of paper",
    "how birds migrate",
    "what a compiler does",
    "the rules of chess",
    "how vaccines work",
    "the causes of tides",
    "life in a beehive",
    "how trains changed cities",
    "the planets of the solar system",
)

_FORMS = (
    "Explain {} to a curious twelve-year-old.",
    "Write a short summary of {} in five sentences.",
    "List six facts about {}, one per line.",
    "Write a dialogue between two friends about {}.",
)

_FUNCTIONS = (
    "reverses a linked list",
    "checks whether a string is a palindrome",
    "merges two sorted lists",
    "counts the words of a text",
    "computes the n-th Fibonacci number",
    "finds the largest element of a matrix",
    "parses a date in ISO form",
    "removes duplicates from a list",
)

_SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "summary": {"type": "string", "maxLength": 300},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 5},
    },
    "required": ["title", "summary", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and the options they are sent with."""

    name: str
    """Name for reports."""
    prompts: tuple[str, ...]
    """User messages."""
    body: dict[str, Any] = field(default_factory=dict)
    """Fields that are added to every request."""


def built_in() -> dict[str, Workload]:
    """Workloads that need no file."""
    chat = tuple(form.format(topic) for topic in _TOPICS for form in _FORMS)
    code = tuple(f"Write a Python function that {what}, with a docstring." for what in _FUNCTIONS for _ in range(3))
    facts = tuple(
        f"Answer with a JSON object about {topic} with the keys title, summary and tags." for topic in _TOPICS
    )
    known = {"code": Workload("code", code, {"temperature": 0.0})}
    schema = {"type": "json_schema", "json_schema": {"name": "article", "schema": _SCHEMA, "strict": True}}
    for temperature in (0.0, 0.7, 1.0):
        suffix = f"-{temperature}" if temperature else ""
        known[f"chat{suffix}"] = Workload(f"chat{suffix}", chat, {"temperature": temperature})
        body = {"temperature": temperature, "response_format": schema}
        known[f"schema{suffix}"] = Workload(f"schema{suffix}", facts, body)
    return known


MT_BENCH = frozenset(("coding", "extraction", "humanities", "math", "reasoning", "roleplay", "stem", "writing"))
"""Categories that `mt_bench` stands for. Each has few prompts."""


def read(path: Path, *, category: str | None = None) -> Workload:
    """Read a prompt file as a greedy workload.

    Args:
        path: of the file.
        category: the prompts of this category only; `mt_bench` stands for several; None for all prompts.

    Raises:
        ConfigError: the file cannot be read or holds no prompt.
    """
    categories = MT_BENCH if category == "mt_bench" else {category}
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        prompts = tuple(
            line["turns"][0] if "turns" in line else line["prompt"]
            for line in lines
            if category is None or line.get("category") in categories
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path}: not a prompt file ({type(error).__name__}: {error})") from None
    if not prompts:
        raise ConfigError(f"{path}: no prompts" + (f" of category {category}" if category else ""))
    return Workload(category or path.stem, prompts, {"temperature": 0.0})


def pick(workload: Workload, number: int, seed: int) -> list[str]:
    """`number` prompts in a random order that depends on the seed alone. Prompts repeat where there are too few."""
    order = list(workload.prompts)
    random.Random(seed).shuffle(order)
    return [order[index % len(order)] for index in range(number)]


def choose_workload(options: argparse.Namespace) -> Workload:
    """The workload that the options name: that of a prompt file, or a built-in one.

    Raises:
        ConfigError: there is no such workload.
    """
    if options.prompts is not None:
        return read(options.prompts)
    known = built_in()
    if len(options.workload) != 1 or options.workload[0] not in known:
        raise ConfigError(f"--workload: {' '.join(options.workload)!r} given; allowed: one of {', '.join(known)}")
    return known[options.workload[0]]
