"""The report in a real browser: headless Chromium, driven over its DevTools pipe with the standard library alone."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from report_samples import Config, report_json, sample_experiments, write_run, write_sample

from splitfg_lab.experiments.spec import Cell, Experiment, Preset, Row, Table
from splitfg_lab.report import build_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
LAUNCHER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PHONE, DESKTOP = (390, 844), (1280, 900)
TIMEOUT = 60.0


class Browser:
    """A Chromium that takes commands on file descriptor 3 and answers on 4: JSON, each message ended by a NUL."""

    def __init__(self, home: Path) -> None:
        read_end, self._commands = os.pipe()
        self._answers, write_end = os.pipe()
        # out of the way of 3 and 4, which the launcher is about to set
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_end, write_end)]
        chromium = [str(CHROMIUM), *FLAGS, f"--user-data-dir={home}", "about:blank"]
        command = [sys.executable, "-c", LAUNCHER, *map(str, theirs), *chromium]
        quiet = subprocess.DEVNULL
        environment = os.environ | {"HOME": str(home)}
        self._process = subprocess.Popen(command, pass_fds=theirs, stdout=quiet, stderr=quiet, env=environment)
        for end in (read_end, write_end, *theirs):
            os.close(end)
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result; events that arrive meanwhile are kept."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        os.write(self._commands, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Wait until an event has arrived."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._receive())

    def close(self) -> None:
        """End the browser."""
        self.call("Browser.close")
        self._process.wait(TIMEOUT)
        os.close(self._commands)
        os.close(self._answers)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            assert data, "Chromium does not answer"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


class Tab:
    """One page in a tab of its own, with everything that went wrong in it."""

    def __init__(self, browser: Browser, page: Path, size: tuple[int, int], *, dark: bool) -> None:
        self._browser = browser
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]  # with its own storage
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=size == PHONE
        )
        self.emulate_media("screen", dark=dark)
        self.load(page)

    def load(self, page: Path) -> None:
        """Go to a page."""
        self._browser.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self._browser.wait_for("Page.loadEventFired")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to this tab."""
        return self._browser.call(method, self._session, **parameters)

    def emulate_media(self, media: str, *, dark: bool) -> None:
        """Print or screen, in the system's light or dark colours."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which fails if something lies over it."""
        place = self.js(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center", inline: "center", behavior: "instant"}});
            const box = element.getBoundingClientRect();
            const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
            return {{x, y, hit: element.contains(document.elementFromPoint(x, y))}};
        }})()""")
        assert place["hit"], f"{selector} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place["x"], y=place["y"], button="left", clickCount=1)

    def press_enter(self) -> None:
        """The Enter key, for whatever has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
            )

    def complaints(self) -> list[Any]:
        """Errors, dialogs and requests to anywhere but the page itself."""
        self.js("0")  # everything up to here has arrived
        found: list[Any] = []
        for event in self._browser.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                found.append(parameters)
            if method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(parameters)
            if method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
                ("file:", "data:")
            ):
                found.append(parameters["request"]["url"])
        return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sample has a broken run on purpose
        return build_report(*write_sample(root), root, sample_experiments())


OpenTab = Callable[..., Tab]


