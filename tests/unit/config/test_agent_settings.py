"""Settings of agents: what is refused before anything starts."""

from __future__ import annotations

import pytest

from mgrpo.config.validate import problems
from mgrpo.moving import from_values

TOKEN = "RAY_AUTH_TOKEN"


@pytest.fixture
def found_in(model):
    def found(**values):
        agent = {"agent": "python agent.py", "output_dir": f"{model['model_name_or_path']}/out"}
        return [
            each for each in problems(from_values(model | agent | values), world_size=1) if "agent_endpoint" in each
        ]

    return found


@pytest.mark.parametrize("address", ["node0", "node0:", ":29500", "node0:x", "node0:65536", "node0:295000"])
def test_endpoints_join_at_an_address(found_in, monkeypatch, address):
    """A run of hours must not find out at its start on which port nobody can come."""
    monkeypatch.setenv(TOKEN, "a secret")
    assert found_in(agent_endpoint_join=address) == [
        f"agent_endpoint_join={address} must be HOST:PORT, such as node0:29500"
    ]


def test_the_default_limit_of_an_agent_is_below_that_of_a_step(model):
    """One agent that hangs would end the run."""

    def found(**values):
        own = {"agent": "python agent.py", "output_dir": f"{model['model_name_or_path']}/out"}
        told = problems(from_values(model | own | values), world_size=1)
        return [each for each in told if "rollout_timeout" in each]

    assert [each.partition(" where")[0] for each in found(rollout_timeout=500)] == ["an agent may take 600 s"]
    assert not found(rollout_timeout=500, trajectory_timeout=400) and not found()
    assert not found(rollout_timeout=500, agent=None)


def test_endpoints_join_with_a_secret(found_in, monkeypatch):
    """Without one anybody who reaches the port could forge trajectories."""
    monkeypatch.delenv(TOKEN, raising=False)
    assert [TOKEN in each for each in found_in(agent_endpoint_join="node0:29500")] == [True]
    monkeypatch.setenv(TOKEN, "a secret")
    assert not found_in(agent_endpoint_join="node0:29500") and not found_in()


@pytest.fixture
def boxes(model, monkeypatch, tmp_path):
    """What is refused of a box where these programs alone are on PATH."""

    def found(*programs, **values):
        for name in programs:
            (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        own = {"agent": "python agent.py", "output_dir": f"{model['model_name_or_path']}/out"}
        told = problems(from_values(model | own | values), world_size=1)
        return [each for each in told if each.startswith("agent_box")]

    return found


@pytest.mark.parametrize(("box", "other"), [("docker", "podman"), ("podman", "docker")])
def test_containers_need_their_program_and_an_image(boxes, box, other):
    """Otherwise the run finds out once its engines have been loaded."""
    needs = f"agent_box={box} needs the command {box} on PATH; install it, or set agent_box="
    assert boxes(agent_box=box, agent_image="python:3.12") == [f"{needs}local"]
    assert boxes(other, agent_box=box, agent_image="python:3.12") == [f"{needs}{other}"]
    assert boxes(box, agent_box=box, agent_image="python:3.12") == []
    assert [each.partition(",")[0] for each in boxes(agent_box=box)] == [f"agent_box={box} needs agent_image"]
    assert boxes(agent_box="local") == []


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "agent=remote gives tasks to whoever has the key"),
        ("schlüssel", "expected one word of printable ASCII"),
        ("a\nb", "expected one word of printable ASCII"),
        (" a", "expected one word of printable ASCII"),
        ("0f" * 32, None),
    ],
)
def test_the_key_of_agent_workers_must_fit_into_a_header(model, monkeypatch, key, said):
    """No worker could come: its key would never be the run's."""
    monkeypatch.setenv("MGRPO_WORKER_KEY", key)
    values = {"agent": "remote", "output_dir": f"{model['model_name_or_path']}/out"}
    told = [each for each in problems(from_values(model | values), world_size=1) if "MGRPO_WORKER_KEY" in each]
    assert [said in each for each in told] == [True] * (said is not None)
