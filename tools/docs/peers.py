"""docs/config_peers.md, written from the tables of other trainers' names: `python -m tools.docs.peers > docs/config_peers.md`."""

from __future__ import annotations

import sys

from mgrpo.moving.command_words import TRAINERS, Word, words
from tools.docs import markdown

INTRODUCTION = """<!-- Written by `python -m tools.docs.peers > docs/config_peers.md`; do not edit. -->

# Names of verl and slime

`mgrpo.GRPOConfig.from_verl(...)` takes a command line or a script, its words `a.b.c=value`, a YAML file or a mapping, and
`mgrpo.GRPOConfig.from_slime(...)` a command line or a script, its flags or a mapping. Both return a config for `mgrpo.train`, whose `notes` say
what became of every name, and raise one error with everything that cannot be done. What a command leaves out has that trainer's
default. Settings of this project given as keywords override, and take the place of what is refused:

```python
import mgrpo

command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=4"
config = mgrpo.GRPOConfig.from_verl(command, reward_funcs="reward.py:score")
print(*config.notes, sep="\\n")
```

| status | meaning |
|---|---|
| alias | sets the settings that it names |
| combined | sets them together with other names |
| no effect | accepted, but changes nothing |
| refused | accepted with its neutral values; any other value is an error, unless one of the settings named is given |

A name that ends in `*` stands for all that begin so and have no row of their own; a name without a row is an error. On the command line
of `mgrpo train` these names are not accepted; it says what to use instead.

## Scripts

A script is read, and nothing in it is run. Read are quotes, comments, continued lines, lists, variables that the script or the environment
sets, `${NAME:-default}`, sums of whole numbers, `$(date +...)`, `$(seq ...)`, several commands, redirections and here-documents; a script is
read as if it were started without arguments. What else could change a word of the trainer's command is refused with its line, in one error
with everything else:

- other commands in `$(...)` or backticks, other forms of `${...}`, patterns of files (`*`, `?`, `{a,b}`) without quotes
- variables that are set nowhere, or in an `if`, a loop, a `case`, a function, behind `&&` or `||`, or by `read`, `eval`, `((...))` and the like
- variables and lists that are not set again after a file is sourced, except slime's `MODEL_ARGS`, which describes the architecture
- a trainer that is started from within quotes, such as `bash -c "..."`

In verl's words `~name`, choices between values (`a,b`), groups (`name@group=`) and files of settings other than `ppo_trainer` and
`ppo_megatron_trainer` are refused; in its YAML files `${name}`, `${oc.select:name,default}` and `${oc.env:NAME}` are followed.
"""


def to_markdown() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(f"{_section(trainer)}\n" for trainer in TRAINERS)]).rstrip() + "\n"


def _section(trainer: str) -> str:
    rows = (
        (f"`{word.name}`", word.default, ", ".join(word.neutral), word.status, _meaning(word))
        for word in words(trainer).values()
    )
    header = ("name", "default", "neutral values", "status", "meaning")
    return "\n".join([f"## {trainer}", "", *markdown.table(header, rows)])


def _meaning(word: Word) -> str:
    targets = ", ".join(f"`{target}`" for target in word.targets)
    return "; ".join(part for part in (targets, word.sentence) if part)


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
