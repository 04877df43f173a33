"""A server whose pace is changed while it serves: policies take turns on it without a restart in between.

Owns its start (admin key, metrics folder, a draft that can be made wrong) and the change of policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.load.servers import Server, paceline
from deployments.http.admin import ADMIN_KEY_ENV
from deployments.local import yaml_config
from deployments.monitoring.discovery import FOLDER_ENV
from engine.errors import ConfigError, EngineUnavailable

DEEPEST_K = 8
SETTLE_S = 0.8
"""A plan reaches the engine within a quarter of a second; the draft then reads what it has missed."""
THRESHOLD = {"policy": "threshold", "max_k": 5, "max_batch": 16}


def plan_of(policy: str) -> dict[str, Any]:
    """What to change in the plan for a policy's name.

    Raises:
        ConfigError: there is no such policy.
    """
    known: dict[str, dict[str, Any]] = {
        "off": {"policy": "off"},
        "threshold": THRESHOLD,
        "goodput": {"policy": "goodput", "max_k": DEEPEST_K},
    }
    prefix, _, k = policy.partition("-")
    if policy in known:
        return known[policy]
    if prefix == "fixed" and k.isdigit() and 1 <= int(k) <= DEEPEST_K:
        return {"policy": "fixed", "max_k": int(k)}
    raise ConfigError(f"--policies: {policy!r} given; allowed: off, fixed-1 to fixed-{DEEPEST_K}, threshold, goodput")


@dataclass(frozen=True, slots=True)
class PacedServer:
    """A server and what it takes to set its pace and to read its counters."""

    server: Server
    targets: Path
    key: str

    async def follow(self, policy: str) -> None:
        """Change the policy and wait until the engine follows it."""
        url = f"{self.server.url.removesuffix('/v1')}/admin/pace"
        async with httpx.AsyncClient() as client:
            answer = await client.patch(
                url, headers={"Authorization": f"Bearer {self.key}"}, json=plan_of(policy), timeout=30.0
            )
        if answer.status_code != 200:
            raise EngineUnavailable(f"{url}: {answer.status_code} {answer.text[:200]}")
        await asyncio.sleep(SETTLE_S)


@contextlib.contextmanager
def paced(draft: str | None, *, wrong: bool = False) -> Iterator[PacedServer]:
    """A server with this draft, K up to DEEPEST_K.

    Args:
        draft: as of `paceline serve --draft`; None: that of the deployment file.
        wrong: have every drafted token replaced by one that the target does not choose.
    """
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        (targets := folder / "targets").mkdir()
        options = ["--k", str(DEEPEST_K)] + (["--draft", draft] if draft is not None else [])
        if wrong:
            options += ["--config", str(_wrong_config(folder / "wrong.yaml"))]
        with paceline(options, env={ADMIN_KEY_ENV: key, FOLDER_ENV: str(targets)}) as server:
            yield PacedServer(server, targets, key)


def _wrong_config(where: Path) -> Path:
    values = yaml_config.load(yaml_config.DEFAULT_FILE)
    values["applications"][0]["args"]["engine"].setdefault("speculative", {})["wrong_drafts"] = True
    where.write_text(yaml.safe_dump(values))
    return where
