"""From checked rows to prompts: templates, tokens, limits, labels."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mgrpo.data.encoding import Encoder
from mgrpo.data.mixture import open_data
from mgrpo.data.prompt_set import PromptSet
from tests.unit.data.conftest import CHARS, everything, sums, texts, user

ANSWER = {"role": "assistant", "content": "3"}


def rows(*prompts: object) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "ground_truth": index, "dataset": "integer"} for index, prompt in enumerate(prompts)]


@pytest.fixture
def encode(settings, tokenizer) -> Callable[..., PromptSet]:
    """Prompts of rows under the settings."""

    def make(dataset: list[dict], **fields: Any) -> PromptSet:
        return open_data(settings(**fields), dataset=dataset)[0].encode(tokenizer)

    return make


def test_text_prompts_are_encoded_as_they_are(encode, tokenizer) -> None:
    """A bos token that the base model never saw there, or a template around it, changes the task."""
    prompts = encode(rows("1+2="))
    assert tokenizer("1")["input_ids"][0] == tokenizer.bos_token_id
    prompt = prompts.prompt((4, 0))
    assert prompt.tokens.tolist() == [1, 10, 2, 11] and prompt.tokens.dtype == np.int32
    assert (prompt.id, prompt.text, prompt.verifiers, prompt.ground_truths) == ((4, 0), "1+2=", ("integer",), (0,))
    assert (prompt.query, prompt.source) == ("1+2=", "1+2=")


def test_messages_go_through_the_template_up_to_the_answer(encode, tokenizer) -> None:
    """A prompt that holds the answer is solved before it is asked; one without the opening of the turn is not answered."""
    prompts = encode(rows([user("1+2="), ANSWER], [user("1"), ANSWER, user("2")]))
    assert texts(prompts) == ["<u>1+2=<a>", "<u>1<u>3<u>2<a>"]
    opened, opening = tokenizer.convert_tokens_to_ids(["<u>", "<a>"])
    assert prompts.prompt((0, 0)).tokens.tolist() == [opened, 1, 10, 2, 11, opening]


def test_a_prompt_carries_what_judges_and_reward_functions_need(encode) -> None:
    """A judge reads the conversation, a reward function the row: both as they were before the template."""
    messages = [{"role": "system", "content": "0"}, user("1+1="), ANSWER]
    record = {"ground_truth": {"a": [1]}, "dataset": "integer", "level": 2, "tags": ["x", None]}
    own, other = everything(encode([{"prompt": messages, **record}, {"messages": messages, **record}]))
    assert own.query == other.query == "system: 0\nuser: 1+1="
    assert own.source == tuple(messages[:2]) and other.source == other.text == "<u>0<u>1+1=<a>"
    assert own.columns == other.columns == record
    assert own.ground_truths == ({"a": [1]},)


def test_without_template_contents_are_joined(encode) -> None:
    """chat_template_name none is for base models."""
    assert texts(encode(rows([user("1"), user("2"), ANSWER]), chat_template_name="none")) == ["1\n2"]


def test_templates_get_the_settings_of_the_run(encode, tmp_path: Path) -> None:
    """Each of them changes what the model reads."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ sign }}{{ m['content'] }}{% endfor %}=")
    (tmp_path / "system.txt").write_text(" 9\n")
    asked = rows([{"role": "system", "content": "0"}, user("1")], [user("2")])
    fields = {
        "chat_template_name": str(tmp_path / "t.jinja"),
        "chat_template_kwargs": '{"sign": "+"}',
        "system_prompt_override_file": str(tmp_path / "system.txt"),
        "add_bos": True,
    }
    first, second = everything(encode(asked, **fields))
    assert (first.text, second.text) == ("<bos>+9+1=", "<bos>+9+2=")
    assert first.query == "system: 9\nuser: 1"
    assert first.source == ({"role": "system", "content": "9"}, user("1"))
    assert first.tokens.tolist()[0] == len(CHARS) + 3


