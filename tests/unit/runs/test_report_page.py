"""The page: whole without scripts and without anything from elsewhere, small, and right in a browser."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lines import iteration, long_run, recovery, start, written

from moe_ckpt.commands.main import commands
from moe_ckpt.runs.page import render
from moe_ckpt.runs.page.charts import scale, stacked, thinned
from moe_ckpt.runs.page.html import duration
from moe_ckpt.runs.page.page import STYLE
from moe_ckpt.runs.sources import read_runs
from moe_ckpt.runs.watch import LivePage, server

VOID = {"meta", "link", "br", "path"}


class Outline(HTMLParser):
    """Open tags that are never closed, ids, and everything that a page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [
            str(value) for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """A run with two faults, of which one lost tokens."""
    lost = {"0": {str(expert): 100 * expert for expert in range(8)}, "2": {"1": 3}}
    return written(
        tmp_path / "metrics.jsonl",
        start(0.0), *(iteration(number, number * 0.6) for number in range(1, 30)),
        recovery(18.0, 29, lost_tokens=lost, plt=0.01),
        *(iteration(number, 30 + number * 0.6) for number in range(30, 40)),
        recovery(56.0, 39), iteration(38, 65.0, replayed=True),
        iteration(40, 66.0, protection="degraded", reason="r<1>"),
    )  # fmt: skip


def moe_ckpt(*arguments: object) -> Result:
    return CliRunner().invoke(commands, [*map(str, arguments)])


def test_the_head_says_of_what_job_the_report_is(tmp_path: Path) -> None:
    said = {"model": "4 layers, 8 experts", "layout": "PP 2 x EP 2", "software": "torch <2.14>"}
    file = written(tmp_path / "metrics.jsonl", start(0.0, **said), iteration(1, 1.0))
    head = render(read_runs([file]), 0.0).partition("<section")[0]
    for text in ("<td>j</td>", "<td>sparse</td>", "4 layers, 8 experts", "PP 2 x EP 2", "torch &lt;2.14&gt;"):
        assert text.removeprefix("<td>").removesuffix("</td>") in head, text


def test_times_below_a_second_are_in_milliseconds_and_others_are_not(tmp_path: Path) -> None:
    lines = [iteration(number, number * 2.0, stall_s=0.005, iteration_time_s=1.5) for number in range(1, 5)]
    page = render(read_runs([written(tmp_path / "metrics.jsonl", start(0.0), *lines)]), 0.0)
    units = dict(re.findall(r"<figcaption>([^<]+) <small>(\w+)</small>", page))
    assert (units["Training waiting for checkpoints"], units["Time of an iteration"]) == ("ms", "s")
    waiting = page.partition("Training waiting for checkpoints")[2]
    assert "from 5 to 5" in waiting.partition("</figure>")[0]


def test_iterations_that_a_restored_state_lacks_are_counted(tmp_path: Path) -> None:
    before = [iteration(at, at * 0.6) for at in range(1, 5)]
    lines = [*before, recovery(3.0, 3, replayed=0), iteration(4, 12.0), iteration(5, 12.6)]
    page = render(read_runs([written(tmp_path / "metrics.jsonl", start(0.0), *lines)]), 0.0)
    assert "local rollback, no replay, 1 iteration recomputed." in page


def test_parts_of_a_bar_have_the_same_colors_where_one_is_left_out() -> None:
    assert '<i class="p1" style' in stacked([("training", 0.0, "0 s"), ("waiting", 1.0, "1 s")], 1.0)


def test_what_copies_cost_is_unknown_and_not_zero_without_passes_to_compare_with(tmp_path: Path) -> None:
    lines = [iteration(number, number * 0.6, slowed_s=None) for number in range(1, 5)]
    page = render(read_runs([written(tmp_path / "metrics.jsonl", start(0.0), *lines)]), 0.0)
    assert "Passes slowed by copies" not in page and "no warm pass without a copy yet" in page


def test_an_iteration_is_at_the_same_place_in_all_charts(metrics: Path) -> None:
    page = render(read_runs([metrics]), 0.0)
    axes = {tuple(re.findall(r"<span>([\d,]+)</span>", axis)) for axis in re.findall(r'<div class="x".*?</div>', page)}
    assert {(axis[0], axis[-1]) for axis in axes} == {("1", "40")}
    lefts = re.findall(r"(?:grid-template-columns|margin-left):([\d.]+rem)", STYLE)
    assert len(lefts) == 3 and len(set(lefts)) == 1


def test_what_is_unknown_takes_its_place_and_no_line_goes_through_it(tmp_path: Path) -> None:
    known = {3, 4, 7, 9, 10}
    lines = [iteration(at, at * 0.6, slowed_s=0.01 * at if at in known else None) for at in range(1, 13)]
    page = render(read_runs([written(tmp_path / "metrics.jsonl", start(0.0), *lines)]), 0.0)
    figure = page.partition("Passes slowed by copies")[2].partition("</figure>")[0]
    assert "iterations 1 to 12" in figure
    (line,) = re.findall(r'class="line s3" d="([^"]*)"', figure)
    assert [part.count("L") for part in line.split("M")[1:]] == [1, 0, 1]


def test_bytes_are_in_the_unit_of_the_largest(tmp_path: Path) -> None:
    lines = [iteration(at, at * 0.6, snapshot_bytes=3_000_000 * (at % 2)) for at in range(1, 5)]
    page = render(read_runs([written(tmp_path / "metrics.jsonl", start(0.0), *lines)]), 0.0)
    assert "Bytes of an iteration <small>MB</small>" in page and "from 0 to 3" in page


def test_the_page_is_whole_and_loads_nothing(metrics: Path) -> None:
    page = render(read_runs([metrics]), 0.0)
    outline = Outline(page)
    assert outline.open == [] and outline.loaded == ["data:,"]
    assert "script" not in outline.tags and "http://" not in page and "https://" not in page
    for heading in (
        "Loss",
        "Protection",
        "Faults and recoveries",
        "Lost tokens",
        "Memory and bytes",
        "Window and order",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert page.count('class="mark"') > 2 and page.count('class="bar"') == 3


def test_what_files_say_is_escaped(metrics: Path) -> None:
    page = render(read_runs([metrics]), 0.0)
    assert "recovered &lt;all&gt;" in page and "r&lt;1&gt;" in page and "<all>" not in page


def test_charts_and_columns_have_names_for_those_who_do_not_see_them(metrics: Path) -> None:
    page = render(read_runs([metrics]), 0.0)
    assert all('aria-label="' in tag for tag in re.findall(r"<svg[^>]*>", page))
    assert all('scope="' in tag for tag in re.findall(r"<th[^>e]*>", page))
    assert '<html lang="en">' in page and "<title>" in page


def test_several_runs_are_compared(metrics: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other.jsonl", iteration(1), iteration(2))
    page = render(read_runs([metrics, other, other]), 0.0)
    assert "Compared" in page and "other (2)" in page and page.count('id="run') == 3
    assert Outline(page).open == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read_on_their_background(theme: str) -> None:
    colors = dict(re.findall(r"--(\w+):(#\w+)", STYLE.split("@media")[theme == "dark"]))
    assert {"bg", "fg", "soft", "card"} <= set(colors)
    for text in ("fg", "soft", "c0"):
        for behind in ("bg", "card"):
            assert _contrast(colors[text], colors[behind]) >= 4.5, (text, behind)
    # Curves, marks and bars, which are no texts.
    assert all(
        _contrast(colors[name], colors["bg"]) >= 3 for name in colors if re.fullmatch(r"c\d|mark|ok|warn|bad", name)
    )


def _contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_thinning_keeps_every_outlier_that_is_the_least_or_the_greatest_nearby() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[1234], points[8765] = (1234.0, 99.0), (8765.0, -99.0)
    kept = list(thinned(points))
    assert len(kept) <= 800 and kept == sorted(kept)
    assert points[1234] in kept and points[8765] in kept
    assert list(thinned(points[:500])) == points[:500]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (5, 5), (-3, 7), (0, 1e-12), (1e12, 3e12), (-1e300, 1e300), (0, 5e-324)]
)
def test_an_axis_holds_its_values(low: float, high: float) -> None:
    bottom, top, ticks = scale(low, high)
    assert bottom <= low and high <= top and bottom < top and 2 <= len(ticks) <= 12


def test_durations_are_as_people_say_them() -> None:
    said = [duration(seconds) for seconds in (0.0031, 42.0, 200, 7500, 280_000)]
    assert said == ["3.1 ms", "42 s", "3 min 20 s", "2 h 5 min", "3 d 5 h"]


def test_the_command_writes_the_page_and_says_how_large_it_is(metrics: Path, tmp_path: Path) -> None:
    result = moe_ckpt("report", metrics, "--out", tmp_path / "page.html")
    assert result.exit_code == 0 and "page.html: 0.0" in result.output
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "page.html"]


