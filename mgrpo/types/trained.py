"""Training samples, and the packs that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mgrpo.types.per_token import KeptTokens, Routes, TeacherScores


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One completion, or a branch of one, as a sample of the optimizer."""

    prompt_tokens: np.ndarray
    """`[prompt]` int32."""
    tokens: np.ndarray
    """`[response]` int32, at least one."""
    loss_mask: np.ndarray
    """`[response]` bool, false wherever `is_sampled` is, and where a set of `kept` is empty."""
    rollout_logprobs: np.ndarray
    """`[response]` float32."""
    advantage: float
    """Mean over the predicted tokens where `token_advantages` is set."""
    group: int
    """Samples of one prompt share this number; they may share the prompt's tokens in a pack."""
    ages: np.ndarray | None = None
    """`[response]` uint8, at most 127: policy versions since the weights that sampled each token. None: all 0."""
    is_sampled: np.ndarray | None = None
    """`[response]` bool: the tokens to predict; the others stand between turns and are inputs only. None: all."""
    token_advantages: np.ndarray | None = None
    """`[response]` float32, in place of `advantage`. All samples of a step have them, or none has."""
    kept: KeptTokens | None = None
    """The sets of the response's tokens. All samples of a step have them, or none has."""
    continues: bool = False
    """A further branch of the completion that the sample before it belongs to."""
    teacher: int = -1
    """Index of its teacher in `Distillation.teachers`; -1: no distillation."""
    taught: TeacherScores | None = None
    """Teacher scores of the response's tokens. All samples with a teacher have them, or none has: learners then query theirs."""
    teacher_prompt: np.ndarray | None = None
    """`[len]` int32: the teacher's prompt in place of `prompt_tokens`. None: the same."""
    routes: Routes | None = None
    """The experts of the prompt's tokens and the response's, except the last. All samples of a step have them, or none has."""

    @property
    def is_predicted(self) -> np.ndarray:
        """`[response]` bool: the tokens that are responses in a pack, at least one: without any it would have no place there."""
        if self.is_sampled is None:
            return np.ones(len(self.tokens), np.bool_)
        return self.is_sampled if self.is_sampled.any() else np.arange(len(self.tokens)) == 0

    @property
    def num_predicted(self) -> int:
        return len(self.tokens) if self.is_sampled is None else max(int(np.count_nonzero(self.is_sampled)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Documents laid end to end: one micro-batch of one data-parallel rank.

    Responses are the tokens that are predicted: those of the completions that were sampled. A completion without any keeps
    its first token among them, untrained.

    A document is a trunk (the prompt) followed by one or more branches (completions, each without its last token, whose
    output would predict nothing). A token attends to the trunk and to the earlier tokens of its own branch. With one
    branch per document this is plain causal attention.
    """

    tokens: np.ndarray
    """`[tokens]` int32."""
    positions: np.ndarray
    """`[tokens]` int32, position in prompt + completion (restarts in every branch)."""
    branches: np.ndarray
    """`[tokens]` int32: 0 in the trunk, 1.. in the branches of a document."""
    cu_seqlens: np.ndarray
    """`[documents + 1]` int32, over `tokens`."""
    rows: np.ndarray
    """`[responses]` int32: the row of `tokens` whose output predicts each response."""
    targets: np.ndarray
    """`[responses]` int32: the tokens that are predicted, sequence after sequence."""
    response_cu_seqlens: np.ndarray
    """`[sequences + 1]` int32, over `rows` and `targets`."""
    loss_mask: np.ndarray
    """`[responses]` bool."""
    rollout_logprobs: np.ndarray
    """`[responses]` float32."""
    ages: np.ndarray
    """`[responses]` uint8, see `TrainSample`."""
    advantages: np.ndarray
    """`[sequences]` float32, or `[responses]` where tokens have their own."""
    samples: np.ndarray
    """`[sequences]` int32: the sample each sequence came from."""
    kept: KeptTokens | None = None
    """The sets of the responses' tokens, each with its target in it. None: logprobs are normalised over the whole vocabulary."""
    teachers: np.ndarray | None = None
    """`[sequences]` int8, `TrainSample.teacher`. None: none of the step's samples has any."""
    taught: TeacherScores | None = None
    """Teacher scores of the responses' tokens; NaN and -1 in sequences without a teacher. None: no sample of the step has any."""
    routes: Routes | None = None
    """`[tokens, MoE layers, top_k]`; a shared prompt has those of its first sample, padding none. None: no sample of it has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLengths:
    """The lengths in some packs, from which their metrics follow."""

    runs: np.ndarray
    """`[runs, 2]` int64: the first position of a prompt, a completion or padding, and its number of rows."""
    responses: int
    """Tokens that are predicted."""
    padding: int
    """Rows of padding."""
    filled: int
    """Packs that are not dummies."""

    @property
    def tokens(self) -> int:
        """All rows."""
        return int(self.runs[:, 1].sum())
