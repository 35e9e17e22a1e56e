"""`mgrpo watch`: a page that follows a run, for this machine only."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mgrpo.cli import main
from mgrpo.telemetry.report import watch
from mgrpo.telemetry.report.watch import Pages, PageServer
from tests.unit.telemetry.report.runs import append_lines, step_line, write_run


@contextmanager
def served(*folders) -> Iterator[PageServer]:
    with PageServer(folders) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str = "/", *, method: str = "GET", host: str | None = None):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or "127.0.0.1:1")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer


def test_the_page_follows_the_files(tmp_path, monkeypatch):
    """A page that is made once shows the run of an hour ago."""
    monkeypatch.setattr(watch, "MIN_REST_S", 0.0)
    monkeypatch.setattr(watch, "REST", 0.0)
    folder = tmp_path / "<i>run"
    with served(folder) as server:
        status, page, _ = ask(server)
        assert (
            status == 200 and "Nothing to show yet" in page and "&lt;i&gt;run" in page and "data-follow='poll'" in page
        )
        first = ask(server, "/version")[1]
        write_run(folder, [step_line(1), step_line(2)], state="running")
        second = ask(server, "/version")[1]
        assert second != first
        page = ask(server)[1]
        assert "step 2" in page and "step 3" not in page and f"data-version='{second}'" in page
        assert ask(server, "/version")[1] == second
        append_lines(folder / "metrics.jsonl", [step_line(3)])
        assert ask(server, "/version")[1] != second and "step 3" in ask(server)[1]
        assert not (folder / "report.html").exists()


def test_several_runs_are_compared(tmp_path):
    """Also while one of them has not begun."""
    write_run(tmp_path / "a", [step_line(1), step_line(2)])
    with served(tmp_path / "a", tmp_path / "b") as server:
        assert "Nothing to show yet" in ask(server)[1]
        write_run(tmp_path / "b", [step_line(1)])
        server.pages._due = 0.0
        assert "Comparison of 2 runs" in ask(server)[1]


def test_a_page_is_not_made_more_often_than_its_work_allows(tmp_path, monkeypatch):
    """The page of a long run takes seconds; made for every step, it would take the cores from the training."""
    write_run(tmp_path, [step_line(1)], state="running")
    pages, made = Pages([tmp_path]), []
    monkeypatch.setattr(Pages, "_make", lambda self, version: made.append(version) or f"{len(made)}")
    monkeypatch.setattr(watch, "MIN_REST_S", 1000.0)
    assert pages.page() == "1"
    append_lines(tmp_path / "metrics.jsonl", [step_line(2)])
    assert pages.page() == "1" and pages.version() == made[0]
    pages._due = 0.0
    assert pages.version() != made[0] and pages.page() == "2"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "10.0.0.1"])
def test_pages_of_other_sites_read_nothing(tmp_path, host):
    """A site whose name leads to 127.0.0.1 sends its own name: what the browser is shown there, it could read."""
    write_run(tmp_path, [step_line(1)], config="secret: 1\n")
    with served(tmp_path) as server:
        status, page, _ = ask(server, host=host)
        assert status == 403 and "secret" not in page
        for local in ("localhost", "localhost:123", "127.0.0.1", "[::1]:5"):
            assert ask(server, host=local)[0] == 200


@pytest.mark.parametrize(
    "path", ["/config.yaml", "/../config.yaml", "/%2e%2e/config.yaml", "//etc/passwd", "/?x", "/report.html"]
)
def test_no_path_names_a_file(tmp_path, path):
    """The run's folder lies beside others."""
    write_run(tmp_path, [step_line(1)], config="secret: 1\n")
    with served(tmp_path) as server:
        status, page, _ = ask(server, path)
        assert status == 404 and "secret" not in page


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_can_be_sent(tmp_path, method):
    with served(tmp_path) as server:
        assert ask(server, method=method)[0] == 501


def test_the_page_may_not_be_framed_or_kept(tmp_path):
    """Another site could lay it under its own buttons; a browser could show the old one."""
    with served(tmp_path) as server:
        headers = dict(ask(server)[2].getheaders())
    assert headers["X-Frame-Options"] == "DENY" and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff" and "Python" not in headers["Server"]


def test_a_page_that_cannot_be_made_is_asked_for_again(tmp_path, monkeypatch):
    """A file that vanishes while it is read must not end the page for the rest of the run."""
    write_run(tmp_path, [step_line(1)])
    with served(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(watch, "page", lambda *args, **kwargs: (tmp_path / "none").read_text())
            assert ask(server)[0] == 503
        server.pages._due = 0.0
        assert ask(server)[0] == 200


def test_damaged_files_are_served_with_a_sentence_about_them(tmp_path):
    """One bad line must not end the page for the rest of the run."""
    write_run(tmp_path, [step_line(1)])
    (tmp_path / "engines.jsonl").write_text("[" * 100_000 + '\n{"engines": [1]}\n')
    with served(tmp_path) as server:
        status, page, _ = ask(server)
        assert status == 200 and "Damaged, and left out here: 2 lines of engines.jsonl." in page


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    """It says where, on loopback; Ctrl-C is one line and the exit code of an interrupted command."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mgrpo", "watch", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:") and line.endswith("/   (Ctrl-C ends it)\n")
        connection = http.client.HTTPConnection("127.0.0.1", int(line.split(":")[2].split("/")[0]), timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (out, err, process.returncode) == ("", "mgrpo: interrupted\n", 130)
    finally:
        process.kill()


def test_an_address_that_is_taken_is_one_sentence(tmp_path, capsys):
    with served(tmp_path) as server:
        port = server.server_address[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
        assert f"cannot listen at --host 127.0.0.1 --port {port}: " in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "99999"]) == 2
    assert main(["watch", str(tmp_path), "--host", "no such host"]) == 2
    assert main(["watch"]) == 2
    assert main(["watch", "--help"]) == 0
