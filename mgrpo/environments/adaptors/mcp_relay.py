"""The program around an MCP server that is started here: `connect` starts it in place of the server. Standard library only.

It bounds the server's output. When either of them ends, so does everything that the server has started.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading

from mgrpo.processes.guarded import go_on_guarded

MAX_MESSAGE_BYTES = 4 * 2**20
"""Length of a server's longest message: to read one that is many times as long would delay all others in the worker."""
_MAX_LOG_BYTES = 2**20
_LAST_WORDS_S = 0.5


def main() -> None:
    """Run the server of the arguments: its standard input is this program's, its messages and errors are passed on."""
    go_on_guarded()
    server = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    readers = [threading.Thread(target=read, args=(server,), daemon=True) for read in (_pass_messages, _pass_errors)]
    for reader in readers:
        reader.start()
    server.wait()
    for reader in readers:
        # One of its children may hold the pipe.
        reader.join(_LAST_WORDS_S)
    os._exit(0)


def _pass_messages(server: subprocess.Popen[bytes]) -> None:
    """Pass on lines that may be JSON objects, and end the server after the last one or a line that is too long."""
    assert server.stdout is not None
    while line := server.stdout.readline(MAX_MESSAGE_BYTES + 1):
        if len(line) > MAX_MESSAGE_BYTES:
            _log(f"\nit wrote a message of more than {MAX_MESSAGE_BYTES} bytes and was ended".encode())
            break
        if line.lstrip()[:1] == b"{":
            _write(1, line)
        elif line.strip():
            _log(line)
    server.kill()


def _pass_errors(server: subprocess.Popen[bytes]) -> None:
    assert server.stderr is not None
    while text := os.read(server.stderr.fileno(), 1 << 16):
        _log(text)


def _log(text: bytes) -> None:
    """Append to standard error; a file begins anew where it has become too long."""
    found = os.fstat(2)
    if stat.S_ISREG(found.st_mode) and found.st_size > _MAX_LOG_BYTES:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
    _write(2, text)


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


if __name__ == "__main__":
    main()
