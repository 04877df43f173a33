"""The web page: its files and headers, the data of its charts, and the trace of a stream.

No browser here; tests/e2e/test_ui_browser.py has one.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from api_harness import EOS, SCRIPT, TEXT, URLS, dependencies, error_of, make_engine, post, stream_of, text_of
from fakes import FixedPacer, ToyEngine, ToyModel, toy_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.control.history import KEPT_S, History, HistoryView
from autoscale.control.report import Observation, combine
from deployments.http.app import build_api
from deployments.http.ui_routes import FOLDER, HistorySource, add_ui_routes, served_files
from engine.core.pacing import SpeculationPlan
from engine.errors import EngineUnavailable
from engine.messages import SamplingParams, Submit

NOW_S = 1_800_000_000.0
TRACED = {"stream": True, "speculative": {"trace": True}}


def observation(**values: Any) -> Observation:
    reasons = values.pop("k_by_reason", {"plan": 3})
    return Observation(num_steps=1, num_decodes=3, k_by_reason=reasons, step_s=0.02, **values)


async def _quiet(since_s: float) -> HistoryView:
    return History().view(since_s, SpeculationPlan(), NOW_S)


def get(path: str, history: HistorySource = _quiet) -> httpx.Response:
    async def run() -> httpx.Response:
        engine = make_engine()
        app = build_api(dependencies(engine))
        add_ui_routes(app, model_name="tiny", history=history, health=engine.health)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(run())


# What is served


def test_the_page_and_everything_it_names_is_served_under_a_strict_policy() -> None:
    page = get("/ui")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:href|src)="(ui/[^"]+)"', page.text)
    assert len(named) >= 5
    for path in [f"/{name}" for name in named] + [f"/ui/{p.relative_to(FOLDER)}" for p in served_files()]:
        response = get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert not re.search(r"https?:|\*", policy)
        assert response.headers["x-content-type-options"] == "nosniff"


def test_modules_import_only_what_is_served_and_what_is_exported() -> None:
    for path in FOLDER.glob("*.js"):
        for names, source in re.findall(r'import \{([^}]+)\} from "\./([^"]+)"', path.read_text(encoding="utf-8")):
            text = (FOLDER / source).read_text(encoding="utf-8")
            for name in names.split(","):
                assert re.search(rf"export (async )?(function\*?|class|const) {name.strip()}\b", text), (path, name)


@pytest.mark.parametrize("path", served_files(), ids=lambda path: path.name)
def test_no_file_reaches_outside_or_has_anything_inline(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    # The library's first comment contains its URL, and an SVG its namespace.
    text = re.sub(r"^/\*!.*?\*/", "", text, flags=re.DOTALL).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|['\"(]//\w", text)
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
    if path.suffix == ".js" and path.parent == FOLDER:
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|localStorage|sessionStorage", text)


def test_the_library_has_its_licence_beside_it() -> None:
    assert "MIT License" in (FOLDER / "vendor" / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/../api.py", "/ui/%2e%2e/api.py", "/ui/vendor"])
def test_other_paths_are_not_files(path: str) -> None:
    assert error_of(get(path))["code"] == "unknown_route"


def test_an_address_with_a_slash_leads_to_the_page() -> None:
    response = get("/ui/")
    assert (response.status_code, response.headers["location"]) == (307, "../ui")


# Its numbers


def test_data_without_a_step_yet() -> None:
    data = get("/ui/data").json()
    assert data == {
        "now": NOW_S,
        "period_s": 1.0,
        "model": "tiny",
        "health": {"status": "ok", "reason": "", "draft": "ok"},
        "num_engines": 0,
        "plan": {"version": 0, "policy": "goodput", "max_k": 5, "max_batch": 16} | _rest_of(data["plan"]),
        "points": [],
        "changes": [],
    }


def _rest_of(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name not in ("version", "policy", "max_k", "max_batch")}


def test_data_holds_sums_per_second_of_all_engines_and_changes_of_the_plan() -> None:
    history, first, second = History(), SpeculationPlan(version=1), SpeculationPlan(version=2, policy="fixed", max_k=2)
    history.add("a", observation(num_drafted=9, accepted_by_position=(3, 1)), first, NOW_S)
    history.add("b", observation(num_drafted=3, accepted_by_position=(1,)), first, NOW_S + 0.5)
    history.add("a", Observation(), second, NOW_S + 1.25)
    history.add("a", observation(num_drafted=6, k_by_reason={"off": 3}), second, NOW_S + 2.0)

    async def source(since_s: float) -> HistoryView:
        return history.view(since_s, second, NOW_S + 2.5)

    data = get(f"/ui/data?since={NOW_S}", source).json()
    assert [point["t"] for point in data["points"]] == [NOW_S, NOW_S + 2]
    merged, last = data["points"]
    assert (merged["num_steps"], merged["num_drafted"], merged["k_by_reason"]) == (2, 12, {"plan": 6})
    assert merged["accepted_by_position"] == [4, 1]
    assert last["k_by_reason"] == {"off": 3}
    assert data["num_engines"] == 2
    assert [(change["t"], change["plan"]["policy"]) for change in data["changes"]] == [(NOW_S + 1.25, "fixed")]
    later = get(f"/ui/data?since={NOW_S + 2.75}", source).json()
    assert [point["t"] for point in later["points"]] == [NOW_S + 2], "a second that still grows is sent again"


@pytest.mark.parametrize("since", ["soon", "-1", "nan", "inf", "1e400", ""])
def test_since_must_be_a_time(since: str) -> None:
    response = get(f"/ui/data?since={since}")
    assert response.status_code == 400
    assert error_of(response)["param"] == "since"


def test_a_lost_controller_is_an_ordinary_error() -> None:
    async def lost(since_s: float) -> HistoryView:
        raise EngineUnavailable("The controller does not respond; try again soon")

    response = get("/ui/data", lost)
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")


def test_history_is_bounded_and_old_engines_are_forgotten() -> None:
    history = History()
    for second in range(3 * KEPT_S):
        history.add("old" if second == 0 else "new", observation(), SpeculationPlan(), NOW_S + second)
    view = history.view(0.0, SpeculationPlan(), NOW_S + 3 * KEPT_S)
    assert KEPT_S - 1 <= len(view.seconds) <= KEPT_S
    assert view.num_engines == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 5), max_size=4)), min_size=1))
def test_observations_can_be_added_in_any_grouping(rows: list[tuple[int, int, list[int]]]) -> None:
    parts = [Observation(num_steps=a, num_emitted=b, accepted_by_position=tuple(c)) for a, b, c in rows]
    middle = len(parts) // 2
    grouped = [combine(half) for half in (parts[:middle], parts[middle:]) if half]
    assert combine(grouped) == combine(parts)


# Traced streams


@pytest.mark.parametrize("kind", URLS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), stop=st.sampled_from([None, "brown", "ow", "🙂 b", "\n"]), logprobs=st.booleans())
def test_the_traced_tokens_spell_the_text_and_their_origins_add_up(
    kind: str, seed: int, stop: str | None, logprobs: bool
) -> None:
    url, body = URLS[kind]
    asked = {"chat": {"logprobs": True}, "completion": {"logprobs": 1}}[kind] if logprobs else {}
    body = body | TRACED | asked | {"stream_options": {"include_usage": True}} | ({"stop": stop} if stop else {})
    *chunks, usage, done = stream_of(post(make_engine(seed=seed), url, body))
    assert done == "[DONE]"
    traces = [chunk["paceline"] for chunk in chunks]
    for chunk, trace in zip(chunks, traces, strict=True):
        assert trace.keys() == {"step", "accepted", "last", "token_ids", "texts"}
        assert "".join(trace["texts"]) == text_of(chunk["choices"][0])
        assert len(trace["texts"]) == len(trace["token_ids"]) >= 1
        assert len(trace["token_ids"]) == trace["accepted"] + (trace["last"] is not None)
    token_ids = [token_id for trace in traces for token_id in trace["token_ids"]]
    assert token_ids == [*SCRIPT, EOS][: len(token_ids)]
    assert len(token_ids) == usage["usage"]["completion_tokens"]
    shown = "".join(text for trace in traces for text in trace["texts"])
    assert shown == (TEXT[: TEXT.index(stop)] if stop else TEXT)
    assert [trace["step"] for trace in traces] == list(range(1, len(traces) + 1))
    assert "paceline" not in usage


def test_a_stream_that_did_not_ask_has_nothing_of_ours() -> None:
    url, body = URLS["chat"]
    for extra in ({}, {"speculative": {"enabled": True}}):
        response = post(make_engine(), url, body | {"stream": True} | extra)
        assert "paceline" not in response.text


@pytest.mark.parametrize(
    "extra", [{"speculative": {"trace": True}}, TRACED | {"stream_granularity": "token"}], ids=["whole", "token"]
)
def test_a_trace_belongs_to_a_stream_of_steps(extra: dict[str, Any]) -> None:
    response = post(make_engine(), URLS["chat"][0], URLS["chat"][1] | extra)
    assert response.status_code == 400
    assert error_of(response)["param"] == "speculative.trace"


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_engine_names_the_origin_of_each_token(k: int) -> None:
    target = ToyModel(vocab_size=7)
    engine = ToyEngine(target, toy_drafter(ToyModel(vocab_size=7, seed=3, blend=0.3)), FixedPacer(k))
    sampling = SamplingParams(max_tokens=40, seed=5)
    engine.run([Submit(request_id=f"r{i}", prompt=(1, 2, i), sampling=sampling) for i in range(6)])
    kinds = set()
    for deltas in engine.deltas.values():
        before = 0
        for delta in deltas:
            assert delta.num_accepted_now == delta.num_accepted - before
            before = delta.num_accepted
            assert len(delta.token_ids) == delta.num_accepted_now + (delta.last is not None)
            kinds.add(delta.last)
            if delta.last == "plain":
                assert delta.num_accepted_now == 0
    assert kinds - {None} == ({"plain"} if k == 0 else {"plain", "recovered", "bonus"})


def test_data_is_small() -> None:
    """The page polls every second: one busy second takes less than 2 kB, ten minutes less than 600 kB."""
    history = History()
    reasons = {"plan": 10, "acceptance": 3, "batch": 2, "probe": 1}
    for second in range(KEPT_S):
        positions = tuple(range(200, 192, -1))
        history.add(
            "a", observation(accepted_by_position=positions, k_by_reason=reasons), SpeculationPlan(), NOW_S + second
        )

    async def source(since_s: float) -> HistoryView:
        return history.view(since_s, SpeculationPlan(), NOW_S + KEPT_S)

    assert len(get(f"/ui/data?since={NOW_S + KEPT_S - 1}", source).content) < 2_000
    whole = get("/ui/data", source)
    assert len(whole.content) < 600_000
    assert len(json.loads(whole.content)["points"]) == KEPT_S
