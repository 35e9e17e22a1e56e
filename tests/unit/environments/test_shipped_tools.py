"""The tool calculate and the games of examples/game, by hand-worked games."""

from __future__ import annotations

import asyncio

import pytest

from mgrpo.environments.environment import Call
from mgrpo.environments.tools.calculate import calculate
from mgrpo.environments.workers.environment_catalog import Spec, built
from tests.shipped import GAMES

COUNTER, GUESS_NUMBER = f"{GAMES}:Counter", f"{GAMES}:GuessNumber"


def played(spec, row, *moves, seed=1):
    """The opening and the observations of calls that are made in one turn."""

    async def play():
        toolbox = built([spec])
        await toolbox.setup()
        opening = await toolbox.reset(row, seed=seed)
        answers = await toolbox.step([Call(name=name, arguments=arguments) for name, arguments in moves])
        return opening, [answered.observation for answered in answers]

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", "84"),
        ("-3-4", "-7"),
        ("2--3", "5"),
        ("99*99", "9801"),
        ("7 / 2", "3.5"),
        ("1/3", "0.333333333333"),
        ("100 * 10", "1000"),
        ("0.1 + 0.2", "0.3"),
        ("5 - 5.0", "0"),
        ("-0 * 3", "0"),
        ("1.50 * 2", "3"),
        (f"{'9' * 40} * {'9' * 40}", str(int("9" * 40) ** 2)),
    ],
)
def test_calculate_is_exact(expression, value):
    """A wrong digit would be a wrong answer that the model could not have avoided."""
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["1+2+3", "2**9", "abs(1)", "1e9 * 2", "٣ + 1", "9" * 41 + "+1", "", "1 +", "(1+2)"]
)
def test_calculate_takes_one_operation_on_two_numbers(expression):
    """Nothing is evaluated: what a model writes may be anything."""
    _, (answer,) = played(Spec(entry="calculate"), {}, ("calculate", {"expression": expression}))
    assert answer.failed and "is not two numbers with one of + - * / between them" in answer.text


def test_calculate_tells_of_a_division_by_zero():
    _, (answer,) = played(Spec(entry="calculate"), {}, ("calculate", {"expression": "1 / 0.0"}))
    assert answer.failed and answer.text == '{"error": "ZeroDivisionError: 1 / 0.0 divides by zero"}'


def test_the_counter_rewards_a_target_that_is_reached_and_submitted():
    row = {"env_config": {"env_name": "counter", "target": 1}}
    moves = [("increment", {}), ("increment", {}), ("decrement", {}), ("submit", {}), ("increment", {})]
    opening, answers = played(Spec(entry=COUNTER), row, *moves)
    assert opening.text == "The counter is at 0. Bring it to 1 and submit it."
    assert [answer.reward for answer in answers] == [-0.1, -0.1, -0.1, 1.0, 0.0]
    assert [answer.done for answer in answers] == [False, False, False, True, True]
    assert answers[2].text == "The counter is at 1."
    assert answers[3].text == "Right: the counter is at 1, the target was 1."
    expected = {"counter/step_count": 4.0, "counter/final_value": 1.0, "counter/reached_target": 1.0}
    assert answers[3].metrics == expected
    assert answers[4].text == "not called: the game is over" and not answers[4].failed


def test_the_counter_punishes_a_wrong_number():
    opening, (answer,) = played(Spec(entry=COUNTER, settings={"target": 2}), {}, ("submit", {}))
    assert "to 2" in opening.text and answer.reward == -0.5 and answer.done
    assert answer.text == "Wrong: the counter is at 0, the target was 2."


def test_guesses_are_rewarded_by_their_distance():
    row = {"env_config": [{"env_name": "guess_number", "number": 30}]}
    guesses = [("guess", {"number": number}) for number in (80, "20", 30)]
    opening, answers = played(Spec(entry=GUESS_NUMBER, settings={"max_val": 101}), row, *guesses)
    assert opening.text == "The number is one from 1 to 101."
    assert [answer.text for answer in answers] == ["80 is too high.", "20 is too low.", "30 is right, after 3 guesses."]
    assert [answer.reward for answer in answers] == pytest.approx([0.5, 0.9, 1.0])
    assert [answer.done for answer in answers] == [False, False, True]
    assert answers[2].metrics == {"guess_number/guesses": 3.0}


def test_a_guess_far_away_is_worth_nothing():
    """A large number must neither give a large negative reward nor fail."""
    row = {"env_config": {"env_name": "guess_number", "number": 30}}
    _, (answer,) = played(Spec(entry=GUESS_NUMBER), row, ("guess", {"number": 10**400}))
    assert answer.reward == 0.0 and not answer.failed


def test_the_number_is_drawn_for_each_prompt():
    """All samples of a prompt play the same game."""

    def secret(seed):
        guesses = [("guess", {"number": number}) for number in range(1, 101)]
        _, answers = played(Spec(entry=GUESS_NUMBER), {}, *guesses, seed=seed)
        return next(answer.text for answer in answers if answer.done)

    assert secret(1) == secret(1) and len({secret(seed) for seed in range(8)}) > 4


def test_games_repeat():
    """Then a run with them repeats to the bit."""
    assert built([Spec(entry=name) for name in ("calculate", COUNTER, GUESS_NUMBER)]).describe().is_repeatable
