"""The page about a run: complete, readable without a network, and safe whatever a model wrote."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from mgrpo.cli import main
from mgrpo.telemetry.chart import (
    BOTTOM,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    curves_svg,
    metric_points,
    reward_svg,
    running_mean,
    ticks,
)
from mgrpo.telemetry.report import choose_samples, write_report
from mgrpo.telemetry.samples import read_records

HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></div><img src=x onerror=alert(2)>",
    "\"' onmouseover='alert(3)",
    "<!-- ]]> <style>@import 'http://evil'</style> &lt;",
    "\x00\x07\x1b[31m\u202egnp.exe \ud83d \ufeff",
    "<svg/onload=alert(4)>",
]


class Page(HTMLParser):
    """Tags and attributes, and the text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def record(number: int, reward: float | None = 0.0, text: str = "answer", prompt: int | None = None) -> dict:
    return {
        "step": 10,
        "prompt_idx": number if prompt is None else prompt,
        "sample_idx": 0,
        "prompt": f"prompt {text}",
        "completion": text,
        "verifiers": ["integer"],
        "ground_truth": [text],
        "scores": {"integer": reward},
        "reward": reward,
        "correct": None if reward is None else reward > 0,
        "finish_reason": "stop",
        "num_tokens": 3,
        "policy_version": 10,
    }


@pytest.fixture
def run(tmp_path):
    """The files of a run, with hostile text wherever text can be."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text(
        "exp_name: '<script>alert(0)</script>'\nmodel_name_or_path: models/<b>x\nlearning_rate: 2.0e-05\nseed: 1\n"
    )
    lines = [
        {"step": 0, "policy_version": 0, "eval/pass_at_1": 0.25, "eval/scores": 0.25},
        *({"step": step, "policy_version": step, "reward": step / 20} for step in range(1, 11)),
        {"step": 10, "eval/pass_at_1": 0.75, "eval/scores": 0.75, "eval/by_source/<i>/pass_at_1": 0.5, "eval/x": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11, "rew')
    records = [record(number, float(number), text) for number, text in enumerate([*HOSTILE, "a", "b", "c"])]
    (tmp_path / "rollouts" / "eval_step_9.jsonl").write_text(json.dumps(record(0, text="an older evaluation")) + "\n")
    (tmp_path / "rollouts" / "eval_step_10.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def read(folder) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_what_a_model_wrote_is_text_and_nothing_else(run):
    """A model that is rewarded for it would write a script; the reader opens the page with her own rights."""
    page = read(run)
    assert page.open == []
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "link", "object", "embed", "form", "a", "base", "i", "b"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    for text in (
        HOSTILE[0],
        HOSTILE[1],
        HOSTILE[2],
        HOSTILE[5],
        "<script>alert(0)</script>",
        "models/<b>x",
        "by_source/<i>",
    ):
        assert text in page.text
    assert not any(char in page.text for char in "\x00\x07\x1b\u202e\ufeff\ud83d")
    assert "\\u202egnp.exe \\ud83d \\ufeff" in page.text


def test_the_page_loads_nothing(run):
    """It is mailed and opened without a network, and no text in it may send a request."""
    page = read(run)
    assert not [
        a for _, attributes in page.tags for a in attributes if a in ("src", "href", "data", "srcset", "action")
    ]
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_page_shows_settings_course_and_evaluations(run):
    """Enough to see what was run and what came of it; the newest evaluation's samples."""
    page = read(run)
    for text in (
        "learning_rate",
        "2e-05",
        "0.25",
        "0.75",
        "Highest reward",
        "Lowest reward",
        "At random",
        "after step 10",
    ):
        assert text in page.text
    assert "an older evaluation" not in page.text
    assert len([tag for tag, _ in page.tags if tag == "circle"]) == 2
    assert len([tag for tag, _ in page.tags if tag == "polyline"]) == 2


