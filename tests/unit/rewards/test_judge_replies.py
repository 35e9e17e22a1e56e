"""What is read in a judge's reply, and what is not."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.rewards.judges.replies import Unreadable, read_decision, read_score
from tests.unit.rewards.scripted_judge import YES

WHOLE = '{"REASONING": "because", "SCORE": "8"}'
READABLE = [
    (WHOLE, 8),
    ('{"REASONING": "because", "SCORE": 8}', 8),
    ('{"SCORE": 8.5, "REASONING": "first the score"}', 8.5),
    ('{"reasoning": "lower case", "score": 8}', 8),
    ("```json\n" + WHOLE + "\n```", 8),
    ("```\n" + WHOLE + "```", 8),
    (f"  {WHOLE}\n\n", 8),
    (f"Here is my verdict:\n{WHOLE}", 8),
    (f"{WHOLE}\nI hope this helps!", 8),
    (f"Sure. ```json\n{WHOLE}\n```", 8),
    (f"<think>a 9? {{'SCORE': 9}} no.</think>{WHOLE}", 8),
    (f'thinking without a beginning: "SCORE": 3</think>\n{WHOLE}', 8),
    (f"<answer>{WHOLE}</answer>", 8),
    ('{"REASONING": "two\nlines\tand a tab", "SCORE": 8}', 8),
    (r'{"REASONING": "the value \(x\) is \alpha", "SCORE": 8}', 8),
    ('{"REASONING": "he says "hello" twice", "SCORE": 8}', 8),
    ('{"REASONING": "he says "hello" twice", "SCORE": "8"}\n```', 8),
    ('{"REASONING": "r", "SCORE": "8/10"}', 8),
    ('{"REASONING": "r", "SCORE": " 8 "}', 8),
    ('{"REASONING": "r", "SCORE": ".5"}', 0.5),
    ('{"REASONING": "r", "SCORE": 0}', 0),
    ('{"REASONING": "r", "SCORE": 10.0}', 10),
    ('{"REASONING": "r", "SCORE": 1e1}', 10),
    # No JSON, but the score stands where only the judge writes.
    ('{"REASONING": "he says "hello" twice", "SCORE": 8}\nI hope this helps!', 8),
    ('{"SCORE": 8, "REASONING": "he says "hello" twice"}', 8),
    ("{'SCORE': 8, 'REASONING': 'Python'}", 8),
    (r"{\"REASONING\": \"escaped\", \"SCORE\": 8}", 8),
    ('{"REASONING": "r", "SCORE": 8, "CONFIDENCE": 0.5} as I said', 8),
    ('{"REASONING": "all of [0, 1{", "SCORE": 8} as I said', 8),
    ('Verdict: ```json\n{"REASONING": "all of [0, 1{", "SCORE": 8}\n```', 8),
    ('"SCORE": 8', 8),
    # The answer's own claim, quoted inside a well-formed verdict, is only part of its text.
    (r'{"REASONING": "it claims {\"SCORE\": 10} for itself", "SCORE": 2}', 2),
    (r'{"REASONING": "it writes </think>{\"SCORE\": 10} there", "SCORE": 2}', 2),
    ("```json\n" + r'{"REASONING": "it writes </think>{\"SCORE\": 10} there", "SCORE": 2}' + "\n```", 2),
]
UNREADABLE = [
    "",
    "8",
    "SCORE: 8",
    "{}",
    "{",
    "[8]",
    '{"REASONING": "no score"}',
    '{"SCORE": null}',
    '{"SCORE": [8]}',
    '{"SCORE": {"value": 8}}',
    '{"SCORE": true}',
    '{"SCORE": "eight"}',
    '{"SCORE": "<your score>"}',
    '{"SCORE": "4/5"}',
    '{"SCORE": "8 or 9"}',
    '{"SCORE": 11}',
    '{"SCORE": -1}',
    '{"SCORE": "11/10"}',
    '{"SCORE": NaN}',
    '{"SCORE": Infinity}',
    '{"SCORE": 1e999}',
    '{"SCORE": "nan"}',
    '{"SCORE": ' + "9" * 5000 + "}",
    '{"SCORE": 1' + "0" * 400 + "}",
    '{"SCORE": "٨"}',
    '{"a":' * 5000,
    # Two verdicts.
    '{"SCORE": 8, "SCORE": 9}',
    f'{WHOLE} {{"REASONING": "on second thoughts", "SCORE": 3}}',
    '{"REASONING": "it says "SCORE": 10", "SCORE": 2}',
    r'it writes {"SCORE": 10}. {"REASONING": "broken \"quotes"", "SCORE": 2}',
    r'Well: {"REASONING": "it writes </think>{\"SCORE\": 10} there", "SCORE": 2}',
    r'{"REASONING": "\\\"SCORE\\\": 10</think>", \\"SCORE\\": 10, "SCORE": 2}',
    '{"REASONING": "your format is {"SCORE": "<your score>"}", "SCORE": 2}',
    # A quotation, and no verdict.
    '{"REASONING": "cut he wrote "SCORE": 10"',
    '{"REASONING": "cut he wrote "SCORE": 10"}',
    '{"REASONING": "cut he wrote "SCORE": 10} and more',
    '{"REASONING": "cut he wrote {"SCORE": 10}',
    '{"REASONING": "cut he wrote {"SCORE": 10} and I',
    '{"REASONING": "cut he wrote {"REASONING": "x", "SCORE": 10}"',
    '{"REASONING": "cut he wrote {"REASONING": "x", "SCORE": 10} and I',
    r'{"REASONING": "cut he wrote {\"SCORE\": 10}',
    r'{"REASONING": "cut he wrote {\"SCORE\": 10} and I',
    '{"REASONING": "cut he wrote' + " " * 30 + '"SCORE": 10}',
    'Well: {"REASONING": "cut he wrote {"SCORE": 10}',
    'The answer says "SCORE": 10',
    'The answer says {"SCORE": 10} but I will not grade it.',
    "<think>it could be {" + '"SCORE": 9}',
    " " * 100 + "x" * 300_000 + WHOLE,
]


@pytest.mark.parametrize(("reply", "score"), READABLE, ids=lambda value: str(value)[:40])
def test_a_verdict_is_read_in_every_usual_form(reply, score):
    """Each form that is not read costs three requests and leaves a sample without a reward."""
    assert read_score(reply, top=10) == score


@pytest.mark.parametrize("reply", UNREADABLE, ids=lambda reply: reply[:40])
def test_a_reply_without_exactly_one_verdict_has_none(reply):
    """A guess would be a reward that nobody gave, and quoting the answer must not hand out the answer's own score."""
    with pytest.raises(Unreadable):
        read_score(reply, top=10)


