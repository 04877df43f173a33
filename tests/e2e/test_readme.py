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


def test_the_configuration_table_names_real_settings() -> None:
    from deployments.settings import AppSettings
    from engine.config import EngineConfig, SpeculativeConfig

    fields = {
        **{f"engine.speculative.{name}": info for name, info in SpeculativeConfig.model_fields.items()},
        **{f"engine.{name}": info for name, info in EngineConfig.model_fields.items()},
        **dict(AppSettings.model_fields.items()),
    }
    rows = re.findall(r"^\| `((?:engine\.|model_name|num_replicas)[\w.]*)` \| ([^|]*) \|", README, flags=re.MULTILINE)
    assert len(rows) > 10
    for name, default in rows:
        assert name in fields, f"README names {name}, which is no setting"
        literal = default.strip().strip("`")
        if literal and literal not in ("from the model", "the model's", "from memory"):
            assert literal.lower() in (
                str(fields[name].default).lower(),
                f"{fields[name].default:g}" if isinstance(fields[name].default, float) else "",
                "0.10",
            )
