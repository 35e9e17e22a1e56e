"""What the checks of the package's shape allow, in one place: each row is a decision.

A row that nothing needs any more fails as well, so that the tables hold what is there. `python -m tests.repo.walls` prints
what is there.
"""

from __future__ import annotations

ROOMS = {
    "types": set(),
    "layout": set(),
    "processes": set(),
    "ops": {"_C"},
    "models": {"layout"},
    "packing": {"types"},
    "parallel": {"layout"},
    "telemetry": {"processes", "types"},
    "sandbox": {"processes"},
    "config": {"models", "layout"},
    "sync": {"processes", "models", "layout"},
    "algo": {"ops", "config", "types"},
    "data": {"config", "types"},
    "rewards": {"sandbox", "config", "processes", "types"},
    "rollout": {"environments", "models", "config", "processes", "types"},
    "environments": {"sandbox", "data", "processes", "types"},
    "planner": {"models", "config", "layout"},
    "policy": {"parallel", "models", "ops", "config", "layout", "types"},
    "checkpoint": {"policy", "parallel", "models", "layout"},
    "model_io": {"checkpoint", "policy", "parallel", "packing", "models", "layout", "types"},
    "run": set(),
    "run.ranks": {"rollout", "telemetry", "parallel", "config", "processes"},
    "run.inputs": {"rollout", "environments", "rewards", "checkpoint", "data", "models", "config", "types"},
    "run.produce": {
        *("rollout", "rewards", "algo", "data", "packing", "parallel", "telemetry"),
        *("config", "layout", "processes", "types"),
    },
    "run.report": {"model_io", "checkpoint", "planner", "telemetry", "models", "config", "processes", "types"},
    "run.train": {
        *("rollout", "model_io", "checkpoint", "policy", "sync", "algo", "packing", "parallel"),
        *("models", "config", "layout", "processes"),
    },
    "run.start": {
        *("rollout", "model_io", "algo", "data", "ops", "parallel", "telemetry", "models", "config", "processes"),
    },
    "run.commands": {"rollout", "checkpoint", "models", "config", "processes", "types"},
    "run.nodes": {"rollout", "config", "processes"},
}
"""What each room, and each unit of `run`, imports of the other rooms; what is missing here is a decision, not an accident."""

APPLICATION = {"cli", "__init__", "__main__", "rehearsal", "trl"}
"""May import every room. A rehearsal is the application itself, in a process of its own."""

INNER = {
    "algo.losses": {"correction", "loss_inputs", "surrogate"},
    "config.peers": {"errors", "fields", "load", "resolution", "schema", "tracking"},
    "environments.adaptors": {"environment", "offered"},
    "environments.formats": {"environment"},
    "environments.loop": {"environment", "formats", "offered", "workers"},
    "environments.offered": {"environment"},
    "environments.tools": {"environment", "offered"},
    "environments.workers": {"environment", "offered"},
    "rewards.constraints": {"verifier"},
    "rewards.judges": {"verifier"},
    "rewards.verifiers": {"constraints", "judges", "verifier"},
    "rollout.vllm": {"engine"},
    "run.ranks": set(),
    "run.inputs": {"ranks"},
    "run.produce": {"inputs", "ranks"},
    "run.report": {"inputs", "produce", "ranks"},
    "run.train": {"inputs", "produce", "ranks", "report"},
    "run.start": {"inputs", "produce", "ranks", "report", "train"},
    "run.commands": {"inputs", "produce", "ranks", "report", "start"},
    "run.nodes": {"ranks"},
    "telemetry.report": {"alerts", "chart", "completions", "engines", "files", "progress", "samples", "status"},
    "telemetry.trackers": {"sinks"},
}
"""What each folder inside a room, and each unit of `run`, imports of its siblings."""

UNTIL_MERGED = {
    "run": {("produce", "train"), ("report", "train"), ("start", "commands")},
    "environments": {("offered", "adaptors"), ("offered", "workers")},
    "config": {(unit, "peers") for unit in ("adapter_rules", "help", "load", "resolution", "resolve")},
}
"""Arrows between siblings that are about to go: no check counts them. Delete each with its arrow, and the table with the last."""

