"""Every layout's training step on tensors that believe they are on CUDA: it runs, waits nowhere, and holds and sends what
the plan says.

One process rehearses all of them: it rebinds torch.cuda for good. What only CUDA reaches is read from the source, and has
to have run.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mgrpo.config.derived import layout_of
from mgrpo.models.family import shape_of
from mgrpo.moving import load_file, parse
from mgrpo.planner.comparison import AXES, compare
from mgrpo.planner.gpu_memory import StageMemory
from mgrpo.planner.hardware import GPUS, Assumptions, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import shipped_config
from tests.unit.rehearsal.branches import branches
from tests.unit.rehearsal.layouts import CASES, ENGINE_CASES, Case

pytestmark = pytest.mark.learners

ROOT = Path(__file__).parents[3]
WATCHED = [
    path
    for room in ("policy", "parallel", "sync", "checkpoint", "ops")
    for path in (ROOT / "mgrpo" / room).rglob("*.py")
]
QUIET = {"forward", "backward", "score", "teach"}
"""Phases in which the host may not wait."""
WAITS = {
    "token_dispatcher.py _maybe_dtoh_and_synchronize": "the host says how many tokens go to which rank",
}
"""Where the host waits nevertheless in passes that are not repeated, by `file function`, and why."""
UNREACHED = {
    "backend.py init_process_group": "joins NCCL; a rehearsal is in torch's fake process group",
    "backend.py device_name": "is asked when a run starts",
    "architecture.py block": "Transformer Engine's layers, which need a GPU; their names and shapes are recorded",
    "model.py build": "the same",
    "group.py is_due": "a peer does not answer",
    "compiled.py ops_for": "kernels for CUDA are taken to be built",
    "head.py inverse_temperature": "a temperature for each row, which the learner does not have",
    "offload.py _copy": "learners that take turns with engines on their GPU; tests with the mark `gpu`",
    "backend.py release_memory": "the same",
    "channel.py _apart": "engines on the learners' GPUs",
    "shared.py _tell": "weights for an engine on the learner's GPU; a test with the mark `gpu`",
    "receiver.py": "runs in an engine, not in a learner",
    "transfer_engine.py update_weights": "the same",
    "train_state.py restore_optimizer": "refuses to continue with offloaded states",
}
"""What only CUDA reaches and no rehearsal does, by `file function` or file, and why."""


class Rehearsals:
    """The process; answers are kept."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.rehearsal.server", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.known: dict[str, Any] = {}

    def ask(self, request: dict[str, Any]) -> Any:
        key = json.dumps(request)
        if key not in self.known:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(key + "\n")
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
            assert reply, "the process has ended, see its output"
            self.known[key] = json.loads(reply)
        return self.known[key]

    def of(self, name: str, rank: int, **extra: Any) -> dict[str, Any]:
        case = (CASES | ENGINE_CASES)[name]
        return self.ask(
            {
                "argv": case.argv,
                "hf_config": case.model,
                "teachers": case.teachers,
                "learners": case.learners,
                "rank": rank,
                "packs": packs_of(case),
                **extra,
            }
        )


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[Rehearsals]:
    started = Rehearsals(*map(str, WATCHED))
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def packs_of(case: Case) -> int:
    """As many as stages: each stage then has one warm-up or cool-down at most."""
    return parse(case.argv).parallel.pipeline_model_parallel_size


@functools.cache
def plan_of(name: str) -> RunPlan:
    case = (CASES | ENGINE_CASES)[name]
    config = parse(case.argv)
    hardware = Hardware(gpu=GPUS["H100"], nodes=2, gpus_per_node=8, network_gbps=400.0, assumed=Assumptions())
    teachers = [*map(shape_of, case.teachers)]
    return plan_run(config, shape_of(case.model), hardware, num_learners=case.learners, teachers=teachers)


def every_rank() -> list[Any]:
    return [pytest.param(name, rank, id=f"{name}, rank {rank}") for name, case in CASES.items() for rank in case.ranks]


def described(found: dict[str, Any]) -> str:
    return f"{found['error']}\n" + "\n".join(found["at"])


@pytest.mark.parametrize(("name", "rank"), every_rank())
def test_the_step_runs_on_cuda_and_the_host_waits_nowhere_in_it(rehearsals, name, rank):
    """A crash, or a queue of kernels that runs dry at every layer, would show on a GPU only."""
    found = rehearsals.of(name, rank)
    assert "error" not in found, described(found)
    assert [wait for wait in found["waits"] if wait[0] in QUIET and not is_allowed(wait[2])] == []


