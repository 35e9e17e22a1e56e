"""The records that travel between rooms: frozen, numpy and plain values only, no torch.

Data makes `Prompt`, rollout `RolloutGroup`, rewards `ScoredGroup`, algo `TrainSample`, packing `PackedBatch` and `PackLengths`.
Ragged data is flat with cumulative lengths: `cu_seqlens [n + 1]` int32 starts at 0 and ends at the total.
"""

from mgrpo.types.per_token import KeptTokens, Routes, TeacherScores, lengthened, unrouted
from mgrpo.types.sampled import (
    AgentRecord,
    Branch,
    Completion,
    Criterion,
    JudgedRubric,
    Lesson,
    Prompt,
    PromptId,
    RewardContext,
    RewardScale,
    RolloutGroup,
    Score,
    ScoredBatch,
    ScoredGroup,
    TrajectoryRecord,
    Turn,
)
from mgrpo.types.trained import PackedBatch, PackLengths, TrainSample

__all__ = [
    "AgentRecord",
    "Branch",
    "Completion",
    "Criterion",
    "JudgedRubric",
    "KeptTokens",
    "Lesson",
    "PackLengths",
    "PackedBatch",
    "Prompt",
    "PromptId",
    "RewardContext",
    "RewardScale",
    "RolloutGroup",
    "Routes",
    "Score",
    "ScoredBatch",
    "ScoredGroup",
    "TeacherScores",
    "TrainSample",
    "TrajectoryRecord",
    "Turn",
    "lengthened",
    "unrouted",
]
