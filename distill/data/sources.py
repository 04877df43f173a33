"""Text that is free to use and already on the machine: manual pages, package descriptions, Python source.

Owns the search and the cleaning into paragraphs. Knows nothing of prompts. A source that is absent is skipped; Python's
standard library is always present.
"""

from __future__ import annotations

import ast
import gzip
import random
import re
import sysconfig
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

LANGUAGES = {
    "de": "German",
    "fr": "French",
    "es": "Spanish",
    "it": "Italian",
    "pt": "Portuguese",
    "nl": "Dutch",
    "pl": "Polish",
    "sv": "Swedish",
    "da": "Danish",
    "ro": "Romanian",
}
_REQUEST = re.compile(r"^\.(?:[BIRS]{1,2}|BR|IR|RB|RI|Nm|Ar|Fl|Pa|Xr|Em|Sy)\s+")
_ESCAPE = re.compile(r"\\(?:f(?:\[[^]]*\]|\(..|.)|[&%:/,|^]|s[-+]?\d+|m\[[^]]*\])")
_SPECIAL = re.compile(r"\\\((..)|\\\[([^]]{2,6})\]")
_ACCENTS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", ":": "\u0308", "~": "\u0303", ",": "\u0327", "o": "\u030a"}
_ENGLISH = re.compile(r"\b(?:the|of|and|is|to|with|are)\b")
_SIGNS = {
    "ss": "ß",
    "AE": "Æ",
    "ae": "æ",
    "/o": "ø",
    "/O": "Ø",
    "/l": "ł",
    "lq": '"',
    "rq": '"',
    "oq": "'",
    "cq": "'",
    "aq": "'",
    "dq": '"',
    "em": "-",
    "en": "-",
    "bu": "-",
    "co": "(c)",
}


@dataclass(frozen=True)
class Function:
    """A documented Python function."""

    name: str
    signature: str
    """`def name(arguments):` on one line."""
    doc: str
    """First paragraph of the docstring."""
    code: str
    """Source of the function, at most 40 lines."""


@dataclass(frozen=True)
class Sources:
    """Paragraphs by language code (`en` first) and documented functions."""

    paragraphs: dict[str, list[str]]
    functions: list[Function]

    def passage(self, rng: random.Random, min_words: int, max_words: int, language: str = "en") -> str:
        """Successive paragraphs of one document, joined up to `min_words` words and cut at `max_words`."""
        pool = self.paragraphs[language]
        at = rng.randrange(len(pool))
        words: list[str] = []
        parts: list[str] = []
        while len(words) < min_words and at < len(pool):
            parts.append(pool[at])
            words += pool[at].split()
            at += 1
        if len(words) <= max_words:
            return "\n\n".join(parts)
        return " ".join(words[:max_words])


def collect(*, max_pages: int = 6000, seed: int = 0, extra: list[str] | None = None) -> Sources:
    """Scan the machine; `extra` paragraphs are added to the English ones."""
    rng = random.Random(seed)
    english = list(extra or [])
    english += [text for page in _sample(_pages(""), max_pages, rng) for text in manual_paragraphs(page)]
    english += list(_package_paragraphs())
    functions = list(_functions())
    english += [f.doc for f in functions if len(f.doc.split()) > 25]
    paragraphs = {"en": english}
    for code in LANGUAGES:
        found = [text for page in _pages(code) for text in manual_paragraphs(page)]
        found = [text for text in found if len(_ENGLISH.findall(text)) < 3]
        if len(found) >= 20:
            paragraphs[code] = found
    return Sources(paragraphs, functions)


def manual_paragraphs(page: Path) -> list[str]:
    """Prose paragraphs of one gzipped manual page: roff requests and font changes removed."""
    try:
        text = gzip.decompress(page.read_bytes()).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return []
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith((".\\", "'")) or not line.strip():
            continue
        line = _REQUEST.sub("", line)
        if line.startswith("."):
            parts.append([])
            continue
        line = _SPECIAL.sub(lambda m: _sign(m.group(1) or m.group(2)), _ESCAPE.sub("", line))
        parts[-1].append(line.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace('"', "").strip())
    return [text for part in parts if is_prose(text := " ".join(" ".join(part).split()))]


def is_prose(text: str) -> bool:
    """Whether a paragraph is prose: 15-250 words, mostly letters, ending like a sentence."""
    words = text.split()
    letters = sum(ch.isalpha() or ch == " " for ch in text)
    return 15 <= len(words) <= 250 and letters > 0.88 * len(text) and text[0].isupper() and text[-1] in ".!?:"


def sentences(text: str) -> list[str]:
    """Sentences of 6-40 words."""
    return [s for s in re.split(r"(?<=[.!?])\s+", text) if 6 <= len(s.split()) <= 40]


def _sign(name: str) -> str:
    """A roff special character: a named sign or an accented letter; unknown ones are dropped."""
    if name in _SIGNS:
        return _SIGNS[name]
    if len(name) == 2 and name[0] in _ACCENTS and name[1].isalpha():
        return unicodedata.normalize("NFC", name[1] + _ACCENTS[name[0]])
    return ""


def _pages(language: str) -> list[Path]:
    root = Path("/usr/share/man") / language
    return sorted(path for section in root.glob("man[1-8]") for path in section.glob("*.gz") if not path.is_symlink())


def _sample(paths: list[Path], limit: int, rng: random.Random) -> list[Path]:
    """At most `limit` of the paths. Large groups of similar pages, which share a name prefix, are reduced first."""
    seen: dict[str, int] = {}
    kept = []
    for path in rng.sample(paths, len(paths)):
        family = path.name[:10]
        seen[family] = seen.get(family, 0) + 1
        if seen[family] <= 8:
            kept.append(path)
    return kept[:limit]


def _package_paragraphs() -> Iterator[str]:
    for distribution in metadata.distributions():
        body = distribution.metadata.json.get("description", "")
        for part in re.split(r"\n\s*\n", str(body)):
            text = " ".join(part.split())
            if text and is_prose(text):
                yield text


def _functions() -> Iterator[Function]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and len(doc) > 30:
                code = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno][:40])
                signature = f"def {node.name}({ast.unparse(node.args)}):"
                yield Function(node.name, signature, " ".join(doc.split("\n\n")[0].split()), code)