def test_add_bos_is_for_text_prompts_too_and_never_doubles(encode) -> None:
    """Two bos tokens are a prompt that no model has seen."""
    assert everything(encode(rows("1"), add_bos=True))[0].tokens.tolist() == [len(CHARS) + 3, 1]
    with pytest.raises(ValueError, match="dataset:2: add_bos=true would write '<bos>' twice"):
        encode(rows("1", "<bos>1"), add_bos=True)


def test_messages_need_a_template(encode, tokenizer) -> None:
    """A silent fallback to some other format costs accuracy without an explanation."""
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"dataset:2 has messages: .* no chat template; pass chat_template_name none"):
        encode(rows("1", [user("1")]))
    assert len(encode(rows("1"))) == 1
    assert len(encode(rows([user("1")]), chat_template_name="simple_chat")) == 1


def test_rows_that_cannot_be_made_prompts_are_reported_together(encode, tokenizer) -> None:
    """Each mistake once, with its first rows."""
    tokenizer.chat_template = "{% if messages[0]['content'] == '1' %}{{ raise_exception('odd') }}{% endif %}"
    with pytest.raises(ValueError) as raised:
        encode(rows(*[[user("1")]] * 15, *[[user("2")]] * 15, "3"))
    text = str(raised.value)
    first, refused, empty = text.splitlines()
    assert first == "30 of 31 rows cannot be made prompts:"
    assert refused.startswith("  dataset:1: the chat template refused") and refused.endswith(
        "(14 more such rows: 2, 3, 4, ...)"
    )
    assert empty == "  dataset:16: the prompt has no tokens (14 more such rows: 17, 18, 19, ...)"


def test_longer_prompts_are_left_out_and_counted(encode, caplog) -> None:
    """Cut prompts ask other questions, and labels must stay with their own."""
    with caplog.at_level(logging.WARNING):
        prompts = encode(rows("1+2=", "1", "1+22=", "2"), max_prompt_token_length=4)
    assert prompts.statistics["total"]["taken"] == 4 and len(prompts) == 3
    assert [prompt.ground_truths[0] for prompt in everything(prompts)] == [0, 1, 3]
    assert [len(prompt.tokens) for prompt in everything(prompts)] == [4, 1, 1]
    assert "1 of 4 prompts of dataset are left out: they have more than 4 tokens" in caplog.text
    with pytest.raises(ValueError, match="none of 2 prompts fits max_prompt_token_length=3; the shortest has 4"):
        encode(rows("1+2=", "1+22="), max_prompt_token_length=3)


def test_longer_prompts_may_be_cut_to_their_last_tokens(encode, caplog) -> None:
    """What `max_prompt_length` of TRL asks for; text and tokens must still be of each other."""
    with caplog.at_level(logging.WARNING):
        prompts = encode(rows([user("1+22=")], "3"), max_prompt_token_length=4, overlong_prompt_policy="truncate_left")
    assert texts(prompts) == ["22=<a>", "3"]
    assert prompts.prompt((0, 0)).tokens.tolist() == [2, 2, 11, len(CHARS) + 2]
    assert prompts.prompt((0, 0)).query == "user: 1+22="
    assert [len(prompt.tokens) for prompt in everything(prompts)] == [4, 1]
    assert "1 of 2 prompts of dataset are cut to their last 4 tokens" in caplog.text


def test_longer_prompts_may_be_an_error(encode) -> None:
    """For users who expect none."""
    fields = {"max_prompt_token_length": 4, "overlong_prompt_policy": "error"}
    assert len(encode(rows("1+2=", "1"), **fields)) == 2
    with pytest.raises(ValueError, match=r"=error forbids; the first:\n  dataset:2: 5 tokens\n  dataset:3: 6 tokens$"):
        encode(rows("1", "1+22=", "11+22="), **fields)


