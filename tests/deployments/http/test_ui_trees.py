"""The page in a headless Chromium: what it shows of a draft that branched. The engine is scripted, with known trees."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import uvicorn
from api_harness import CODEC, EOS, dependencies
from browser import Browser, browsing, find

from autoscale.control.history import History, HistoryView
from deployments.engine_client import Health
from deployments.http.app import build_api
from deployments.http.ui_routes import add_ui_routes
from engine.core.pacing import SpeculationPlan
from engine.messages import Delta, Submit, VerifiedTree

pytestmark = pytest.mark.skipif(find() is None, reason="chromium and chromedriver are not installed")
ENTER, RIGHT = "\ue007", "\ue014"


def tokens(text: str) -> tuple[int, ...]:
    return CODEC.encode(text)


A, B, C, D, E = (token for (token,) in map(tokens, "abcde"))
STEPS = (
    Delta(request_id="", token_ids=(A,), last="plain"),
    Delta(
        request_id="",
        token_ids=(B, D, E),
        num_accepted_now=2,
        last="bonus",
        tree=VerifiedTree((C, B, D, A), (-1, -1, 1, 2), (1, 2)),
    ),
    Delta(request_id="", token_ids=(C, B), num_accepted_now=1, last="recovered"),
    Delta(
        request_id="",
        token_ids=(EOS,),
        last="recovered",
        tree=VerifiedTree((A, B), (-1, -1), ()),
        finish_reason="stop",
    ),
)


class TreeEngine:
    """Generates the same four steps for every request."""

    async def health(self) -> Health:
        return Health(status="ok", draft="ok")

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        for step in STEPS:
            await asyncio.sleep(0.01)
            yield step


async def _quiet(since_s: float) -> HistoryView:
    return History().view(since_s, SpeculationPlan(), time.time())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    engine = TreeEngine()
    app = build_api(dependencies(engine))
    add_ui_routes(app, model_name="tiny", history=_quiet, health=engine.health)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with browsing(tmp_path_factory.mktemp("browser")) as browser:
            browser.size(1280, 900)
            browser.open(f"http://127.0.0.1:{port}/ui")
            browser.wait("document.getElementById('model').textContent")
            browser.type("#prompt", "go" + ENTER)
            browser.wait("document.querySelectorAll('.message.response[data-done]').length")
            yield browser
            assert browser.complaints() == []
    finally:
        server.should_exit = True
        thread.join(10)


def test_the_summary_has_the_mean_size_of_the_trees(page: Browser) -> None:
    text = page.run("return document.querySelector('.summary .trees').textContent")
    assert text == "2 trees: 3.0 nodes, 2.0 deep, 1.0 accepted"


def test_a_token_shows_the_tree_of_its_step(page: Browser) -> None:
    page.type(".tokens", RIGHT * 3)
    detail = page.wait("!document.getElementById('detail').hidden && document.getElementById('detail').innerText")
    assert "4 nodes, 3 deep, path of 2 accepted" in detail
    nodes = page.run(
        "return [...document.querySelectorAll('#detail .node')]"
        ".map(n => [n.textContent, n.classList.contains('accepted')])"
    )
    assert nodes == [['"c"', False], ['"b"', True], ['"d"', True], ['"a"', False]]
    edges = page.run(
        "return [...document.querySelectorAll('#detail .node')].map(n => parseFloat(getComputedStyle(n).marginLeft))"
    )
    assert edges == [0, 0, 12, 24], "a node is indented by its depth"
    assert "draft tree of 4 nodes" in page.run("return document.getElementById('said').textContent")
    inside = page.run(
        "const r = document.getElementById('detail').getBoundingClientRect();"
        "return r.left >= 0 && r.top >= 0 && r.right <= innerWidth && r.bottom <= innerHeight"
    )
    assert inside
    if folder := os.environ.get("PACELINE_SCREENSHOTS"):
        page.screenshot(Path(folder) / "trees.png")


def test_a_chain_shows_no_tree(page: Browser) -> None:
    page.type(".tokens", RIGHT * 2)
    detail = page.wait("!document.getElementById('detail').hidden && document.getElementById('detail').innerText")
    assert "recovered" in detail or "accepted" in detail
    assert "nodes" not in detail
    assert page.run("return document.querySelectorAll('#detail .tree').length") == 0
