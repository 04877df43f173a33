"""OpenAI's JavaScript client in a browser, on a page of another origin that `cors_origins` names."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import browsing, find
from scripted_server import TEXT, serve

CLIENTS = os.environ.get("PACELINE_CLIENTS")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(CLIENTS is None, reason="PACELINE_CLIENTS is not set; run make test-clients"),
    pytest.mark.skipif(find() is None, reason="Chromium and its driver are not installed"),
]
PAGE = """<!doctype html>
<script type="module">
import OpenAI from "/node_modules/openai/index.mjs";
const options = { baseURL: "BASE_URL", apiKey: "none", maxRetries: 0, dangerouslyAllowBrowser: true };
const client = new OpenAI(options);
const request = { model: "tiny", messages: [{ role: "user", content: "Which city?" }], stream: true };
try {
  let text = "";
  const stream = await client.chat.completions.create(request);
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  window.answer = text;
} catch (error) {
  window.answer = `failed: ${error}`;
}
</script>
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def page_url(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server of another origin with the client's modules; its URL and its folder."""
    (tmp_path / "node_modules").symlink_to(Path(str(CLIENTS)) / "node_modules")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", tmp_path
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("is_named", [True, False])
def test_the_client_streams_from_a_named_origin_only(
    page_url: tuple[str, Path], is_named: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    origin, folder = page_url
    profile = tmp_path_factory.mktemp("browser")
    with serve(origins=(origin,) if is_named else ()) as url, browsing(profile) as browser:
        (folder / "page.html").write_text(PAGE.replace("BASE_URL", url))
        browser.open(f"{origin}/page.html")
        answer = browser.wait("window.answer")
    assert answer == TEXT if is_named else str(answer).startswith("failed: ")