def test_a_mix_keeps_its_order_and_its_repeats(settings, write, tokenizer, size) -> None:
    """The row's index is its identity across restarts: it must depend on the mix alone."""
    a, b = write("a.jsonl", sums(4)), write("b.jsonl", sums(3, "math"))
    mix = (a, "1.5", b, "1.0", a, "2")
    for skip in (True, False, False):
        train, _ = open_data(settings(*mix, dataset_skip_cache=skip))
        found = [(prompt.verifiers[0], prompt.ground_truths[0]) for prompt in everything(train.encode(tokenizer))]
        # RandomState(42) chooses rows 1 and 3 of four.
        expected = [("integer", row) for row in (0, 1, 2, 3, 1, 3)] + [("math", row) for row in (0, 1, 2)]
        assert found == [*expected, ("integer", 1), ("integer", 3)]


def test_a_prompt_knows_its_source(settings, write, tokenizer) -> None:
    """Evaluations are reported for each data set, also where one was moved since it was prepared."""
    for name in ("a.jsonl", "moved.jsonl"):
        a, b = write(name, rows("1", "12345")), write("b.jsonl", rows("2", "3"))
        prompts = open_data(settings(a, "2.0", b, "1.0", max_prompt_token_length=3))[0].encode(tokenizer)
        assert [prompts.source_of(index) for index in range(len(prompts))] == [a, a, b, b]
        assert [part["source"] for part in prompts.statistics["sources"]] == [a, b]


def test_any_thread_may_ask(settings, write, tokenizer) -> None:
    """Prompts are taken by the controller's thread while samples are written by another."""
    data = settings(write("a.jsonl", sums(200)), "1.0")
    for _ in range(2):  # made, and found
        prompts = open_data(data)[0].encode(tokenizer)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(prompts.prompt, [(0, index) for index in range(200)] * 5))
        assert [prompt.ground_truths[0] for prompt in found] == list(range(200)) * 5


def test_statistics_say_what_became_of_the_rows(settings, write, tokenizer) -> None:
    """Saved beside the prompts, for each source and for all; repeats count as often as they are trained on."""
    a = write("a.jsonl", rows("1", "12", "123", "1234", "12345"))
    b = write("b.jsonl", rows("1"))
    prompts = open_data(settings(a, "2.0", b, "1.0", max_prompt_token_length=3))[0].encode(tokenizer)
    saved = json.loads((prompts.folder / "statistics.json").read_text())
    assert prompts.statistics == saved and saved["max_prompt_token_length"] == 3
    first, second = saved["sources"]
    assert (first["source"], first["rows"], first["taken"], first["too_long"], first["prompts"]) == (a, 5, 10, 4, 6)
    assert first["tokens"] == {"mean": 3.0, "min": 1, "p25": 2, "p50": 3, "p75": 4, "p90": 5, "p99": 5, "max": 5}
    assert (second["taken"], second["too_long"], second["prompts"]) == (1, 0, 1)
    assert {name: saved["total"][name] for name in ("rows", "taken", "too_long", "prompts")} == {
        "rows": 6,
        "taken": 11,
        "too_long": 4,
        "prompts": 7,
    }
    from mgrpo.data.statistics import statistics_lines

    assert statistics_lines(saved)[0] == (
        f"{a}: 5 rows, 10 taken, 6 prompts, 4 of more than 3 tokens left out; tokens 1 to 5, half 3 or fewer"
    )
    assert statistics_lines(saved)[-1].startswith("all: 6 rows, 11 taken, 7 prompts")


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    contents=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9), min_size=1, max_size=6
    ),
    truths=st.lists(
        st.recursive(
            st.integers() | st.text() | st.booleans() | st.floats(allow_nan=False),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
            max_leaves=5,
        ),
        min_size=6,
        max_size=6,
    ),
)
def test_any_text_and_any_label_come_back_as_they_were(settings, tokenizer, contents: list, truths: list) -> None:
    """From Python to JSON to Arrow and back: a label that is not the same is a wrong label."""
    data = [
        {"prompt": text, "ground_truth": truth, "dataset": "math"}
        for text, truth in zip(contents, truths, strict=False)
    ]
    prompts = everything(open_data(settings(dataset_skip_cache=True), dataset=data)[0].encode(tokenizer))
    assert [(p.text, p.ground_truths[0]) for p in prompts] == [(row["prompt"], row["ground_truth"]) for row in data]


