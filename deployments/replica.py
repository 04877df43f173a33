"""The Serve replica: one HTTP process with one engine group behind it. CPU only.

Owns nothing but the joining: model folder -> tokenizer -> engine group -> API. Serve decides when it lives and asks
whether it is well. Knows no protocol detail and no step.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from deployments.admin import AdminDependencies, add_admin_routes, admin_key
from deployments.api import ApiDependencies, ApiLimits, build_api
from deployments.continuation import ContinuedEngine
from deployments.engine_group import EngineGroup
from deployments.observing import ReplicaObserver
from deployments.settings import AppSettings
from deployments.text import TextCodec
from deployments.ui_routes import add_ui_routes
from deployments.vocabulary import check_draft_vocabulary
from engine.errors import EngineUnavailable
from engine.model_store import resolve_model


class Replica:
    """Serves one model.

    Args:
        settings: of the app, as plain values, device resolved.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = AppSettings.parse(settings)
        engine = self._settings.engine
        folder = resolve_model(engine.model, progress=False)
        draft = engine.speculative.draft
        draft_folder = resolve_model(draft, progress=False) if draft is not None else None
        if draft_folder is not None:
            check_draft_vocabulary(folder, draft_folder)
        self._codec = TextCodec.from_folder(folder)
        self._created = int(time.time())
        context = serve.get_replica_context()
        self._group = EngineGroup(
            self._settings,
            folder=folder,
            draft_folder=draft_folder,
            app_name=context.app_name,
            group=ray.util.get_current_placement_group(),
        )
        names = {"app": context.app_name, "replica": context.replica_id.unique_id}
        continued = ContinuedEngine(self._group, patience_s=self._settings.resume_timeout_s)
        self._observer = ReplicaObserver(self._settings, continued, self._group.metrics, **names)
        self._ready = await self._group.start()
        self._observer.start(asyncio.get_running_loop(), node_ip=ray.util.get_node_ip_address())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve mounts what this returns, once the replica is up."""
        limits = ApiLimits(
            max_model_len=self._ready.max_model_len,
            vocab_size=self._ready.vocab_size,
            max_body_bytes=self._settings.max_body_bytes,
        )
        app = build_api(
            ApiDependencies(
                client_provider=lambda: self._observer.engine,
                codec=self._codec,
                model_name=self._settings.served_name,
                created=self._created,
                limits=limits,
            )
        )
        admin = AdminDependencies(
            key=admin_key(),
            plan=self._group.plan,
            override=self._group.override,
            max_k=self._settings.engine.speculative.k,
            find=self._observer.engine.find,
        )
        add_admin_routes(app, admin)
        add_ui_routes(
            app, model_name=self._settings.served_name, history=self._group.history, health=self._group.health
        )
        return app

    async def check_health(self) -> None:
        """Called by Serve; raising a few times in a row has the replica replaced."""
        health = await self._group.health()
        if health.status == "dead":
            raise EngineUnavailable(health.reason)

    async def __del__(self) -> None:
        """Called by Serve when the replica stops."""
        if hasattr(self, "_observer"):
            await asyncio.to_thread(self._observer.close)
        if hasattr(self, "_group"):
            await self._group.stop()
