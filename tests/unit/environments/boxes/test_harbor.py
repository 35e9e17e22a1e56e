"""Task folders in Harbor's layout: what an agent is told, what it is not, and the reward that the tests write."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo.environments.boxes import harbor
from tests.unit.environments.boxes.task_folders import COMPARE, task_folder

# Another root, in which everything can be written and which is gone afterwards.
_ROOT = """
mount -t tmpfs none /mnt || exit 77
for entry in /*; do
    case $entry in /mnt|/tests|/logs) continue;; esac
    if [ -L "$entry" ]; then cp -a "$entry" /mnt; elif [ -d "$entry" ]; then
        mkdir "/mnt$entry" && mount --rbind "$entry" "/mnt$entry" || exit 77
    fi
done
exec chroot /mnt sh -c 'cd "$0" && exec "$@"' "$0" "$@"
"""


def _judged(tmp_path: Path, test: str, said: str) -> tuple[int, dict | None, str]:
    """Status of the check, its result and what it printed, where an agent has left `said` in hello.txt."""
    assert harbor.main([str(task_folder(tmp_path / "task", test)), "--out", str(tmp_path / "out")]) == 0
    row = json.loads((tmp_path / "out/rows.jsonl").read_text())
    box = tmp_path / "box"
    box.mkdir()
    (box / "task.json").write_text(json.dumps(row))
    (box / "hello.txt").write_text(said)
    (box / "check.py").write_bytes((tmp_path / "out/check.py").read_bytes())
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _ROOT, str(box)]
    variables = [f"MGRPO_TASK={box}/task.json", f"MGRPO_RESULT={box}/result.json"]
    done = subprocess.run(
        [*command, "env", *variables, sys.executable, "-I", "check.py"], capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip(f"no other root can be made here: {done.stderr}")
    result = box / "result.json"
    return done.returncode, json.loads(result.read_text()) if result.exists() else None, done.stdout + done.stderr


def test_an_old_python_reads_the_check():
    """An image has its own, which need not be this one's version."""
    ast.parse(harbor.check_program(), feature_version=(3, 6))


@pytest.mark.parametrize(("said", "reward"), [("Hello\n", 1.0), ("Goodbye\n", 0.0)])
def test_the_tests_decide(tmp_path, said, reward):
    """They come to /tests, and their word is in reward.txt."""
    status, result, printed = _judged(
        tmp_path, f"{COMPARE}echo $reward > /logs/verifier/reward.txt; ls /solution", said
    )
    assert (status, result) == (0, {"reward": reward, "metrics": {}}), printed
    assert not Path("/tests").exists() or not Path("/tests/data/expected").exists()


def test_several_numbers_are_metrics_of_which_one_is_the_reward(tmp_path):
    """reward.json may name more than one."""
    test = """echo '{"reward": 0.5, "speed": 2}' > /logs/verifier/reward.json"""
    assert _judged(tmp_path, test, "")[:2] == (0, {"reward": 0.5, "metrics": {"reward": 0.5, "speed": 2.0}})


@pytest.mark.parametrize(
    "test",
    ["true", "echo none > /logs/verifier/reward.txt", """echo '{"a": 1, "b": 2}' > /logs/verifier/reward.json"""],
)
def test_no_verdict_is_no_score(tmp_path, test):
    """Tests that break are not the agent's failure."""
    status, result, printed = _judged(tmp_path, test, "Hello\n")
    assert (status, result) == (harbor.UNJUDGED, None) and "no verdict" in printed


def test_the_agent_is_not_told_the_tests(tmp_path, capsys):
    """They are the ground truth, which only the check is given; images are named, and how to build them is said."""
    task_folder(tmp_path / "one", "true")
    task_folder(tmp_path / "two", "true", '[environment]\ndocker_image = "own:2"\n')
    for name in ("three", "four"):
        task_folder(tmp_path / name, "true", "= no toml" if name == "four" else "")
    (tmp_path / "three/environment/docker-compose.yaml").write_text("")
    assert harbor.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    rows = {row["task"]: row for row in map(json.loads, (tmp_path / "out/rows.jsonl").read_text().splitlines())}
    assert {name: row["image"] for name, row in rows.items()} == {"one": "harbor-one", "two": "own:2"}
    assert sorted(rows["one"]) == ["ground_truth", "image", "prompt", "task"]
    assert (
        sorted(rows["one"]["ground_truth"]["tests"]) == ["data/expected", "test.sh"]
        and rows["two"]["ground_truth"]["timeout_s"] == 300.0
    )
    printed = capsys.readouterr()
    assert printed.out == f"docker build --tag harbor-one {tmp_path}/one/environment\n"
    assert "three needs several containers" in printed.err and "four/task.toml" in printed.err
    assert harbor.main([str(tmp_path / "out"), "--out", str(tmp_path / "none")]) == 2


def test_a_variable_may_be_a_number(tmp_path):
    """TOML has them, and a shell's variables are text."""
    row = harbor.row_of(task_folder(tmp_path, "true", "[verifier.env]\nKEY = 7\n"))
    assert row["ground_truth"]["env"] == {"KEY": "7"}


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ("[[environment.mcp_servers]]\nname = 'a'\n", "environment.mcp_servers"),
        ("[agent]\nuser = 'agent'\n[verifier]\nuser = 'root'\n", "agent.user, verifier.user"),
        ("[verifier]\nenvironment_mode = 'separate'\n", "a verifier's environment of its own"),
        ("[environment]\nos = 'windows'\n", "another system than Linux"),
        ("[verifier.env]\nKEY = '${KEY}'\n", "variables of the machine"),
    ],
)
def test_a_task_that_a_box_would_make_another_one_is_refused(tmp_path, toml, named):
    """Without what it asks for, its reward would say something else."""
    with pytest.raises(ValueError, match=f"asks for {re.escape(named)}.*which a box does not have"):
        harbor.row_of(task_folder(tmp_path, "true", toml))


def test_harbor_reads_the_same_from_a_folder(tmp_path):
    """Its package needs Python 3.12, and brings much that the tests' requirements must not have."""
    why = "the package harbor is not installed"
    task = pytest.importorskip("harbor.models.task.task", reason=why).Task
    places = pytest.importorskip("harbor.models.trial.paths", reason=why).EnvironmentPaths()
    own = shutil.copytree(Path(sys.modules["harbor"].__file__).parent / "cli" / "template-task", tmp_path / "own")
    for folder in (own, task_folder(tmp_path / "task", "true", '[verifier.env]\nKEY = "7"\n')):
        read, row = task(folder), harbor.row_of(folder)
        assert row["prompt"] == read.instruction
        assert row["ground_truth"]["env"] == read.config.verifier.env
        assert row["ground_truth"]["timeout_s"] == min(read.config.verifier.timeout_sec, 300)
        assert row["image"] == read.config.environment.docker_image or row["image"] == f"harbor-{folder.name}"
    assert (str(places.tests_dir), str(places.verifier_dir)) == (harbor.TESTS, harbor.LOGS)
    assert [places.reward_json_path.name, places.reward_text_path.name] == ["reward.json", "reward.txt"]


@pytest.mark.parametrize("name", ["instruction.md", "tests/data", "tests/data/link", "tests", "task.toml"])
def test_a_link_out_of_a_task_is_refused(tmp_path, name):
    """What it names would be the prompt, or in the ground truth."""
    (tmp_path / "private" / "data").mkdir(parents=True)
    task = task_folder(tmp_path / "task", "true")
    for path in ("key", "test.sh", "data/key", "task.toml"):
        (tmp_path / "private" / path).write_text("")
    if (link := task / name).exists():
        link.rename(tmp_path / "away")
    is_file = (tmp_path / "away").is_file() or name.endswith("link")
    link.symlink_to(tmp_path / "private" / ("key" if is_file else ""))
    with pytest.raises(ValueError, match="is a link out of the task"):
        harbor.row_of(task)
    assert harbor.main([str(task), "--out", str(tmp_path / "out")]) == 2


def test_a_link_within_a_task_is_what_it_names(tmp_path):
    task = task_folder(tmp_path / "task", "true")
    (task / "tests/same").symlink_to("data/expected")
    tests = harbor.row_of(task)["ground_truth"]["tests"]
    assert tests["same"] == tests["data/expected"]


@pytest.mark.parametrize(
    "toml",
    [
        "[verifier]\ntimeout_sec = nan\n",
        "[verifier]\ntimeout_sec = inf\n",
        "[verifier]\ntimeout_sec = -1\n",
        "[verifier]\ntimeout_sec = 'soon'\n",
        "[verifier]\ntimeout_sec = true\n",
        "verifier = 3\n",
        "environment = []\n",
        "agent = 'x'\n",
        "[verifier]\nenv = 3\n",
        "[verifier.env]\nKEY = [1]\n",
        "[environment]\ndocker_image = 3\n",
        "[environment]\ndocker_image = '--privileged'\n",
        "[environment]\ndocker_image = 'a b'\n",
    ],
)
def test_a_setting_of_a_wrong_type_is_refused(tmp_path, toml, capsys):
    """One folder must not end the conversion of others by a traceback, nor write what is no JSON."""
    task_folder(tmp_path / "tasks/good", "true")
    task_folder(tmp_path / "tasks/bad", "true", toml)
    assert harbor.main([str(tmp_path / "tasks"), "--out", str(tmp_path / "out")]) == 0
    rows = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()
    ]
    assert [row["task"] for row in rows] == ["good"] and "left out" in capsys.readouterr().err


def test_tests_run_in_the_agents_folder_and_find_no_task(tmp_path):
    """The check starts elsewhere, and what it was told is gone before the agent's work runs."""
    test = "pwd; ls -A; env | grep -c MGRPO_; echo 1 > /logs/verifier/reward.txt"
    status, result, printed = _judged(tmp_path, test, "")
    assert (status, result["reward"]) == (0, 1.0)
    assert printed.split() == [str(tmp_path / "box"), "check.py", "hello.txt", "0"]
