"""`run_ranks(n, function, **arguments)`: run a function of `cases.py` or `run_cases.py` on n gloo ranks."""

from __future__ import annotations

import pytest

from tests.ranks.rank_pool import RankPool


@pytest.fixture(scope="package")
def run_ranks():
    pools: dict[int, RankPool] = {}

    def start(world_size: int, function, **arguments) -> RankPool:
        if world_size in pools and not pools[world_size].is_usable:
            pools.pop(world_size).close()
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size].start(function, **arguments)

    def run(world_size: int, function, **arguments):
        return start(world_size, function, **arguments).results()

    run.start = start
    yield run
    for pool in pools.values():
        if pool.is_alive:
            pool.close()
