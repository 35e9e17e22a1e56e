"""The program that prepares large data: `python -m mgrpo.data.worker`, JSON lines on stdin and stdout (see `workers`).

In:  {"prepare": {...}}   load a tokenizer, before tasks that encode     -> {}
     {"check": {...}}     a task of `checking.check_task`                -> its summary
     {"encode": {...}}    a task of `encoding.Encoder.encode_task`       -> its account
An error is answered by {"refused": text} if it is the user's, else by {"failed": traceback}. Tables travel as files. The
program ends with its input, and with its parent.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from mgrpo.processes.lifetime import die_with_parent


def main() -> None:
    die_with_parent()
    # Whatever libraries print goes to stderr: stdout is for answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder: Any = None
    for line in sys.stdin.buffer:
        try:
            question = json.loads(line)
            if "prepare" in question:
                from mgrpo.data.encoding import Encoder

                encoder, answer = Encoder.from_json(question["prepare"]), {}
            elif "encode" in question:
                answer = encoder.encode_task(question["encode"])
            else:
                from mgrpo.data.checking import check_task

                answer = check_task(question["check"])
        except ValueError as err:
            answer = {"refused": str(err)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
