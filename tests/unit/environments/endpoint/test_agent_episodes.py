"""Groups of agents with OpenAI's client, an endpoint in a process of its own and a scripted engine: what each trajectory becomes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from mgrpo.environments.agents.agent_episodes import AgentBounds, Agents
from mgrpo.environments.agents.endpoint_link import Endpoints
from mgrpo.environments.loop.episodes import EpisodeBounds, Task
from mgrpo.environments.loop.gathering import Ask, Gathering
from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.loop.program_language import ProgramLanguage
from mgrpo.types import Completion, RolloutGroup
from tests.builders import prompt
from tests.unit.environments.chat_templates import make_tokenizer
from tests.unit.environments.endpoint.scripted import Engine
from tests.unit.environments.endpoint.test_endpoint_links import settings_of, until

Messages = list[dict[str, Any]]
BOUNDS = EpisodeBounds(max_model_length=4000, max_calls=1 << 30)
OWN = AgentBounds(limit_s=60.0, sets_reward=True, are_remote=False)
RUN_KEY = "the run's"
ENDED = {"ended": "ended", "status": 0, "output": "", "reward": None, "metrics": {}}


class Play:
    """What an agent is given."""

    def __init__(self, endpoint: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self.endpoint, self.row = endpoint, row
        self.sample = int(endpoint["trajectory"].rpartition("/")[2])

    async def chat(self, messages: Messages, **settings: Any) -> dict[str, Any]:
        url, key = f"{self.endpoint['base_url']}/v1", self.endpoint["api_key"]
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            answer = await client.chat.completions.create(model="policy", messages=messages, **settings)
            return answer.choices[0].message.model_dump(exclude_none=True)

    async def post_reward(self, reward: float) -> None:
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{self.endpoint['base_url']}/reward",
                json={"reward": reward},
                headers={"Authorization": f"Bearer {self.endpoint['reward_key']}"},
            )
            answer.raise_for_status()


Agent = Callable[[Play], Awaitable[Mapping[str, Any] | None]]


class Instance:
    """An agent in place of a worker's."""

    opening, acts, active = "", False, frozenset[str]()
    metrics: Mapping[str, float] = {}

    def __init__(self, agent: Agent, row: Mapping[str, Any]) -> None:
        self.agent, self.row = agent, row
        self.released: list[bool] = []

    async def run_agent(self, endpoint: Mapping[str, Any], *, truth: object, limit_s: float) -> Mapping[str, Any]:
        return ENDED | (await self.agent(Play(endpoint, self.row)) or {})

    async def release(self, broken: bool = False) -> None:
        self.released.append(broken)


