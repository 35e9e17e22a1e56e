"""Whatever an agent does: each trained token was sampled after exactly what precedes it, and is trained once."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest

from mgrpo.algo.training_samples import train_samples
from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.data.tokenizer import load_tokenizer
from mgrpo.environments.endpoint.tree import Node
from mgrpo.types import RolloutGroup, Score, ScoredGroup, TrainSample
from tests.builders import prompt
from tests.shipped import EXAMPLES
from tests.unit.environments.agent_worlds import Engine, World, language
from tests.unit.environments.chat_templates import FORGETTING, GOOD, make_tokenizer
from tests.unit.environments.test_bridges_of_several import QWEN3, real, template_of

pytest.importorskip("transformers")

CHATML = ("<|im_end|>", "<|endoftext|>")
WORLDS: dict[str, tuple[Any, Any, tuple[str, ...], dict[str, Any]]] = {
    "calculator": ("calculator", None, ("<|im_end|>",), {}),
    "qwen3": ("qwen", QWEN3, CHATML, {}),
    "qwen3, stripped": ("qwen", QWEN3, CHATML, {"strips": True, "enable_thinking": True}),
    "olmo": ("smollm2", "olmo", CHATML, {}),
    "olmo, stripped": ("qwen", "olmo_thinker_remove_intermediate_thinking", CHATML, {"strips": True}),
    "tulu": ("qwen", "tulu", CHATML, {}),
    "joined": ("made", GOOD["joined"][0], GOOD["joined"][1], {}),
    "named": ("made", GOOD["named"][0], GOOD["named"][1], {}),
    "forgetting, stripped": ("made", FORGETTING, ("<|im_end|>",), {"strips": True, "opening": "<think>\n"}),
}


@functools.cache
def tokenizer_of(kind: str) -> Any:
    if kind == "made":
        return make_tokenizer()
    return load_tokenizer(EXAMPLES / "calculator/model") if kind == "calculator" else real(kind)


def world(name: str, seed: int) -> World:
    kind, template, stops, options = WORLDS[name]
    tokenizer = tokenizer_of(kind)
    if template is None:
        template = (EXAMPLES / "calculator/model/chat_template.jinja").read_text()
    elif template in TEMPLATES or template == QWEN3:
        template = template_of(template)
    drawn = random.Random(seed)
    end = tokenizer.convert_tokens_to_ids(stops[0])
    engine = Engine(tokenizer, end, drawn, thinks="stripped" in name or name == "qwen3")
    own = language(tokenizer, template, stops, **options)
    return World(own, engine, drawn, template=template, has_tools=name != "tulu")


def samples_of(made: World) -> list[TrainSample]:
    trajectory = made.record.trajectory(made.end())
    completion = trajectory.completion(text_of=made.language.text, scored_text="final", reward=1.0)
    other = trajectory.completion(text_of=made.language.text, scored_text="final", reward=0.0)
    group = RolloutGroup(prompt=prompt(), completions=(completion, other))
    scored = ScoredGroup(group=group, scores=(Score(reward=1.0), Score(reward=0.0)))
    found = train_samples([scored], normalization="centered", ddof=0, eps=0.0)
    # Both completions have the same branches.
    return found[: len(found) // 2]


def expected(made: World) -> set[int]:
    """The turns that are trained, by the words of the docs."""
    nodes = made.tree.nodes
    kept = {number for number, node in nodes.items() if node.delivered}
    for number in sorted(nodes, reverse=True):
        if number in kept and (parent := nodes[number].parent) is not None:
            kept.add(parent.number)
    has_child = {parent.number for number in kept if (parent := nodes[number].parent) is not None}
    last = max(number for number in kept if nodes[number].delivered)
    dropped = {
        number
        for number in kept - has_child - {last}
        for other in has_child
        if made.samples[other].context == made.samples[number].context and nodes[other].parent is nodes[number].parent
    }
    return kept - dropped


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", range(6))
def test_every_trained_token_was_sampled_after_exactly_its_context(name: str, seed: int) -> None:
    """A token that is trained after other tokens than it was sampled after has a wrong ratio: the policy learns from noise."""
    made = world(name, seed)
    made.run(25)
    origin = {
        value: (number, place) for number, one in made.samples.items() for place, value in enumerate(one.logprobs)
    }
    trained: list[tuple[int, int]] = []
    for sample in samples_of(made):
        whole = [*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]
        first = len(sample.prompt_tokens)
        assert sample.loss_mask.tolist() == (sample.rollout_logprobs != 0).tolist()
        for place in np.flatnonzero(sample.loss_mask).tolist():
            number, within = origin[float(sample.rollout_logprobs[place])]
            one = made.samples[number]
            assert whole[: first + place] == [*one.context, *one.tokens[:within]]
            assert whole[first + place] == one.tokens[within]
            trained.append((number, within))
    assert len(trained) == len(set(trained)), "a token is trained twice"
    assert set(trained) == {
        (number, within) for number in expected(made) for within in range(len(made.samples[number].tokens))
    }


def plain(text: Any) -> str:
    joined = text if isinstance(text, str) else "".join(part["text"] for part in text or ())
    return joined.encode(errors="replace").decode()


def conversation(made: World, node: Node | None, added: list[Any]) -> list[dict[str, Any]]:
    """Messages as a template takes them, in which the model's turns are what it wrote."""
    found: list[dict[str, Any]] = []
    if node is not None:
        said = node.tokens[: len(node.tokens) - (node.tokens[-1] == made.engine.end)]
        found = conversation(made, node.parent, node.messages)
        found.append({"role": "assistant", "content": made.language.tokenizer.decode(said)})
    role = "environment" if "environment" in made.template else "tool"
    for message in added:
        own = {"role": role if message["role"] == "tool" else message["role"], "content": plain(message["content"])}
        if own["role"] == role:
            own["name"] = node.calls.get(message["tool_call_id"], "") if node else "look"
        found.append(own)
    return found


