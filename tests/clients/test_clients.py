"""Real clients against the server: each script in `scripts/` runs in the clients' own environment and must succeed.

`make test-clients` installs the clients and sets PACELINE_CLIENTS to their folder. Without PACELINE_URL the server is
the real HTTP application over a scripted engine; with it, a running server with the model PACELINE_MODEL. The results
are written into docs/openai.md.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from scripted_server import serve

CLIENTS = os.environ.get("PACELINE_CLIENTS")
URL = os.environ.get("PACELINE_URL")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(CLIENTS is None, reason="PACELINE_CLIENTS is not set; run make test-clients"),
]
FOLDER = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[2] / "docs" / "openai.md"
BLOCK = re.compile(r"(<!-- clients -->\n).*?(<!-- /clients -->)", re.DOTALL)
TIMEOUT_S = 300
PACKAGES = {
    "ai_sdk.mjs": ("AI SDK", "ai"),
    "dspy_predict.py": ("dspy", "dspy"),
    "instructor_parse.py": ("instructor", "instructor"),
    "langchain_chat.py": ("langchain-openai", "langchain-openai"),
    "litellm_chat.py": ("litellm", "litellm"),
    "llama_index_chat.py": ("llama-index", "llama-index-llms-openai-like"),
    "openai_agents_run.py": ("openai-agents", "openai-agents"),
    "openai_chat.py": ("openai, Chat and Completions", "openai"),
    "openai_js.mjs": ("openai for JavaScript", "openai"),
    "openai_responses.py": ("openai, Responses", "openai"),
    "pydantic_ai_agent.py": ("pydantic-ai", "pydantic-ai-slim"),
    "smolagents_run.py": ("smolagents", "smolagents"),
}
"""Scripts: the client's name, and the package whose version is reported."""


@dataclass
class Results:
    rows: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """Rows of the table, written into the page if every script has run."""
    results = Results()
    yield results
    if set(results.rows) == set(PACKAGES):
        server = "a running server" if URL else "the HTTP application over a scripted engine"
        table = "\n".join(results.rows[name] for name in sorted(results.rows))
        head = f"Tried against {server}:\n\n| Client | Version | Tried | Result |\n|---|---|---|---|\n"
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(BLOCK.sub(lambda match: f"{match[1]}{head}{table}\n{match[2]}", text), encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    """Base URL and model."""
    if URL is not None:
        yield URL, os.environ["PACELINE_MODEL"]
        return
    with serve() as url:
        yield url, "tiny"


def version_of(script: str, package: str) -> str:
    if script.endswith(".mjs"):
        text = (Path(str(CLIENTS)) / "node_modules" / package / "package.json").read_text(encoding="utf-8")
        found = re.search(r'"version": "([^"]+)"', text)
        assert found
        return found[1]
    command = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return run([f"{CLIENTS}/venv/bin/python", "-c", command], {}).stdout.strip()


def run(command: list[str], environment: dict[str, str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_every_script_is_listed() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".mjs")} == set(PACKAGES)


@pytest.mark.parametrize("script", PACKAGES)
def test_a_client_works(script: str, server: tuple[str, str], results: Results) -> None:
    url, model = server
    name, package = PACKAGES[script]
    text = (FOLDER / script).read_text(encoding="utf-8")
    tried = text.splitlines()[0].strip('"/ .').partition(": ")[2]
    environment = {"BASE_URL": url, "MODEL": model, "OPENAI_API_KEY": "none", "DO_NOT_TRACK": "1"}
    if script.endswith(".mjs"):
        # Node finds packages beside the script, so the script's text runs in the clients' folder.
        done = run(["node", "--input-type=module", "--eval", text], environment, CLIENTS)
    else:
        done = run([f"{CLIENTS}/venv/bin/python", str(FOLDER / script)], environment)
    result = "works" if done.returncode == 0 else "fails"
    results.rows[script] = f"| {name} | {version_of(script, package)} | {tried} | {result} |"
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
