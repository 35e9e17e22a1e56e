"""Games in text: scripted ones, and those of the libraries where they are installed."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import types

import pytest

from mgrpo.environments.adaptors.gymnasium import Gymnasium
from mgrpo.environments.environment import Call
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import EnvironmentPool


class Numbered:
    """Like gymnasium.spaces.Discrete."""

    def __init__(self, n, start=0):
        self.n, self.start = n, start

    def __repr__(self):
        return f"Discrete({self.n})"


class Doors:
    """Three doors, numbered from 5; the last one wins, and five steps are all there are."""

    action_space = Numbered(3, start=5)

    def __init__(self, reward=1.0):
        self.reward, self.steps = reward, 0

    def reset(self, *, seed=None):
        self.steps = 0
        return {"doors": 3, "seed": seed}, {}

    def step(self, action):
        self.steps += 1
        return (action, 1.5), self.reward if action == 7 else 0, action == 7, self.steps == 5, {}

    def close(self):
        self.steps = None


class Echo:
    """A game of text."""

    def reset(self, *, seed=None):
        return f"start {seed}", {}

    def step(self, action):
        return f"{action}!", 0.0, False, False, {}


DICE = """
import random


class Dice:
    def reset(self, *, seed=None):
        random.seed(seed)
        return f"start {random.random()}", {}

    def step(self, action):
        return f"{action} {random.random()}", 0.0, False, False, {}
