"""Which engine gets its weights from which, while engines go and come."""

from __future__ import annotations

import random

import pytest

from mgrpo.layout import InferLayout, Layout
from mgrpo.sync.plan import plan
from mgrpo.sync.sending.seating import Apart, Link, Seating, upstreams
from tests.unit.sync.ends import shipped


def depth(engine: int, above: dict[int, int | None]) -> int:
    """Engines between this one and the learners."""
    upstream = above[engine]
    return 0 if upstream is None else 1 + depth(upstream, above)


def test_a_thousand_engines_stand_in_a_few_low_trees():
    """Every floor adds the time of a message, and an engine sends to two others at most."""
    above = upstreams(dict.fromkeys(range(1024), 0), direct=8)
    assert [engine for engine, upstream in above.items() if upstream is None] == [*range(8)]
    assert max(depth(engine, above) for engine in above) == 7
    assert max([*above.values()].count(engine) for engine in above) == 2


def test_without_an_engine_the_few_below_it_go_elsewhere():
    """A tree that is built anew would have all of them join again."""
    everyone = dict.fromkeys(range(200), 0)
    before = upstreams(everyone, direct=4)
    for gone in (0, 7, 16, 199):
        after = upstreams({engine: 0 for engine in everyone if engine != gone}, direct=4)
        changed = {engine for engine in after if after[engine] != before[engine]}
        assert changed == {engine for engine in after if before[engine] == gone}
        assert all(depth(engine, after) < 8 for engine in after)
        # One of them takes the place of a missing first one.
        assert sum(upstream is None for upstream in after.values()) == 4


class Engines:
    """What engines have been told when they joined."""

    def __init__(self, seating: Seating) -> None:
        self.seating = seating
        self.told: dict[Link, tuple[Link | None, list[Link]]] = {}

    def arrange(self, members: dict[int, int], *, apart: Apart | None = None) -> list[int]:
        before = {self.seating.link(engine) for engine in self.seating.seats}
        joining = self.seating.arrange(members, apart=apart)
        for engine in joining:
            link = self.seating.link(engine)
            assert link in before or link not in self.told, "the keys of a meeting are spent"
            self.told[link] = self.seating.seats[engine].upstream, self.seating.followers(engine)
        return joining

    def check_agreed(self, members: dict[int, int]) -> None:
        """Both ends of each transfer between engines know of each other."""
        present = {link: self.told[link] for link in map(self.seating.link, members)}
        for link, (upstream, followers) in present.items():
            assert upstream is None or link in present[upstream][1]
            assert all(present[follower][0] == link for follower in followers)


def test_engines_that_go_and_come_always_know_who_is_above_and_below_them():
    """An engine that waits for one that does not know of it gets no weights."""
    for seed in range(30):
        chance = random.Random(seed)
        direct = chance.choice((1, 2, 3, 8, None))
        engines = Engines(Seating(direct))
        generations = dict.fromkeys(range(chance.randint(1, 40)), 0)
        members = dict(generations)
        for _ in range(20):
            joining = engines.arrange(members)
            engines.check_agreed(members)
            assert not engines.seating.arrange(members), "nothing has changed"
            assert direct is None or len(engines.seating.heads()) <= direct
            left = {engine: members[engine] for engine in joining if chance.random() < 0.5}
            for apart in chance.choice(((), ("tree",), ("tree", "tree"), ("tree", "direct"))):
                # Those below an engine that has failed get their weights after the others.
                engines.arrange(left, apart=apart)
                engines.check_agreed(left)
                assert engines.seating.heads().keys() & left == (
                    left.keys() if apart == "direct" else heads_of(left, direct)
                )
                assert apart == "direct" or direct is None or len(engines.seating.heads()) <= direct + 1
            for engine in generations:
                generations[engine] += chance.random() < 0.1
            members = {e: g for e, g in generations.items() if chance.random() < 0.9} or {0: generations[0]}


def heads_of(left: dict[int, int], direct: int | None) -> set[int]:
    """Those of engines that stand apart in a tree that learners send to."""
    return set(left) if direct is None else {min(left)} if left else set()


def test_learners_stay_in_their_groups_while_nothing_changes():
    """A sync that forms groups takes longer, and is checked."""
    seating = Seating(direct=2)
    assert seating.arrange({0: 0, 1: 0, 2: 0}) == [0, 1, 2] and seating.heads() == {0: 0, 1: 0}
    assert seating.arrange({0: 0, 1: 0, 2: 0}) == []
    # Started again: the one above it is told.
    assert seating.arrange({0: 0, 1: 0, 2: 1}) == [0, 2] and seating.followers(0) == [(2, 1)]
    assert seating.arrange({0: 0, 1: 1, 2: 1}) == [1] and seating.heads() == {0: 0, 1: 1}
    assert seating.arrange({1: 1, 2: 1}) == [2] and seating.heads() == {1: 1, 2: 2}


@pytest.mark.parametrize(
    ("name", "train", "infer"),
    [
        (
            "235b_a22b_32x8",
            Layout(world_size=256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11),
            InferLayout(engines=1024, tensor=8, expert_parallel=True),
        ),
        ("32b_16x8", Layout(world_size=128, tensor=8, pipeline=4), InferLayout(engines=1024, tensor=4)),
        ("32b_16x8", Layout(world_size=1024, tensor=4, pipeline=2), InferLayout(engines=1024, tensor=4)),
    ],
    ids=["235B on 256", "32B on 128", "32B on 1,024"],
)
def test_a_learner_holds_eight_communicators_at_a_thousand_engines(name, train, infer):
    """Each has its buffers in the learner's memory, and its turn in every sync; also while engines are served apart."""
    made = plan(shipped(name)[0], train, infer)
    seating = Seating(made.sources.trees(infer.engines))

    def most() -> int:
        groups = [0] * train.world_size
        for engine in seating.heads():
            for rank in made.learners(engine):
                groups[rank] += 1
        return max(groups)

    everyone = dict.fromkeys(range(infer.engines), 0)
    seating.arrange(everyone)
    assert len(seating.seats) == 1024 and most() <= 7
    # An engine that learners send to, two that send on, one at the end of a tree.
    gone = {3, 17, 300, 1023}
    rest = {engine: 0 for engine in everyone if engine not in gone}
    seating.arrange(dict.fromkeys(range(40, 90), 0), apart="tree")
    assert most() <= 8
    seating.arrange(rest)
    assert most() <= 7
    for engine in gone:
        seating.arrange({engine: 1}, apart="tree")
        assert most() <= 8
    seating.arrange(everyone | dict.fromkeys(gone, 1))
    assert most() <= 7
