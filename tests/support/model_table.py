"""The tables of docs/models.md: every family and format, with the difference of its logits that was measured last.

`python tests/support/model_table.py` measures all rows and writes the page; `tests/engine/model/test_models_page.py`
compares the page with the rows. The bounds are those of the tests of each row.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from gguf_models import TYPES, write_gguf_model  # noqa: E402  The paths above are for a run as a script.
from quantised_models import FORMATS, quantise  # noqa: E402
from tiny_gguf import TOKENS  # noqa: E402
from tiny_models import FAMILIES, VOCAB, reference_logits, run_cuts, write_model  # noqa: E402

from engine.gguf.convert import link  # noqa: E402
from engine.model.load import load_model  # noqa: E402
from engine.model.runner import ModelRunner  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BOUND = 1e-4
TABLES = ("families", "formats", "gguf")
Measure = Callable[[Path], float]


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    cells: tuple[str, ...]
    """All cells but the bound and the measured difference."""
    measure: Measure
    """Makes a checkpoint in an empty folder and returns the largest difference of logits."""


@dataclass(frozen=True)
class Family:
    """How a family is called, and the model of `tiny_models` that stands for it."""

    models: str
    features: str
    example: str


FAMILY_ROWS = {
    "llama": Family("Llama 2, 3, 3.x, SmolLM2", "RoPE scaling llama3, biases", "llama"),
    "mistral": Family("Mistral", "sliding window", "mistral-window"),
    "qwen2": Family("Qwen2, Qwen2.5", "biases of q, k, v", "qwen2"),
    "qwen3": Family("Qwen3", "norms of q and k, windows by layer", "qwen3-window"),
    "gemma3_text": Family(
        "Gemma 3 text (270M, 1B)", "windows by layer, two RoPE bases, norms of outputs", "gemma3_text"
    ),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4", "fused projections, partly rotated heads, longrope", "phi3"),
    "mixtral": Family("Mixtral", "experts", "mixtral"),
    "qwen3_moe": Family("Qwen3-MoE", "experts in some layers, norms of q and k", "qwen3_moe"),
}


def difference(folder: Path, reference: Path, vocab: int) -> float:
    """Largest difference of logits between the engine on `folder` and `transformers` on `reference`, in float32."""
    rng = random.Random(0)
    prompt = [rng.randrange(vocab) for _ in range(90)]
    expected = reference_logits(reference, [prompt])[0]
    runner = ModelRunner(load_model(folder, dtype=torch.float32), num_blocks=20, block_size=8)
    return float((run_cuts(runner, [prompt], [[60, 1, 6, 23]])[0] - expected).abs().max())


def _of_family(example: str) -> Measure:
    def measure(folder: Path) -> float:
        write_model(folder / "model", example)
        return difference(folder / "model", folder / "model", VOCAB)

    return measure


def _of_format(name: str) -> Measure:
    def measure(folder: Path) -> float:
        plain = write_model(folder / "plain", "llama", intermediate_size=72)
        return difference(*quantise(plain, folder, FORMATS[name]), VOCAB)

    return measure


def _of_type(kind: str, architecture: str = "llama") -> Measure:
    def measure(folder: Path) -> float:
        source = write_gguf_model(folder / "model.gguf", folder / "plain", kind, architecture=architecture)
        (folder / "linked").mkdir()
        link(source, folder / "linked")
        return difference(folder / "linked", folder / "plain", len(TOKENS))

    return measure


def rows(table: str) -> list[Row]:
    """All rows of a table."""
    if table == "families":
        return [
            Row((family.models, f"`{name}`", family.features), _of_family(family.example))
            for name, family in FAMILY_ROWS.items()
        ]
    if table == "formats":
        return [Row((name,), _of_format(name)) for name in FORMATS]
    types = [Row((f"`{kind}`", "llama"), _of_type(kind)) for kind in TYPES]
    return [*types, *(Row(("`Q4_K`", name), _of_type("Q4_K", name)) for name in ("qwen2", "qwen3"))]


def pattern(table: str) -> re.Pattern[str]:
    """The lines of a table's body in the page, between two comments."""
    return re.compile(rf"(?<=<!-- {table} -->\n)(.*?)(?=<!-- end of {table} -->)", re.DOTALL)


def body(page: str, table: str) -> list[list[str]]:
    """Cells of a table's body as the page has them."""
    found = pattern(table).search(page)
    lines = found[0].splitlines() if found else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def write() -> None:
    """Measure all rows and write them into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for table in TABLES:
        found = pattern(table).search(page)
        head = found[0].splitlines()[:2] if found else []
        lines = []
        for row in rows(table):
            with tempfile.TemporaryDirectory() as folder:
                lines.append("| " + " | ".join((*row.cells, f"{BOUND:.0e}", f"{row.measure(Path(folder)):.0e}")) + " |")
        text = "\n".join([*head, *lines]) + "\n"
        page = pattern(table).sub(lambda _, text=text: text, page)  # type: ignore[misc]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    assert set(FAMILY_ROWS) == {name.partition("-")[0] for name in FAMILIES}
    write()
