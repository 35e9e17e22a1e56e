"""Base classes of callers of a language model: one client for all calls, and for verifiers the text that the model reads."""

from __future__ import annotations

import functools
import json
from typing import ClassVar

from mgrpo.config.schema import Reward
from mgrpo.rewards.judges.client import ChatClient
from mgrpo.rewards.judges.endpoint import FEWEST_TOKENS, SPARE_TOKENS, Endpoint, judge_endpoint, problems
from mgrpo.rewards.judges.judgements import Judgement, unused_mark
from mgrpo.rewards.judges.prompt_context import shortened, token_counter
from mgrpo.rewards.verifier import Answer, RemoteVerifier, after_thinking, single


class Asker:
    """Calls one model; subclasses choose the model and the questions."""

    def __init__(self, settings: Reward, endpoint: Endpoint, *, temperature: float) -> None:
        self.settings = settings
        self.client = ChatClient(
            endpoint,
            temperature=temperature,
            max_tokens=settings.llm_judge_max_tokens,
            timeout_s=settings.llm_judge_timeout,
            max_connections=settings.remote_verifier_concurrency,
        )

    async def close(self) -> None:
        """Close connections."""
        await self.client.close()

    def metrics(self) -> dict[str, float]:
        """Sums since the start: tokens and requests of every attempt."""
        usage = self.client.usage
        return {
            "prompt_tokens": float(usage.prompt_tokens),
            "completion_tokens": float(usage.completion_tokens),
            "requests": float(usage.requests),
        }


class AskingVerifier(Asker, RemoteVerifier):
    """A verifier that requests verdicts on the final answer from one model."""

    @classmethod
    def problems(cls, settings: Reward) -> list[str]:
        return problems(settings, [cls.name])

    async def judge(self, judgement: Judgement, question: str, completion: str, reference: str) -> float:
        """The verdict on a completion's final answer; question and answer are shortened where the context is too small.

        An answer without a letter or digit is 0.0 without a question: judges call silence safe.
        """
        self._check_reference(judgement, reference)
        question, answer, reference = (
            encodable(text) for text in (question, final_answer(completion), reference if judgement.reference else "")
        )
        if not any(map(str.isalnum, answer)):
            return 0.0
        settings = self.settings
        count = token_counter(self.client.endpoint.model)
        prompt_tokens = settings.llm_judge_max_context_length - settings.llm_judge_max_tokens - SPARE_TOKENS
        room = prompt_tokens - count(judgement.render("", "", reference))
        if room < FEWEST_TOKENS:
            raise ValueError(
                f"llm_judge_max_context_length={settings.llm_judge_max_context_length} leaves {max(room, 0)} tokens for "
                f"question and answer beside llm_judge_max_tokens={settings.llm_judge_max_tokens} and the template; raise it"
            )
        question, answer = shortened([question, answer], room, count)
        read = functools.partial(judgement.read, mark=unused_mark(question, reference, answer), answer=answer)
        return await self.client.ask(judgement.render(question, answer, reference), read)

    @classmethod
    def _check_reference(cls, judgement: Judgement, reference: str) -> None:
        if judgement.needs_reference and not reference.strip():
            raise ValueError(f"ground_truth is empty; {cls.name} shows it to the judge as the {judgement.reference}")


class Judge(AskingVerifier):
    """Scores the final answer by one verdict of `llm_judge_model`; a judge that gives none leaves it without a score."""

    judgement: ClassVar[Judgement]

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        cls._check_reference(cls.judgement, reference_text(ground_truth))
        return ""

    def __init__(self, settings: Reward) -> None:
        super().__init__(settings, judge_endpoint(settings), temperature=settings.llm_judge_temperature)

    async def score(self, answer: Answer) -> float:
        return await self.judge(self.judgement, answer.prompt, answer.completion, reference_text(answer.ground_truth))


def final_answer(completion: str) -> str:
    """The last `<answer>...</answer>` after the last `</think>`, or everything after it; "" where a thought is never ended."""
    text = after_thinking(completion.replace("<|assistant|>", ""))
    before, end, _ = text.rpartition("</answer>")
    _, start, answer = before.rpartition("<answer>")
    return (answer if start and end else text).strip()


def reference_text(ground_truth: object) -> str:
    """A label as text: text as it is, None as the empty text, anything else as JSON."""
    label = single(ground_truth)
    if label is None:
        return ""
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def encodable(text: str) -> str:
    """The text with a question mark in place of every lone surrogate, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()
