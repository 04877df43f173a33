"""API keys: the key file, the environment, and a comparison in constant time. No message repeats a key."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from deployments.http.keys import KeyEntry, KeyRing, add_key, hash_key
from engine.errors import ConfigError

KEY, OTHER = "pl-" + "k" * 43, "pl-" + "m" * 43


def test_a_key_file_is_made_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = [add_key(file, name) for name in ("a", "b")]
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(key in file.read_text() for key in keys)
    loaded = KeyRing.load(str(file), {"PACELINE_API_KEYS": f"{KEY}, {OTHER}"})
    found = [loaded.find(key) for key in (*keys, KEY, OTHER, "no")]
    assert [client and client.name for client in found] == ["a", "b", "key-1", "key-2", None]
    with pytest.raises(ConfigError, match="same name"):
        add_key(file, "a")
    file.chmod(0o620)
    with pytest.raises(ConfigError, match="other users may write"):
        KeyRing.load(str(file), {})


@pytest.mark.parametrize(
    "content",
    [
        "keys: []",
        "keys: 3",
        "- a",
        "",
        f"keys: [{{name: a, sha256: {KEY}}}]",
        f"keys: [{{name: a, key: {KEY}}}]",
        f"keys: [{{name: {KEY}!, sha256: aa}}]",
        f"\x00{KEY}",
        f"a: [{KEY}",
    ],
)
def test_a_bad_key_file_is_named_but_not_quoted(tmp_path: Path, content: str) -> None:
    """A key that an operator wrote into the file by mistake must not appear in a log."""
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        KeyRing.load(str(file), {})
    assert str(file) in str(refused.value)
    assert KEY not in str(refused.value)


def test_a_short_key_in_the_environment_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="at least 16") as refused:
        KeyRing.load(None, {"PACELINE_API_KEYS": "hunter2"})
    assert "hunter2" not in str(refused.value)


def test_finding_a_key_looks_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key, the last key and a wrong key are compared with every entry, so that time tells nothing."""
    keys = [f"{i:064x}" for i in range(400)]
    many = KeyRing([KeyEntry(name=f"k{i}", sha256=hash_key(key)) for i, key in enumerate(keys)])
    compared = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return given == expected

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key, name in ((keys[0], "k0"), (keys[-1], "k399"), ("x" * 64, None)):
        compared.clear()
        found = many.find(key)
        assert (found and found.name) == name
        assert compared == [bytes.fromhex(hash_key(key)) for key in keys]
