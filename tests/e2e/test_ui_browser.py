"""The web page in a real browser with a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import Browser, browsing, find
from serving import Server

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find() is None, reason="chromium and chromedriver are not installed"),
]
ENTER, LEFT, RIGHT = "\ue007", "\ue012", "\ue014"
PROMPT = "Count from one to ten in words."
RESPONDED = "document.querySelectorAll('.message.response[data-done]').length"


@pytest.fixture(scope="module")
def page(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        browser.size(1280, 900)
        browser.open(f"{server.url}/ui")
        browser.wait("document.getElementById('model').textContent")
        yield browser
        assert browser.complaints() == []


def ask(page: Browser, prompt: str) -> None:
    before = page.run(f"return {RESPONDED}")
    page.type("#prompt", prompt + ENTER)
    page.wait(f"{RESPONDED} > {before}", 60)


def test_an_answer_is_coloured_token_by_token(page: Browser, server: Server) -> None:
    page.run("document.getElementById('max-tokens').value = 40")
    ask(page, PROMPT)
    text = page.run("return document.querySelector('.tokens').textContent")
    body = {
        "model": page.run("return document.getElementById('model').textContent"),
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 40,
    }
    with httpx.Client(trust_env=False, timeout=60) as client:
        whole: Any = client.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert text == whole["choices"][0]["message"]["content"]
    kinds = page.run("return [...new Set([...document.querySelectorAll('.tokens .tok')].map(t => t.classList[1]))]")
    assert set(kinds) <= {"accepted", "recovered", "bonus", "plain"}
    colours = page.run(
        "return [...document.querySelectorAll('.origins .tok')].map(t => getComputedStyle(t).backgroundColor)"
    )
    assert len(set(colours)) == 4


def test_arrow_keys_tell_where_a_token_came_from(page: Browser) -> None:
    page.type(".tokens", RIGHT + RIGHT + LEFT + RIGHT)
    detail = page.wait("!document.getElementById('detail').hidden && document.getElementById('detail').innerText")
    for part in ("token id", "step", "position", "text"):
        assert part in detail
    assert "token" in page.run("return document.getElementById('said').textContent")
    assert page.run("return [...document.querySelectorAll('.tok.chosen')].map(t => t.dataset.index)") == ["1"]


def test_charts_show_what_the_engine_did(page: Browser) -> None:
    page.wait("document.querySelectorAll('#plots canvas').length === 6")
    page.wait("[...document.querySelectorAll('#plots .none')].slice(0, 3).every(p => p.hidden)")
    page.wait("/[1-9]/.test(document.querySelector('#chart-speed .legend b').textContent)")
    page.type("#chart-speed", LEFT)
    assert page.wait("document.querySelector('#chart-speed .when').textContent")


def test_both_speeds_are_compared(page: Browser) -> None:
    page.run("document.getElementById('compare-tokens').value = 24")
    page.click("#compare-run")
    page.wait("document.querySelector('#compare-result table')", 60)
    speeds = page.run(
        "return [...document.querySelectorAll('#compare-result tbody tr')].map(r => +r.cells[1].innerText)"
    )
    assert len(speeds) == 2
    assert min(speeds) > 0
    assert "same text" in page.run("return document.getElementById('compare-result').innerText")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(page: Browser, scheme: str) -> None:
    page.size(360, 740, is_phone=True)
    page.scheme(scheme)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    text, ground = page.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    assert contrast(text, ground) > 7
    page.wait("[...document.querySelectorAll('#plots canvas')].every(c => c.clientWidth <= 340)")
    page.size(1280, 900)
    page.scheme("light")


def test_a_viewer_without_the_key_changes_nothing(page: Browser) -> None:
    page.type("#key", "guess" + ENTER)
    message = page.wait("document.getElementById('pace-message').textContent")
    assert "admin key" in message
    assert page.run("return document.getElementById('pace-form').hidden")
    assert page.run("return document.getElementById('key').value") == ""
    # The refusal itself is logged by the browser, and nothing else.
    assert all("/admin/pace" in line for line in page.complaints())


def test_a_server_that_goes_away_is_said_and_found_again(page: Browser) -> None:
    page.command("Network.enable", {})
    page.command("Network.setBlockedURLs", {"urls": ["*/ui/data*"]})
    assert "does not respond" in page.wait(
        "!document.getElementById('banner').hidden && document.getElementById('banner-text').textContent"
    )
    page.command("Network.setBlockedURLs", {"urls": []})
    page.click("#banner-retry")
    page.wait("document.getElementById('banner').hidden")
    time.sleep(0.2)
    assert all("/ui/data" in line for line in page.complaints())


def contrast(one: str, other: str) -> float:
    """Ratio of two CSS rgb() colours (WCAG 2.2, 1.4.3)."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
