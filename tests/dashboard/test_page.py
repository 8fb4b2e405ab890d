"""The page as a person meets it: in a real browser, on a finished run, a live one, a long one, two together."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmorl.dashboard.charts import CHARTS
from olmorl.metrics.jsonl_sink import JsonlSink
from olmorl.metrics.rollout_log import read_rollouts, write_rollouts

Make = Callable[..., Path]
Serve = Callable[..., str]


IN_SIGHT = """(() => {
  const seen = [...document.querySelectorAll(".plot")].filter(plot => plot.getBoundingClientRect().top < innerHeight);
  return seen.length > 0 && seen.every(plot => plot.querySelector(".main-svg, .none"));
})()"""
"""every chart that a person sees without scrolling is drawn"""


class Page:
    """A tab that keeps what went wrong in it and where it asked."""

    def __init__(self, browser: Any, address: str, *, width: int = 1440) -> None:
        self.tab = browser.new_page(viewport={"width": width, "height": 900})
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.address = address
        started = time.perf_counter()
        self.tab.goto(address)
        self.until(IN_SIGHT)
        self.seconds_to_open = time.perf_counter() - started
        self.tab.wait_for_selector(f"#plot-{CHARTS[-1].id} .main-svg, #plot-{CHARTS[-1].id} .none")

    def points(self, chart: str) -> int:
        script = "id => (document.getElementById(id).data || []).reduce((n, trace) => n + (trace.x || []).length, 0)"
        return int(self.tab.evaluate(script, f"plot-{chart}"))

    def until(self, script: str) -> None:
        """Wait for a condition; the page itself may not evaluate strings, so it is asked from outside."""
        deadline = time.monotonic() + 15
        while not self.tab.evaluate(script):
            assert time.monotonic() < deadline, f"never came true: {script}"
            self.tab.wait_for_timeout(20)

    def check(self) -> None:
        assert self.errors == []
        local = [url for url in self.asked if url.startswith((self.address, "data:", "blob:"))]
        assert self.asked == local, "a request left the host"
        self.tab.close()


@pytest.fixture
def opened(browser: Any, serve: Serve) -> Callable[..., Page]:
    return lambda *runs, **options: Page(browser, serve(*runs), **options)


@pytest.mark.parametrize("width", [1440, 390])
def test_every_chart_of_a_finished_run_has_data(
    width: int, tmp_path: Path, make_run: Make, opened: Callable[..., Page]
) -> None:
    page = opened(make_run(tmp_path / "run", steps=40), width=width)
    assert page.tab.text_content("#status") == "finished" and page.tab.text_content("#step") == "step 40"
    assert {chart.id: page.points(chart.id) for chart in CHARTS if page.points(chart.id) == 0} == {}
    bars = "document.querySelectorAll('#plot-lengths .bars .point').length"
    assert page.tab.evaluate(bars) > 10, "plotly.js came without bars"
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    page.check()


def test_hover_and_the_hiding_of_a_line_work(tmp_path: Path, make_run: Make, opened: Callable[..., Page]) -> None:
    run = make_run(tmp_path / "run", steps=40)
    page = opened(run)
    plot = page.tab.locator("#plot-reward .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.tab.mouse.move(box["x"] + 10, box["y"] + box["height"] / 2)
    page.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10, steps=5)
    page.tab.wait_for_selector("#plot-reward .hoverlayer .hovertext", state="attached")
    entry = page.tab.locator("#legend-reward button").first
    entry.click()
    visible = "document.getElementById('plot-reward').data.map(trace => trace.visible).join()"
    page.until(f"{visible} === 'legendonly,true'")
    assert entry.get_attribute("aria-pressed") == "false"
    sink = JsonlSink(run / "metrics.jsonl")
    sink.write(41, {"reward/mean": 0.123})
    sink.close()
    page.until("document.getElementById('step').textContent === 'step 41'")
    page.until("document.getElementById('plot-reward').data[0].x.length === 41")
    assert page.tab.evaluate(visible) == "legendonly,true", "new data brought it back"
    page.tab.focus("#legend-reward button >> nth=0")
    page.tab.keyboard.press("Enter")
    page.until(f"{visible} === 'true,true'")
    page.check()


def test_a_live_run_is_followed(tmp_path: Path, make_run: Make, opened: Callable[..., Page]) -> None:
    run = make_run(tmp_path / "run", steps=5, summary=False)
    page = opened(run)
    assert page.tab.text_content("#status") == "live"
    sink = JsonlSink(run / "metrics.jsonl")
    sink.write(6, {"reward/mean": 0.123})
    sink.close()
    page.until("document.getElementById('step').textContent === 'step 6'")
    assert "0.123" in page.tab.text_content("#tiles")
    page.check()


def test_rollouts_are_read_as_text_with_the_keyboard_alone(
    tmp_path: Path, make_run: Make, opened: Callable[..., Page]
) -> None:
    page = opened(make_run(tmp_path / "run", steps=4))
    page.tab.focus("#tab-rollouts")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_selector("#groups details summary")
    assert page.tab.locator("#groups details").count() == 3
    page.tab.focus("#groups details summary >> nth=0")
    page.tab.keyboard.press("Enter")
    page.until("document.querySelectorAll('#groups .sample').length === 4")
    assert page.tab.locator("#groups .sample i").count() == 0, "a verdict is no markup"
    shades = "[...document.querySelectorAll('.tokens span')].map(s => s.style.background)"
    colours = page.tab.evaluate(shades)
    page.tab.select_option("#colour", "versions")
    recoloured = page.tab.evaluate(shades)
    assert len(colours) == len(recoloured) > 0 and colours != recoloured and len(set(recoloured)) == 2
    page.tab.select_option("#colour", "ratios")
    tints = {colour.split(",")[0] for colour in page.tab.evaluate(shades)}
    assert {"rgba(213", "rgba(0"} <= tints, "orange, blue"
    assert "ratio" in page.tab.get_attribute(".tokens span >> nth=0", "title")
    page.tab.select_option("#which", label="2")
    page.until("document.querySelector('#groups summary').textContent.startsWith('0-2-')")
    page.tab.select_option("#which", "step=0&of=evals")
    page.until("document.querySelector('#groups summary').textContent.startsWith('heldout/0_0')")
    page.tab.click("#groups summary >> nth=0")
    page.until("document.querySelectorAll('#groups .sample').length === 1")
    page.check()


def test_a_long_sample_is_shown_in_parts(tmp_path: Path, make_run: Make, opened: Callable[..., Page]) -> None:
    run = make_run(tmp_path / "run", steps=1)
    path = run / "rollouts" / "step_000001.parquet"
    ones = np.ones(7000, np.float32)
    row = replace(
        read_rollouts(path)[3], token_ids=ones, logprobs=-ones, raw_logprobs=-ones, loss_mask=ones > 0,
        version_spans=((0, 0, 7000),),
    )  # fmt: skip
    write_rollouts(path, [row])
    page = opened(run)
    page.tab.click("#tab-rollouts")
    page.tab.click("#groups summary")
    for shown in (3000, 6000, 7000):
        page.until(f"document.querySelectorAll('.sample .tokens span').length === {shown}")
        if shown < 7000:
            page.tab.click(f"text={7000 - shown} more tokens")
    page.check()


@pytest.mark.parametrize(  # who shares the machine slows it down
    "seconds", [10, pytest.param(2, marks=[pytest.mark.soak, pytest.mark.timed])]
)
def test_a_run_of_2000_steps_opens_in_two_seconds(
    seconds: float, tmp_path: Path, make_run: Make, browser: Any, serve: Serve
) -> None:
    """By a browser that was never there before. The best of three: other load can only make it slower."""
    address = serve(make_run(tmp_path / "run", steps=2000, rollouts=40, noise=0.5))
    best = float("inf")
    for _ in range(3):
        page = Page(browser, address)
        assert page.points("reward") >= 2000
        best = min(best, page.seconds_to_open)
        page.check()
        if best < seconds:
            return
    raise AssertionError(f"{best:.2f} s, where {seconds} are allowed")


def test_runs_are_laid_over_each_other(tmp_path: Path, make_run: Make, opened: Callable[..., Page]) -> None:
    page = opened(make_run(tmp_path / "one", steps=5), make_run(tmp_path / "two", steps=9))
    assert page.tab.text_content("#name") == "one against two"
    names = page.tab.evaluate("document.getElementById('plot-reward').data.map(trace => trace.name)")
    assert {"reward · one", "reward · two"} <= set(names)
    page.check()


def test_dark_and_light_differ(tmp_path: Path, make_run: Make, opened: Callable[..., Page]) -> None:
    page = opened(make_run(tmp_path / "run", steps=3))
    colour = "document.querySelector('#plot-reward .xtick text').style.fill"
    page.tab.emulate_media(color_scheme="light")
    page.until(f"{colour} === 'rgb(27, 31, 39)'")
    page.tab.emulate_media(color_scheme="dark")
    page.until(f"{colour} === 'rgb(231, 234, 240)'")
    page.check()
