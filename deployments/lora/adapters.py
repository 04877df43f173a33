"""The adapters of one replica: their names and numbers, and their life in the targets that follow each other.

Owns which adapters clients may name, and which every target must hold. A name is served only once all shards have the
weights. A dropped adapter takes no new requests; those that run end with its weights. Every load gets a number of its
own, so that neither a cached block nor a request that is retried can meet the weights of another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import ray

from deployments.engine_client import AdapterTarget, ServedAdapter
from deployments.errors import ModelNotFound
from engine.checkpoint.model_config import ModelConfig
from engine.config import LoraConfig
from engine.errors import ConfigError, EngineUnavailable, InvalidRequest
from engine.lora.adapter_files import read_adapter
from engine.messages import AdapterRef

PATIENCE_S = 30.0
"""Seconds to wait for a target that serves."""
DRAIN_S = 2.0
"""Seconds to wait for the place of an adapter that was unloaded before."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An adapter that every target must hold."""

    ref: AdapterRef
    folder: Path


class Adapters:
    """The adapters of one replica. Lives in its event loop.

    Args:
        settings: `engine.lora`; its adapters are checked here.
        folder: the target's model folder.
        model_name: name of the base model, which no adapter may have.

    Raises:
        ConfigError: an adapter of the settings is damaged or does not fit the target.
    """

    def __init__(self, settings: LoraConfig, folder: Path, model_name: str) -> None:
        self._settings = settings
        self._config = ModelConfig.load(folder)
        self._model_name = model_name
        self._next = 1
        self._wanted: dict[int, _Wanted] = {}
        self._served: dict[str, ServedAdapter] = {}
        self._draining: dict[int, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()
        self._is_up = False  # whether a target has held the adapters of the settings
        self.served: Mapping[str, ServedAdapter] = MappingProxyType(self._served)
        """The adapters that requests may use, by name; a live view."""
        for name, given in settings.adapters.items():
            try:
                self._want(name, self._checked(Path(given).expanduser()))
            except ConfigError as error:
                raise ConfigError(f"engine.lora.adapters.{name}: {error}") from None

    async def bring_up(self, target: AdapterTarget) -> None:
        """Load every adapter into a new target, before it serves.

        Raises:
            ConfigError: an adapter of the settings cannot be read at the first start. Later such an adapter is
                dropped, because the other models must go on.
        """
        for wanted in list(self._wanted.values()):
            try:
                await target.load_adapter(wanted.ref, wanted.folder)
            except ConfigError as error:
                if not self._is_up:
                    raise ConfigError(f"engine.lora.adapters.{wanted.ref.name}: {_reason(error)}") from None
                _log.error("adapter %s is dropped, it cannot be read again: %s", wanted.ref.name, _reason(error))
                self._wanted.pop(wanted.ref.number, None)
                self._served.pop(wanted.ref.name, None)
                continue
            if wanted.ref.number in self._wanted:  # it may have been unloaded meanwhile
                self._serve(wanted.ref)
        self._is_up = True

    async def load(self, name: str, folder: Path, find: Callable[[float], Awaitable[AdapterTarget]]) -> ServedAdapter:
        """Load an adapter while the target serves.

        Args:
            name: that clients send as `model`.
            folder: in the layout of `peft`.
            find: returns the target within so many seconds.

        Raises:
            InvalidRequest: the name is taken, there are too many adapters, or the adapter does not fit.
            EngineUnavailable: no target serves.
        """
        async with self._lock:
            if name in self._served or name == self._model_name:
                raise InvalidRequest(
                    f"lora_name: a model {name!r} is served already; unload it first", field="lora_name"
                )
            most = self._settings.max_loras
            if self._draining and len(self._wanted) + len(self._draining) >= most:
                # One that was unloaded just now and has no requests is freed in a moment.
                await asyncio.wait(self._draining.values(), timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if len(self._wanted) + len(self._draining) >= most:
                raise InvalidRequest(
                    f"lora_name: {most} adapters are held, engine.lora.max_loras allows no more; unloaded ones count "
                    f"until their last request has ended ({len(self._draining)} now)",
                    field="lora_name",
                )
            try:
                wanted = self._want(name, await asyncio.to_thread(self._checked, folder))
                try:
                    await (await find(PATIENCE_S)).load_adapter(wanted.ref, wanted.folder)
                except BaseException:
                    self._wanted.pop(wanted.ref.number, None)
                    self._served.pop(name, None)
                    raise
            except ConfigError as error:
                raise InvalidRequest(f"lora_path: {_reason(error)}", field="lora_path") from None
            except ray.exceptions.RayError as error:
                raise EngineUnavailable("The engine cannot load the adapter now; try again soon") from error
            return self._serve(wanted.ref)

    async def unload(self, name: str, find: Callable[[float], Awaitable[AdapterTarget]]) -> None:
        """Take no more requests for an adapter. It is freed when the last one has ended.

        Raises:
            ModelNotFound: there is no adapter of this name.
        """
        async with self._lock:
            served = self._served.pop(name, None)
            if served is None:
                raise ModelNotFound(f"The adapter {name[:200]!r} is not loaded", field="lora_name")
            number = served.ref.number
            self._wanted.pop(number, None)
            self._draining[number] = asyncio.create_task(self._drain(number, find))

    async def close(self) -> None:
        """End the tasks that wait for requests of dropped adapters."""
        tasks = list(self._draining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, number: int, find: Callable[[float], Awaitable[AdapterTarget]]) -> None:
        try:
            with contextlib.suppress(EngineUnavailable, ray.exceptions.RayError):
                # A target that fails meanwhile takes the adapter with it, and the next one does not load it.
                await (await find(PATIENCE_S)).retire_adapter(number)
        finally:
            del self._draining[number]

    def _want(self, name: str, folder: Path) -> _Wanted:
        wanted = _Wanted(AdapterRef(number=self._next, name=name), folder)
        self._next += 1
        self._wanted[wanted.ref.number] = wanted
        return wanted

    def _serve(self, ref: AdapterRef) -> ServedAdapter:
        served = self._served.get(ref.name) or ServedAdapter(ref, int(time.time()))
        self._served[ref.name] = served
        return served

    def _checked(self, folder: Path) -> Path:
        return read_adapter(folder, self._config, max_rank=self._settings.max_lora_rank).folder.resolve()


def _reason(error: ConfigError) -> str:
    """What is wrong. An error of an actor carries its trace in the message, and the error itself as its cause."""
    return str(getattr(error, "cause", None) or error)
