"""Limits of everything that an environment does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Seconds and bytes."""

    tool_timeout_s: float = 30.0
    """Of one call; a turn of several may take as long as they together."""
    reset_timeout_s: float = 60.0
    """Of set-up and reset, and of the reward at the end."""
    acquire_timeout_s: float = 60.0
    """Until an environment is free for a trajectory, since any was given to another one. Time in which no environment is asked
    anything counts a tenth: it is the model that is sampled or trained then, and its trajectories hold what they will need."""
    grace_s: float = 30.0
    """For which the other trajectories of a worker go on when a call in it hangs and cannot be cancelled."""
    idle_s: float = 300.0
    """After which an environment is closed that serves nobody; longer than most training phases, since set-up is costly."""
    output_bytes: int = 1 << 16
    """Of an observation's text in UTF-8; a longer one is cut in the middle."""
