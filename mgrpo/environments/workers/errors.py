"""What keeps a trajectory from its environment. Each costs one trajectory, which then has no score, and not the run."""

from __future__ import annotations


class EnvironmentLost(RuntimeError):
    """A trajectory's environment is gone, or cannot say how the trajectory ended."""


class TrajectoryTimeout(EnvironmentLost):
    """The trajectory took too long with all its turns."""


class Frozen(EnvironmentLost):
    """The worker did not answer this question in time, and is killed."""


class AcquireTimeout(RuntimeError):
    """No environment became free in time."""


class ResetFailed(RuntimeError):
    """Two environments could not begin the trajectory."""
