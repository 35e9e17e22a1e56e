"""What the ranks of a test of the source run: batches of scripted engines, without a model."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mgrpo.config import Config
from mgrpo.layout import Layout
from mgrpo.run.produce.producer import Producer
from mgrpo.run.produce.production import Production
from mgrpo.run.ranks import lead as leading
from mgrpo.run.ranks.lead import Lead, Stopped
from tests.scripted_engine import ScriptedEngine
from tests.unit.run.producing import collect, config, evaluator, producer

if TYPE_CHECKING:
    from mgrpo.run.produce.source import SilentSource, Source

SOLVED, MIXED = (1.0, 1.0), (0.0, 1.0)


def source_on(lead: Lead, own: Config, given: Producer) -> Source | SilentSource:
    """This rank's source; rank 0's has `given` and an evaluator of three prompts."""
    from mgrpo.run.produce.source import SilentSource, Source

    if dist.get_rank() != 0:
        return SilentSource(lead, own, layout=Layout(world_size=dist.get_world_size()), rejoining=None)
    production = Production(config=own, tokenizer=None, producer=given, evaluator=evaluator(), data=[], remarks=[])
    layout = Layout(world_size=dist.get_world_size())
    return Source(production, lead, own, layout=layout, hidden=64, rejoining=None)


def draw(settings: dict[str, Any], steps: int, solves: bool = False) -> list[tuple[Any, int]]:
    """For each step index and slice of its batch, or None, and the number of batches that were submitted by its end."""
    own, lead = config(**settings), Lead()
    given = producer(lambda index: SOLVED if solves else MIXED, **settings)
    (engine,) = given.dispatcher.fleet.engines
    source, drawn = source_on(lead, own, given), []
    for step in range(1, steps + 1):
        batch = source.next(step, step)
        index = batch and {name: (str(array.dtype), array.tolist()) for name, array in batch.index.items()}
        drawn.append((batch and (index, batch.slice.tobytes()), len(engine.batches)))
    lead.close()
    return drawn


def evaluate() -> list[str] | None:
    """The sources of the evaluated prompts."""
    lead = Lead()
    evaluation = source_on(lead, config(), producer()).evaluate(1)
    lead.close()
    return evaluation and [f"{name}{len(evaluation.groups)}" for name in evaluation.sources]


class StoppingEngine(ScriptedEngine):
    """Its second batch has the run asked to end, and is not done before it is aborted."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self.stop = stop

    def resume(self) -> Future[None]:
        if len(self.batches) > 1:
            self.answers = False
            self.stop.set()
        return super().resume()


def stop_in_the_second_step() -> dict[str, Any]:
    """The states before and after a step that was stopped, what the engine was told, and what a resumed run samples."""
    own, stop = config(total_episodes=800), threading.Event()
    lead, heartbeat = Lead(stop), leading.HEARTBEAT_S
    given = producer(total_episodes=800, engine=(engine := StoppingEngine(stop)))
    source = source_on(lead, own, given)
    leading.HEARTBEAT_S = 0.05
    try:
        source.next(1, 1)
        before = source.state_dict()
        try:
            source.next(2, 2)
            is_stopped = False
        except Stopped:
            is_stopped = True
    finally:
        leading.HEARTBEAT_S = heartbeat
        lead.close()
    resumed = producer(total_episodes=800)
    if dist.get_rank() == 0:
        resumed.load_state_dict(source.state_dict())
    return {
        "is_stopped": is_stopped,
        "is_aborted": ("abort",) in engine.calls,
        "states": (before, source.state_dict()),
        "resumed": [scored.group.prompt.id[1] for scored in collect(resumed).groups],
    }
