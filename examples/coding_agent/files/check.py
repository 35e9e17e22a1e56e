"""The judge: its exit status is 0 where the repaired function gives what it should, in cases that the agent has not seen.

The function runs in a process of its own, which is told the arguments and not what is expected: it cannot end this one, or
answer for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ANSWERING_S = 10
ANSWERING = """
import importlib.util, json, sys
path, name = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps([getattr(module, name)(*given) for given in json.load(sys.stdin)]))
"""

truth = json.loads(Path(os.environ["MGRPO_TASK"]).read_text())["ground_truth"]
name = truth["function"]
try:
    done = subprocess.run(
        [sys.executable, "-I", "-c", ANSWERING, f"{name}.py", name],
        input=json.dumps([given for given, _ in truth["cases"]]),
        capture_output=True,
        text=True,
        timeout=ANSWERING_S,
    )
    answers = json.loads(done.stdout)
except (subprocess.TimeoutExpired, ValueError):
    sys.exit(1)
sys.exit(answers != [value for _, value in truth["cases"]])
