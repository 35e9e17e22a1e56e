"""A check that tests have judge: whether the agent's answer.txt holds what only it is told. Standard library only."""

import json
import os
import signal
import sys

with open(os.environ["MGRPO_TASK"]) as file:
    task = json.load(file)
match task.get("judge"):
    case "word":
        with open(os.environ["MGRPO_RESULT"], "w") as file:
            json.dump({"reward": 0.25, "metrics": {"share": 0.5}}, file)
        sys.exit(1)
    case "broken":
        with open(os.environ["MGRPO_RESULT"], "w") as file:
            file.write('{"reward": NaN}')
    case "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    case _:
        with open(os.path.join(os.environ["MGRPO_WORK"], "answer.txt")) as file:
            sys.exit(file.read() != task["ground_truth"])
