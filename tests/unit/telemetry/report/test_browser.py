"""The pages in Chromium: what the script adds, that nothing else runs, and that a reader loses nothing when a page is made anew."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator

import pytest

from mgrpo.telemetry.files import write_whole
from mgrpo.telemetry.report import watch, write_report
from mgrpo.telemetry.report.compare import comparison
from mgrpo.telemetry.report.watch import PageServer
from tests.unit.telemetry.report.runs import HOSTILE, append_lines, played, record, step_line, write_lines, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, see requirements/dev.txt")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        # Without its own sandbox it also runs as root, in a container; the pages are ours.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser) -> Iterator:
    """A page that must neither log anything, nor ask for anything else, nor show a dialog."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(20_000)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message) or dialog.dismiss())
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI}`))"
    )
    yield page
    page.close()
    assert complaints == []


@pytest.fixture
def run(tmp_path):
    """40 steps, two evaluations, and samples of training with their tokens."""

    def asked(number: int) -> dict:
        return {"prompt": f"question {number}", "ground_truth": [f"truth {number}"]}

    lines = [
        {"step": 0, "eval/pass_at_1": 0.25, "eval/scores": 0.25},
        *(step_line(step, **{"optim/grad_norm": 10.0**-step if step < 4 else 1.0}) for step in range(1, 41)),
        {"step": 40, "eval/pass_at_1": 0.75, "eval/scores": 0.75},
    ]
    write_run(tmp_path, lines)
    write_lines(
        tmp_path / "rollouts" / "eval_step_0.jsonl", [record(n, 0.0, f"wrong {n}") | asked(n) for n in range(6)]
    )
    write_lines(
        tmp_path / "rollouts" / "eval_step_40.jsonl", [record(n, float(n % 2), f"now {n}") | asked(n) for n in range(6)]
    )
    hostile = [record(n, None, text) | {"step": 1, "finish_reason": "length"} for n, text in enumerate(HOSTILE)]
    tokens = {"tokens": ["the ", "<b>", "\u202ex", "<eos>"], "logprobs": [-0.01, -5.0, None, -0.01]}
    late = record(9, 1.0, "the <b>\u202ex") | {"step": 40} | tokens
    write_lines(tmp_path / "rollouts" / "train_samples.jsonl", [*hostile, late])
    return tmp_path


def trees() -> list[dict]:
    """Samples of agents, with hostile text in every place."""
    return [record(n, None, "tree") | {"step": 40, "trajectory": played(text)} for n, text in enumerate(HOSTILE)]


def visible(page, selector: str) -> int:
    return page.locator(f"{selector}:visible").count()


def point(page, chart: str, share: float) -> None:
    """Move the pointer to a share of a chart's x axis."""
    svg = page.locator(f"#{chart} svg")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    left, right, *_ = page.evaluate(
        f"JSON.parse(document.getElementById('values').textContent).charts['{chart}'].frame"
    )
    width = float(svg.get_attribute("viewBox").split()[2])
    page.mouse.move(box["x"] + box["width"] * (left + share * (right - left)) / width, box["y"] + box["height"] / 2)


def test_hostile_text_is_inert(page, run):
    """It is in the page as text, visible; the script sets the same text when it colours and searches."""
    append_lines(run / "rollouts" / "train_samples.jsonl", trees())
    page.goto(write_report(run).as_uri())
    page.check("#colours")
    page.fill("#search", "alert(1)")
    page.fill("#search", "")
    shown = page.evaluate("document.getElementById('samples-shown').textContent")
    assert (
        all(text in shown for text in (*HOSTILE[:4], HOSTILE[5]))
        and "\u202e" not in shown
        and "\\u202egnp.exe" in shown
    )
    assert (
        page.locator("#samples-shown img, #samples-shown script, #samples-shown b b, #samples-shown svg").count() == 0
    )
    assert page.evaluate("document.scripts.length") == 2


def test_what_is_folded_up_in_a_sample_can_be_opened(page, run):
    """The search folds up what it finds nothing in, and must leave alone what lies inside a sample."""
    append_lines(run / "rollouts" / "train_samples.jsonl", trees())
    page.goto(write_report(run).as_uri())
    page.fill("#search", "fork <svg")
    sample = page.locator(".sample:visible")
    assert sample.count() == 1 and not sample.locator("pre.written").is_visible()
    assert sample.get_by_text("agent crashed").is_visible() and sample.locator("details[open] pre").count() == 1
    sample.get_by_text("tokens of all branches").click()
    assert sample.locator("pre.written").is_visible()


def test_the_policy_blocks_what_escaping_would_miss(browser, run):
    """The second wall: with the escaping gone, a script or an event handler of a sample does not run."""
    path = write_report(run)
    attack = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    text = path.read_text()
    assert "<main>" in text
    path.write_text(text.replace("<main>", f"<main>{attack}", 1))
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_timeout(200)
    assert page.title() == run.name
    page.close()


def test_pointing_at_a_chart_reads_out_that_step_in_all_charts(page, run):
    """A curve without numbers cannot be quoted; what else happened at that step is the next question."""
    page.goto(write_report(run).as_uri())
    before = page.locator("#c1 svg").bounding_box()
    point(page, "c1", 0.5)
    page.wait_for_selector("#c1 .key b")
    assert page.locator("#c1 svg").bounding_box() == before
    assert page.locator("#c1 output").text_content() == "step 20"
    assert page.locator("#c1 .key").all_text_contents() == ["training1", "held-out0.25"]
    # The mean of the last 4 steps.
    grad = page.locator("[data-title*='optim/grad_norm']")
    assert grad.locator("output").text_content() == "step 20: 1 · mean 1"
    assert grad.locator(".scale").text_content() == "log scale"
    # The marker is on the curve: 1 is the highest of 0.001 ... 1.
    top = page.evaluate("JSON.parse(document.getElementById('values').textContent).charts['c1'].frame[2]")
    assert abs(float(grad.locator(".cursor circle").get_attribute("cy")) - top) < 0.01
    page.mouse.move(5, 5)
    page.wait_for_selector("#c1 .key b", state="detached")
    page.focus("#c1")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert page.locator("#c1 output").text_content() == "step 39"


def test_search_and_filters_leave_what_fits(page, run):
    """Among 400 samples the one that says it, the wrong ones, those that were cut off."""
    page.goto(write_report(run).as_uri())
    every = page.locator("#samples-shown .sample").count()
    assert page.locator("#found").text_content() == f"{every} samples" and every == 19
    page.fill("#search", "NOW 3")
    assert page.locator("#found").text_content() == f"1 of {every} samples"
    for words in ("Question 3", "truth 3"):  # of the prompt: with both its answers
        page.fill("#search", words)
        assert page.locator("#found").text_content() == f"2 of {every} samples" and visible(page, ".prompt") == 1
    page.fill("#search", "onerror")
    assert visible(page, ".sample") == 1 and page.locator("#training-1").get_attribute("open") is not None
    assert page.evaluate("CSS.highlights.get('search').size") >= 1
    page.fill("#search", "")
    assert page.locator("#training-1").get_attribute("open") is None
    for kind, number in (("correct", 4), ("wrong", 9), ("unscored", 6), ("cut", 6)):
        page.select_option("#kind", kind)
        assert page.locator("#found").text_content() == f"{number} of {every} samples"
    page.select_option("#kind", "")
    page.fill("#least", "0.5")
    assert page.locator("#found").text_content() == f"4 of {every} samples"
    page.fill("#find-chart", "grad_norm")
    assert visible(page, ".chart") == 1


def test_tokens_are_coloured_by_their_probability(page, run):
    """Where the model was unsure; what it was given, and did not sample, has no probability."""
    page.goto(write_report(run).as_uri())
    page.check("#colours")
    spans = page.locator(".sample pre span")
    assert spans.all_text_contents() == ["the ", "<b>", "\\u202ex", "<eos>"]
    assert [spans.nth(n).get_attribute("class") for n in range(4)] == ["p0", "p4", "p5", "p0"]
    assert visible(page, ".swatches span") == 6
    spans.nth(1).hover()
    assert page.locator("#read-out").text_content() == "probability 0.00674, log-probability -5"
    page.uncheck("#colours")
    assert spans.count() == 0 and "the <b>\\u202ex" in page.locator(".sample pre").all_text_contents()


def test_without_scripts_curves_and_samples_can_be_read(browser, run):
    """In a mail, or where scripts are off."""
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(write_report(run).as_uri())
    assert visible(page, "#c1 polyline") == 3 and visible(page, ".sample") > 5 and visible(page, ".tools") == 0
    page.context.close()


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_nothing_runs_out_of_the_page_or_shrinks(page, run, width):
    """A table that is wider than the window hides its last columns; text that a telephone scales down cannot be read."""
    engine = {"engine": 0, "state": "serving", "starts": 1, "last_failure": ""}
    write_lines(run / "engines.jsonl", [{"step": 1, "engines": [engine]}])
    append_lines(
        run / "metrics.jsonl",
        [
            {
                "step": 41,
                "eval/scores": 1.0,
                **{f"eval/pass_at_{n}": 0.5 for n in (1, 2, 4, 8, 16)},
                "eval/stop_rate": 1.0,
            }
        ],
    )
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(write_report(run).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    name, bar = page.get_by_text("engine 0", exact=True).bounding_box(), page.locator("rect.engine").bounding_box()
    assert name["height"] > 10 and bar["height"] == 14 and bar["width"] > width / 2


def test_a_served_page_follows_its_run_and_keeps_what_the_reader_has_set(page, run, monkeypatch):
    """A page that jumps to its top every few seconds cannot be read."""
    monkeypatch.setattr(watch, "MIN_REST_S", 0.0)
    monkeypatch.setattr(watch, "REST", 0.0)
    write_run(run, [step_line(step) for step in range(1, 21)], state="running")
    with PageServer([run]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page.goto(server.url)
            page.wait_for_selector(".pill.running")
            page.evaluate("document.getElementById('every-setting').open = true")
            page.check("#colours")
            page.fill("#search", "now")
            page.locator("#found").scroll_into_view_if_needed()
            place = page.evaluate("scrollY")
            assert place > 100
            append_lines(run / "metrics.jsonl", [step_line(step) for step in range(21, 31)])
            page.locator(".progress", has_text="step 30").wait_for()
            assert page.input_value("#search") == "now" and page.is_checked("#colours")
            assert page.evaluate("document.activeElement.id") == "search"
            assert page.evaluate("document.getElementById('every-setting').open")
            assert abs(page.evaluate("scrollY") - place) < 2
            found = page.locator("#found").text_content()
            assert "of" in found
            point(page, "c1", 1.0)
            page.locator("#c1 output", has_text="step 30: 1.5").wait_for()
            write_whole(run / "status.json", json.dumps({"state": "finished", "cause": ""}))
            page.wait_for_selector(".pill.finished")
        finally:
            server.shutdown()
            thread.join()


def test_a_file_of_a_run_that_goes_on_loads_itself_again(page, run):
    """Opened from the disk, without a server; what the reader has set survives also this."""
    write_run(run, [step_line(step) for step in range(1, 21)], state="running")
    page.clock.install()
    page.goto(write_report(run).as_uri())
    page.fill("#search", "now")
    page.select_option("#kind", "correct")
    page.locator("#found").scroll_into_view_if_needed()
    place = page.evaluate("scrollY")
    append_lines(run / "metrics.jsonl", [step_line(21)])
    (run / "status.json").write_text(json.dumps({"state": "finished", "cause": ""}))
    write_report(run)
    page.clock.run_for(31_000)
    page.wait_for_selector(".pill.finished")
    assert "step 21" in page.locator(".progress").text_content()
    assert page.input_value("#search") == "now" and page.input_value("#kind") == "correct"
    assert page.locator("html").get_attribute("data-follow") == ""
    assert place > 100 and abs(page.evaluate("scrollY") - place) < 2


def test_a_page_that_waits_shows_the_run_when_it_begins(page, tmp_path, monkeypatch):
    """The page is opened before the run."""
    monkeypatch.setattr(watch, "MIN_REST_S", 0.0)
    with PageServer([tmp_path / "run"]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page.goto(server.url)
            assert page.locator("h1").text_content() == "Nothing to show yet"
            write_run(tmp_path / "run", [step_line(1), step_line(2)], state="running")
            page.wait_for_selector("#c1")
            assert page.title() == "run"
        finally:
            server.shutdown()
            thread.join()


def test_runs_of_a_comparison_can_be_told_apart_and_switched_off(page, run, tmp_path):
    """The legend is drawn in the colours of the curves."""
    other = write_run(tmp_path / "other <i>", [step_line(step, reward=1.0 - step / 50) for step in range(1, 41)])
    path = tmp_path / "comparison.html"
    path.write_text(comparison([run, other]))
    page.goto(path.as_uri())
    page.set_viewport_size({"width": 700, "height": 800})
    assert page.locator("td", has_text="finished").nth(1).bounding_box()["height"] < 40, "a word is broken in two"
    page.set_viewport_size({"width": 1280, "height": 900})
    keys = page.locator("#c1 .key")
    names = keys.all_text_contents()
    assert len(names) == 2 and names[1] == "other <i>"
    colours = page.evaluate("[...document.querySelectorAll('#c1 .key')].map((key) => getComputedStyle(key).color)")
    strokes = page.evaluate(
        "[...document.querySelectorAll('#c1 polyline.line')].map((line) => getComputedStyle(line).stroke)"
    )
    assert colours == strokes and len(set(colours)) == 2
    point(page, "c1", 0.5)
    page.wait_for_selector("#c1 .key b")
    assert "0.6" in keys.nth(1).text_content()
    page.click(".runs button >> nth=1")
    assert visible(page, "#c1 polyline.line") == 1 and visible(page, "#c1 .key") == 1
    page.click(".runs button >> nth=1")
    assert visible(page, "#c1 polyline.line") == 2
