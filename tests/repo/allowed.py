"""What the checks of the package's shape allow, in one place: each row is a decision.

A row that nothing needs any more fails as well, so that the tables hold what is there. `python -m tests.repo.walls` prints
what is there.
"""

from __future__ import annotations

ROOMS = {
    "types": set(),
    "processes": set(),
    "ops": {"_C"},
    "models": {"layout"},
    "packing": {"types"},
    "parallel": {"layout"},
    "telemetry": {"processes", "types"},
    "sandbox": {"processes"},
    "config": {"layout", "models", "processes"},
    "moving": {"config"},
    "sync": {"layout", "models", "processes"},
    "algo": {"config", "ops", "types"},
    "data": {"config", "types"},
    "rewards": {"config", "processes", "sandbox", "types"},
    "rollout": {"config", "environments", "models", "processes", "types"},
    "environments": {"data", "processes", "sandbox", "types"},
    "planner": {"config", "layout", "models", "moving"},
    "policy": {"config", "layout", "models", "ops", "parallel", "types"},
    "checkpoint": {"layout", "models", "parallel", "policy"},
    "model_io": {"checkpoint", "layout", "models", "packing", "parallel", "policy", "types"},
    "run": set(),
    "run.ranks": {"config", "parallel", "processes", "rollout", "telemetry"},
    "run.inputs": {"checkpoint", "config", "data", "environments", "models", "rewards", "rollout", "types"},
    "run.produce": {
        "algo",
        "config",
        "data",
        "layout",
        "packing",
        "parallel",
        "processes",
        "rewards",
        "rollout",
        "telemetry",
        "types",
    },
    "run.report": {"checkpoint", "config", "model_io", "models", "planner", "processes", "telemetry", "types"},
    "run.train": {
        "algo",
        "checkpoint",
        "config",
        "layout",
        "model_io",
        "models",
        "packing",
        "parallel",
        "policy",
        "processes",
        "rollout",
        "sync",
        "types",
    },
    "run.start": {
        "algo",
        "config",
        "data",
        "model_io",
        "models",
        "moving",
        "ops",
        "parallel",
        "processes",
        "rollout",
        "telemetry",
    },
    "run.commands": {
        "checkpoint",
        "config",
        "environments",
        "models",
        "moving",
        "processes",
        "rollout",
        "telemetry",
        "types",
    },
    "run.nodes": {"config", "moving", "processes", "rollout"},
    "layout": set(),
    "run.records": {"config", "packing", "policy", "types"},
}
"""What each room, and each unit of `run`, imports of the other rooms; what is missing here is a decision, not an accident."""

APPLICATION = {"cli", "__init__", "__main__", "rehearsal", "trl"}
"""May import every room. A rehearsal is the application itself, in a process of its own."""

INNER = {
    "algo.losses": {"correction", "loss_inputs", "loss_metrics", "surrogate"},
    "environments.adaptors": {"environment", "offered"},
    "environments.formats": {"environment"},
    "environments.agents": {"loop", "offered", "workers"},
    "environments.boxes": set(),
    "environments.boxes.local": {"box", "captured", "relay"},
    "environments.endpoint": {"environment", "loop", "normal_form", "offered"},
    "environments.launch": {"boxes", "offered"},
    "environments.loop": {"environment", "formats", "normal_form", "offered"},
    "environments.offered": {"environment"},
    "environments.tools": {"environment", "offered"},
    "environments.workers": {"adaptors", "environment", "loop", "offered"},
    "models.hf_files": {"placement", "shape", "table"},
    "models.placement": {"shape"},
    "rewards.constraints": {"verifier"},
    "rewards.judges": {"verifier"},
    "rewards.rubrics": {"compose", "judges", "remote_endpoint", "trajectory_rewards", "verifier"},
    "rewards.verifiers": {"constraints", "judges", "rubrics", "verifier"},
    "rewards.verifiers.answers": set(),
    "rollout.engines": {"engine", "requests"},
    "rollout.vllm": {"engine"},
    "run.ranks": set(),
    "run.inputs": {"ranks"},
    "run.produce": {"inputs", "ranks", "records"},
    "run.report": {"inputs", "ranks", "records"},
    "run.train": {"inputs", "produce", "ranks", "records", "report"},
    "run.start": {"inputs", "produce", "ranks", "report", "train"},
    "run.commands": {"inputs", "produce", "ranks", "records", "report", "start"},
    "run.nodes": {"ranks"},
    "telemetry.report": {
        "alerts",
        "completions",
        "files",
        "metrics",
        "progress",
        "recorded",
        "samples",
        "state",
        "untrusted",
    },
    "telemetry.trackers": set(),
    "moving.scripts": {"command_words", "config_doors"},
    "rollout.vllm.ray_processes": {"printed"},
    "rollout.vllm.server": {"calls", "kept_sets"},
    "run.records": set(),
    "telemetry.metrics": {"files", "trackers"},
}
"""What each folder inside a room, and each unit of `run`, imports of its siblings."""

MAX_UNITS = 12
"""Files and folders of a folder, unless its units do not import each other: a catalogue may be long."""
LARGE = {
    "mgrpo": (26, "the rooms; `ROOMS` is their plan"),
    "algo": (15, "a formula a file, beside the loss that adds them up"),
    "config": (33, "a section of the settings a file, with its rules"),
    "data": (16, "the stations from a file of rows to token ids, one after the other"),
    "environments.endpoint": (15, "three APIs side by side, and a call's way from its connection to its turn and back"),
    "environments.loop": (13, "a conversation from its messages to its tokens, and the loop that plays it"),
    "parallel": (14, "nearly flat: each file does one thing of Megatron's our way"),
    "planner": (13, "a cause of memory or time a file, the plan that adds them up, and its page"),
    "policy": (17, "the model, the optimizer and one training step, each with its parts on several ranks"),
    "rewards": (21, "three catalogues as folders; the ways of a reward from a name to a number"),
    "rewards.constraints": (17, "a catalogue: a theme a file, above the few files that they share"),
    "rewards.verifiers": (13, "a catalogue: a theme a file, above the few files that they share"),
    "sandbox": (33, "one noun, an untrusted program, with processes inside one another"),
}
"""Folders with more units, and why. The numbers only fall."""

