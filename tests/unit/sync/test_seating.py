"""Which engine gets its weights from which, while engines go and come."""

from __future__ import annotations

import random

from mgrpo.sync.sending.seating import Link, Seating, upstreams


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

    def __init__(self, tree: Seating) -> None:
        self.tree = tree
        self.told: dict[Link, tuple[Link | None, list[Link]]] = {}

    def arrange(self, members: dict[int, int], *, anew: bool = False) -> list[int]:
        before = {self.tree.link(engine) for engine in self.tree.seats}
        joining = self.tree.arrange(members, anew=anew)
        for engine in joining:
            link = self.tree.link(engine)
            assert link in before or link not in self.told, "the keys of a meeting are spent"
            self.told[link] = self.tree.seats[engine].upstream, self.tree.followers(engine)
        return joining

    def check_agreed(self) -> None:
        """Both ends of each transfer between engines know of each other."""
        present = {link: self.told[link] for link in map(self.tree.link, self.tree.seats)}
        for link, (upstream, followers) in present.items():
            assert upstream is None or link in present[upstream][1]
            assert all(present[follower][0] == link for follower in followers)


def test_engines_that_go_and_come_always_know_who_is_above_and_below_them():
    """An engine that waits for one that does not know of it gets no weights."""
    for seed in range(30):
        chance = random.Random(seed)
        engines = Engines(Seating(direct=chance.choice((1, 2, 3, 8))))
        generations = dict.fromkeys(range(chance.randint(1, 40)), 0)
        members = dict(generations)
        for _ in range(20):
            joining = engines.arrange(members)
            engines.check_agreed()
            assert not engines.tree.arrange(members), "nothing has changed"
            left = {engine: members[engine] for engine in joining if chance.random() < 0.5}
            if left and chance.random() < 0.5:
                # Those below an engine that has failed get their weights after the others.
                engines.arrange(left, anew=True)
                assert all(
                    upstream is None or upstream[0] in left
                    for upstream in (engines.tree.seats[engine].upstream for engine in left)
                )
            for engine in generations:
                generations[engine] += chance.random() < 0.1
            members = {e: g for e, g in generations.items() if chance.random() < 0.9} or {0: generations[0]}


def test_learners_stay_in_their_groups_while_nothing_changes():
    """A sync that forms groups takes longer, and is checked."""
    tree = Seating(direct=2)
    assert tree.arrange({0: 0, 1: 0, 2: 0}) == [0, 1, 2] and tree.heads({0: 0, 1: 0, 2: 0}) == {0: 0, 1: 0}
    assert tree.arrange({0: 0, 1: 0, 2: 0}) == []
    # Started again: the one above it is told.
    assert tree.arrange({0: 0, 1: 0, 2: 1}) == [0, 2] and tree.followers(0) == [(2, 1)]
    assert tree.arrange({0: 0, 1: 1, 2: 1}) == [1] and tree.heads({1: 1}) == {1: 1}
    assert tree.arrange({1: 1, 2: 1}) == [2] and tree.heads({2: 1}) == {2: 2}
