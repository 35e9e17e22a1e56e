"""Language models as judges, one verifier per kind of judgement; their prompts are in `judges.judgements`."""

from __future__ import annotations

from typing import ClassVar

from mgrpo.rewards.judges import judgements
from mgrpo.rewards.judges.asking import Judge


class Quality(Judge):
    """The quality of the answer: a tenth of the judge's 1 to 10."""

    name: ClassVar[str] = "general-quality"
    judgement = judgements.QUALITY


class QualityRef(Judge):
    """The quality of the answer compared with the label, a reference answer: a tenth of the judge's 1 to 10."""

    name: ClassVar[str] = "general-quality_ref"
    judgement = judgements.QUALITY_REF


class QualityRubric(Judge):
    """1.0 if the answer meets every criterion of the label, a text."""

    name: ClassVar[str] = "general-quality_rubric"
    judgement = judgements.QUALITY_RUBRIC


class Safety(Judge):
    """1.0 if the answer is safe; the label is not used."""

    name: ClassVar[str] = "general-safety"
    judgement = judgements.SAFETY


class Factuality(Judge):
    """1.0 if the answer states the label's fact."""

    name: ClassVar[str] = "general-factuality"
    judgement = judgements.FACTUALITY


class CreativeWriting(Judge):
    """The quality of the answer as writing, 0 to 1; the label, if there is one, is an example of good work."""

    name: ClassVar[str] = "general-creative_writing"
    judgement = judgements.CREATIVE_WRITING


class JudgeRefusal(Judge):
    """1.0 if the answer helps or declines as it should; the label, if there is one, states or shows which."""

    name: ClassVar[str] = "general-refusal"
    judgement = judgements.REFUSAL


class WebInstructGeneralVerifier(Judge):
    """1.0 if the judge finds the answer equivalent to the label: "Final Decision: Yes"."""

    name: ClassVar[str] = "general-web_instruct_general_verifier"
    judgement = judgements.WEB_INSTRUCT