MAX_UNITS = 12
"""Files and folders of a folder, unless its units do not import each other: a catalogue may be long."""
LARGE = {
    "mgrpo": (25, "the rooms; `ROOMS` is their plan"),
    "algo": (15, "a formula a file, beside the loss that adds them up"),
    "config": (34, "a section of the settings a file, with its rules"),
    "config.peers": (18, "a trainer and a section a file"),
    "data": (16, "the stations from a file of rows to token ids, one after the other"),
    "environments.workers": (13, "the two ends of a worker process, and what passes between them"),
    "parallel": (14, "nearly flat: each file does one thing of Megatron's our way"),
    "planner": (13, "a cause of memory or time a file, the plan that adds them up, and its page"),
    "policy": (17, "the model, the optimizer and one training step, each with its parts on several ranks"),
    "rewards": (21, "three catalogues as folders; the ways of a reward from a name to a number"),
    "rewards.constraints": (17, "a catalogue: a theme a file, above the few files that they share"),
    "rewards.verifiers": (17, "a catalogue: a theme a file, above the few files that they share"),
    "rollout": (13, "the engine's contract, the fleet of engines, and requests on their way"),
    "rollout.vllm": (16, "the two ends of an engine process and of a server, nearly flat"),
    "sandbox": (33, "one noun, an untrusted program, with processes inside one another"),
    "telemetry": (21, "a sink or a family of metrics a file, nearly flat"),
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
    "config/adapter.py": "a section of the settings a file",
    "config/checkpoint.py": "a section of the settings a file",
    "config/derived.py": "read by planner, rehearsal and run beside the sections",
    "config/errors.py": "below everything that raises it",
    "config/hub.py": "a section of the settings a file",
    "config/hub_rules.py": "the rules of a section a file",
    "config/peers/adapters.py": "the translation of a section a file",
    "config/peers/hub.py": "the translation of a section a file",
    "config/peers/tracking.py": "the translation of a section a file",
    "config/provenance.py": "below fields and resolution",
    "config/tracking.py": "a section of the settings a file",
    "config/tracking_rules.py": "the rules of a section a file",
    "environments/offered/calling.py": "for user code of two kinds of adaptors",
    "environments/tools/calculate.py": "a tool a file: users name it by its path",
    "environments/tools/game.py": "shared by two tools, each of which is named by its path",
    "environments/workers/errors.py": "raised in the workers, and read by the loop",
    "environments/workers/limits.py": "both ends of a worker process read them",
    "environments/workers/losses.py": "the loop's and the fleet's warnings, counted together",
    "environments/workers/plain.py": "read by programs, which know nothing else of the workers",
    "packing/cost.py": "one formula, under which everything else in the room is balanced",
    "parallel/axes.py": "makes the groups, once a process; the room's other files find them made",
    "parallel/gather.py": "a collective that three rooms call",
    "parallel/gradients.py": "replaces functions of Megatron where two packages are missing, and goes when they need not be",
    "policy/learning_rate.py": "a pure formula, beside an optimizer that is none",
    "processes/stopwatch.py": "a clock of threads that two rooms share",
    "processes/visible.py": "standard library only: programs of two rooms start with it",
    "rewards/judges/bounded.py": "the transport below another package's client",
    "rewards/overlong.py": "shared by the rewarder and by the built-in functions",
    "rewards/snapshot.py": "the record that reward functions and their callers share",
    "rewards/verifiers/cpu_limit.py": "a signal and its handler, of which verifiers know nothing",
    "run/train/due.py": "asked by the trainer and by what produces for it",
    "sandbox/clipped.py": "also the tool python's, which needs nothing else of an interpreter",
    "sandbox/outputs.py": "one rule, which two benchmarks fix",
    "telemetry/engines.py": "a file of the run's folder, and its reader",
    "telemetry/kept.py": "a family of metrics a file",
    "telemetry/startup.py": "printed before there is a run to tell of",
    "telemetry/status.py": "a file of the run's folder, and its reader",
    "telemetry/trajectories.py": "a part of the samples' tables",
}
"""Files with fewer lines, and why they are not part of another."""

DOUBLED_FILES = {
    "__main__": "what `python -m` runs",
    "adapters": "peers' words for adapters; where an adapter's parts lie",
    "catalog": "of environments; of charts",
    "checkpoint": "a room and its section of the settings",
    "commands": "other trainers' commands; ours",
    "engines": "the command `mgrpo engines`; the file `engines.jsonl`",
    "errors": "each room's own",
    "fleet": "of worker processes; of engines",
    "hints": "for a setting that does not exist; for a type that a model is shown",
    "hub": "the Hugging Face Hub, its section of the settings, and peers' words for it",
    "layout": "ranks and axes, and peers' words for them",
    "limits": "of a worker's environment; of a program",
    "loss": "the loss, and its section of the settings",
    "losses": "the named losses; trajectories that were lost",
    "plan": "of a run; of a weight sync, where users import it from",
    "policy": "a room and its main class",
    "process": "the process of a rank; that of a tracker",
    "report": "a run tells of itself; the page that shows a run",
    "run": "a room, and the run that a report reads",
    "sandbox": "a room and its main class",
    "start": "of the engines; of a run",
    "tools": "tools of a model, and their section of the settings",
    "trackers": "a run's, and the programs that they are",
    "tracking": "a section of the settings, and peers' words for it",
    "trl": "peers' words, and the door for TRL's programs",
    "verifiers": "ours, and the adaptor of the library of that name",
}
"""Names of files and folders that occur more than once, and why. A grep for such a name finds two things."""

DOUBLED_CLASSES = {
    "Engine": "a section of the settings; the protocol of an engine",
    "Frame": "the coordinates of two kinds of charts",
    "Given": "a value of a command line; a value of a configuration",
    "Model": "a section of the settings; the model that a user's program talks to",
}
"""Names of public classes that are defined more than once, and why."""