@pytest.mark.parametrize(("name", "rank"), every_rank())
def test_nothing_is_copied_to_the_device_from_memory_that_it_cannot_read(rehearsals, name, rank):
    """Such a copy holds up the host in every micro-batch."""
    uploads = rehearsals.of(name, rank)["uploads"]
    assert [upload for upload in uploads if upload[0] not in ("build", "restore", "save", "sync", "again")] == []


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("experts", {"forward": 2}),
        ("experts, tensor, recompute full", {"score": 4, "forward": 4}),
        ("experts, recompute moe", {"forward": 2}),
        ("experts, whole", {}),
        ("experts, whole, recompute full", {}),
    ],
)
def test_the_host_waits_for_an_exchange_of_tokens_once_in_each_layer(rehearsals, name, waits):
    """Of two layers and one micro-batch, or two: not again in the backward pass, nor where all experts are on the rank."""
    found = rehearsals.of(name, 0)
    assert "error" not in found, described(found)
    counts: Counter[str] = Counter()
    for phase, _, _, count in found["waits"]:
        counts[phase] += count
    assert {phase: count for phase, count in counts.items() if phase in QUIET} == waits


def is_allowed(site: str) -> bool:
    """Of Megatron's frame, or mgrpo's where Megatron is not involved."""
    where, function = site.split(" < ")[0].rsplit(" ", 1)
    return f"{Path(where.partition(':')[0]).name} {function}" in WAITS


@pytest.mark.parametrize(("name", "rank"), every_rank())
def test_states_have_the_planned_size(rehearsals, name, rank):
    """What a run needs is computed before it starts: a buffer that the plan forgets is a crash in the first step."""
    found = rehearsals.of(name, rank)
    states = plan_of(name).stages[found["stage"]].states
    for kind in ("parameters", "gradients", "optimizer", "reference", "teachers"):
        planned, held = getattr(states, kind), found["states"].get(kind, 0)
        if name == "offload" and kind == "optimizer":
            planned = states.gradients // 2  # moments move to the host, masters stay
        assert held == pytest.approx(planned, rel=5e-3), (kind, held, planned)


@pytest.mark.parametrize(("name", "rank"), every_rank())
def test_traffic_is_as_planned(rehearsals, name, rank):
    """A collective too many, per layer or update, costs a large run a tenth of its time."""
    found = rehearsals.of(name, rank)
    for line in compare(plan_of(name), found):
        if line.section == "sent" and line.name in AXES:
            # Of a document's stretches a context rank may have those with more responses than the mean.
            tolerance = 0.05 if plan_of(name).layout.context > 1 else 0.02
            assert line.rehearsed == pytest.approx(line.planned, rel=tolerance), line


@pytest.mark.parametrize(
    ("name", "rank"), [(name, rank) for name, case in CASES.items() if name.startswith("fp32") for rank in case.ranks]
)
def test_training_in_float32_needs_the_planned_memory(rehearsals, name, rank):
    """There is no flash attention: of each layer the padded call keeps four operands, and no scores."""
    lines = {line.name: line for line in compare(plan_of(name), rehearsals.of(name, rank))}
    peak, passes = lines["peak"], lines["whole weights, passes"]
    assert peak.rehearsed == pytest.approx(peak.planned, rel=0.05)
    assert passes.rehearsed == pytest.approx(passes.planned, rel=0.1), passes


@pytest.mark.parametrize(
    ("name", "rank"), [case for case in every_rank() if case.values[0].startswith("offloaded activations")]
)
def test_offloaded_activations_leave_the_device_as_planned(rehearsals, name, rank):
    """A reference to one of them keeps it there, and the run that was planned to fit does not."""
    found, plan = rehearsals.of(name, rank), plan_of(name)
    lines = {line.name: line for line in compare(plan, found)}
    passes, copied = lines["whole weights, passes"], lines["activations copied to the host"]
    assert copied.rehearsed == pytest.approx(copied.planned, rel=0.01), copied
    assert 0.9 * passes.planned < passes.rehearsed < 1.02 * passes.planned, passes
    assert plan.stages[found["stage"]].activations.on_host > 0.11 * passes.planned, "more than the limits leave open"


@pytest.mark.parametrize(("name", "rank"), [case for case in every_rank() if case.values[0] != "offload"])
def test_a_restored_rank_holds_what_it_held_and_never_more(rehearsals, name, rank):
    """A run that fits must also fit when it continues; a state in the wrong place would fail the first update."""
    found = rehearsals.of(name, rank)
    assert "error" not in found, described(found)
    assert misplaced(found["restored"], plan_of(name).stages[found["stage"]]) == {}
    waits = [(site.rsplit(" ", 1)[1], count) for phase, _, site, count in found["waits"] if phase == "restore"]
    looks = 1 + len(CASES[name].teachers)
    assert waits == [("not_finite", looks)], "one look at all weights of each model that was loaded"


def misplaced(restored: dict[str, Any], planned: StageMemory) -> dict[str, tuple[int, int]]:
    """What takes another place on the device than it should, with its bytes and those planned."""
    kinds = ("parameters", "gradients", "optimizer", "reference", "teachers")
    sizes = {kind: (restored["states"].get(kind, 0), getattr(planned.states, kind)) for kind in kinds}
    # Whole layers of ZeRO-3 are there only from the first step on.
    expected = planned.start if planned.built else planned.start - planned.states.unsharded
    wrong = {kind: pair for kind, pair in sizes.items() if pair[0] != pytest.approx(pair[1], rel=5e-3)}
    if restored["peak"] != pytest.approx(expected, rel=5e-3, abs=2**14):  # with numbers that lie beside the states
        wrong["peak"] = restored["peak"], expected
    return wrong


