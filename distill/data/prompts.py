"""Generated prompts for every kind of work: templates over free text, numbers and word lists.

Owns the mix of prompts. A draft learns only what its data contains. A model that chats with itself never translates,
extracts or summarises, so those prompts are made here. Knows nothing of tokens. No prompt is taken from a benchmark.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distill.data import templates as t
from distill.data import wordlists as w
from distill.data.sources import LANGUAGES, Sources, sentences

Make = Callable[[random.Random, Sources], str]


@dataclass(frozen=True)
class Prompt:
    """One or more user turns, and the kind of work they request."""

    kind: str
    turns: tuple[str, ...]


def prompts(sources: Sources, seed: int, mix: dict[str, float] | None = None) -> Iterator[Prompt]:
    """Endless prompts; `mix` maps kinds to weights (default `MIX`).

    Raises:
        ValueError: a kind has no template.
    """
    weights = dict(mix or MIX)
    unknown = sorted(set(weights) - set(MAKERS))
    if unknown:
        raise ValueError(f"mix: unknown kinds {unknown}; allowed: {sorted(MAKERS)}")
    rng = random.Random(seed)
    kinds, shares = list(weights), list(weights.values())
    while True:
        kind = rng.choices(kinds, shares)[0]
        first = MAKERS[kind](rng, sources)
        count = rng.choice((0, 1, 1, 2)) if kind in GROUNDED else int(kind in FOLLOWED and rng.random() < 0.3)
        follow = [rng.choice(t.PASSAGE_FOLLOW_UPS if kind in GROUNDED else t.FOLLOW_UPS) for _ in range(count)]
        yield Prompt(kind, (first, *follow))


def translation(rng: random.Random, sources: Sources) -> str:
    """A sentence or short passage from one language into another, mostly into English."""
    foreign = [code for code in sources.paragraphs if code != "en"]
    if not foreign or rng.random() < 0.35:
        text, source, into = _sentence(rng, sources, "en"), "English", rng.choice(w.TARGET_LANGUAGES)
    else:
        code = "de" if "de" in foreign and rng.random() < 0.4 else rng.choice(foreign)
        text, source, into = _sentence(rng, sources, code), LANGUAGES[code], "English"
    return rng.choice(t.TRANSLATE).format(text=text, source=source, into=into)


def summarization(rng: random.Random, sources: Sources) -> str:
    """A passage of 80-450 words to shorten."""
    text = sources.passage(rng, rng.choice((80, 150, 250, 350)), 450)
    return rng.choice(t.SUMMARIZE).format(text=text)


def reading(rng: random.Random, sources: Sources) -> str:
    """A question over one to three passages, answered from them."""
    count = rng.choice((1, 1, 2, 3))
    passages = [sources.passage(rng, 50, 140) for _ in range(count)]
    subject = " ".join(rng.choice(sentences(passages[0]) or [passages[0]]).split()[:7]).strip(".,;:")
    question = rng.choice(t.READING_QUESTIONS).format(subject=subject)
    shown = "\n\n".join(rng.choice(("", f"[{i + 1}] ", f"Passage {i + 1}: ")) + p for i, p in enumerate(passages))
    return rng.choice(t.READING).format(text=shown, question=question)


def question(rng: random.Random, sources: Sources) -> str:
    """A short question of fact."""
    del sources
    return _fill(rng, rng.choice(t.QUESTIONS))


def word_problem(rng: random.Random, sources: Sources) -> str:
    """School arithmetic in two to four steps."""
    del sources
    text = _fill(rng, rng.choice(t.WORD_PROBLEMS))
    return rng.choice(
        ("{}", "{}", "{} Explain your reasoning.", "Solve step by step: {}", "{} Show your work.")
    ).format(text)


def mathematics(rng: random.Random, sources: Sources) -> str:
    """Algebra, number theory, geometry and probability exercises."""
    del sources
    return _fill(rng, rng.choice(t.MATH))


def coding(rng: random.Random, sources: Sources) -> str:
    """Write, explain, test or repair a function."""
    if rng.random() < 0.45:
        return _fill(rng, rng.choice(t.CODE_TASKS))
    f = rng.choice(sources.functions)
    template = rng.choice(t.CODE_OVER_SOURCE)
    return template.format(name=f.name, signature=f.signature, doc=f.doc, code=f.code)


def extraction(rng: random.Random, sources: Sources) -> str:
    """Extract facts from a text into a list, a table or JSON."""
    if rng.random() < 0.5:
        return rng.choice(t.EXTRACT_FROM_TEXT).format(text=sources.passage(rng, 50, 160))
    lines = " ".join(_fill(rng, rng.choice(t.RECORDS)) for _ in range(rng.randint(2, 5)))
    return rng.choice(t.EXTRACT_RECORDS).format(text=lines)


def writing(rng: random.Random, sources: Sources) -> str:
    """Letters, posts, stories, rewriting of a given text."""
    if rng.random() < 0.25:
        return rng.choice(t.REWRITE).format(text=sources.passage(rng, 40, 120))
    return _fill(rng, rng.choice(t.WRITING))


def roleplay(rng: random.Random, sources: Sources) -> str:
    """The model takes a role."""
    del sources
    return _fill(rng, rng.choice(t.ROLEPLAY))


def reasoning(rng: random.Random, sources: Sources) -> str:
    """Order, family, logic and common-sense puzzles."""
    del sources
    return _fill(rng, rng.choice(t.REASONING))


def knowledge(rng: random.Random, sources: Sources) -> str:
    """Explanations in science, engineering and the humanities."""
    del sources
    return _fill(rng, rng.choice(t.EXPLAIN))


def _sentence(rng: random.Random, sources: Sources, language: str) -> str:
    text = rng.choice(sources.paragraphs[language])
    found = sentences(text)
    return rng.choice(found) if found else text


def _fill(rng: random.Random, template: str) -> str:
    """Fill words and numbers into a template: {name} {other} {item} ... {a} {b} {c} {d} (2-12, 10-60, 2-9, 100-900)."""
    name, other, third = rng.sample(w.NAMES, 3)
    item, item2 = rng.sample(w.ITEMS, 2)
    concept, concept2 = rng.sample(w.CONCEPTS, 2)
    return template.format(
        name=name,
        other=other,
        third=third,
        item=item,
        item2=item2,
        concept=concept,
        concept2=concept2,
        place=rng.choice(w.PLACES),
        country=rng.choice(w.COUNTRIES),
        person=rng.choice(w.PEOPLE),
        job=rng.choice(w.JOBS),
        animal=rng.choice(w.ANIMALS),
        topic=rng.choice(w.TOPICS),
        style=rng.choice(w.STYLES),
        audience=rng.choice(w.AUDIENCES),
        algorithm=rng.choice(w.ALGORITHMS),
        language=rng.choice(w.PROGRAMMING),
        thing=rng.choice(w.THINGS),
        a=rng.randint(2, 12),
        b=rng.randint(10, 60),
        c=rng.randint(2, 9),
        d=rng.randint(100, 900),
        e=rng.randint(3, 20),
        p=rng.choice((5, 10, 20, 25, 30, 40, 50)),
        year=rng.randint(1780, 2015),
    )


MAKERS: dict[str, Make] = {
    "translation": translation,
    "summarization": summarization,
    "reading": reading,
    "question": question,
    "word_problem": word_problem,
    "mathematics": mathematics,
    "coding": coding,
    "extraction": extraction,
    "writing": writing,
    "roleplay": roleplay,
    "reasoning": reasoning,
    "knowledge": knowledge,
}
MIX = {
    "translation": 2.0,
    "summarization": 2.0,
    "reading": 2.0,
    "question": 2.0,
    "word_problem": 2.0,
    "mathematics": 0.5,
    "coding": 0.7,
    "extraction": 0.6,
    "writing": 0.6,
    "roleplay": 0.6,
    "reasoning": 0.6,
    "knowledge": 1.0,
}
GROUNDED = frozenset({"summarization", "reading"})
"""Kinds with long prompts. Further turns over the same passage are cheap, because it is read once."""
FOLLOWED = frozenset({"coding", "writing", "roleplay", "reasoning", "knowledge", "question", "mathematics"})
