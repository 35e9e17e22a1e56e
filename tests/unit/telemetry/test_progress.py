"""What a run says while it runs."""

import io
import time

import pytest

from mgrpo.telemetry.progress import (
    History,
    Progress,
    StartUp,
    clock_text,
    evaluation_line,
    sparkline,
    step_line,
    summary_lines,
)

rich_console = pytest.importorskip("rich.console")


class Clock:
    """Time that passes only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def metrics(step, *, reward=1.0):
    return {
        "reward": reward,
        "objective/kl2_avg": 0.0012,
        "policy/entropy_avg": 1.25,
        "time/actor_tokens_per_second": 1234.0,
        "time/generate": 3.1,
        "time/score": 0.1,
        "time/train": 1.9,
        "time/sync": 0.2,
        "time/total": 5.5,
    }


def log_of(total_steps, *, seconds_per_step=5.5, given=metrics):
    clock, out = Clock(), io.StringIO()
    with Progress(total_steps, rich_console.Console(file=out, force_terminal=False), clock=clock) as progress:
        for step in range(1, total_steps + 1):
            clock.now += seconds_per_step
            progress.update(step, given(step))
    return out.getvalue().splitlines()


def test_a_log_gets_a_dozen_lines_with_the_first_and_the_last():
    """One line per step floods the log; a panel fills it with control codes."""
    lines = log_of(50)
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, *range(4, 50, 4), 50]
    assert "\x1b" not in "".join(lines)
    assert len(log_of(3)) == 3
    assert len(log_of(1)) == 1


def test_a_line_tells_reward_kl_entropy_phases_speed_and_time_left():
    """A reader of the log must see whether the run learns and where the time goes."""
    lines = log_of(48)
    assert lines[0] == (
        "step  1/48  reward  1.000  kl 0.0012  entropy 1.25  "
        "5.5 s (generate 3.1, score 0.1, train 1.9, sync 0.2)  tok/s 1,234  left 4:18"
    )
    assert lines[1].startswith("step  4/48") and lines[1].endswith("left 4:02")
    assert "left" not in lines[-1]


def test_a_run_of_long_steps_is_not_silent():
    """A dozen lines in a run of days would look like a hang."""
    lines = log_of(24, seconds_per_step=400)
    assert len(lines) == 24


def test_missing_metrics_are_left_out():
    """The first step has no sync and a step without trainable tokens has no loss: neither may end the run."""
    assert log_of(1, given=lambda step: {}) == ["step 1/1"]
    assert log_of(1, given=lambda step: {"reward": 0.5, "time/total": 2.0}) == ["step 1/1  reward  0.500  2.0 s"]
    out = io.StringIO()
    with Progress(2, rich_console.Console(file=out, force_terminal=True, width=100)) as progress:
        progress.update(1, {})
        progress.update(2, {"reward": float("nan")})
    assert "step 2/2" in out.getvalue()


def test_a_terminal_gets_a_panel_that_is_redrawn_a_few_times_a_second():
    """Redrawing at every step of milliseconds would cost more than the step."""
    clock, out = Clock(), io.StringIO()
    with Progress(1000, rich_console.Console(file=out, force_terminal=True, width=100), clock=clock) as progress:
        for step in range(1, 1000):
            clock.now += 0.01
            progress.update(step, metrics(step, reward=step / 100))
        seen = out.getvalue()
    # 10 seconds at 4 a second; Live draws once more when it starts.
    assert 35 <= seen.count("step ") / 2 <= 50
    assert "▁" in seen and "█" in seen and "tokens/s" in seen
    assert out.getvalue().endswith("\x1b[?25h"), "the cursor must be visible again"


def test_the_panel_gives_the_terminal_back_when_the_run_fails():
    """A hidden cursor after a traceback is the mark of a careless tool."""
    out = io.StringIO()
    with pytest.raises(RuntimeError), Progress(2, rich_console.Console(file=out, force_terminal=True)) as progress:
        progress.update(1, metrics(1))
        raise RuntimeError
    assert "\x1b[?25h" in out.getvalue()


def test_a_step_costs_less_than_a_millisecond():
    """Progress runs inside the training loop; the bound is wide for a busy machine."""
    for is_terminal in (False, True):
        console = rich_console.Console(file=io.StringIO(), force_terminal=is_terminal)
        with Progress(100_000, console) as progress:
            progress.update(1, metrics(1))
            started = time.process_time()
            for step in range(2, 1002):
                progress.update(step, metrics(step))
            assert time.process_time() - started < 1.0


def test_an_evaluation_is_one_line():
    """Accuracy before and after is the result of a run."""
    before, after = {"eval/pass_at_1": 0.031, "eval/scores": 0.31}, {"eval/pass_at_1": 0.906, "eval/scores": 9.06}
    assert evaluation_line(before, when="before training") == (
        "evaluation before training: accuracy 3.1 %, mean reward 0.310"
    )
    assert evaluation_line(after, when="after step 40", before=before) == (
        "evaluation after step 40: accuracy 90.6 % (+87.5 points), mean reward 9.060"
    )
    assert evaluation_line({}, when="now") == "evaluation now: no result"


def test_the_summary_adds_up():
    """Phases that do not sum to the whole, or a change with the wrong sign, discredit every other number."""
    clock = Clock()
    history = History(20, clock)
    clock.now += 10  # start-up: counts as other
    for step in range(1, 21):
        clock.now += 5.5
        history.add(step, metrics(step, reward=float(step)))
    lines = summary_lines(history, before={"eval/pass_at_1": 0.05}, after={"eval/pass_at_1": 0.9})
    assert [line.rstrip() for line in lines] == [
        "                         start       end",
        "held-out accuracy        5.0 %    90.0 %",
        "training reward          1.500    19.500   (mean of 2 steps)",
        "",
        "20 steps in 2:00",
        "  generate       62.0 s   52 %  ████████████",
        "  score           2.0 s    2 %",
        "  train          38.0 s   32 %  ████████",
        "  sync            4.0 s    3 %  █",
        "  other          14.0 s   12 %  ███",
    ]


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ({"eval/scores": 0.056}, {"eval/scores": 0.896}, "held-out reward          0.056     0.896"),
        (None, {"eval/scores": 0.896}, "held-out reward              -     0.896"),
        ({"eval/pass_at_1": 0.0, "eval/scores": 0.0}, None, "held-out accuracy        0.0 %         -"),
    ],
)
def test_the_summary_has_held_out_rewards_where_nothing_is_right_or_wrong(before, after, row):
    """With a reward function of the user's own the last table would have the training's rewards alone."""
    history = History(1, Clock())
    history.add(1, {"reward": 0.5})
    lines = summary_lines(history, before=before, after=after)
    assert lines[1] == row and lines[2].startswith("training reward") and lines[3] == ""


def test_draining_the_engines_has_a_name():
    """In an asynchronous run it may be most of a step, and would look like time lost between the phases."""
    clock = Clock()
    history = History(1, clock)
    clock.now += 8.0
    history.add(1, {"time/total": 8.0, "time/generate": 1.0, "time/train": 2.0, "time/drain": 4.5, "time/sync": 0.5})
    assert step_line(history) == "step 1/1  8.0 s (generate 1.0, train 2.0, drain 4.5, sync 0.5)"
    rows = [line.split()[:3] for line in summary_lines(history)]
    assert ["drain", "4.5", "s"] in rows and ["other", "0.0", "s"] in rows


def test_a_reward_says_what_it_is_out_of():
    """An accuracy of 31 % that is printed as 3.125 looks like a fault."""
    out = io.StringIO()
    with Progress(1, rich_console.Console(file=out, force_terminal=False), highest=10.0) as progress:
        progress.evaluation({"eval/scores": 2.5}, when="before training")
        progress.update(1, {"reward": 3.125})
        progress.finish()
    lines = out.getvalue().splitlines()
    assert lines[0] == "evaluation before training: mean reward 2.500 of 10"
    assert lines[1] == "step 1/1  reward  3.125 of 10"
    assert lines[4] == "training reward          3.125     3.125   (a right answer has 10)"
    for panel_of in (0.0, 1.0):
        history = History(1, highest=panel_of)
        history.add(1, {"reward": 0.5})
        assert step_line(history) == "step 1/1  reward  0.500"


def test_evaluations_have_a_row_of_their_own():
    """They may take longer than the training, and would look like time lost between the steps."""
    clock = Clock()
    out = io.StringIO()
    with Progress(1, rich_console.Console(file=out, force_terminal=False), clock=clock) as progress:
        clock.now += 14.5
        progress.evaluation({}, when="before training", seconds=9.0)
        progress.update(1, metrics(1))
        progress.finish()
    rows = [line.split()[:3] for line in out.getvalue().splitlines()]
    assert ["evaluate", "9.0", "s"] in rows and ["other", "0.2", "s"] in rows
    assert "1 step in 0:14" in out.getvalue()


def test_a_run_that_goes_on_counts_its_own_steps_beside_all():
    """15 steps in the time of five make every plan for the next run three times too short."""
    clock = Clock()
    history = History(15, clock)
    for step in range(11, 16):
        clock.now += 6.0
        history.add(step, metrics(step))
    assert "5 of 15 steps in 0:30" in summary_lines(history)


def test_a_summary_of_nothing_is_short():
    """A run that ends before its first step still ends in order."""
    assert summary_lines(History(5, Clock())) == ["", "0 steps in 0:00"]


def test_a_log_that_knows_only_ascii_does_not_end_the_run():
    """LANG=C is common under batch systems, and the summary has bars in it."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Progress(1, rich_console.Console(file=out, force_terminal=False)).say("train ███")
    assert raw.getvalue() == b"train ???\n"


