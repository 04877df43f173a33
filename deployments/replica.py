"""The Serve replica: one HTTP process with one engine group behind it. Uses no GPU.

Owns the wiring only: model folder -> tokenizer -> engine group -> HTTP application. Serve starts it, stops it and
checks its health. Knows no detail of the protocol and no step of the engine.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from deployments.cluster.drafts import check_draft_vocabulary, with_draft
from deployments.cluster.engine_group import engine_group_on_ray
from deployments.cluster.failover import ContinuedEngine
from deployments.cluster.grammar_checks import GrammarChecks
from deployments.http.access import Access
from deployments.http.admin import AdminDependencies, add_admin_routes, admin_key
from deployments.http.admission import Admission
from deployments.http.app import ApiDependencies, ApiLimits, attach, build_api
from deployments.http.connection import BehindProxy
from deployments.http.direct_port import DirectHttp
from deployments.http.keys import KeyRing
from deployments.http.ui_routes import add_ui_routes
from deployments.lora.adapters import Adapters
from deployments.lora.routes import AdapterRoutes, add_adapter_routes
from deployments.monitoring.metrics_route import add_metrics_route, add_targets_route
from deployments.monitoring.replica_observer import ReplicaObserver
from deployments.responses_api.store import ResponseStore
from deployments.settings import AppSettings, LiveSettings, check_live
from deployments.text.tokenizer import TextCodec
from engine.checkpoint.store import resolve_model
from engine.errors import EngineUnavailable


class Replica:
    """Serves one model.

    Args:
        settings: `AppSettings` as plain values, with `device` resolved.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        given = AppSettings.parse(settings)
        folder = resolve_model(given.engine.model, progress=False)
        self._settings, draft_folder = with_draft(given, folder)
        if draft_folder is not None:
            check_draft_vocabulary(folder, draft_folder)
        self._created = int(time.time())
        lora = self._settings.engine.lora
        self._adapters = Adapters(lora, folder, self._settings.served_name) if lora is not None else None
        context = serve.get_replica_context()
        self._group = engine_group_on_ray(
            self._settings,
            folder=folder,
            draft_folder=draft_folder,
            app_name=context.app_name,
            group=ray.util.get_current_placement_group(),
            prepare=self._adapters.bring_up if self._adapters is not None else None,
        )
        self._check_grammar = GrammarChecks(self._group.check_grammar, asyncio.get_running_loop())
        names = {"app": context.app_name, "replica": context.replica_id.unique_id}
        continued = ContinuedEngine(self._group, patience_s=self._settings.resume_timeout_s)
        self._observer = ReplicaObserver(self._settings, continued, self._group.metrics, **names)
        self._access = Access(
            keys=KeyRing.load(self._settings.api_keys_file),
            origins=self._settings.cors_origins,
            on_refused=self._observer.count_refusal,
        )
        self._admission = Admission(self._settings.capacity, on_refused=self._observer.count_refusal)
        self._live = LiveSettings()
        self._api: ApiDependencies | None = None
        self._app: FastAPI | None = None
        # Both take seconds, the one here and the other in the engine's processes.
        self._ready, self._codec = await asyncio.gather(
            self._group.start(),
            asyncio.to_thread(TextCodec.from_folder, folder, generic_tools=given.generic_tools),
        )
        node_ip, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        target = self._observer.start(asyncio.get_running_loop(), node_ip=node_ip, node_id=node_id)
        self._announcing = asyncio.create_task(self._observer.announce(target, self._group.controller.announce))

    def __serve_build_asgi_app__(self) -> BehindProxy:
        """The application that Serve mounts once the replica is up."""
        settings = self._settings
        limits = ApiLimits(
            max_model_len=self._ready.max_model_len,
            vocab_size=self._ready.vocab_size,
            max_body_bytes=settings.max_body_bytes,
            max_prompt_tokens=settings.max_prompt_tokens,
            strict_max_tokens=settings.strict_max_tokens,
        )
        self._api = ApiDependencies(
            engine=self._observer.engine,
            codec=self._codec,
            check_grammar=self._check_grammar,
            model_name=settings.served_name,
            created=self._created,
            adapters=self._adapters.served if self._adapters is not None else {},
            limits=limits,
            responses=ResponseStore(settings.stored_responses) if settings.stored_responses is not None else None,
            admission=self._admission,
            timeout_s=settings.request_timeout_s,
        )
        app = self._app = build_api(self._api, self._access)
        self._apply(self._live)
        admin = AdminDependencies(
            key=admin_key(),
            plan=self._group.controller.plan,
            override=self._group.controller.override,
            max_k=settings.engine.speculative.k,
            find=self._observer.engine.find,
        )
        add_admin_routes(app, admin)
        if self._adapters is not None:
            is_alone = settings.most_replicas == 1
            routes = AdapterRoutes(key=admin.key, adapters=self._adapters, find=self._group.target, is_alone=is_alone)
            add_adapter_routes(app, routes)
        add_ui_routes(
            app, model_name=settings.served_name, history=self._group.controller.history, health=self._group.health
        )
        add_targets_route(app, self._group.controller.targets)
        if settings.direct_port is not None:
            self._direct = DirectHttp(app, host=settings.direct_host, port=settings.direct_port)
            self._direct.open()
            if settings.most_replicas == 1:
                add_metrics_route(app, self._observer.render)
        return BehindProxy(app)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve with the values under `user_config:`, at the start and when only these have changed.

        Raises:
            ConfigError: a value is wrong; nothing has changed, and the deployment's status shows the message.
        """
        live = LiveSettings.parse(user_config)
        check_live(live, self._settings)
        if live.keys_version != self._live.keys_version:
            self._access.keys = KeyRing.load(self._settings.api_keys_file)
        self._live = live
        self._apply(live)
        if live.pace():
            await self._group.controller.override(live.pace())

    def _apply(self, live: LiveSettings) -> None:
        settings = self._settings
        self._admission.accepts = live.accepts_requests
        self._admission.capacity = live.max_in_flight or settings.capacity
        if self._app is not None and self._api is not None:
            self._api = replace(self._api, timeout_s=live.request_timeout_s or settings.request_timeout_s)
            attach(self._app, self._api)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every few seconds. The autoscaling policy reads the result."""
        load = await self._group.replica_load()
        return load.as_numbers() if load is not None else {}

    async def check_health(self) -> None:
        """Called by Serve. A replica whose check raises three times in a row is replaced."""
        health = await self._group.health()
        if health.status == "dead":
            raise EngineUnavailable(health.reason)

    async def __del__(self) -> None:
        """Called by Serve when the replica stops. Parts that were never created are skipped."""
        if hasattr(self, "_direct"):
            await self._direct.close()
        if hasattr(self, "_announcing"):
            self._announcing.cancel()
        if hasattr(self, "_observer"):
            await asyncio.to_thread(self._observer.close)
        adapters: Adapters | None = getattr(self, "_adapters", None)
        if adapters is not None:
            await adapters.close()
        if hasattr(self, "_group"):
            await self._group.stop()
