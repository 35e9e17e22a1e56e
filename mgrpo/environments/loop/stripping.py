"""The context of a turn if the chat template removes thinking from earlier turns after a new user message.

Such a context is written once, from the one before it: the last turn's opening and tokens are replaced by the template's text
for an earlier turn, and a bridge follows. That text is found from conversations with stand-ins, as bridges are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from mgrpo.environments.loop.bridge import BridgeError, Bridges
from mgrpo.environments.loop.frames import Message

_ASKED, _ANSWER, _THOUGHT = "qzaskedzq", "qzanswerzq", "qzthoughtzq"
_BEGIN = "<think>"
_ASK: Message = {"role": "user", "content": _ASKED}
_NEXT: Message = {"role": "user", "content": "qznextzq"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripping:
    """The texts of one such template."""

    bridges: Bridges
    begins: str
    """A conversation up to the last added token with which both an earlier turn and a new one open."""
    token: str
    """The last added token of `begins`."""
    opening: str
    """The rest of a new turn's opening."""
    opening_ids: list[int]
    thought: str
    """The part of the opening that begins the turn's own thinking."""
    follows: str
    """The text from the end of an earlier turn to the opening of a new one."""

    def context(self, before: np.ndarray, said: str, text: str) -> list[int] | None:
        """The whole context of the next turn; None if the template leaves the last turn as it was sampled.

        Args:
            before: `[len]` int32, the context of the last turn.
            said: the last turn, without the token that ended it.
            text: the user's answer.
        """
        past = self.past_ids(before.tolist(), said)
        if past is None:
            return None
        kept = before[: len(before) - len(self.opening_ids)].tolist()
        return [*kept, *past, *self.bridges.after_user(text, last=None)]

    def past_ids(self, before: Sequence[int], said: str) -> list[int] | None:
        """Token ids that replace an earlier turn's opening and tokens; None if the template leaves it as it was sampled.

        Args:
            before: the context of the turn.
            said: the turn, without the token that ended it.
        """
        past = self.past(said)
        opening = before[len(before) - len(self.opening_ids) :]
        if past is None or past == self.opening + said or list(opening) != self.opening_ids:
            return None
        (ids,) = self.bridges.encoded([self.token + past])
        return ids[1:]

    def past(self, said: str) -> str | None:
        """The template's text of an earlier turn after `begins`; None if it refuses the turn."""
        try:
            text = self.bridges.render([_ASK, self.message(said), _NEXT], True)
        except ValueError:
            return None
        if not (text.startswith(self.begins) and text.endswith(self.follows)):
            return None
        return text[len(self.begins) : len(text) - len(self.follows)]

    def message(self, said: str) -> Message:
        """A turn as a message of the model."""
        return {"role": "assistant", "content": self.thought + said}


def find_stripping(bridges: Bridges) -> Stripping | None:
    """Find how the template removes thinking from earlier turns; None if it keeps it.

    Raises:
        BridgeError: it removes thinking, but not turn by turn.
    """
    new = bridges.render([_ASK], True)
    earlier = bridges.render([_ASK, {"role": "assistant", "content": _ANSWER}, _NEXT], True)
    pairs = zip(new, earlier[: earlier.rfind(_ANSWER)], strict=False)
    common = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    tokens = list(bridges.guarded.finditer(common, max(0, common.find(_ASKED))))
    cut = tokens[-1].end() if tokens else 0
    ids, kept = bridges.encoded([new, common[:cut]])
    found = Stripping(
        bridges=bridges,
        begins=common[:cut],
        token=tokens[-1][0] if tokens else "",
        opening=new[cut:],
        opening_ids=ids[len(kept) :],
        thought=new[new.rfind(_BEGIN) :] if new.rfind(_BEGIN) > new.rfind(_ASKED) else "",
        follows=bridges.user_frame(str(_NEXT["content"])),
    )
    thinks = f"{'' if found.thought.rstrip().endswith(_BEGIN) else _BEGIN}\n{_THOUGHT}\n</think>\n\n{_ANSWER}"
    if _THOUGHT in bridges.render([_ASK, found.message(thinks), _NEXT], True):
        return None
    if ids[: len(kept)] != kept or not _is_local(found, thinks):
        raise BridgeError(
            "thinking_history=strip: the chat template leaves thinking out of earlier turns in a way that cannot be followed turn "
            f"by turn (it opens a turn with {new[new.rfind(_ASKED) + len(_ASKED) :]!r}); set thinking_history to keep"
        )
    return found


def _is_local(found: Stripping, thinks: str) -> bool:
    """True if each of two earlier turns is written as if it were the only one."""
    if not found.follows.endswith(found.opening):
        return False
    between = found.follows[: len(found.follows) - len(found.opening)]
    for turns in ((thinks, _ANSWER), (_ANSWER, thinks), (thinks, thinks)):
        first, second = map(found.past, turns)
        messages = [_ASK, found.message(turns[0]), _NEXT, found.message(turns[1]), _NEXT]
        if first is None or second is None or _ANSWER not in first or _ANSWER not in second:
            return False
        if found.bridges.render(messages, True) != found.begins + first + between + second + found.follows:
            return False
    return True
