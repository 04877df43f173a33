"""The README's examples run unchanged except for the port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server

pytestmark = pytest.mark.ray

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert found
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python(server: Server, code: str) -> None:
    code = code.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("code", blocks("bash"))
def test_shell(server: Server, code: str) -> None:
    code = code.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert '"finish_reason":"' in done.stdout
