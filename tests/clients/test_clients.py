"""Real clients against the server: each script in `scripts/` runs in an environment of its clients and must succeed.

`make test-clients` makes the environments and sets PACELINE_CLIENTS to their folder. Each script runs against the HTTP
application over a scripted engine, where it checks exact answers, and against `paceline serve` with the default model.
PACELINE_URL and PACELINE_MODEL name a running server in place of the latter. The results are written into
docs/openai.md; those of scripts that did not run stay.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from scripted_server import TEXT, serve
from serving import serving

from engine.checkpoint.store import resolve_model

CLIENTS = os.environ.get("PACELINE_CLIENTS")
URL = os.environ.get("PACELINE_URL")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(CLIENTS is None, reason="PACELINE_CLIENTS is not set; run make test-clients"),
]
FOLDER = Path(__file__).parent / "scripts"
TASKS = Path(__file__).parent / "tasks"
PAGE = Path(__file__).parents[2] / "docs" / "openai.md"
BLOCK = re.compile(r"(<!-- clients -->\n)(.*?)(<!-- /clients -->)", re.DOTALL)
TIMEOUT_S = 600
SCRIPTED, MODEL = "scripted engine", "model"
DEFAULT = "SmolLM2-135M"
NAMES = {"smollm2": DEFAULT}
"""Names in the table, by the names that servers give their models."""


@dataclass(frozen=True)
class Client:
    """A client that a script runs."""

    name: str
    package: str
    """The package whose version is reported."""
    environment: str = "venv"
    """Folder of its Python environment."""
    servers: tuple[str, ...] = (SCRIPTED, MODEL)
    """What it runs against. A client that measures needs a model."""


SCRIPTS = {
    "ai_sdk.mjs": Client("AI SDK", "ai"),
    "aider_ask.py": Client("aider", "aider-chat", "aider"),
    "dspy_predict.py": Client("dspy", "dspy"),
    "guidellm_run.py": Client("guidellm", "guidellm", "measure", (MODEL,)),
    "instructor_parse.py": Client("instructor", "instructor"),
    "langchain_chat.py": Client("langchain-openai", "langchain-openai"),
    "litellm_chat.py": Client("litellm", "litellm"),
    "llama_index_chat.py": Client("llama-index", "llama-index-llms-openai-like"),
    "lm_eval_run.py": Client("lm_eval", "lm_eval", "measure", (MODEL,)),
    "openai_agents_run.py": Client("openai-agents", "openai-agents"),
    "openai_chat.py": Client("openai, Chat and Completions", "openai"),
    "openai_js.mjs": Client("openai for JavaScript", "openai"),
    "openai_responses.py": Client("openai, Responses", "openai"),
    "pydantic_ai_agent.py": Client("pydantic-ai", "pydantic-ai-slim"),
    "smolagents_run.py": Client("smolagents", "smolagents"),
}
RUNS = [(script, server) for script, client in SCRIPTS.items() for server in client.servers]


@dataclass
class Results:
    """Versions by script, and results by script and server."""

    versions: dict[str, str] = field(default_factory=dict)
    results: dict[tuple[str, str], str] = field(default_factory=dict)

    def table(self, before: str) -> str:
        """The table of all clients.

        Args:
            before: the table whose results stay where a script did not run.
        """
        served = NAMES.get(os.environ["PACELINE_MODEL"], os.environ["PACELINE_MODEL"]) if URL is not None else DEFAULT
        known = {cells[0]: cells for cells in (row.strip("| ").split(" | ") for row in before.splitlines())}
        lines = [f"| Client | Version | Tried | Scripted engine | {served} |", "|---|---|---|---|---|"]
        for script, client in SCRIPTS.items():
            _, version, _, *old = known.get(client.name, ("", "", "", "not run", "not run"))
            new = [self.results.get((script, server), old[at]) for at, server in enumerate((SCRIPTED, MODEL))]
            lines.append(f"| {' | '.join([client.name, self.versions.get(script, version), tried(script), *new])} |")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """The results, written into the page at the end."""
    results = Results()
    yield results
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda match: f"{match[1]}{results.table(match[2])}\n{match[3]}", text), encoding="utf-8")


@pytest.fixture(scope="module")
def scripted() -> Iterator[dict[str, str]]:
    with serve() as url:
        yield {"BASE_URL": url, "MODEL": "tiny", "ANSWER": TEXT}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`paceline serve`, or the running server that PACELINE_URL names. In float32, greedy answers are reproducible."""
    common = {"ANSWER": "", "TOKENIZER": str(resolve_model("smollm2", progress=False)), "TASKS": str(TASKS)}
    if URL is not None:
        yield {"BASE_URL": URL, "MODEL": os.environ["PACELINE_MODEL"], **common}
        return
    with serving(tmp_path_factory.mktemp("server") / "log", "--dtype", "float32") as server:
        yield {"BASE_URL": f"{server.url}/v1", "MODEL": "smollm2", **common}


def tried(script: str) -> str:
    """What a script does, by its first line."""
    return (FOLDER / script).read_text(encoding="utf-8").splitlines()[0].strip('"/ .').partition(": ")[2]


def python(client: Client) -> str:
    return f"{CLIENTS}/{client.environment}/bin/python"


def version_of(script: str) -> str:
    client = SCRIPTS[script]
    if script.endswith(".mjs"):
        text = (Path(str(CLIENTS)) / "node_modules" / client.package / "package.json").read_text(encoding="utf-8")
        found = re.search(r'"version": "([^"]+)"', text)
        assert found
        return found[1]
    command = f"import importlib.metadata; print(importlib.metadata.version({client.package!r}))"
    return run([python(client), "-c", command], {}).stdout.strip()


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
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".mjs")} == set(SCRIPTS)


@pytest.mark.parametrize(("script", "server"), RUNS)
def test_a_client_works(script: str, server: str, request: pytest.FixtureRequest, results: Results) -> None:
    client = SCRIPTS[script]
    results.versions[script] = version_of(script)
    if not results.versions[script]:
        results.versions[script], results.results[script, server] = "", "not installed"
        pytest.skip(f"{client.package} does not support this Python")
    given: dict[str, str] = request.getfixturevalue("scripted" if server == SCRIPTED else "real")
    environment = given | {"OPENAI_API_KEY": "none", "DO_NOT_TRACK": "1"}
    if script.endswith(".mjs"):
        # Node finds packages beside the script, so the script's text runs in the clients' folder.
        text = (FOLDER / script).read_text(encoding="utf-8")
        done = run(["node", "--input-type=module", "--eval", text], environment, CLIENTS)
    else:
        done = run([python(client), str(FOLDER / script)], environment)
    results.results[script, server] = "works" if done.returncode == 0 else "fails"
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
