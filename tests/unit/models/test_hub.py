"""Names on the Hub, by the real client in a process of its own against a server on the loopback interface.

The client reads its address and its cache from the environment when it is imported; the server is ours, see `tests.hub_server`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import TOKEN, Answer, Hub, hub_server

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.add("someone/tiny", MODEL)
        yield server


def fetch(
    hub: Hub, home: Path, name: str, revision: str = "main", part: str = "model", **more: str
) -> tuple[int, str, str]:
    """Exit code, folder, and what was said."""
    command = [sys.executable, "-m", "mgrpo.models.hf_files.hub", name, revision, part]
    done = subprocess.run(command, env=hub.environment(home, **more), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def refused(*words: object, **more: str) -> str:
    """The only line that it says, which ends the program with 2."""
    code, folder, said = fetch(*words, **more)
    assert (code, folder) == (2, "") and "Traceback" not in said
    return said.splitlines()[-1]


def test_model_is_downloaded_once_and_says_how_large_it_is(hub, tmp_path):
    """A second run must not ask for files again, and a user must see why the start takes minutes."""
    code, folder, said = fetch(hub, tmp_path, "someone/tiny")
    commit = hub.repositories["someone/tiny"].commit("main")
    assert code == 0 and folder.endswith(f"hub/models--someone--tiny/snapshots/{commit}")
    assert f"downloading someone/tiny (main, commit {commit[:7]})" in said and "1.9 MB in 6 files" in said
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == hub.repositories["someone/tiny"].files(
        "main"
    )
    hub.requests.clear()
    assert fetch(hub, tmp_path, "someone/tiny") == (0, folder, "")
    assert hub.requests == ["GET /api/models/someone/tiny/revision/main"]


def test_code_pickles_and_other_programs_weights_stay_there(hub, tmp_path):
    """What is never loaded must not arrive: code, pickles, and the same weights again in another form."""
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    unwanted = [
        "modeling_own.py",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/model.safetensors",
        "tokenizer.pkl",
    ]
    hub.add("someone/mixed", {**files, **dict.fromkeys(unwanted, b"x" * 1000)})
    _, folder, _ = fetch(hub, tmp_path, "someone/mixed")
    assert {path.name for path in Path(folder).rglob("*")} == set(files)


def test_only_the_configuration_is_downloaded_for_a_plan(hub, tmp_path):
    """A plan of a large model must not take its weights; the run after it must."""
    _, folder, _ = fetch(hub, tmp_path, "someone/tiny", part="config")
    assert [path.name for path in Path(folder).iterdir()] == ["config.json"]
    commit = Path(folder).name
    _, again, said = fetch(hub, tmp_path, "someone/tiny", commit)
    assert again == folder and "in 5 files of 6; the others are there" in said
    assert (Path(folder) / "model.safetensors").is_file()


def test_revision_leads_to_its_own_commit(hub, tmp_path):
    """Training another revision than the one that was asked for is found by nobody."""
    repository = hub.repositories["someone/tiny"]
    repository.branches["v2"] = {**repository.branches["main"], "README.md": b"second"}
    _, first, _ = fetch(hub, tmp_path, "someone/tiny")
    _, second, said = fetch(hub, tmp_path, "someone/tiny", "v2")
    assert Path(second).name == repository.commit("v2") != Path(first).name
    assert (Path(second) / "README.md").read_text() == "second"
    assert f"(v2, commit {Path(second).name[:7]}) into" in said and ": 0.0 kB in 6 files" in said
    assert len(hub.asked("GET", "resolve", "model.safetensors")) == 1
    assert fetch(hub, tmp_path, "someone/tiny", Path(second).name, HF_ENDPOINT=NOWHERE) == (0, second, "")


def test_cache_serves_without_the_hub(hub, tmp_path):
    """A cluster node without network goes on with what an earlier run has downloaded."""
    _, folder, _ = fetch(hub, tmp_path, "someone/tiny")
    assert fetch(hub, tmp_path, "someone/tiny", HF_HUB_OFFLINE="1") == (0, folder, "")
    code, again, said = fetch(hub, tmp_path, "someone/tiny", HF_ENDPOINT=NOWHERE)
    assert (code, again) == (0, folder) and "is taken from the cache" in said and len(said.splitlines()) == 1


def test_half_a_download_does_not_serve(hub, tmp_path):
    """An interrupted download must not become a model that lacks files."""
    _, folder, _ = fetch(hub, tmp_path, "someone/tiny")
    (Path(folder) / "tokenizer.json").unlink()
    assert "HF_HUB_OFFLINE is set" in refused(hub, tmp_path, "someone/tiny", HF_HUB_OFFLINE="1")
    _, _, said = fetch(hub, tmp_path, "someone/tiny", Path(folder).name)
    assert "in 1 file of 6" in said and (Path(folder) / "tokenizer.json").is_file()


def test_processes_of_a_machine_download_once(hub, tmp_path):
    """Eight ranks that start together must not download eight times."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: fetch(hub, tmp_path, "someone/tiny"), range(4)))
    assert len({folder for code, folder, _ in found if code == 0}) == 1 and all(code == 0 for code, *_ in found)
    assert sum("downloading" in said for *_, said in found) == 1
    assert len(hub.asked("GET", "resolve", "model.safetensors")) == 1


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("someone/nothing", {}, "is not a folder, and not on the Hub, or private there and no token is set"),
        ("someone/secret", {"HF_TOKEN": "hf_other"}, "private there and this machine's token may not read it"),
        ("someone/gated", {}, "is gated; accept its conditions at"),
        ("someone/pickles", {}, "has no safetensors on the Hub, only pytorch_model.bin; pickles are never loaded"),
        (
            "someone/adapter",
            {},
            "holds an adapter without its model; give the model, and this name as lora_adapter_path",
        ),
        ("someone/empty", {}, "has no config.json on the Hub; it holds README.md"),
        ("some one/x", {}, "is neither a folder nor a name that the Hub could have"),
        (
            "someone/tiny",
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE is set; on a machine with network: hf download someone/tiny",
        ),
        ("someone/tiny", {"HF_ENDPOINT": NOWHERE}, f"{NOWHERE} does not answer (ConnectError"),
    ],
)
def test_refusal_is_one_line_that_says_what_to_do(hub, tmp_path, name, more, expected):
    """The client's own errors are pages of text about other programs."""
    hub.add("someone/secret", MODEL, private=True)
    hub.add("someone/gated", MODEL, gated=True)
    hub.add("someone/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("someone/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"})
    hub.add("someone/empty", {"README.md": b"x"})
    said = refused(hub, tmp_path, name, **more)
    assert said.startswith(name) and expected in said


def test_unknown_revision_names_those_that_there_are(hub, tmp_path):
    assert refused(hub, tmp_path, "someone/tiny", "v9") == "someone/tiny has no revision v9 on the Hub; it has main"


def test_token_opens_private_and_gated_models(hub, tmp_path):
    hub.add("someone/secret", MODEL, private=True, gated=True)
    code, folder, _ = fetch(hub, tmp_path, "someone/secret", HF_TOKEN=TOKEN)
    assert code == 0 and (Path(folder) / "model.safetensors").is_file()


@pytest.mark.parametrize("part", ["model", "served"])
def test_engine_of_another_machine_has_the_same_commit_in_its_own_cache(hub, tmp_path, part):
    """Engines are kept from the network, and rank 0's folder means nothing on their machine. Those that a sync gives all weights need none."""
    commit = hub.repositories["someone/tiny"].commit("main")
    hub.repositories["someone/tiny"].branches["old"] = hub.repositories["someone/tiny"].branches["main"]
    hub.repositories["someone/tiny"].branches["main"] = {"config.json": b"{}"}
    code = (
        "from pathlib import Path\nfrom mgrpo.models.hf_files.hub import HubSnapshot, fetch_apart\nimport sys\n"
        "there = HubSnapshot(name='someone/tiny', commit=sys.argv[1], part=sys.argv[2], folder=Path('/elsewhere'))\n"
        "print(fetch_apart(there))"
    )
    environment = hub.environment(tmp_path, HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, "-c", code, commit, part], env=environment, capture_output=True, text=True)
    folder = tmp_path / f"hub/models--someone--tiny/snapshots/{commit}"
    assert done.stdout.strip() == str(folder), done.stderr
    assert (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) == (part == "model")
    done = subprocess.run([sys.executable, "-c", code, "0" * 40, part], env=environment, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert "HubError: someone/tiny has no revision 0000" in last and "where this engine runs" in last


def test_full_disk_is_told_before_the_download(hub, tmp_path):
    """Found out after an hour of downloading it costs an hour."""
    code = (
        "import shutil, collections\n"
        "shutil.disk_usage = lambda path: collections.namedtuple('U', 'total used free')(1, 1, 1000)\n"
        "from mgrpo.models.hf_files.hub import fetch\nfetch('someone/tiny')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=hub.environment(tmp_path), capture_output=True, text=True)
    assert (
        "someone/tiny needs 1.9 MB in" in done.stderr
        and "has 1.0 kB left; make room there, or set HF_HOME" in done.stderr
    )
    assert not hub.asked("resolve")


def of_files(change: Callable[[bytes], bytes]) -> Callable[..., Answer]:
    """Another content of every file."""

    def spoil(path: str, status: int, body: object, headers: dict[str, str]) -> Answer:
        return status, change(body) if "/resolve/" in path and isinstance(body, bytes) else body, headers

    return spoil


def of_info(**fields: object) -> Callable[..., Answer]:
    """Another record of the repository; of a file, where a field is one of a file's."""

    def spoil(path: str, status: int, body: object, headers: dict[str, str]) -> Answer:
        if "/revision/" not in path or not isinstance(body, dict):
            return status, body, headers
        files = [file | {k: v for k, v in fields.items() if k in file} for file in body["siblings"]]
        return status, body | {"siblings": files} | {k: v for k, v in fields.items() if k not in files[0]}, headers

    return spoil


def of_headers(**fields: str) -> Callable[..., Answer]:
    """Other headers of every file."""

    def spoil(path: str, status: int, body: object, headers: dict[str, str]) -> Answer:
        return status, body, headers | fields if "/resolve/" in path else headers

    return spoil


HTML = b"<html>Please log in</html>"
UPWARDS = {"rfilename": "tokenizer/../../../../evil.json", "size": 2, "blobId": "0" * 40}


SPOILT: list[tuple[Callable[..., Answer], str]] = [
    (
        lambda path, status, body, headers: (200, HTML, {"Content_Type": "text/html"}),
        "does not answer (JSONDecodeError",
    ),
    (of_files(lambda content: HTML), "arrived damaged and was deleted; start again"),
    (of_files(lambda content: content[:-5]), "arrived damaged and was deleted; start again"),
    (of_files(lambda content: content + b"more"), "arrived damaged and was deleted; start again"),
    (of_files(lambda content: content[:-1] + b"x"), "arrived damaged and was deleted; start again"),
    (of_info(sha=None), "answers with commit None, as the Hub does not"),
    (of_info(sha="../../evil"), "answers with commit ../../evil, as the Hub does not"),
    (of_info(sha="f" * 40), "has no revision"),
    (of_info(size="many"), "of many bytes, as the Hub does not"),
    (of_info(size=-5), "of -5 bytes, as the Hub does not"),
    (of_info(size=10**18), "which has"),
    (of_info(siblings=[1]), "does not answer (TypeError"),
    (of_info(siblings=None), "has no config.json"),
    (of_info(siblings=[{"rfilename": "config.json", "size": 826, "blobId": ""}, UPWARDS]), "has no safetensors"),
    (of_info(rfilename="../../../tokenizer.json"), "has no config.json"),
    (of_headers(X_Repo_Commit="e" * 40), "did not arrive; start again"),
    (of_headers(X_Repo_Commit="../../../evil"), "does not answer (ValueError"),
]
FETCH = """
import sys
from mgrpo.models.hf_files.hub import HubError, fetch
for name in sys.argv[1:]:
    try:
        print(fetch(name, revision="main").folder)
    except HubError as err:
        print(err)
"""


def test_a_reply_that_is_not_the_hubs_is_refused_and_leaves_nothing_to_trust(hub, tmp_path):
    """A proxy's page in place of config.json, a download that broke off, a name that leads out of the cache: one line, and the next
    start does not take it for the model."""
    names = [f"someone/tiny-{number:02}" for number in range(len(SPOILT))]
    for name in names:
        hub.add(name, MODEL)

    def spoil(path: str, *answer: Any) -> Answer:
        return SPOILT[int(path.partition("/tiny-")[2][:2])][0](path, *answer)

    def said() -> list[str]:
        command = [sys.executable, "-c", FETCH, *names]
        environment = hub.environment(tmp_path / "home")
        return subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
        ).stdout.splitlines()

    good, hub.spoil = hub.spoil, spoil
    for name, (_, words), line in zip(names, SPOILT, said(), strict=True):
        assert line.startswith(f"{name} ") and words in line
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    hub.spoil = good
    for folder in said():
        for path in MODEL.iterdir():
            assert (Path(folder) / path.name).read_bytes() == path.read_bytes()


def test_a_mirror_without_sizes_and_with_commits_of_another_form_serves(hub, tmp_path):
    """Some list files by their names alone, and number their commits; what they do record is compared."""
    hub.spoil = of_info(size=None, blobId=None)
    hub.repositories["someone/tiny"]._sha = lambda branch: "revision-7"
    code, folder, said = fetch(hub, tmp_path, "someone/tiny")
    assert code == 0 and Path(folder).name == "revision-7", said
    for path in MODEL.iterdir():
        assert (Path(folder) / path.name).read_bytes() == path.read_bytes()