def test_a_run_without_evaluations_or_settings_has_a_page(tmp_path):
    """A run that has just begun, or has no held-out data."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": null}\n{"step": 2, "reward": 0.5}\n')
    page = read(tmp_path)
    assert "None." in page.text and tmp_path.name in page.text


def test_long_texts_are_shortened(tmp_path):
    """200,000 characters of one answer would hide the others."""
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "eval_step_1.jsonl").write_text(json.dumps(record(0, text="A" * 200_000)) + "\n")
    page = read(tmp_path)
    assert "196000 more characters" in page.text and len(page.text) < 20_000


def test_samples_are_the_extremes_and_a_few_of_the_rest():
    """Of different prompts, each sample once, unscored ones only by chance; always the same choice."""
    records = [record(n, None if n == 3 else n % 7 - 3.0, prompt=n // 2) for n in range(40)]
    chosen = choose_samples(lambda: iter(records))
    best, worst, others = chosen.values()
    assert [r["reward"] for r in best] == [3.0] * 3 and [r["reward"] for r in worst] == [-3.0] * 3
    assert len({r["prompt_idx"] for r in best}) == len({r["prompt_idx"] for r in worst}) == 3
    together = [id(r) for r in [*best, *worst, *others]]
    assert len(together) == len(set(together)) == 12
    assert choose_samples(lambda: iter(records)) == chosen
    assert choose_samples(lambda: iter(())) == {"Highest reward": [], "Lowest reward": [], "At random": []}
    # The highest and the lowest of equal rewards would be two names for the same.
    alike = choose_samples(lambda: (record(n, 0.0) for n in range(20)))
    assert [len(group) for group in alike.values()] == [0, 0, 6]


def test_points_skip_null_and_a_torn_last_line(tmp_path):
    """The curve is also drawn from runs that crashed."""
    path = tmp_path / "metrics.jsonl"
    records = [{"step": 0, "eval/scores": 0.5}]
    for step in range(1, 61):
        records.append({"step": step, "reward": None if step == 30 else step / 10 + step % 3})
        records += [{"step": step, "eval/scores": step / 10}] if step % 20 == 0 else []
    path.write_text("\n".join(json.dumps(record) for record in records) + '\n{"step": 61, "sco')
    lines = list(read_records([path]))
    assert len(metric_points(lines, "reward")) == 59
    assert metric_points(lines, "eval/scores") == [(0, 0.5), (20, 2.0), (40, 4.0), (60, 6.0)]


def test_the_running_mean_looks_back_only():
    """A mean that looks ahead would show learning before it happened."""
    assert running_mean([0.0, 2.0, 4.0, 6.0], 2) == [0.0, 1.0, 3.0, 5.0]
    assert running_mean([3.0], 5) == [3.0]


def test_the_curve_is_a_picture_of_its_own():
    """Viewers of SVG files are stricter than browsers: one namespaced XML element, with both lines and every evaluation."""
    root = ElementTree.fromstring(reward_svg([(step, step / 60) for step in range(1, 61)], [(0, 0.5), (60, 1.0)]))
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    thin, bold = root.findall(f"{namespace}polyline")
    # From the left edge of the frame to its right edge; the mean of the last 6 steps ends at 57.5 / 60.
    frame = Frame([(0, 0.0), (60, 1.0)], WIDTH, HEIGHT)
    for line in (thin, bold):
        xs = [float(point.split(",")[0]) for point in line.attrib["points"].split()]
        assert xs[0] == pytest.approx(frame.x(1), abs=0.1) and xs[-1] == WIDTH - RIGHT
    assert [float(dot.attrib["cx"]) for dot in root.findall(f"{namespace}circle")] == [
        round(frame.left, 1),
        WIDTH - RIGHT,
    ]
    top, bottom = float(thin.attrib["points"].split(",")[-1]), float(bold.attrib["points"].split(",")[-1])
    assert top == TOP and bottom == pytest.approx(TOP + (HEIGHT - TOP - BOTTOM) * (1 - 57.5 / 60), abs=0.1)
    assert "held-out" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]),
        (-0.19, -0.05, [-0.2, -0.15, -0.1, -0.05]),
        (3.0, 41.0, [0, 10, 20, 30, 40, 50]),
        (0.0, 0.0, [-1, -0.5, 0, 0.5, 1]),
        (3.125, 3.125, [1, 2, 3, 4, 5]),
        (1e-6, 3e-6, [1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6]),
    ],
)
def test_ticks_are_round_numbers_around_all_values(low, high, expected):
    """-0.04824 tells a reader nothing, and a flat curve on the edge of its frame looks like an empty one."""
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    "points", [[(1, -0.14472), (9, -0.09648)], [(4, 0.0), (5, 0.0)], [(7, 1e-7)], [(1, -2e12), (2, 3.0)]]
)
def test_labels_and_lines_are_inside_the_picture(points):
    """Of a negative label the sign was cut off; a single step had no mark at all."""
    for svg in (reward_svg(points, []), curves_svg("KL", {"": points})):
        root = ElementTree.fromstring(svg)
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        labels = [node for node in root.iter() if node.attrib.get("text-anchor") == "end"]
        assert labels and all(float(n.attrib["x"]) - 6.5 * len(n.text or "") >= 0 for n in labels)
        places = [corner.split(",") for n in root.iter() for corner in n.attrib.get("points", "").split()]
        places += [[n.attrib["cx"], n.attrib["cy"]] for n in root.iter() if "cx" in n.attrib]
        assert places and all(0 < float(x) < width and 10 < float(y) < height - 10 for x, y in places)
        steps = [n.text.removeprefix("step ") for n in root.iter() if n.attrib.get("text-anchor") == "middle"]
        assert steps[0] == str(points[0][0]) and all(step.isdigit() for step in steps)


def test_the_page_of_a_run_without_held_out_data_shows_what_training_sampled(tmp_path):
    """Texts, and the row's own columns, which a reward function was given; no label that is not there."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": s, "reward": 1.0, "optim/steps": s % 2, "time/unix": 1e9 + s, "lr": 1e-5}) + "\n"
            for s in (1, 2, 3)
        )
    )
    (tmp_path / "config.yaml").write_text("# mgrpo 9, Python 3\nseed: 1\n")
    (tmp_path / "rollouts").mkdir()
    shown = [record(0, text=text) | {"step": step, "ground_truth": []} for step, text in ((1, "early"), (3, "late"))]
    shown[1] |= {"columns": {"solution": "<b>7"}, "advantage": -0.5}
    called = [{"calls": [{"name": "search", "failed": True}, {"name": "<i>", "failed": False}]}, {"calls": []}]
    shown[1] |= {"trajectory": {"turns": called, "ended_by": "done"}}
    path = tmp_path / "rollouts" / "train_samples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in shown))
    page = read(tmp_path)
    assert "Samples of training, step 3" in page.text and "late" in page.text and "early" not in page.text
    assert "solution: <b>7" in page.text and "advantage -0.5" in page.text and "ground truth" not in page.text
    assert "ended by the environment; 2 turns, called search (failed), <i>" in page.text
    assert "from 2001-09-09 01:46:41 to 2001-09-09 01:46:43 UTC" in page.text and "mgrpo 9, Python 3" in page.text
    assert "1 of them had nothing to train on" in page.text and "learning rate" in page.text


def test_without_evaluations_the_legend_does_not_promise_them():
    """Runs without held-out prompts also have a curve."""
    assert "held-out" not in reward_svg([(1, 0.5), (2, 1.0)], [])


def test_a_curve_of_many_steps_stays_small():
    """A page of a month's run must open."""
    svg = reward_svg([(step, step % 10 / 10) for step in range(1, 100_001)], [])
    assert len(svg) < 30_000
    assert "NaN" not in reward_svg([(5, 1.0)], [(5, 1.0)]).replace("nan", "NaN")


def test_the_report_command(run, tmp_path, capsys):
    """From the files alone, in place of the old page; a folder without a run is one sentence."""
    (run / "report.html").write_text("old")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert "alert" in (run / "report.html").read_text()
    assert main(["report", str(tmp_path / "rollouts")]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    assert main(["report"]) == 2
