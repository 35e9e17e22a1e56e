"""Boxes of another machine: a real server in a process of its own, and what a stranger gets from it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgrpo.environments.boxes import remote_box
from mgrpo.environments.boxes.box import MIB, Bounds, BoxError, BoxLost, Done
from mgrpo.environments.boxes.box_app import BoxApp
from mgrpo.environments.boxes.box_server import box_server_command, within
from mgrpo.environments.boxes.opening import open_box
from tests.namespaces import skip_without_namespaces
from tests.unit.environments.boxes.boxed import PLENTY_S, SMALL, running, served, sh, until, wait_until

SECRET = "a token of the tests 0123456789"


@contextlib.contextmanager
def _server(*options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    command = [sys.executable, "-m", "mgrpo", "box-server", "--port", "0", "--box", "none", *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, remote_box.TOKEN: SECRET}
    ) as server:
        try:
            line = server.stderr.readline()
            assert "box server at http://127.0.0.1:" in line, line + server.stderr.read()
            yield line.split()[4].rstrip(","), server
        finally:
            server.kill()


@pytest.fixture
def server(monkeypatch) -> Iterator[str]:
    monkeypatch.setenv(remote_box.TOKEN, SECRET)
    with _server() as (url, _):
        yield url


def _with_box(url: str, use, bounds: Bounds = SMALL):
    async def run():
        box = await open_box(url, bounds)
        try:
            return await use(box)
        finally:
            await box.close()

    return asyncio.run(run())


def test_a_remote_box_does_what_a_box_does(server, monkeypatch):
    """The launcher knows only the protocol."""
    monkeypatch.setattr(remote_box, "POLL_S", 0.3)  # a long command is waited for again and again

    async def use(box):
        assert await box.alive()
        done = await sh(box, "pwd; cat; echo $A; sleep 1; echo err >&2; exit 3", env={"A": "ü b"}, stdin=b"\xff\n")
        assert done == Done(status=3, stdout=f"{box.folder}\n".encode() + b"\xff\n" + "ü b\n".encode(), stderr=b"err\n")
        merged = await box.start(["sh", "-c", "echo out; echo err >&2; exit 7"])
        assert await merged.wait(PLENTY_S) == await merged.wait() == Done(status=7, stdout=b"out\nerr\n")
        await box.put("in/a b", b"\x00\xff" * 1000, mode=0o600)
        assert await box.get("in/a b", max_bytes=2000) == b"\x00\xff" * 1000
        with pytest.raises(FileNotFoundError):
            await box.get("none", max_bytes=1)
        with pytest.raises(OSError, match="longer than"):
            await box.get("in/a b", max_bytes=1)
        late = await sh(box, "echo began; sleep 2345", timeout_s=1.0)
        assert late == Done(status=-9, stdout=b"began\n", timed_out=True)
        agent = await box.start(["sleep", "2345"])
        assert (await agent.wait(0.7)).timed_out
        cancelled = asyncio.create_task(sh(box, "exec sleep 2345"))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await sh(box, "(setsid sleep 2345 &); exit 0")
        await box.end_processes()
        assert not running("2345")
        with served() as url:
            inner = await box.url_for(f"{url}/s/7")
            script = f"import urllib.request; print(urllib.request.urlopen('{inner}', b'x').read().decode())"
            assert (await box.exec(["python3", "-c", script], timeout_s=PLENTY_S)).stdout == b"/s/7 x\n"
        await box.close()
        await box.close()
        assert not await box.alive()
        with pytest.raises(BoxLost):
            await sh(box, "true")

    _with_box(server, use)


def test_strangers_get_nothing(server):
    """Whoever is answered runs programs on that machine."""

    def ask(path: str, body: bytes, key: str | None, method: str = "POST") -> tuple[int, dict]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(server + path, data=body, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as err:
            return err.code, json.loads(err.read())

    opening = json.dumps({"bounds": {}}).encode()
    for key in (None, "", "wrong", SECRET + "x", SECRET[:-1]):
        assert ask("/boxes", opening, key)[0] == 401
    status, opened = ask("/boxes", opening, SECRET)
    assert status == 200
    argv = {"argv": ["true"], "env": {}, "cwd": None, "stdin": "", "timeout_s": 1}
    for path, body, expected in (
        ("/boxes/none/exec", json.dumps(argv).encode(), 410),
        (f"/boxes/{opened['box']}/nothing", b"{}", 404),
        ("/", b"{}", 404),
        ("/boxes", b"not json", 422),
        ("/boxes", b"[]", 422),
        ("/boxes", b"[" * 100_000, 422),
        ("/boxes", b'{"bounds": 7}', 422),
        ("/boxes", b'{"bounds": {"unknown": 7}}', 422),
        (f"/boxes/{opened['box']}/exec", json.dumps(argv | {"argv": "true"}).encode(), 422),
        (f"/boxes/{opened['box']}/exec", json.dumps(argv | {"argv": []}).encode(), 422),
        (f"/boxes/{opened['box']}/exec", json.dumps(argv | {"env": {"A": 1}}).encode(), 422),
        (f"/boxes/{opened['box']}/exec", json.dumps(argv | {"stdin": 7}).encode(), 422),
        (f"/boxes/{opened['box']}/wait", b'{"process": 99, "limit_s": 1}', 422),
        (f"/boxes/{opened['box']}/get", b'{"path": "x", "max_bytes": "nan"}', 422),
    ):
        status, answer = ask(path, body, SECRET)
        assert status == expected and "error" in answer, (path, body[:50], status, answer)
    assert ask("/boxes", b"{}", SECRET, method="PUT")[0] == 405
    with socket.create_connection(("127.0.0.1", int(server.rsplit(":", 1)[1]))) as raw:
        length = 2**40
        raw.sendall(
            f"POST /boxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        assert b" 401 " in raw.recv(100)
    assert ask(f"/boxes/{opened['box']}/close", b"{}", SECRET) == (200, {})


def test_a_box_ends_with_its_killed_run(tmp_path, monkeypatch):
    """The server hears no more of a run that was killed, and its boxes would fill the machine."""

    class Box:
        folder, is_closed = "/", False

        async def close(self):
            self.is_closed = True

    async def run():
        box = Box()

        async def open_it(_):
            return box

        app = BoxApp(open_it, token=SECRET, max_boxes=1, lease_s=0.4)
        app._sweeping = asyncio.create_task(app._sweep())
        opened = await app._open({"bounds": dataclasses.asdict(SMALL)})
        with pytest.raises(BoxError, match="all of the server's 1 boxes"):
            await app._open({"bounds": {}})
        while not box.is_closed:
            await asyncio.sleep(0.05)
        assert opened["box"] not in app._held
        await app.close()

    asyncio.run(run())


def test_boxes_end_with_a_killed_server(monkeypatch):
    """Their trajectories have no score; nothing of them stays on the server's machine."""
    monkeypatch.setenv(remote_box.TOKEN, SECRET)
    monkeypatch.setattr(remote_box, "_RETRIES_S", 0.5)

    async def use(box):
        process = await box.start(["sleep", "2346"])
        await until(lambda: running("2346"))
        killed.kill()
        with pytest.raises(BoxLost, match="does not answer"):
            await process.wait()
        assert not await box.alive()

    with _server() as (url, killed):
        _with_box(url, use)
    wait_until(lambda: not running("2346"))


