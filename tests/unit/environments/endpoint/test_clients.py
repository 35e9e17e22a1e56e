"""The same conversation by the clients of all APIs, in processes of their own: the same tokens are trained."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.environments.endpoint.serving import endpoints

AGENTS_PYTHON = os.environ.get("MGRPO_TEST_AGENTS_PYTHON", "")
AGENT = Path(__file__).parent / "agent_clients.py"
APIS = ["chat", "chat-stream", "responses", "responses-stream", "previous", "previous-stream"]
if find_spec("anthropic") is not None:
    APIS += ["messages", "messages-stream"]


async def run(api, session, goal=4):
    """What an agent prints that counts by an API."""
    words = (str(AGENT), api, session["base_url"], session["api_key"], str(goal))
    child = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    printed, _ = await asyncio.wait_for(child.communicate(), 120)
    assert child.returncode == 0
    return json.loads(printed)


def test_all_apis_train_the_same_tokens(tmp_path):
    """What is trained must not depend on the library that an agent happens to use; and nothing is encoded again: the engine
    spells as no tokenizer does."""

    async def check():
        async with endpoints(tmp_path) as [served]:
            found = {}
            for api in APIS:
                session = await served.open()
                printed = await run(api, session)
                assert printed == {
                    "turns": 5,
                    "text": "I have counted to 4",
                    "thoughts": [f"{x} < 4" for x in range(4)],
                }
                end = await served.ask("end", session=session["session"])
                assert end["counts"]["rendered_again"] == 0, end["first_difference"]
                assert [turn["delivered"] for turn in end["turns"]] == [True] * 5
                found[api] = served.learner.branches(session["session"], end)
            [(context, tokens, mask)] = found["chat"]
            assert all(branches == found["chat"] for branches in found.values())
            assert sum(mask) == sum(len(said) for _, said in served.learner.engine.log[:5]) < len(mask)
            tokenizer = served.learner.engine.tokenizer
            assert (
                tokenizer(tokenizer.decode(context + tokens), add_special_tokens=False)["input_ids"] != context + tokens
            )

    asyncio.run(check())


@pytest.mark.skipif(not AGENTS_PYTHON, reason="MGRPO_TEST_AGENTS_PYTHON names no interpreter with openai-agents")
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_agents_of_a_framework_that_knows_nothing_of_it(tmp_path, api):
    """The OpenAI Agents SDK, plain, streamed, and with Responses by ids: every turn goes on from the tokens of the one before."""

    async def check():
        async with endpoints(tmp_path) as [served]:
            session = await served.open()
            words = (str(AGENT.with_name("agents_sdk.py")), api, session["base_url"], session["api_key"], "3")
            child = await asyncio.create_subprocess_exec(AGENTS_PYTHON, *words, stdout=asyncio.subprocess.PIPE)
            printed, _ = await asyncio.wait_for(child.communicate(), 120)
            assert child.returncode == 0 and json.loads(printed) == ["I have counted to 3"] * 3
            end = await served.ask("end", session=session["session"])
            branches = served.learner.branches(session["session"], end)
            # Three conversations that begin alike: a trunk for each, of four turns.
            assert len(end["turns"]) == 12 and len(branches) == 3 and end["counts"]["rendered_again"] == 2
            assert branches[0][1:] == branches[1][1:] == branches[2][1:]

    asyncio.run(check())
