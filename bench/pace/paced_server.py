"""A server whose policy is changed while it serves, so that policies take turns without a restart.

Owns its start (admin key, metrics folder, optionally a draft that is always rejected) and the change of policy.
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
"""Largest K of every policy."""
SETTLE_S = 0.8
"""Seconds after a change of policy: a plan reaches the engine within 0.25 s, then the draft catches up."""
THRESHOLD = {"policy": "threshold", "max_k": 5, "max_batch": 16}


def plan_of(policy: str) -> dict[str, Any]:
    """The changes of the plan that select a policy by name.

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
    """A server, and what is needed to change its policy and to read its metrics."""

    server: Server
    """The running server."""
    targets: Path
    """Folder with the address of its metrics."""
    key: str
    """Admin key."""

    async def follow(self, policy: str) -> None:
        """Change the policy and wait until the engine follows it.

        Raises:
            EngineUnavailable: the server refuses the change.
        """
        url = f"{self.server.url.removesuffix('/v1')}/admin/pace"
        async with httpx.AsyncClient() as client:
            response = await client.patch(
                url, headers={"Authorization": f"Bearer {self.key}"}, json=plan_of(policy), timeout=30.0
            )
        if response.status_code != 200:
            raise EngineUnavailable(f"{url}: {response.status_code} {response.text[:200]}")
        await asyncio.sleep(SETTLE_S)


@contextlib.contextmanager
def paced(draft: str | None, *, wrong: bool = False) -> Iterator[PacedServer]:
    """A server with this draft, K up to DEEPEST_K.

    Args:
        draft: see `paceline serve --draft`; None for that of the deployment file.
        wrong: replace every drafted token by one that the target does not choose.
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