def test_a_page_behind_a_link_is_renewed_where_it_is(metrics: Path, tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    assert moe_ckpt("report", metrics, "--out", tmp_path / "link.html").exit_code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "old.html").read_text().startswith("<!doctype html>")


def test_half_a_surrogate_pair_in_a_log_costs_that_character(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", start(0.0, job="a\ud800b"), iteration(1, 1.0))
    assert moe_ckpt("report", path, "--out", tmp_path / "page.html").exit_code == 0
    assert "a?b" in (tmp_path / "page.html").read_text()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["metrics.jsonl", "page.html"]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path, tmp_path / "none" / "page.html", tmp_path / "pipe", Path("/dev/null")):
        result = moe_ckpt("report", tmp_path / "not-there.jsonl", "--out", out)
        assert "cannot be written" in str(result.exception)


@pytest.fixture
def live(metrics: Path) -> Iterator[str]:
    """The address at which the run is shown while it grows."""
    with server(LivePage([metrics], every_s=0.1), 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_address[1]}/"
        serving.shutdown()
        thread.join()


def _served(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        return str(answer.read().decode())


def _comes(address: str, text: str) -> bool:
    deadline_s = time.monotonic() + 60  # a page that takes long to make is made seldom
    while not (found := text in _served(address)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found


def test_a_page_that_is_watched_shows_what_was_written_since(live: str, metrics: Path) -> None:
    assert ">1,041<" not in _served(live)
    with metrics.open("a") as file:
        file.write('{"iteration": 1041, "lm_loss": 1.0}\n{"iteration": 1042, "lm_')
    assert _comes(live, ">1,041<")
    metrics.unlink()
    assert _comes(live, "does not exist")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{live}etc/passwd", timeout=30)


def test_a_port_in_use_is_one_line(metrics: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = moe_ckpt("report", metrics, "--watch", "--port", taken.getsockname()[1])
    assert re.fullmatch(r"--port \d+ of 127\.0\.0\.1 cannot be used: Address already in use; .*", str(result.exception))


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FIRST_S = 60
"""How long a browser may take to start and to print a page without content."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: apt-get install chromium)")
    if unusable := why_unusable(found, tmp_path_factory.mktemp("browser")):
        pytest.skip(unusable)
    return found


def why_unusable(browser: str, folder: Path, limit_s: float = FIRST_S) -> str:
    """Why a browser cannot show pages to these tests; empty if it can.

    Builds that are made for remote control, such as npm's @sparticuz/chromium, start and never end.
    """
    try:
        _looked_at(browser, "<title></title><body></body>", folder, limit_s=limit_s)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"{browser} does not print a page with --dump-dom: {type(error).__name__}"
    return ""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("exec sleep 600", "TimeoutExpired"),
        ("exit 21", "CalledProcessError"),
        ("echo '<body></body>'", "AssertionError"),
        ("""echo '<body data-found="0|0|0">'""", ""),
    ],
)
def test_a_browser_that_prints_no_page_is_passed_over_with_its_reason(does: str, said: str, tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    reason = f"{program} does not print a page with --dump-dom: {said}"
    assert why_unusable(str(program), tmp_path, 1 if "sleep" in does else FIRST_S) == (reason if said else "")


PROBE = """<script>addEventListener('error',e=>document.title='broken: '+e.message);addEventListener('load',()=>{
let wide=document.documentElement.scrollWidth-innerWidth,small=[...document.querySelectorAll('svg')].filter(s=>
s.getBoundingClientRect().width<100||s.getBoundingClientRect().height<5).length;
document.body.dataset.found=[wide,small,document.querySelectorAll('path.line').length,Math.round(performance.now()),
getComputedStyle(document.body).backgroundColor,innerWidth,
getComputedStyle(document.querySelector('.bar i')||document.body).printColorAdjust].join('|')})</script>"""
"""Asks the page how it turned out; put into it by the test."""


def _looked_at(
    browser: str, page: str, folder: Path, *flags: str, limit_s: float = 120, probe: str = PROBE
) -> list[str]:
    file = folder / "probed.html"
    before, end, after = page.rpartition("</body>")
    file.write_text(before + probe + end + after)
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", *flags, "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    environment = os.environ | {"HOME": str(folder)}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True, env=environment).stdout
    found = re.search(r'data-found="([^"]*)"', shown)
    assert found and "<title>broken" not in shown, shown[:500]
    return found[1].split("|")


def test_a_browser_shows_it_wide_and_on_a_phone(browser: str, metrics: Path, tmp_path: Path) -> None:
    page = render(read_runs([metrics]), 0.0)
    wide = _looked_at(browser, page, tmp_path, "--window-size=1200,900")
    assert wide[:2] == ["0", "0"] and int(wide[2]) >= 5, "nothing sticks out, every chart has a size"
    assert wide[6] == "exact", "bars and colors of legends are printed"
    # Headless windows are not narrower than 500 pixels: a frame of the width of a phone is.
    degraded = [iteration(at, at * 66.0, protection="degraded") for at in range(1, 90)]
    long = render(read_runs([metrics, written(tmp_path / "long.jsonl", start(0.0), *degraded)]), 0.0)
    frame = long.replace('"', "&quot;")
    phone = f'<body><iframe srcdoc="{frame}" style="width:360px;height:800px"></iframe></body>'
    # Tables of experts and of several runs alone may be wider than the page.
    tables = "[...d.querySelectorAll('section .scroll:not(:has(.heat))')].filter(s=>s.scrollWidth>s.clientWidth).length"
    narrow = PROBE.replace("document.documentElement.scrollWidth-innerWidth", f"d.scrollWidth-360+{tables}").replace(
        "{\nlet", "{let d=document.querySelector('iframe').contentDocument.documentElement;\nlet"
    )
    found = _looked_at(browser, phone, tmp_path, probe=narrow)
    assert found[0] == "0"


def test_a_page_of_ten_thousand_iterations_is_small_and_opens_at_once(browser: str, tmp_path: Path) -> None:
    page = render(read_runs([long_run(tmp_path / "long.jsonl", 10_000)]), 0.0)
    assert len(page.encode()) <= 2_000_000
    assert "of each of 400 spans" in page, "that curves are thinned is said"
    small_page = render(read_runs([long_run(tmp_path / "short.jsonl", 400)]), 0.0)
    opened = [[_looked_at(browser, one, tmp_path) for one in (page, small_page)] for _ in range(2)]
    _, small, lines, *_ = opened[0][0]
    assert small == "0" and int(lines) >= 5
    long_ms, short_ms = (min(int(shown[3]) for shown in shows) for shows in zip(*opened, strict=True))
    assert long_ms <= 4 * short_ms