MAX_FLOORS = 8
"""Units on the longest path of imports inside a folder: who reads the highest goes down all of them."""
TALL = {
    "mgrpo": (9, "the rooms; `ROOMS` is their plan"),
    "sandbox": (13, "walls around walls, in as many processes: each floor hands an untrusted program to the next"),
}
"""Folders with more floors, and why. The numbers only fall."""

MAX_FILE_LINES = 500

MIN_FILE_LINES = 40
SMALL = {
    "__main__.py": "what `python -m` runs",
    "sandbox/__main__.py": "what `python -m` runs",
    "algo/losses/cispo.py": "a loss a file, to be read beside its paper",
    "algo/losses/ppo_clip.py": "a loss a file, to be read beside its paper",
    "algo/losses/reinforce.py": "a loss a file, to be read beside its paper",
    "algo/losses/sapo.py": "a loss a file, to be read beside its paper",
    "config/errors.py": "below everything that raises it",
    "environments/tools/calculate.py": "a tool a file: users name it by its path",
    "environments/tools/game.py": "shared by two tools, each of which is named by its path",
    "packing/cost.py": "one formula, under which everything else in the room is balanced",
    "parallel/axes.py": "makes the groups, once a process; the room's other files find them made",
    "parallel/gather.py": "a collective that three rooms call",
    "parallel/gradients.py": "replaces functions of Megatron where two packages are missing, and goes when they need not be",
    "policy/learning_rate.py": "a pure formula, beside an optimizer that is none",
    "processes/reply_bodies.py": "read by an engine of the run and by a tool, which share no other room",
    "processes/stopwatch.py": "a clock of threads that two rooms share",
    "processes/visible.py": "standard library only: programs of two rooms start with it",
    "rewards/judges/bounded.py": "the transport below another package's client",
    "rewards/overlong.py": "shared by the rewarder and by the built-in functions",
    "rewards/verifiers/cpu_limit.py": "a signal and its handler, of which verifiers know nothing",
    "run/train/finite.py": "one rule for the policy and for the models beside it, which health and loading share",
    "sandbox/clipped.py": "also the tool python's, which needs nothing else of an interpreter",
    "sandbox/outputs.py": "one rule, which two benchmarks fix",
}
"""Files with fewer lines, and why they are not part of another."""

DOUBLED_FILES = {
    "__main__": "what `python -m` runs",
    "agents": "what plays trajectories; their metrics",
    "agent": "the process of a node; an agent of the user's, and its section of the settings",
    "app": "the sandbox over HTTP; a model's endpoint over HTTP",
    "boxes": "of tensors in a checkpoint; for agents to run in",
    "calls": "of a model's endpoint; of vLLM's engines",
    "checkpoint": "a room and its section of the settings",
    "data": "a room and its section of the settings",
    "distillation": "what is learned from teachers, and its section of the settings",
    "endpoint": "a model's, which agents ask; a judge's",
    "engine": "the protocol of an engine, and its section of the settings",
    "engines": "those of a run; the command about them",
    "hub": "the Hugging Face Hub, and its section of the settings",
    "local": "programs of the sandbox, and boxes of agents, on this machine",
    "launch": "of agents; of a run",
    "loss": "the loss, and its section of the settings",
    "losses": "the named losses; trajectories that were lost",
    "model": "Megatron's model, and its section of the settings",
    "optimizer": "the optimizer, and its section of the settings",
    "parallel": "a room and its section of the settings",
    "plan": "of a run; of a weight sync, where users import it from",
    "policy": "a room and its main class",
    "process": "of a rank, of a tracker, of an endpoint",
    "report": "a run tells of itself; the page that shows a run",
    "rollout": "a room and its section of the settings",
    "run": "a room, and the run that a report reads",
    "sandbox": "a room and its main class",
    "server": "engines behind HTTP; the sandbox behind HTTP",
    "session": "an agent's at the endpoint; a program's in the sandbox",
    "sessions": "those of the endpoint; those of the sandbox",
    "start": "of the engines; of a run",
    "teachers": "on engines of their own; whether they suit a run",
    "tools": "tools of a model, and their section of the settings",
    "trackers": "a run's, and the programs that they are",
    "verifiers": "ours, and the adaptor of the library of that name",
}
"""Names of files and folders that occur more than once, and why. A grep for such a name finds two things."""

DOUBLED_CLASSES = {
    "Agent": "a section of the settings; what plays a trajectory",
    "Endpoint": "an agent's address of the model; a judge's",
    "Box": "where an agent runs; a part of a tensor",
    "Ask": "a turn that is asked of engines; what a request to the endpoint asks",
    "ContextFull": "of a user's program; of a request to the endpoint",
    "Fault": "a call that cannot be read; a request that is answered with an error",
    "Engine": "a section of the settings; the protocol of an engine",
    "Given": "a value of a command line; a value of a configuration",
    "Model": "a section of the settings; the model that a user's program talks to",
    "Session": "an agent's trajectory, at the endpoint and as the learner holds it; a program's in the sandbox",
    "Sessions": "those of the endpoint; those of the sandbox",
}
"""Names of public classes that are defined more than once, and why."""
