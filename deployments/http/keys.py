"""API keys: their owners and limits. Only hashes of keys are stored.

Owns the key file, the environment variable and the comparison. A key has 256 random bits, so one SHA-256 is enough. The
error messages of this module never repeat their input. Does not know HTTP.

    keys:                            PACELINE_API_KEYS="<key>,<key>"     without limits, named key-1, key-2
      - name: batch
        sha256: 2c26b46b68ffc68f...
        max_concurrent: 8
        requests_per_minute: 600
        max_priority: low
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from deployments.http.admission import Client
from deployments.settings import AppSettings
from engine.config import Settings
from engine.errors import ConfigError
from engine.messages import Priority

KEYS_ENV = "PACELINE_API_KEYS"
MIN_KEY_LEN = 16
PREFIX = "pl-"
"""Prefix of generated keys, by which secret scanners find keys that were committed by mistake."""


class KeyEntry(Settings):
    """One key of a key file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key's UTF-8 bytes, in hexadecimal."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Largest number of choices in flight."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Largest number of requests per minute."""
    max_priority: Priority = "normal"
    """Highest priority that its requests may have."""


class KeyFile(Settings):
    """The content of a key file."""

    keys: Annotated[tuple[KeyEntry, ...], Field(min_length=1)]


class KeyRing:
    """All keys of a server.

    Args:
        entries: the keys, with different names and hashes.

    Raises:
        ConfigError: two keys have the same name or hash.
    """

    def __init__(self, entries: Sequence[KeyEntry] = ()) -> None:
        for field in ("name", "sha256"):
            values = [getattr(entry, field) for entry in entries]
            if len(set(values)) < len(values):
                raise ConfigError(f"api keys: two keys have the same {field}")
        self._entries = [
            (
                bytes.fromhex(entry.sha256),
                Client(
                    name=entry.name,
                    max_concurrent=entry.max_concurrent,
                    requests_per_minute=entry.requests_per_minute,
                    max_priority=entry.max_priority,
                ),
            )
            for entry in entries
        ]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def names(self) -> frozenset[str]:
        """Names of the keys' owners."""
        return frozenset(client.name for _, client in self._entries)

    def find(self, key: str) -> Client | None:
        """The client of a key; None for an unknown key. Takes the same time for every key."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for expected, client in self._entries:
            if hmac.compare_digest(digest, expected):
                found = client
        return found

    @classmethod
    def load(cls, file: str | None, environ: Mapping[str, str] = os.environ) -> KeyRing:
        """The keys of a file and of the environment.

        Raises:
            ConfigError: the file or a key is invalid. The message never contains a key.
        """
        entries = list(_read(Path(file).expanduser())) if file is not None else []
        given = [key.strip() for key in environ.get(KEYS_ENV, "").split(",") if key.strip()]
        for number, key in enumerate(given, start=1):
            if len(key) < MIN_KEY_LEN:
                raise ConfigError(f"{KEYS_ENV}: key {number} has {len(key)} characters; at least {MIN_KEY_LEN} needed")
            entries.append(KeyEntry(name=f"key-{number}", sha256=hash_key(key), max_priority="high"))
        return cls(entries)


def has_keys(settings: AppSettings, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether clients of this app need an API key."""
    return settings.api_keys_file is not None or bool(environ.get(KEYS_ENV))


def hash_key(key: str) -> str:
    """The hash of a key, as a key file holds it."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def add_key(file: Path, name: str) -> str:
    """Generate a key and append its hash to a file. A new file is readable by its owner only.

    Returns:
        The key. It cannot be recovered from the file.

    Raises:
        ConfigError: the file is invalid or cannot be written, or the name is invalid or taken.
    """
    key = new_key()
    entries = list(_read(file)) if file.exists() else []
    try:
        entry = KeyEntry(name=name, sha256=hash_key(key))
    except ValidationError:
        raise ConfigError("key name: allowed are 1 to 64 letters, digits, '_', '.' and '-'") from None
    KeyRing([*entries, entry])
    values = [item.model_dump(exclude_none=True) for item in (*entries, entry)]
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            yaml.safe_dump({"keys": values}, out, sort_keys=False)
        temporary.rename(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    return key


def _read(file: Path) -> tuple[KeyEntry, ...]:
    try:
        if file.stat().st_mode & 0o022:
            raise ConfigError(f"{file}: other users may write to it and could add keys; run chmod go-w on it")
        values = yaml.safe_load(file.read_text())
        return KeyFile.model_validate(values).keys
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError):
        raise ConfigError(f"{file}: not a YAML file of keys") from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'file'}: {item['msg']}"
            for item in error.errors(include_input=False)
        )
        raise ConfigError(f"{file}: {problems}") from None