@pytest.mark.parametrize("name", [name for name in WORLDS if "stripped" not in name])
@pytest.mark.parametrize("seed", range(3))
def test_contexts_are_what_the_template_writes(name: str, seed: int) -> None:
    """Given the turns as they were sampled, it writes the same after them: nothing is left out, doubled or moved."""
    made = world(name, seed + 100)
    made.run(15)
    tokenizer = made.language.tokenizer
    num_bridges = 0
    for number, ask in made.asks.items():
        assert made.samples[number].context[-len(ask.added) :] == ask.added
        if ask.parent is None:
            if number:
                text = tokenizer.decode(ask.added)
                for message in ask.messages:
                    assert (
                        message["role"] == "assistant" or readable(tokenizer, plain(message["content"]).strip()) in text
                    )
            continue
        messages = conversation(made, ask.parent, ask.messages)
        written = tokenizer.apply_chat_template(
            messages, chat_template=made.template, tools=None, tokenize=False, add_generation_prompt=True
        )
        assert readable(tokenizer, written).endswith(tokenizer.decode(ask.added))
        num_bridges += 1
    assert num_bridges >= 5


def readable(tokenizer: Any, text: str) -> str:
    """Without letters that a small vocabulary does not have."""
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_most_requests_of_a_steady_agent_go_on() -> None:
    """Contexts that are rendered again are right but dear: an agent that only adds must never have one."""
    for name in WORLDS:
        made = world(name, 7)
        made.ask([{"role": "user", "content": "1+1?"}], made.tools())
        made.answer_all()
        for _ in range(12):
            made.talks = made.talks[-1:]
            made.extend()
            made.answer_all()
        if name not in ("named", "tulu"):
            assert made.tree.num_rendered_again == 0, (name, made.tree.first_difference)
            branches = made.record.trajectory(made.end()).branches
            assert not branches or "stripped" in name