"""
"""A game that throws the dice of the whole process."""


class Arena:
    """Like a game of TextArena, which is made for one episode; its observations repeat everything."""

    def __init__(self):
        self.heard, self.log, self.count = [], "", 0

    def reset(self, num_players, seed=None):
        assert (num_players, len(self.log)) == (1, 0)
        self.log = f"[GAME] begin {seed}"

    def get_observation(self):
        return 0, self.log

    def step(self, action):
        self.count += 1
        self.log += f"\n[Player 0] {action}\n[GAME] turn {self.count}"
        return self.count == 2, {}

    def close(self):
        return {0: 0.75}, {}


class RawArena(Arena):
    def get_observation(self):
        return 0, [(-1, "look", None), (0, "my own move", None), (-1, "here", None)]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """The games can be imported by this name."""
    found = types.ModuleType("games_of_the_test")
    for game in (Doors, Echo, Arena, RawArena):
        setattr(found, game.__name__, game)
    found.named = lambda env_id, **options: Doors(**options)
    monkeypatch.setitem(sys.modules, "games_of_the_test", found)


def opened(game, **settings):
    environment = Gymnasium(make=f"games_of_the_test:{game}", **settings)
    environment.setup()
    return environment


def play(environment, text):
    (observation,) = environment.step([Call(name="act", arguments={"text": text})])
    return observation


def test_a_turn_is_an_action_and_observations_become_text():
    environment = opened("named", env_id="Doors-v0", options={"reward": 2})
    assert not environment.tools()
    assert environment.reset({}, seed=2**40 + 3).text == '{"doors": 3, "seed": 3}'
    first, second = play(environment, "I take door 5."), play(environment, "Now 7")
    assert (first.text, first.reward, first.done) == ("[5, 1.5]", 0.0, False)
    assert (second.text, second.reward, second.done, dict(second.metrics)) == (
        "[7, 1.5]",
        2.0,
        True,
        {"truncated": 0.0},
    )
    assert environment.reward() is None
    after = play(environment, "7")
    assert (after.text, after.failed, after.reward) == ("The game is over.", True, 0.0)


def test_a_game_that_is_cut_off_is_done_and_says_so():
    environment = opened("Doors")
    environment.reset({}, seed=0)
    found = [play(environment, "5") for _ in range(5)]
    assert [each.done for each in found] == [False] * 4 + [True]
    assert [dict(each.metrics) for each in found] == [{}] * 4 + [{"truncated": 1.0}]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("5", 5),
        ("not 5, but 6!", 6),
        ("take 6.", 6),
        ("57", None),
        ("5.5", None),
        ("-5", None),
        ("4 or 8", None),
        ("", None),
        ("door", None),
    ],
)
def test_the_last_number_of_an_action_counts(text, action):
    environment = opened("Doors")
    environment.reset({}, seed=0)
    observation = play(environment, text)
    if action is None:
        assert (observation.failed, observation.text) == (True, "No action was found; expected a number from 5 to 7.")
    else:
        assert json.loads(observation.text)[0] == action


@pytest.mark.parametrize(
    ("text", "action"),
    [("go left", 5), ("LEFT up", 7), ("left-up", 6), ("leftmost", None), ("5", None)],
)
def test_names_of_actions_are_read(text, action):
    environment = opened("Doors", actions=["left", "left-up", "up"])
    environment.reset({}, seed=0)
    observation = play(environment, text)
    if action is None:
        assert observation.text == "No action was found; expected one of left, left-up, up."
    else:
        assert json.loads(observation.text)[0] == action


def test_a_pattern_says_where_the_action_is():
    environment = opened("Doors", action_pattern="<door>(.*?)</door>")
    environment.reset({}, seed=0)
    assert json.loads(play(environment, "<door>7</door> no: <door> 6 </door>, 5").text)[0] == 6
    missing = play(environment, "7")
    assert missing.failed
    assert missing.text == "No action was found; expected a number from 5 to 7, written as <door>(.*?)</door>."


def test_games_that_seed_their_process_do_not_disturb_each_other_in_workers_of_their_own(tmp_path):
    """The samples of a prompt must begin alike, and each depends on its seed alone."""
    (tmp_path / "dice_of_the_test.py").write_text(DICE)
    spec = Spec(entry="gymnasium", settings={"make": "dice_of_the_test:Dice"})

    async def play_games():
        pool = EnvironmentPool([spec], pool_size=3, num_workers=3, folders=[str(tmp_path)])
        await pool.start()
        try:
            for _ in range(2):
                games = [await pool.acquire({}, seed=seed, trajectory=f"0/{seed}") for seed in (1, 1, 9)]
                shown = [[game.opening] for game in games]
                for _ in range(3):
                    for game, texts in zip(games, shown, strict=True):
                        (answered,) = await game.step([Call(name="act", arguments={"text": "go"})])
                        texts.append(answered.observation.text)
                assert shown == [thrown(1), thrown(1), thrown(9)]
                for game in games:
                    await game.release()
        finally:
            await pool.close()

    def thrown(seed):
        dice = random.Random(seed)
        return [f"{word} {dice.random()}" for word in ("start", "go", "go", "go")]

    asyncio.run(asyncio.wait_for(play_games(), 120))


def test_a_game_of_text_gets_the_turn_as_it_is():
    environment = opened("Echo")
    environment.reset({}, seed=0)
    assert play(environment, "  go north \n").text == "go north!"
    assert play(environment, " ").text == "No action was found; expected a text."
    environment.close()


def test_a_game_of_text_arena_shows_what_is_new_and_rewards_at_its_end():
    environment = opened("Arena")
    environment.reset({}, seed=3)
    for seed in (3, 4):
        assert environment.reset({}, seed=seed).text == f"[GAME] begin {seed}"
        assert play(environment, "a").text == "[Player 0] a\n[GAME] turn 1"
        last = play(environment, "b")
        assert (last.text, last.reward, last.done) == ("", 0.75, True)
    raw = opened("RawArena")
    assert raw.reset({}, seed=0).text == "look\nhere"


@pytest.mark.parametrize("rewards", [None, {}, {1: 1.0}, {0: None}, 0.5])
def test_a_game_of_text_arena_without_a_reward_for_its_player_has_no_result(rewards, monkeypatch):
    """As 0 it would be trained as a game that was lost."""
    monkeypatch.setattr(Arena, "close", lambda self: (rewards, {}))
    environment = opened("Arena")
    environment.reset({}, seed=3)
    play(environment, "a")
    last = play(environment, "b")
    assert (last.reward, last.done) == (None, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "got no env_id, expected the name of a game"),
        ({"make": "a:b", "action_pattern": "("}, r"action_pattern='\(' is no regular expression"),
        ({"make": "a:b", "action_pattern": "x"}, "has no group, expected one around the action"),
        ({"make": "nothing"}, "make='nothing', expected module:function"),
        ({"make": "no_such_module:Game"}, "cannot be imported .*; install its package"),
        ({"make": "json:Game"}, "the module has no Game"),
        (
            {"make": "games_of_the_test:Doors", "actions": ["a"]},
            r"got 1 names of actions, but the actions are Discrete",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Gymnasium(**settings).setup()


def test_a_game_whose_actions_are_no_text_is_refused(monkeypatch):
    monkeypatch.setattr(Doors, "action_space", object())
    with pytest.raises(ValueError, match="expected numbered ones or text; wrap the game"):
        opened("Doors")


def test_a_game_of_gymnasium_is_played():
    pytest.importorskip("gymnasium", reason="the package gymnasium is not installed")
    options = {"render_mode": "ansi", "is_slippery": False}
    names = ["left", "down", "right", "up"]
    environment = Gymnasium(env_id="FrozenLake-v1", options=options, actions=names)
    environment.setup()
    assert environment.reset({}, seed=2**61).text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert play(environment, "I go down").text == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    found = [play(environment, name) for name in ("down", "right", "down", "right", "right")]
    assert [each.reward for each in found] == [0, 0, 0, 0, 1]
    assert found[-1].done
    environment.close()


def test_cards_of_gymnasium_are_dealt_by_the_seed():
    pytest.importorskip("gymnasium", reason="the package gymnasium is not installed")
    games = [Gymnasium(env_id="Blackjack-v1") for _ in range(3)]
    openings = []
    for game, seed in zip(games, (5, 5, 6), strict=True):
        game.setup()
        openings.append(game.reset({}, seed=seed).text)
        game.close()
    assert openings[0] == openings[1] != openings[2]
    assert len(json.loads(openings[0])) == 3


@pytest.mark.parametrize("name", ["TowerOfHanoi-v0-raw", "TowerOfHanoi-v0"])
def test_a_game_of_textarena_is_played(name):
    """Its package is large and pins nothing, so that the tests' requirements do not have it."""
    pytest.importorskip("textarena", reason="the package textarena is not installed")
    environment = Gymnasium(env_id=name, make="textarena:make")
    environment.setup()
    for _ in range(2):
        assert "Tower of Hanoi with 3 disks" in environment.reset({}, seed=3).text
        moved = play(environment, "[A C]")
        assert "You moved disk 1 from A to C." in moved.text and "Tower of Hanoi" not in moved.text
        if name.endswith("raw"):
            assert "[A C]" not in moved.text, "the model knows what it has said"
        found = [play(environment, f"[{each}]") for each in ("A B", "A B", "C B", "A C", "B A", "B C", "A C")]
        assert "invalid move" in found[1].text and not found[1].done
        assert (found[-1].reward, found[-1].done) == (1.0, True)
    environment.close()
