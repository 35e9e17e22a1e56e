"""First process of a container, in the image's Python: ends with its owner, and kills processes on request.

Standard library only, one file, Python 3.6 and later; its text is given to the interpreter with the working folder, which it
creates before it prints "ready". A request is a line "all ..." or "one PATH ...", of a file with the number of a process; it is
echoed once that is dead. This process kills because the daemon cannot start commands once an agent has used up all processes.
An agent may be the same user, and must not echo that line itself: being undumpable closes /proc/1/fd and ptrace.
"""

import contextlib
import os
import signal
import sys
import time

PAUSE_S = 0.01
NUMBER_S = 25.0
"""Longest wait for a file that the process itself writes first; the owner waits a little longer."""
PR_SET_DUMPABLE = 4


def kill_all():
    """Kill all other processes; loops while one remains that this user may not kill."""
    while True:
        os.kill(-1, signal.SIGKILL)  # OSError: none is left
        time.sleep(PAUSE_S)


def kill_one(path):
    deadline = time.monotonic() + NUMBER_S
    while True:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # the agent may have put a pipe there
            try:
                number = int(os.read(file, 32))
            finally:
                os.close(file)
            break
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                kill_all()  # an agent has removed the file
            time.sleep(PAUSE_S)
    if number <= 1:
        kill_all()
    try:
        os.killpg(number, signal.SIGKILL)
    except OSError:
        os.kill(number, signal.SIGKILL)


def close_to_others():
    """Close this process to all without CAP_SYS_PTRACE, which root in a container lacks."""
    try:
        import ctypes

        is_closed = ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    except (ImportError, OSError, AttributeError) as err:
        sys.exit(f"its python3 has no ctypes that works, which a box needs: {err}")
    if not is_closed:
        sys.exit("its first process cannot be closed to others: prctl(PR_SET_DUMPABLE) failed")


def main(folder):
    close_to_others()
    os.makedirs(folder, exist_ok=True)
    # With SIGCHLD ignored there are no zombies, which would count against the limit of processes.
    for name in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        words = line.split()
        with contextlib.suppress(OSError, OverflowError):  # of a number that an agent wrote
            kill_all() if words[0] == "all" else kill_one(words[1])
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
