"""The whole program with learners and engines that take turns: who has memory when, and that nothing else changes."""

from __future__ import annotations

from tests.e2e.interrupted import metrics
from tests.e2e.launching import Run, survivors

FLAGS = ["--total_episodes", "1024", "--warm_up_steps", "1", "--local_eval_every", "2", "--checkpoint_state_freq", "3"]
STEPS = 4


def finish(folder, flags, program=("examples/train_grpo.py",)) -> Run:
    folder.mkdir()
    run = Run(folder, [*FLAGS, *flags], program=program)
    try:
        run.wait_for("\nstep ", 300)
        family = run.family()
        assert run.wait(200) == 0, run.text()[-3000:]
    finally:
        run.end()
    assert survivors(family, 10) == []
    return run


def test_learners_and_engines_take_turns_and_learn_the_same(tmp_path) -> None:
    """Both halves at once do not fit on a GPU; a half that comes back changed, or a lost prompt, trains another model."""
    events = tmp_path / "events.txt"
    events.touch()
    turns = ["--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "true"]
    own = finish(tmp_path / "own", turns, program=("tests/e2e/recorded_turns.py", str(events)))
    plain = finish(tmp_path / "plain", [])
    assert metrics(own) == metrics(plain)
    exported = f"hf/step_{STEPS}/model.safetensors"
    assert (own.output_dir / exported).read_bytes() == (plain.output_dir / exported).read_bytes()

    # Loading both at once would not fit either: the engine is asleep when learners begin to load.
    lines = events.read_text().splitlines()
    ranks = dict.fromkeys(("rank 0", "rank 1"), "keeps all")
    engine, num_turns = "awake", 0
    for line in lines:
        if line == "end sleep":
            engine = "asleep"
        elif line.startswith("rank"):
            rank, keeps = line[:6], line[7:]
            if keeps == "keeps all":
                assert engine == "asleep", lines
                num_turns += 1
            ranks[rank] = keeps
        elif line in ("begin join", "begin receive_weights"):
            # The engine wakes its weights.
            assert engine == "asleep" and set(ranks.values()) <= {"keeps what is synced"}, lines
        elif line == "end receive_weights":
            engine = "has weights"
        elif line == "begin resume":
            # It takes memory for its cache.
            assert engine in ("has weights", "awake") and set(ranks.values()) == {"keeps nothing"}, lines
            engine = "awake"
    # Each step, the saved state and the exported model are the learners' turns.
    assert num_turns == 2 * (STEPS + 2), lines
