"""Forwarder in a container without network, in the image's Python: from 127.0.0.1:PORT to a mounted Unix socket.

Standard library only, one file, Python 3.6 and later; its text is given to the interpreter: `python3 - SOCKET PORT`, then "ready".
"""

import contextlib
import socket
import sys
import threading

CHUNK = 1 << 16


def copy(source, target):
    try:
        while True:
            piece = source.recv(CHUNK)
            if not piece:
                break
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def serve(client, path):
    with client, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as owner:
        try:
            owner.connect(path)
        except OSError:
            return
        back = threading.Thread(target=copy, args=(owner, client), daemon=True)
        back.start()
        copy(client, owner)
        back.join()


def main(path, port):
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(128)
    # asyncio and others set this only on sockets with an explicit protocol.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("ready", flush=True)
    while True:
        client, _ = listening.accept()
        threading.Thread(target=serve, args=(client, path), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
