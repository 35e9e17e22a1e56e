"""`thinking_history`: a game against a text environment with a template and a tokenizer, from turns to samples."""

from __future__ import annotations

from typing import Any

import pytest

from mgrpo.algo.training_samples import train_samples
from mgrpo.config import Config
from mgrpo.environments.environment import Observation
from mgrpo.environments.loop.language import TemplateLanguage
from mgrpo.environments.offered.description import Description, Offer
from mgrpo.moving import from_values
from mgrpo.run.inputs.toolset import Toolset, make_language, remarks
from mgrpo.types import Score, ScoredGroup, TrainSample
from tests.builders import prompt
from tests.unit.environments.chat_templates import FORGETTING, JOINED, make_tokenizer
from tests.unit.environments.played import Adder, Scripted, play

pytest.importorskip("transformers")

SAID = ("<think>\nto 4\n</think>\n\n2", "3", "<think>x</think>4")
ANSWERS = ("lower", "<|im_end|>higher")
START = "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
GAME = Offer(name="game", entry="game", tools=(), is_repeatable=True, gives_reward=False, is_alternative=False)
TOOLSET = Toolset(specs=(), description=Description(offers=(GAME,)))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(text=FORGETTING)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def made(tokenizer: Any, template: str, history: str) -> tuple[Config, Toolset, TemplateLanguage]:
    tokenizer.chat_template = template
    settings = {"tools": ["game"], "tool_parser_type": "hermes", "response_length": 500}
    config = from_values(settings | {"thinking_history": history})
    stop_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    return config, TOOLSET, make_language(config, TOOLSET, tokenizer=tokenizer, stop_ids=stop_ids, prompts=[])


def played(tokenizer: Any, template: str, history: str) -> tuple[list[list[int]], list[TrainSample]]:
    """What each turn of a game was sampled from, and what is trained."""
    *_, language = made(tokenizer, template, history)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    engine = Scripted(*[[*ids(tokenizer, said), end] for said in SAID], end=end)
    instance = Adder([*(Observation(text=text) for text in ANSWERS), Observation(done=True)], acts=True)
    group = play(engine, instance, asked=prompt(ids(tokenizer, START), id=(0, 3)), max_tokens=500, language=language)
    scored = ScoredGroup(group=group, scores=(Score(reward=1.0),))
    return [ask.tokens.tolist() for ask in engine.asks], train_samples(
        [scored], normalization="centered", ddof=0, eps=0.0
    )


def test_later_turns_are_sampled_and_trained_without_earlier_thinking(tokenizer: Any) -> None:
    """The model would meet contexts that it never sees when it is used."""
    asked, samples = played(tokenizer, FORGETTING, "strip")
    second = START + "2<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"
    # What the environment says holds no special token; the second turn had no thought, and stays.
    third = f"{second}3<|im_end|>\n<|im_start|>user\n<|im_end|>higher<|im_end|>\n<|im_start|>assistant\n"
    assert asked[:2] == [ids(tokenizer, START), ids(tokenizer, second)]
    assert tokenizer.decode(asked[2]) == third and asked[2][: len(asked[1])] == asked[1]
    assert asked[2].count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 5
    assert [sample.prompt_tokens.tolist() for sample in samples] == asked[:2]
    first, rest = (tokenizer.decode(sample.tokens[sample.loss_mask]) for sample in samples)
    assert (first, rest) == (f"{SAID[0]}<|im_end|>", f"{SAID[1]}<|im_end|>{SAID[2]}<|im_end|>")


@pytest.mark.parametrize(("template", "history"), [(JOINED, "strip"), (FORGETTING, "keep")])
def test_one_sample_is_trained_where_nothing_is_left_out(tokenizer: Any, template: str, history: str) -> None:
    """A template that keeps thinking, or a run that does: strip is then the same as keep."""
    asked, samples = played(tokenizer, template, history)
    (sample,) = samples
    assert sample.prompt_tokens.tolist() == ids(tokenizer, START) == asked[0]
    for tokens in asked:
        assert [*sample.prompt_tokens, *sample.tokens][: len(tokens)] == tokens
    text = tokenizer.decode(sample.tokens[sample.loss_mask])
    assert text == "".join(f"{said}<|im_end|>" for said in SAID)
    kept, _ = played(tokenizer, template, "keep")
    assert asked == kept


def test_a_run_says_what_stripping_costs_or_that_there_is_none(tokenizer: Any) -> None:
    """Every context is trained anew; and a run that keeps its thinking although it was asked not to would look the same."""

    def said(template: str, history: str) -> list[str]:
        return remarks(*made(tokenizer, template, history))

    (cost,), (nothing,) = said(FORGETTING, "strip"), said(JOINED, "strip")
    assert "trained on after a context of its own" in cost and "changes nothing here" in nothing
    assert said(FORGETTING, "keep") == []
