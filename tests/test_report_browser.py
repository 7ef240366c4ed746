"""The report in a real browser: it sorts, asks nobody for anything and fits a desktop and a phone.

Chromium is driven over its DevTools pipe: commands and events are JSON texts that end in a NUL byte.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from curvlab.report import write_report
from curvlab.studies.compare.frames import Comparison

pytestmark = pytest.mark.slow

fcntl = pytest.importorskip("fcntl", reason="the DevTools pipe needs POSIX descriptors")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
EVIL = "<script>window.hacked=1</script><img src=http://evil.invalid/x onerror=hacked=1>"


class Browser:
    """One tab of headless Chromium: `call` a command, `evaluate` an expression; events are kept."""

    def __init__(self, profile: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._number, self._session, self._rest = 0, None, b""
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        # The browser expects the ends as descriptors 3 and 4: out of the way first, in case they are 4 and 3.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_child, from_child)]
        self.process = subprocess.Popen(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False,
            preexec_fn=lambda: [os.dup2(end, place) for end, place in zip(ends, (3, 4), strict=True)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_child, from_child, *ends):
            os.close(end)
        page = next(info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._in, 1 << 16)
            assert chunk, "the browser closed its pipe"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show(self, page: Path, width: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        self.process.wait(timeout=20)
        os.close(self._in)
        os.close(self._out)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(comparison(), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(
            "no Chromium is installed: the page is not opened in a browser (apt-get install chromium)"
        )
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def comparison() -> Comparison:
    """Two providers, one of a hostile name, times two solvers; every section has something to show."""
    rng = np.random.default_rng(0)
    pairs = [(provider, solver) for provider in ("pch-1", EVIL) for solver in ("kfi", "ea-cg")]
    cells = pd.DataFrame(pairs, columns=["provider", "solver"]).assign(
        status="ok", message="", newton_reason=""
    )
    for column in ("estimate", "prepare", "apply", "total"):
        cells[f"{column}_seconds"], cells[f"{column}_iqr"] = [2.0, 10.0, 0.5, 1.0], 1e-4
    for column in (
        "peak_bytes",
        "planned_bytes",
        "held_bytes",
        "flops",
        "iterations",
        "residual",
        "residual_full",
    ):
        cells[column] = rng.uniform(1e3, 1e6, len(cells))
    for column in ("error_total", "error_relative", "cosine", "distance"):
        cells[column] = rng.uniform(0, 1, len(cells))
    cells["route"] = "sample-space"
    cells.loc[3, ["status", "message"]] = ["failed", f"RuntimeError: {EVIL}"]
    cells.loc[3, ["total_seconds", "peak_bytes", "error_relative"]] = np.nan
    layers = [(layer, provider) for provider in ("pch-1", EVIL) for layer in (1, 2, "Total")]
    errors = pd.DataFrame(layers, columns=["layer", "provider"]).assign(
        layer_name=EVIL, error=0.5, relative=0.25
    )
    steps = pd.DataFrame({"iteration": range(4), "residual": [1, 0.1, 0.01, 0.001]})
    epochs = pd.DataFrame({"epoch": range(3), "seconds": [0, 0.5, 1], "train_loss": [2.3, 1.0, 0.4]})
    epochs = epochs.assign(test_loss=1.0, test_accuracy=[0.1, 0.6, 0.8], status="ok")
    runs = [("pch-1 + kfi", "pch-1", "kfi"), (f"{EVIL} + ea-cg", EVIL, "ea-cg"), ("sgd", "", "")]
    return Comparison(
        repetitions=pd.DataFrame(),
        blocks=pd.DataFrame(),
        config={"data": EVIL, "criterion": "cross-entropy", "batch": 500, "repetitions": 5},
        environment={"python": "3.11", "versions": {"torch": EVIL}},
        command=f"curvlab compare --data '{EVIL}' " + "-p a-rather-long-provider-name " * 9,
        cells=cells,
        errors=errors,
        traces=steps.assign(provider=EVIL, solver="ea-cg", block="0.weight"),
        convergence=pd.concat(
            [
                epochs.assign(optimizer=name, provider=provider, solver=solver)
                for name, provider, solver in runs
            ]
        ),
        warnings=[EVIL, "`pch-1` equals `gauss-newton` here"],
        failures=[f"sgd: {EVIL}"],
    )


def test_nothing_is_requested_logged_or_run_from_user_text(browser: Browser, page: Path) -> None:
    browser.show(page, 1280)
    assert browser.evaluate("typeof window.hacked") == "undefined"
    requested = [
        e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requested if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in requested if url.startswith("file:")]) == 1
    noise = {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}
    assert [event for event in browser.events if event["method"] in noise] == []


def test_the_watch_sees_an_error_and_a_request(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The check above must be able to fail: the same page with both faults."""
    broken = tmp_path / "broken.html"
    faults = "<script>undefined_name()</script><img src='http://127.0.0.1:9/x.png'>"
    text = (
        page.read_text().replace("Content-Security-Policy", "X-None").replace("</body>", f"{faults}</body>")
    )
    broken.write_text(text)
    browser.show(broken, 1280)
    methods = [event["method"] for event in browser.events]
    assert "Runtime.exceptionThrown" in methods
    assert any(
        "127.0.0.1" in json.dumps(e) for e in browser.events if e["method"] == "Network.requestWillBeSent"
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("unfolded", [False, True])
def test_the_page_does_not_scroll_sideways(browser: Browser, page: Path, width: int, unfolded: bool) -> None:
    browser.show(page, width)
    if unfolded:
        browser.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert browser.evaluate("window.innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.evaluate("window.scrollTo(500, 0); window.scrollX") == 0


def test_a_pair_with_a_long_name_wraps_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    named = {"pch-1": "gauss-newton[kind=rows,positions=4,samples=1]"}
    found = comparison()
    frames = {name: getattr(found, name).replace(named) for name in ("cells", "errors")}
    browser.show(write_report(replace(found, convergence=pd.DataFrame(), **frames), tmp_path), 390)
    assert browser.evaluate("document.querySelectorAll('.answer .pair').length") > 0
    assert browser.evaluate("document.documentElement.scrollWidth") == 390


def test_every_figure_is_there_and_has_a_size(browser: Browser, page: Path) -> None:
    browser.show(page, 1280)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('figure svg')].map((svg) => [svg.getBoundingClientRect().width,"
        " svg.getBoundingClientRect().height, svg.querySelectorAll('path').length])"
    )
    assert len(sizes) == 10
    assert all(width > 300 and height > 100 and paths > 5 for width, height, paths in sizes)


def test_tables_sort_by_click_and_by_keyboard_with_unknown_values_last(browser: Browser, page: Path) -> None:
    browser.show(page, 1280)
    head = "document.querySelectorAll('#pairs th')[3]"
    values = "[...document.querySelectorAll('#pairs tbody tr')].map((row) => row.cells[3].dataset.value)"
    assert browser.evaluate(f"{head}.textContent").startswith("total")
    browser.evaluate(f"{head}.querySelector('button').click()")
    assert browser.evaluate(f"{head}.getAttribute('aria-sort')") == "ascending"
    assert browser.evaluate(values) == ["0.5", "2.0", "10.0", "nan"]
    browser.evaluate(f"{head}.querySelector('button').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13)
    assert browser.evaluate(f"{head}.getAttribute('aria-sort')") == "descending"
    assert browser.evaluate(values) == ["10.0", "2.0", "0.5", "nan"]


def test_dark_mode_changes_paper_ink_and_figures(browser: Browser, page: Path) -> None:
    colours = (
        "['section', 'figure svg text'].map((name) => document.querySelector(name)).map((part, index) =>"
        " getComputedStyle(part)[index ? 'fill' : 'backgroundColor'])"
    )
    browser.show(page, 1280)
    light = browser.evaluate(colours)
    browser.show(page, 1280, dark=True)
    dark = browser.evaluate(colours)
    assert light == ["rgb(255, 255, 255)", "rgb(29, 35, 43)"]
    assert dark == ["rgb(22, 26, 32)", "rgb(232, 236, 241)"]
