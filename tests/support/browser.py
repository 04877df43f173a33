"""A headless Chromium for tests of the page, driven over WebDriver (W3C) by plain HTTP.

Owns the two processes and the few commands the tests need. Where Chromium or its driver is not installed, `find`
returns None and the tests skip.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deployments.local.ports import free_port

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of element references in WebDriver."""


def find() -> tuple[str, str] | None:
    """Paths of Chromium and its driver."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@dataclass
class Browser:
    """One window."""

    http: httpx.Client
    session: str

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body in the page and return its result."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, condition: str, timeout_s: float = 20.0) -> Any:
        """Wait until an expression is truthy in the page and return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(f"return {condition}")):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.1)
        return value

    def type(self, selector: str, text: str) -> None:
        """Press keys with the focus in an element; \\ue007 is Enter, \\ue012 and \\ue014 are arrow left and right."""
        found = self._post("element", {"using": "css selector", "value": selector})
        self._post(f"element/{found[ELEMENT]}/value", {"text": text})

    def click(self, selector: str) -> None:
        found = self._post("element", {"using": "css selector", "value": selector})
        self._post(f"element/{found[ELEMENT]}/click", {})

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
        self.command("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """Set the preferred colour scheme, `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.command("Emulation.setEmulatedMedia", {"features": features})

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """Send a command of the Chrome DevTools Protocol."""
        return self._post("goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.command("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Warnings and errors in the console since the last call."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self.http.post(f"/session/{self.session}/{path}", json=body)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`."""
    found = find()
    assert found is not None, "chromium and chromedriver are not installed"
    port = free_port()
    with (folder / "chromedriver.log").open("w") as log:
        driver = subprocess.Popen([found[1], f"--port={port}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as http:
            _await_driver(http)
            options = {"binary": found[0], "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in answer, answer
            browser = Browser(http, answer["sessionId"])
            try:
                yield browser
            finally:
                http.delete(f"/session/{browser.session}")
    finally:
        driver.terminate()
        driver.wait(10)


def _await_driver(http: httpx.Client) -> None:
    for _ in range(100):
        with contextlib.suppress(httpx.TransportError):
            if http.get("/status").json()["value"]["ready"]:
                return
        time.sleep(0.1)
    raise AssertionError("chromedriver did not start")