@pytest.fixture
def open_tab(browser: Browser, report: Path) -> Iterator[OpenTab]:
    tabs: list[Tab] = []

    def opened(page: Path = report, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> Tab:
        tabs.append(Tab(browser, page, size, dark=dark))
        return tabs[-1]

    yield opened
    for tab in tabs:
        browser.call("Target.disposeBrowserContext", browserContextId=tab.context)


LABELS = "[...document.querySelectorAll('#tabular-main tbody th')].map(e => e.textContent)"
HEADER = "#tabular-main thead th:nth-child({})"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def brightness(colour: str) -> float:
    """Mean of red, green and blue of ``rgb(r, g, b)``."""
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_it_loads_without_complaints_and_fits_its_window(open_tab: OpenTab, size: tuple[int, int], dark: bool):
    tab = open_tab(size=size, dark=dark)
    assert tab.complaints() == []
    assert tab.js("document.documentElement.scrollWidth") <= size[0]
    assert tab.js("document.querySelectorAll('.drawing svg').length") == 2


def test_wide_tables_scroll_inside_their_own_box(open_tab: OpenTab):
    tab = open_tab(size=PHONE)
    box = "document.querySelector('#tabular-main .scroll')"
    assert tab.js(f"{box}.scrollWidth > {box}.clientWidth")
    tab.js(f"{box}.scrollLeft = 300")
    label = tab.js("document.querySelector('#tabular-main tbody th').getBoundingClientRect().left")
    assert 0 <= label <= 40, "the row's label stays in sight"
    pinned = "[...document.querySelectorAll('.pinned')].map(e => getComputedStyle(e).position)"
    assert "sticky" not in tab.js(pinned), "no other column covers what scrolls"


@pytest.mark.parametrize("size", [(800, 900), DESKTOP], ids=["tablet", "desktop"])
@pytest.mark.parametrize("scrolled", [0, 100, 5000])
def test_the_column_of_split_fg_is_in_sight_except_on_phones(open_tab: OpenTab, size: tuple[int, int], scrolled: int):
    tab = open_tab(size=size)
    tab.js(f"document.querySelector('#tabular-main .scroll').scrollLeft = {scrolled}")
    box, column = (
        tab.js(
            f"(() => {{ const b = document.querySelector('#tabular-main {part}').getBoundingClientRect();"
            " return [b.left, b.right]; })()"
        )
        for part in (".scroll", "tbody tr td:last-child")
    )
    assert box[0] <= column[0] < column[1] <= box[1] + 1
    hit = tab.js("""(() => {
        const cell = document.querySelector('#tabular-main tbody tr td:last-child');
        cell.scrollIntoView({block: "center", behavior: "instant"});
        const b = cell.getBoundingClientRect();
        return cell.contains(document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2));
    })()""")
    assert hit, "nothing lies over it"


def test_the_summary_comes_first_and_has_only_what_was_run(open_tab: OpenTab):
    tab = open_tab()
    assert tab.js("document.querySelector('main section').id") == "summary"
    assert tab.js("document.querySelectorAll('#summary tbody tr').length") == 1
    assert "Adult" in tab.js("document.querySelector('#summary tbody th').textContent")


def test_the_contents_mark_the_current_section(open_tab: OpenTab):
    tab = open_tab()
    marked = "[...document.querySelectorAll('.toc [aria-current]')].map(e => e.getAttribute('href'))"
    assert tab.js(marked) == ["#summary"]
    tab.js("document.querySelector('#experiment-language').scrollIntoView({behavior: 'instant'})")
    tab.js("new Promise(done => setTimeout(done, 200))")
    assert tab.js(marked) == ["#experiment-language"]


def test_a_table_that_was_not_run_is_folded(open_tab: OpenTab):
    tab = open_tab()
    assert tab.js("document.querySelector('#tabular-unrun').open") is False
    assert tab.js("document.querySelector('#tabular-main').tagName") == "DIV"


def test_the_overview_of_all_experiments_fits_a_phone(open_tab: OpenTab, tmp_path: Path):
    shipped = build_report(tmp_path / "runs", tmp_path / "results", tmp_path)
    box = "document.querySelector('#overview .scroll')"
    where = "getComputedStyle(document.querySelector('#overview td.where')).display"
    phone, desktop = open_tab(shipped, PHONE), open_tab(shipped, DESKTOP)
    assert phone.js(f"{box}.scrollWidth <= {box}.clientWidth")
    assert (phone.js(where), desktop.js(where)) == ("none", "table-cell")


def test_text_in_figures_is_readable_on_a_phone(open_tab: OpenTab):
    heights = "[...document.querySelectorAll('.drawing text')].map(e => e.getBoundingClientRect().height)"
    assert min(open_tab(size=PHONE).js(heights)) >= 7


def test_sorting_by_a_column_cycles_and_keeps_what_is_missing_last(open_tab: OpenTab):
    tab = open_tab()
    backprop = HEADER.format(3)  # Adult 83.8, Higgs 68.3, Otto 78.3, Covertype not run
    paper_order = ["Adult", "Higgs Small", "Otto", "Covertype"]
    assert tab.js(LABELS) == paper_order
    for state, expected in (
        ("ascending", ["Higgs Small", "Otto", "Adult", "Covertype"]),
        ("descending", ["Adult", "Otto", "Higgs Small", "Covertype"]),
        ("none", paper_order),
    ):
        tab.click(f"{backprop} button")
        assert tab.js(f"document.querySelector({json.dumps(backprop)}).ariaSort") == state
        assert tab.js(LABELS) == expected
    assert tab.complaints() == []


def test_sorting_by_label_with_the_keyboard_and_only_one_column_at_a_time(open_tab: OpenTab):
    tab = open_tab()
    tab.click(f"{HEADER.format(3)} button")
    tab.js(f"document.querySelector('{HEADER.format(1)} button').focus()")
    tab.press_enter()
    assert tab.js(LABELS) == ["Adult", "Covertype", "Higgs Small", "Otto"]
    states = tab.js("[...document.querySelectorAll('#tabular-main thead th')].map(e => e.ariaSort)")
    assert states.count("ascending") == 1
    assert states[0] == "ascending"


def test_dark_follows_the_system_and_the_button_overrules_it(open_tab: OpenTab, report: Path):
    tab = open_tab(dark=True)
    assert brightness(tab.js(BACKGROUND)) < 60
    tab.click("[data-theme-toggle]")
    assert brightness(tab.js(BACKGROUND)) > 200
    tab.click("[data-theme-toggle]")
    assert brightness(tab.js(BACKGROUND)) < 60
    tab.emulate_media("screen", dark=False)
    deadline = time.monotonic() + TIMEOUT
    tab.load(report)
    while brightness(tab.js(BACKGROUND)) > 60 and time.monotonic() < deadline:
        tab.load(report)  # a page that is opened at once may come before the browser has stored the choice
    assert brightness(tab.js(BACKGROUND)) < 60, "a choice stays"


def test_figures_change_colour_with_the_page(open_tab: OpenTab):
    stroke = "getComputedStyle(document.querySelector('.drawing path[style*=\"series-2\"]')).stroke"
    assert open_tab(dark=False).js(stroke) != open_tab(dark=True).js(stroke)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast(open_tab: OpenTab, dark: bool):
    """At least 4.5 to 1 (WCAG AA) for everything that is said in colour."""
    tab = open_tab(dark=dark)
    background = _luminance(tab.js(BACKGROUND))
    for selector in (".source", ".paper", ".difference.worse", ".difference.better", ".not-run .ours", "main a"):
        text = _luminance(tab.js(f"getComputedStyle(document.querySelector('{selector}')).color"))
        light, shade = max(text, background), min(text, background)
        assert (light + 0.05) / (shade + 0.05) >= 4.5, selector


def _luminance(colour: str) -> float:
    channels = [int(c) / 255 for c in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_figure_can_be_saved_and_stands_on_its_own(open_tab: OpenTab, browser: Browser, tmp_path: Path, kind: str):
    tab = open_tab(dark=True)
    browser.call(
        "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), browserContextId=tab.context
    )
    tab.click(f"#language-rho-figure [data-format={kind}]")
    path = tmp_path / f"language-rho.{kind}"
    deadline = time.monotonic() + TIMEOUT
    while not path.exists() and time.monotonic() < deadline:
        tab.js("new Promise(done => setTimeout(done, 50))")
    data = path.read_bytes()
    assert tab.complaints() == []
    if kind == "png":
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > height > 500
    else:
        assert b"var(--" not in data
        assert b'fill="#15181b"' in data, "the dark page's own background"


def test_printing_is_on_white_and_shows_what_is_folded(open_tab: OpenTab):
    tab = open_tab(dark=True)
    tab.emulate_media("print", dark=True)
    assert brightness(tab.js(BACKGROUND)) > 200
    tab.js("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.js("document.querySelectorAll('details:not([open])').length") == 0


def test_markup_in_names_is_text(open_tab: OpenTab, tmp_path: Path):
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    table = Table("t", attack, (attack,), (Row(attack, (Cell("a", "accuracy"),)),))
    what = Experiment("e", attack, attack, "m:f", (Preset("a", attack, Config()),), (table,))
    write_run(tmp_path / "runs", report_json("e", "a", device=attack, versions={attack: attack}))
    tab = open_tab(build_report(tmp_path / "runs", tmp_path / "results", tmp_path, (what,)))
    assert tab.complaints() == []
    assert tab.js("document.querySelectorAll('main img, main script').length") == 0
    assert tab.js("document.querySelector('.experiment h2').textContent") == attack


def test_the_page_would_not_run_a_foreign_script_nor_ask_anyone(open_tab: OpenTab):
    tab = open_tab()
    tab.js("""(() => {
        const script = document.createElement("script");
        script.textContent = "window.broken = true";
        document.body.append(script);
        document.body.append(Object.assign(new Image(), {src: "https://example.org/x.png"}));
    })()""")
    assert tab.js("window.broken") is None
    refused = [text for text in tab.complaints() if "Content Security Policy" in str(text)]
    assert len(refused) == 2


def test_bold_is_for_the_best_of_all_alone(open_tab: OpenTab):
    """The legend says so; the best with no backward pass has a tint, and is bold only if nothing beats it."""
    weights = open_tab().js("""[...document.querySelectorAll("td > .ours")].map(e => [
        e.parentElement.classList.contains("best"), e.parentElement.classList.contains("best-forward"),
        Number(getComputedStyle(e).fontWeight) >= 600])""")
    assert {(best, forward) for best, forward, _ in weights} >= {(True, False), (False, True), (False, False)}
    assert all(bold == best for best, _, bold in weights)