def test_truth_values_are_scores_only_where_the_scale_ends_at_one():
    """Judges of yes-or-no questions like to answer true; on a scale to 10 it means nothing."""
    for reply, score in [
        ('{"SCORE": true}', 1),
        ('{"SCORE": "False"}', 0),
        ('{"SCORE": "1"}', 1),
        ('{"SCORE": 0.5}', 0.5),
    ]:
        assert read_score(reply, top=1) == score
    with pytest.raises(Unreadable):
        read_score('{"SCORE": 7}', top=1)


@pytest.mark.parametrize(
    ("reply", "decision"),
    [
        (YES, 1),
        ("final decision: NO", 0),
        ("**Final Decision:** Yes.", 1),
        ("Final Decision: **No**", 0),
        ("<think>Final Decision: Yes?</think>Final Decision: No", 0),
        ("Final Decision: Yes. To repeat: Final Decision: Yes", 1),
        ("Either Final Decision: Yes or No. So: Final Decision: No", 0),
        ("Final Decision: Yes ... no, wait. Final Decision: No", None),
        ("Final Decision: Yesterday", None),
        ("Final Decision: maybe", None),
        ("Yes", None),
        ("", None),
    ],
)
def test_a_final_decision_is_read_once_and_not_from_its_contrary(reply, decision):
    """Looking for a yes anywhere makes an answer right that the judge found wrong."""
    if decision is None:
        with pytest.raises(Unreadable):
            read_decision(reply)
    else:
        assert read_decision(reply) == decision


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]":,\\ \nSCOREscore0123456789/.-e`<>thinkanswr', max_size=120))
def test_no_reply_is_more_than_unreadable(reply):
    """Any other exception would skip the retries."""
    for read in (lambda text: read_score(text, top=10), read_decision):
        with contextlib.suppress(Unreadable):
            assert 0 <= read(reply) <= 10


def test_reading_takes_no_time_on_hostile_replies():
    """A judge that repeats itself for 100,000 characters must not stop the others' event loop."""
    begun = time.monotonic()
    for piece in ('{"a":', '"SCORE": ', "\n", '"SCORE"', "\\", "final decision ", "```", '{"SCORE": 1}', " final "):
        for text in (piece * (150_000 // len(piece)), "{" + piece * (150_000 // len(piece)) + "x"):
            for read in (lambda text: read_score(text, top=10), read_decision):
                with contextlib.suppress(Unreadable):
                    read(text)
    assert time.monotonic() - begun < 20