def test_the_time_left_follows_the_pace_and_counts_evaluations():
    """An estimate from step times alone is too short when every tenth step evaluates."""
    clock = Clock()
    history = History(11, clock)
    assert history.remaining_s() is None
    history.add(1, {"time/total": 2.0})
    assert history.remaining_s() == 20.0
    clock.now += 50  # five steps of 2 s and 40 s of evaluation
    history.add(6, {"time/total": 2.0})
    assert history.remaining_s() == 50.0


def test_a_sparkline_shows_the_course():
    """Averages of equal shares, from the least to the most."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 10, 10], 2) == "▁█"
    assert sparkline([3, 3, 3], 8) == "▁▁▁"
    assert sparkline([], 8) == ""


def test_times_read_like_a_clock():
    """3600 seconds are one hour."""
    assert [clock_text(seconds) for seconds in (0, 59.6, 75, 3700)] == ["0:00", "1:00", "1:15", "1:01:40"]


def test_a_line_of_a_fresh_history_needs_no_metrics():
    """Totals of other widths keep the columns aligned."""
    history = History(100, Clock())
    history.add(7, {"reward": 12.5})
    assert step_line(history) == "step   7/100  reward 12.500"


def test_the_phases_of_a_start_add_up_to_the_time_until_the_first_sample():
    """A start of ten minutes is shortened where it is spent; a phase that is left twice counts both times."""
    clock, lines = Clock(), []
    start = StartUp(began=clock.now - 3.0, clock=clock, write=lines.append)
    start.say("importing torch", "import")
    start.sampled()  # an answer to nobody
    for seconds, phase in ((8, "engines"), (1, "weights"), (20, "engines"), (4, "sample")):
        clock.now += seconds
        start.enter(phase)
    clock.now += 2
    start.sampled()
    start.sampled()
    assert start.seconds == {"checks": 3, "import": 8, "engines": 5, "weights": 20, "sample": 2}
    assert lines == [
        "[   3 s] importing torch",
        "[  38 s] first sample; the start by phase (s): checks 3.0, import 8.0, engines 5.0, weights 20.0, sample 2.0",
    ]
