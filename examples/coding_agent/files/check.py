"""The judge: its exit status is 0 where the repaired function gives what it should, in cases that the agent has not seen.

The function runs in a process of its own, which is told the arguments and not what is expected, and it does not find that in
a file or in this process's memory, which is closed to others of the same user. The verdict is written last, once everything that
the function has started is gone: it cannot answer for this process.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ANSWERING_S = 10
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
ANSWERING = """
import json, runpy, sys
path, name = sys.argv[1:]
function = runpy.run_path(path)[name]
print(json.dumps([function(*given) for given in json.load(sys.stdin)]))
"""


def end_descendants():
    """End what the function has started, also in sessions of its own."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while numbers := children.read_text().split():
        for number in map(int, numbers):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


# Before the task is read: from here on neither ptrace nor /proc gives this process's memory, variables and files to others.
system = ctypes.CDLL(None)
if system.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) or system.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
    raise OSError("this process cannot be closed to others: prctl failed")
task = Path(os.environ["MGRPO_TASK"])
truth = json.loads(task.read_text())["ground_truth"]
task.unlink()
name = truth["function"]
# The check itself starts elsewhere: modules that the agent leaves are not imported here.
work = Path(os.environ.get("MGRPO_WORK", ".")).absolute()
try:
    done = subprocess.run(
        [sys.executable, "-I", "-c", ANSWERING, str(work / f"{name}.py"), name],
        input=json.dumps([given for given, _ in truth["cases"]]),
        capture_output=True,
        text=True,
        timeout=ANSWERING_S,
        cwd=work,
        env={},
    )
    is_right = json.loads(done.stdout) == [value for _, value in truth["cases"]]
except (subprocess.TimeoutExpired, ValueError, RecursionError):
    is_right = False
end_descendants()
if path := os.environ.get("MGRPO_RESULT"):
    # The function may have put one there.
    Path(path).unlink(missing_ok=True)
    Path(path).write_text(json.dumps({"reward": float(is_right)}))
sys.exit(not is_right)