def test_threads_batches_and_the_cache_make_the_same_prompts(settings, write, tokenizer, size, monkeypatch) -> None:
    """Whatever the machine, the data are the data: by one thread or by many, in any batches, new or from the cache."""
    data = [
        {**row, "prompt": [user(row["prompt"])] if index % 3 else row["prompt"] * (1 + index % 9)}
        for index, row in enumerate(sums(400))
    ]
    a, b = write("a.jsonl", data), write("b.jsonl", sums(70))
    expected = None
    for num_threads, batch_rows, skip in (
        (1, 1000, True),
        (1, 7, False),
        (1, 7, False),
        (4, 90, True),
    ):
        monkeypatch.setattr("mgrpo.data.building._cores", lambda n=num_threads: n)
        monkeypatch.setattr("mgrpo.data.building._BATCH_ROWS", batch_rows)
        fields = {"max_prompt_token_length": 30, "dataset_skip_cache": skip}
        prompts = open_data(settings(a, "0.8", b, "1.0", **fields))[0].encode(tokenizer)
        found = [(p.tokens.tolist(), p.text, p.ground_truths, p.query, p.columns) for p in everything(prompts)]
        expected = expected or (found, prompts.statistics)
        assert (found, prompts.statistics) == expected
    assert 300 < len(expected[0]) < 390


def test_long_rows_are_encoded_few_at_once(settings, write, tokenizer, monkeypatch) -> None:
    """A thousand rows of a megabyte would be in memory several times."""
    sizes: list[int] = []
    encode = Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda self, records: sizes.append(len(records)) or encode(self, records))
    monkeypatch.setattr("mgrpo.data.building._BATCH_CHARS", 10_000)
    rows = [{**row, "note": "x" * 2000} for row in sums(40)]
    train, _ = open_data(settings(write("a.jsonl", rows), "1.0"))
    assert len(train.encode(tokenizer)) == 40
    assert sum(sizes) == 40 and 1 <= max(sizes) <= 5


def test_data_are_prepared_beside_running_threads(settings, write, tokenizer, monkeypatch) -> None:
    """Rank 0 runs Ray and threads that hold locks: a fork of it could wait forever for one that is never released."""
    is_done, forks = threading.Event(), []
    os.register_at_fork(before=lambda: is_done.is_set() or forks.append(1))
    for name in ("Popen", "run"):
        monkeypatch.setattr(subprocess, name, lambda *_, **__: pytest.fail("a program was started"))

    def keep_logging() -> None:
        while not is_done.is_set():
            logging.getLogger("beside").debug("x")

    threads = [threading.Thread(target=keep_logging) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        asked = rows(*[[user(str(index % 10))] for index in range(3000)])
        monkeypatch.setattr("mgrpo.data.building._cores", lambda: 4)
        train, _ = open_data(settings(write("a.jsonl", asked), "1.0"))
        with ThreadPoolExecutor(1) as thread:
            prompts = thread.submit(train.encode, tokenizer).result(timeout=60)
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    assert texts(prompts)[:11] == [f"<u>{index % 10}<a>" for index in range(11)] and not forks


def test_progress_bars_of_datasets_stay_as_they_were(encode) -> None:
    """They are the user's outside of our use, and in it they would fill the log of the run."""
    import datasets

    for set_bars in (datasets.enable_progress_bars, datasets.disable_progress_bars):
        set_bars()
        were_disabled = datasets.are_progress_bars_disabled()
        encode(rows("1", "2"), dataset_skip_cache=True)
        assert datasets.are_progress_bars_disabled() == were_disabled
    datasets.enable_progress_bars()
