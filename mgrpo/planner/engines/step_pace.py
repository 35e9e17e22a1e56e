"""The time from one step to the next where engines generate while learners train (`async_steps`).

Four times bound it; the longest counts:

    learners    training, and the weight sync after it
    engines     a batch at the speed of full engines
    tail        the longest answer of a batch is begun at most `max_staleness` + 1 steps before the batch is trained on
    admission   groups of `async_steps` + 1 batches are under way at once, each as long as the longest of its answers

An answer's time depends on the number decoded with it, and that on the pace (Little's law). With
`inflight_updates` false, a weight sync waits for all answers under way, so that each step waits for its own longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mgrpo.config.schema import Config
from mgrpo.planner.engines.decoding import Decoder

BOUNDS = {
    "learners": "the learners: fewer engines, or more learners",
    "engines": "the engines: more of them",
    "tail": "the longest answers: a larger max_staleness, or inflight_updates",
    "admission": "what may be under way at once: a larger async_steps",
}
"""Name of each bound of a pace, with its remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds from step to step, and their bound."""

    seconds: float
    bound: str
    """learners, engines, tail or admission."""
    running: float
    """Mean number of sequences that an engine decodes."""


def pace(
    config: Config, decoder: Decoder, *, learn_s: float, sync_s: float, batches_under_way: float | None = None
) -> Pace:
    """The pace of an asynchronous run, whose learners need `learn_s` a step besides the sync.

    Args:
        batches_under_way: batches whose groups are generated at once by a trainer whose groups make room for others when their
            answers have ended; here `async_steps` + 1 batches' do until they are trained on.
    """
    ahead, in_flight = config.rollout.async_steps, config.rollout.inflight_updates
    oldest = ahead if config.rollout.max_staleness is None else config.rollout.max_staleness
    most = min(decoder.most, (batches_under_way or ahead + 1) * decoder.sequences)
    running = np.geomspace(min(1.0, most), most, 256)
    engines = decoder.stream_s(running)
    token_s = engines * running / (decoder.sequences * decoder.lengths.mean)
    learners, answer = np.full_like(engines, learn_s + sync_s), token_s * decoder.longest
    group = token_s * decoder.lengths.longest_of(config.rollout.num_samples_per_prompt_rollout)
    engines = engines + sync_s
    if in_flight and config.rollout.inflight_kv == "recompute":
        engines = engines + decoder.again_s(running)
    bounds = {
        "learners": learners,
        "engines": engines,
        "tail": (answer + learners) / (oldest + 1) if in_flight else answer + sync_s,
        "admission": group / batches_under_way if batches_under_way else (group + learners) / (ahead + 1),
    }
    # Few sequences at once take long together, and many take long each.
    seconds = np.max(list(bounds.values()), axis=0)
    best = int(seconds.argmin())
    return Pace(
        seconds=float(seconds[best]),
        bound=max(bounds, key=lambda name: float(bounds[name][best])),
        running=float(running[best]),
    )
