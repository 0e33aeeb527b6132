"""A headless Chromium, driven by ChromeDriver over the WebDriver protocol, without a library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for an element's id
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,900",
)
KEYS = {"right": "\ue014", "left": "\ue012", "home": "\ue011", "end": "\ue010"}


def browser_missing() -> str | None:
    """What is missing for a Browser, in words; None if nothing is."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return "no Chromium found: install the packages chromium and chromium-driver"
    if not shutil.which("chromedriver"):
        return "no chromedriver found: install the package chromium-driver"
    return None


class Browser:
    """One window; a context manager."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # A preloaded BLAS starts threads, which Chromium's renderers do not survive.
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        )
        try:
            self._address = self._find_address()
            options = {"args": [*FLAGS, f"--user-data-dir={self._profile.name}"]}
            session = self._call(
                "POST",
                "/session",
                {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}},
            )
            self._session = f"/session/{session['sessionId']}"
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._stop()

    def open(self, page: Path) -> None:
        """Load a local page."""
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a JavaScript function body returns."""
        body = {"script": script, "args": []}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def text(self, css: str) -> str:
        """The visible text of an element."""
        return str(self._call("GET", f"{self._element(css)}/text"))

    def press(self, css: str, key: str) -> None:
        """Press one of KEYS with the focus on an element."""
        self._call("POST", f"{self._element(css)}/value", {"text": KEYS[key]})

    def click(self, css: str) -> None:
        self._call("POST", f"{self._element(css)}/click", {})

    def errors(self) -> list[str]:
        """What the page logged as an error since the last call."""
        log = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def _element(self, css: str) -> str:
        query = {"using": "css selector", "value": css}
        found = self._call("POST", f"{self._session}/element", query)
        return f"{self._session}/element/{found[ELEMENT]}"

    def _find_address(self) -> str:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                return f"http://127.0.0.1:{line.rstrip().rstrip('.').split()[-1]}"
        raise RuntimeError("chromedriver did not start")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(10)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        time.sleep(0.2)  # until Chromium has let go of its profile
        self._profile.cleanup()
