"""Whose requests a draft learns from, and which drafts learn at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.adaptation.consent import consents
from engine.config import AdaptationConfig, EngineConfig, SpeculativeConfig
from engine.errors import ConfigError
from engine.messages import AdapterRef, SamplingParams, SpeculativeOptions, Submit

ON = AdaptationConfig(enabled=True, keys=("alice", "bob"))
REQUEST = Submit(request_id="r", prompt=(1,), sampling=SamplingParams())


def test_it_is_off_by_default() -> None:
    assert not SpeculativeConfig().adaptation.enabled
    assert not consents(AdaptationConfig(), REQUEST)
    assert not consents(AdaptationConfig(keys=("alice",)), replace(REQUEST, client="alice"))


@pytest.mark.parametrize(("client", "learns"), [("alice", True), ("bob", True), ("carol", False), ("", True)])
def test_only_listed_keys_are_learned_from(client: str, learns: bool) -> None:
    """A request without a client comes from a server without keys."""
    assert consents(ON, replace(REQUEST, client=client)) is learns


def test_a_request_can_opt_out() -> None:
    asked = replace(REQUEST, client="alice", speculative=SpeculativeOptions(learn=False))
    assert not consents(ON, asked)


def test_an_adapter_s_requests_are_not_learned_from() -> None:
    assert not consents(ON, replace(REQUEST, client="alice", adapter=AdapterRef(number=1, name="a")))


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_method_without_a_draft_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"adaptation\.enabled: true given, but method"):
        SpeculativeConfig.parse({"method": method, "adaptation": {"enabled": True}})


def test_a_gpu_is_refused() -> None:
    values = {"model": "m", "device": "cuda", "speculative": {"draft": "d", "adaptation": {"enabled": True}}}
    with pytest.raises(ConfigError, match=r"speculative\.adaptation\.enabled: true given, but device is cuda"):
        EngineConfig.parse(values)


@pytest.mark.parametrize(
    ("field", "value"),
    [("buffer_mib", 0), ("cpu_share", 0.0), ("cpu_share", 1.5), ("keys", ["a b"]), ("unknown", 1)],
)
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"adaptation\.{field}"):
        SpeculativeConfig.parse({"draft": "d", "adaptation": {field: value}})