def test_a_server_that_ends_closes_its_boxes(monkeypatch):
    """SIGTERM is how services are stopped."""
    monkeypatch.setenv(remote_box.TOKEN, SECRET)

    async def use(box):
        await box.start(["sleep", "2347"])
        await until(lambda: running("2347"))
        server.send_signal(signal.SIGTERM)
        await until(lambda: server.poll() is not None)
        assert not running("2347") and not Path(box.folder).exists()

    with _server() as (url, server):
        _with_box(url, use)


def test_walls_are_raised_on_the_other_machine(monkeypatch):
    """Its owner decides what a token's holder gets at most."""
    skip_without_namespaces()
    monkeypatch.setenv(remote_box.TOKEN, SECRET)

    async def use(box):
        return (await sh(box, "pwd; cat /etc/shadow; df -m /box | tail -1")).stdout.split()

    with _server("--box", "local", "--disk_mb", "8") as (url, _):
        said = _with_box(url, use, Bounds(readable=("/etc/shadow",)))
        assert said[0] == b"/box" and said[2] == b"8"
        with pytest.raises(ValueError, match="does not grant"):
            _with_box(url, use, Bounds(network=True))


def test_what_is_missing_is_named(server, monkeypatch, tmp_path, capsys):
    """Each has another remedy."""
    with pytest.raises(ValueError, match="agent_endpoint_host"):
        asyncio.run(_url_of_another_machine())
    monkeypatch.setenv(remote_box.TOKEN, "wrong")
    with pytest.raises(ValueError, match="the token is missing or wrong"):
        asyncio.run(open_box(server, SMALL))
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    monkeypatch.setenv(remote_box.TOKEN_FILE, str(file))
    assert remote_box.token() == SECRET
    monkeypatch.delenv(remote_box.TOKEN_FILE)
    monkeypatch.delenv(remote_box.TOKEN)
    with pytest.raises(ValueError, match="needs the server's token: set MGRPO_BOX_TOKEN_FILE"):
        asyncio.run(open_box(server, SMALL))
    assert box_server_command([]) == 2 and "at least 16 characters" in capsys.readouterr().err
    monkeypatch.setenv(remote_box.TOKEN, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert box_server_command(["--box", "none", "--port", str(port)]) == 2
    assert f"cannot listen at --host 127.0.0.1 --port {port}: Address already in use" in capsys.readouterr().err
    with pytest.raises(BoxError, match="does not answer"):
        asyncio.run(open_box("http://127.0.0.1:9", SMALL))


async def _url_of_another_machine() -> None:
    box = remote_box.RemoteBox("http://boxes.example:1235", SECRET)
    try:
        await box.url_for("http://127.0.0.1:8000/s/1")
    finally:
        await box.close()


def test_bounds_are_the_smaller_ones():
    """Of what a run wants and what the server's owner grants."""
    wanted = Bounds(memory_bytes=8 * MIB, disk_bytes=999 * MIB, image="own")
    granted = Bounds(memory_bytes=9 * MIB, disk_bytes=10 * MIB, max_processes=3, image="other")
    found = within(wanted, granted, takes_images=True)
    assert (found.memory_bytes, found.disk_bytes, found.max_processes, found.image) == (8 * MIB, 10 * MIB, 3, "own")


def test_a_client_names_no_folder_of_the_server_as_the_root_of_its_walls():
    """Whoever has the token runs programs there, behind walls; a row that says `"image": "/"` would open them."""
    granted = Bounds(image="/srv/root")
    with pytest.raises(ValueError, match="does not take"):
        within(Bounds(image="/"), granted, takes_images=False)
    for image in (None, "", "/srv/root"):
        assert within(Bounds(image=image), granted, takes_images=False).image == "/srv/root"