def test_a_moment_restored_to_the_host_is_found(rehearsals):
    """By its size where the rehearsal ends with the restore, and by the next update."""
    (stage,) = plan_of("ZeRO-1").stages
    large = rehearsals.of("ZeRO-1", 0, mutation="restored_on_the_host")
    assert misplaced(large["restored"], stage).keys() == {"optimizer"}
    small = rehearsals.of("saved", 0, mutation="restored_on_the_host")
    assert "adam" in small["error"] + small["at"][0] and "mgrpo/policy/optimizer.py" in "".join(small["at"]), small


def test_a_second_copy_of_what_is_restored_is_found(rehearsals):
    """It would be the run's peak, and out of memory only when the run continues."""
    found = rehearsals.of("ZeRO-1", 0, mutation="restored_through_a_copy")
    assert misplaced(found["restored"], plan_of("ZeRO-1").stages[0]).keys() == {"peak"}


def test_an_index_on_the_host_fails_the_rehearsal(rehearsals):
    """A tensor on the wrong device is the commonest defect that a machine without a GPU cannot show."""
    found = rehearsals.of("ZeRO-1", 0, mutation="rows_on_the_host")
    assert "index_select" in found["error"] + found["at"][0] and "mgrpo/policy/model.py" in "".join(found["at"]), found


def test_an_item_in_the_loss_is_found(rehearsals):
    """One innocent float() stalls the device in every micro-batch."""
    waits = rehearsals.of("ZeRO-1", 0, mutation="an_item_in_the_loss")["waits"]
    assert any(phase == "forward" and "run/train/learner.py" in site for phase, _, site, _ in waits)


def test_a_wait_for_an_event_is_found(rehearsals):
    """Events and streams do not pass through torch's dispatcher: a silent one would hide every such wait."""
    waits = rehearsals.of("experts", 0)["waits"]
    assert any(phase == "forward" and is_allowed(site) for phase, _, site, _ in waits)


def test_states_equal_those_of_real_tensors_on_the_cpu(rehearsals):
    """The stand-in must not change what it measures."""
    compared = ("ZeRO-0", "ZeRO-1", "tensor", "pipeline", "context, all_gather", "experts")
    requests = []
    for name in compared:
        case = CASES[name]
        layout = layout_of(parse(case.argv), case.learners)
        requests.append(
            [
                "states",
                {
                    "hf": case.model,
                    "layout": {field: getattr(layout, field) for field in layout.__dataclass_fields__},
                    "rank": 0,
                    "dtype": "bfloat16",
                    "parallel": {},
                },
            ]
        )
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.planner.real"],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    for name, real in zip(compared, json.loads(done.stdout.splitlines()[-1]), strict=True):
        found = rehearsals.of(name, 0)["states"]
        assert {kind: found[kind] for kind in real} == real, name


def test_a_rank_of_a_32b_model_at_full_size(rehearsals):
    """The shipped configuration: the last stage of 64 learners. Few layers would hide what grows with their number."""
    file = ROOT / "examples" / "configs" / "32b_16x8.yaml"
    config = load_file(file, world_size=1)
    model = shipped_config(config.model.model_name_or_path)
    assert model is not None
    learners = sum(config.parallel.num_learners_per_node)
    found = rehearsals.ask(
        {
            "argv": ["--config", str(file)],
            "hf_config": model,
            "learners": learners,
            "rank": learners - 1,
            "packs": 1,
        }
    )
    assert "error" not in found, described(found)
    assert [wait for wait in found["waits"] if wait[0] in QUIET] == []
    assert 30 << 30 < found["peak"] < 40 << 30


def test_every_branch_for_cuda_has_run(rehearsals):
    """What no rehearsal reaches runs for the first time on somebody's GPUs."""
    for name, case in CASES.items():
        for rank in case.ranks:
            rehearsals.of(name, rank)
    run = rehearsals.ask({"lines": True})
    missed = Counter(
        f"{branch.file.name} {branch.function}"
        for file in WATCHED
        for branch in branches(file)
        for line in branch.statements
        if line not in run[str(file)]
    )
    explained = {place for place in missed if place in UNREACHED or place.split()[0] in UNREACHED}
    assert set(missed) - explained == set()
    assert {key for key in UNREACHED if not any(place.startswith(key) for place in explained)} == set()


def test_branches_for_cuda_are_found():
    """Or the table above would be empty because nothing was read."""
    found = {f"{branch.file.name} {branch.function}": branch for file in WATCHED for branch in branches(file)}
    assert {"group.py is_due", "backend.py random_states"} <= found.keys()
    assert len(found["group.py is_due"].statements) > 4