class Pool:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.instances: list[Instance] = []

    async def acquire(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Instance:
        self.instances.append(Instance(self.agent, row))
        return self.instances[-1]


class Group:
    """A run with one endpoint."""

    def __init__(self, folder: Any, agent: Agent, *, bounds: EpisodeBounds, own: AgentBounds) -> None:
        self.tokenizer = make_tokenizer()
        settings = settings_of(folder, self.tokenizer, worker_key=RUN_KEY if own.are_remote else None)
        language = settings.language.make(self.tokenizer)
        assert isinstance(language, ProgramLanguage)
        self.engine, self.pool, self.asks = Engine(self.tokenizer), Pool(agent), list[Ask]()
        self.withdrawn: list[Ask] = []
        self.fails: Exception | None = None
        self.endpoints = Endpoints(settings)
        gathering = Gathering(self.send, self.withdrawn.append, in_rounds=False)
        self.agents = Agents(gathering, self.pool, language, bounds, endpoints=self.endpoints, own=own)

    def send(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.asks.append(ask)
            if self.fails is not None:
                ask.answer.set_exception(self.fails)
            else:
                ask.answer.set_result([self.engine.sample(ask.tokens, ask.max_tokens)])

    async def play(self, *, num_samples: int = 2, max_tokens: int = 1000, question: str = "count to 2") -> RolloutGroup:
        row = prompt([1, 2, 3], id=(0, 3))
        task = Task(
            prompt=row,
            name="0/3",
            place=len(self.asks),
            num_samples=num_samples,
            max_tokens=max_tokens,
            row={"prompt": question},
            seed=5,
            opened=lambda text: row,
        )
        self.agents.gathering.enter(1)
        return await self.agents.run(task)

    def check(self, completion: Completion) -> None:
        """Every turn was sampled after exactly what precedes it in its branch."""
        trajectory, tokens = completion.trajectory, completion.tokens.tolist()
        for turn in trajectory.turns:
            branch = next(one for one in trajectory.branches if one.start <= turn.start < one.end)
            before = [*branch.prompt_tokens.tolist(), *tokens[branch.start : turn.start]]
            assert (before, tokens[turn.start : turn.end]) in self.engine.log
        assert sum(turn.end - turn.start for turn in trajectory.turns) == completion.loss_mask.sum()


@contextlib.asynccontextmanager
async def playing(folder: Any, agent: Agent, *, bounds: EpisodeBounds = BOUNDS, own: AgentBounds = OWN):
    group = Group(folder, agent, bounds=bounds, own=own)
    await group.agents.start()
    try:
        async with asyncio.timeout(60):
            yield group
    finally:
        await group.agents.close()


def asked(play: Play) -> Messages:
    return [{"role": "user", "content": play.row["prompt"]}]


async def answers(play: Play) -> None:
    await play.chat(asked(play))


def test_a_group_whose_agents_begin_alike_has_their_context_as_its_prompt(tmp_path):
    """What all samples follow is packed and cached once."""

    async def check():
        async with playing(tmp_path, answers) as run:
            group = await run.play()
            (first,) = {tuple(ask.tokens.tolist()) for ask in run.asks}
            assert group.prompt.tokens.tolist() == list(first) and "count to 2" in group.prompt.text
            assert all(completion.trajectory.branches == () for completion in group.completions)
            # None is the first turn of a whole group, which engines sample once for all.
            assert [(ask.sample, ask.turn, ask.num_samples) for ask in run.asks] == [(0, 1, 1), (1, 1, 1)]

    asyncio.run(check())


def test_agents_that_begin_differently_have_contexts_of_their_own(tmp_path):
    """A system prompt with the time in it is no reason to end a run."""

    async def agent(play):
        await play.chat([{"role": "system", "content": f"you are {play.sample}"}, *asked(play)])

    async def check():
        async with playing(tmp_path, agent) as run:
            group = await run.play()
            assert group.prompt.tokens.tolist() == [1, 2, 3]
            for completion in group.completions:
                assert len(completion.trajectory.branches) == 1
                run.check(completion)

    asyncio.run(check())


def test_no_branch_of_a_training_is_longer_than_its_pack(tmp_path):
    """Evaluations may have longer completions; a context that uses their room would end the run when it is packed."""

    async def agent(play):
        text = "a b c d " * 10
        for _ in range(20):
            try:
                # Each time other words, so that nothing goes on from the turn before.
                await play.chat([{"role": "user", "content": text}])
            except openai.BadRequestError as err:
                assert err.code in ("context_length_exceeded", "trajectory_over")
                return
            text += "e f g h " * 5

    async def check():
        bounds = replace(BOUNDS, max_prompt_length=100)
        async with playing(tmp_path, agent, bounds=bounds) as run:
            lengths = []
            for max_tokens in (300, 600):
                (completion,) = (await run.play(num_samples=1, max_tokens=max_tokens)).completions
                branches = completion.trajectory.branches
                lengths.append(max(len(each.prompt_tokens) + each.end - each.start for each in branches))
                assert len(branches) > 2 and lengths[-1] <= 100 + max_tokens
            assert 300 < lengths[0] < lengths[1]

    asyncio.run(check())


def test_what_an_agent_is_worth(tmp_path):
    """A group's advantages compare what was judged alone: whatever has failed has no score, and never 0."""

    async def agent(play):
        if play.sample != 5:
            await play.chat(asked(play))
        match play.sample:
            case 0:
                await play.post_reward(0.25)
                return None
            case 1:
                await play.post_reward(0.25)
                return {"reward": 0.75}
            case 2:
                return {"ended": "crashed", "status": 1, "output": "Traceback\nValueError"}
            case 3:
                return {"ended": "crashed", "status": 1, "reward": 0.5}
            case 4:
                await play.post_reward(1.0)
                return {"ended": "late"}
            case 6:
                raise EnvironmentLost("its worker has ended")
            case 7:
                return {"metrics": {"agent/steps": 3.0}}
        return {"reward": 1.0}

    async def check():
        async with playing(tmp_path, agent) as run:
            found = (await run.play(num_samples=8)).completions
            records = [completion.trajectory for completion in found]
            assert [record.agent.ended for record in records] == [
                *("ended", "ended", "crashed", "crashed", "late", "silent", "lost", "ended"),
            ]
            assert [record.reward for record in records] == [0.25, 0.75, None, 0.5, None, None, None, None]
            assert [record.ended_by == "error" for record in records] == [False] * 2 + [
                *(True, False, True, True, True, False),
            ]
            assert [len(completion.tokens) > 0 for completion in found] == [True] * 5 + [False] + [True] * 2
            assert (
                records[2].agent.output.endswith("ValueError")
                and records[6].agent.output
                and records[7].metrics["agent/steps"] == 3.0
            )
            assert [instance.released for instance in run.pool.instances] == [[False]] * 6 + [[True], [False]]

    asyncio.run(check())


def test_no_secret_is_in_what_is_kept_of_an_agents_output(tmp_path, caplog):
    """A function's traceback holds what it was called with, and samples are read by others than those who own the key."""

    async def agent(play):
        return {"ended": "crashed", "output": "401 for the key s3cret-value, see a"}

    async def check():
        async with playing(tmp_path, agent, own=replace(OWN, hidden=("a", "s3cret", "s3cret-value"))) as run:
            (completion,) = (await run.play(num_samples=1)).completions
            assert completion.trajectory.agent.output == "401 for the key ***, see a"

    with caplog.at_level("INFO"):
        asyncio.run(check())
    assert "401 for the key" in caplog.text and "s3cret" not in caplog.text


class RemoteWorker:
    """Takes tasks of a run."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.AsyncClient(timeout=60)

    async def take(self) -> Play:
        while True:
            answer = await self.client.get(f"{self.url}/tasks/next?alive=1", headers={"x-api-key": RUN_KEY})
            if (task := answer.json()["task"]) is not None:
                return Play({**task, "trajectory": "0/3/0"}, task["row"])

    async def end(self, play: Play, **words: Any) -> None:
        headers = {"x-api-key": play.endpoint["task_key"]}
        (await self.client.post(f"{play.endpoint['base_url']}/end", json=words, headers=headers)).raise_for_status()


def test_a_task_that_a_worker_gives_back_begins_anew_with_another(tmp_path):
    """What the first one has asked for is not trained, and its keys are dead; the group has its sample all the same."""

    async def check():
        async with playing(tmp_path, answers, own=replace(OWN, are_remote=True)) as run:
            worker = RemoteWorker(run.endpoints.urls[0])
            group = asyncio.create_task(run.play(num_samples=1))
            first = await worker.take()
            await first.chat([{"role": "user", "content": "count to 1"}])
            await worker.end(first, ended="gone")
            second = await worker.take()
            assert second.row == first.row and second.endpoint["api_key"] != first.endpoint["api_key"]
            with pytest.raises(openai.AuthenticationError):
                await first.chat(asked(first))
            await second.chat(asked(second))
            await second.post_reward(0.5)
            await worker.end(second, ended="ended", status=0)
            (completion,) = (await group).completions
            record = completion.trajectory
            assert (record.agent.ended, record.reward, record.agent.counts["workers_gone"]) == ("ended", 0.5, 1.0)
            assert len(record.turns) == 1 and run.engine.log[1][1] == completion.tokens.tolist()
            assert run.engine.log[1][0] == (await group).prompt.tokens.tolist() != run.engine.log[0][0]

    asyncio.run(check())


def test_a_task_that_ends_its_workers_is_given_up(tmp_path):
    """Else it would end all of them, one after the other."""

    async def check():
        async with playing(tmp_path, answers, own=replace(OWN, are_remote=True)) as run:
            worker = RemoteWorker(run.endpoints.urls[0])
            group = asyncio.create_task(run.play(num_samples=1))
            for _ in range(3):
                taken = await worker.take()
                await taken.chat(asked(taken))
                await worker.end(taken, ended="gone")
            (completion,) = (await group).completions
            record = completion.trajectory
            assert record.agent.ended == "lost" and record.reward is None and not record.turns
            assert "3 workers" in record.agent.output and record.agent.counts["workers_gone"] == 3.0

    asyncio.run(check())


def test_agents_that_are_judged_by_others_say_nothing_about_it(tmp_path):
    async def agent(play):
        await play.chat(asked(play))
        assert play.endpoint["reward_key"] is None

    async def check():
        async with playing(tmp_path, agent, own=replace(OWN, sets_reward=False)) as run:
            (completion,) = (await run.play(num_samples=1)).completions
            assert completion.trajectory.agent.ended == "ended" and completion.trajectory.reward is None

    asyncio.run(check())


def test_an_engine_that_fails_ends_the_run_and_no_agent_waits_for_it(tmp_path):
    """Clients wait ten minutes for an answer, and then they try again."""
    told = []

    async def agent(play):
        try:
            await play.chat(asked(play))
        except openai.OpenAIError as err:
            told.append(err)
            raise

    async def check():
        async with playing(tmp_path, agent) as run:
            run.fails = RuntimeError("no engine is left")
            with pytest.raises(RuntimeError, match="no engine is left"):
                await run.play()
            assert [instance.released for instance in run.pool.instances] == [[True]] * 2
            assert not run.endpoints._all[0].sessions

    asyncio.run(check())


def test_a_run_that_is_closed_leaves_no_session(tmp_path):
    """Its keys would let an agent go on that nobody has killed."""
    plays = []

    async def agent(play):
        await play.chat(asked(play))
        plays.append(play)
        await asyncio.sleep(math.inf)

    async def check():
        async with playing(tmp_path, agent) as run:
            playing_on = asyncio.create_task(run.play())
            await until(lambda: len(plays) == 2)
            playing_on.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing_on
            for play in plays:
                with pytest.raises(openai.AuthenticationError):
                    await play.chat(asked(play))

    asyncio.run(check())


def test_trajectories_wait_for_an_endpoint_that_starts_again(tmp_path):
    """Those of the dead one have no score; if those that begin meanwhile had none either, a run would use up its prompts in seconds."""
    started = []

    async def agent(play):
        started.append(play)
        if len(started) <= 2:
            await asyncio.sleep(math.inf)
        await play.chat(asked(play))

    async def check():
        async with playing(tmp_path, agent) as run:
            first = asyncio.create_task(run.play())
            await until(lambda: len(started) == 2)
            os.kill(run.endpoints._all[0]._link.pid, signal.SIGKILL)
            lost = (await first).completions
            assert [completion.trajectory.agent.ended for completion in lost] == ["lost"] * 2
            assert not run.endpoints._all[0].is_serving
            group = await run.play()
            assert [completion.trajectory.agent.ended for completion in group.completions] == ["ended"] * 2

    asyncio.run(check())


def test_trajectories_that_begin_together_are_spread_over_the_endpoints(tmp_path):
    """A step begins a thousand at a time, and each endpoint has one core."""

    async def check():
        endpoints = Endpoints(settings_of(tmp_path, make_tokenizer()), count=2)
        await endpoints.start()
        try:
            bounds = {"max_tokens": 9, "max_model_length": 9, "sampling": {}, "task": None}

            async def sample(wish: Mapping[str, Any]) -> None: ...

            sessions = await asyncio.gather(*(endpoints.open(bounds, sample) for _ in range(6)))
            assert sorted(session.id[0] for session in sessions) == list("000111")
        finally:
            await endpoints.close()

    asyncio.run(check())
