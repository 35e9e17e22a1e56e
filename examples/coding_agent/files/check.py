"""The judge: its exit status is 0 where the repaired function gives what it should, in cases that the agent has not seen.

The function runs in a process of its own, which is told the arguments and not what is expected, and it does not find that in
a file: it cannot end this process, or answer for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ANSWERING_S = 10
ANSWERING = """
import json, runpy, sys
path, name = sys.argv[1:]
function = runpy.run_path(path)[name]
print(json.dumps([function(*given) for given in json.load(sys.stdin)]))
"""

task = Path(os.environ["MGRPO_TASK"])
truth = json.loads(task.read_text())["ground_truth"]
task.unlink()
name = truth["function"]
try:
    done = subprocess.run(
        [sys.executable, "-I", "-c", ANSWERING, f"{name}.py", name],
        input=json.dumps([given for given, _ in truth["cases"]]),
        capture_output=True,
        text=True,
        timeout=ANSWERING_S,
        env={},
    )
    answers = json.loads(done.stdout)
except (subprocess.TimeoutExpired, ValueError):
    sys.exit(1)
sys.exit(answers != [value for _, value in truth["cases"]])
