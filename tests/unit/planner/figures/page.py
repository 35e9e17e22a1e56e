"""The page docs/figures.md: every row, also the bad ones."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, median

from mgrpo.planner.engines.public_steps import STEPS as PUBLIC_STEPS
from tests.unit.planner.figures.held_out import HeldOut, hold_out
from tests.unit.planner.figures.left_out import sensitivity
from tests.unit.planner.figures.own import compare_own, judged
from tests.unit.planner.figures.published import (
    FIGURES,
    Compared,
    compare_training,
    mean_error,
    median_error,
    of,
    rows,
)
from tests.unit.planner.figures.steps import alone_errors, compare_steps, large_table

PHASES = ("generate", "logprobs", "train")
HEAD = """# Planned and published

What others measured on their GPUs, and what `mgrpo plan` says of the same model, layout and hardware: how far to trust a plan
([planning.md](planning.md)). Runs on many GPUs are those of other trainers, whose kernels are not mgrpo's; of mgrpo itself only steps on
one GPU were measured. The page is written by

```sh
python -m tests.unit.planner.figures > docs/figures.md
```

and a test asks that it is up to date. An error is `planned / reported - 1`: a positive one of speed says that the plan is too
optimistic, one of memory that it is too careful.
"""
TRAINING = """
## Training

Tokens per second and GPU, {rows} rows: mean of the absolute errors **{mean:.1%}**, median {median:+.1%}.

{table}

What is not in a plan of mgrpo is stated in the row: kernels (FlashAttention 2, or 3 and cuDNN), what overlaps, fp8, another peak.
Two numbers are derived from these rows, because no measurement of a single kernel says what a whole step reaches:
`compute_efficiency` {products} and `expert_efficiency` {experts}. Derived without one source, they and the mean error of that
source's rows are:

{held}

Held out, a row is off by {out:.1%} in the mean. All other defaults are data sheets, counts, and measurements of single kernels:
see the [assumptions](planning.md#assumptions). Rows have settings of their own, by their programs' documents and code, which no plan of
mgrpo has. How much of the agreement they are, each left out of all rows:

{settings}

Two of them are read off speeds that are judged here: 0.63, from two pairs of torchtitan's runs with and without async TP, of which two
rows are the faster ones, and torchtitan's peak, of which the nearer end of a stated range was taken.
"""
MEMORY = """
## Memory

GiB of torch's allocator on the fullest GPU, {rows} rows: mean of the absolute errors **{mean:.1%}**, median {median:+.1%}.

{table}

These programs do not keep what mgrpo keeps, and the rows state what they do by their own code: 16 bytes of states for a weight
in place of 18, 10 to 14 bytes for a logit where mgrpo overwrites logits or computes them in chunks, and of torchtitan's layers
31,744 elements a token. A plan of mgrpo itself is the comparison below.
"""
OWN = """
## mgrpo on one H100

Models of up to a billion weights, 16 made-up samples a step (`benchmarks/training-cuda.json`). Tokens per second: mean of the
absolute errors **{speed:.1%}** without "experts", from whose time the host's time for a layer with experts was derived.

{speeds}

GiB at the peak, which a plan takes for packs of responses only: mean of the absolute errors **{memory:.1%}**.

{memories}
"""
STEPS = """
## Steps of RL

Seconds from one step to the next of NeMo RL's GRPO, {rows} rows: median of the errors **{median:+.1%}**, mean of the absolute ones
**{mean:.1%}**. A negative error says that the plan is too optimistic. These are not errors of `mgrpo plan` alone, whose
median is **{alone:+.1%}** and whose mean absolute error **{alone_mean:.1%}**: the rest is what only their program does, added here.

{table}

"mgrpo" is the plan of the same model, layout, lengths and hardware; "with theirs" adds what only their program does, and the error
is of that: packs that are padded to the longest between pipeline stages, gradients that are added beside the products, longer packs
where they only score (which is faster), log-probabilities by single operations over float32 logits, the reference's weights and the
optimizer's states copied through memory of the host that is not pinned, and refits as long as they report them of other runs; those of
mixtures in turn were measured on B200 or with an earlier release ({refits}). The first two rows' own refits are in what is reported, so
that those of a plan stand in their place. Rows "1off" and "8off" have
engines of their own; the others take turns on all GPUs. Ahead, their groups of answers take the place of others only when a whole
group has ended, and no more than one batch's (8 batches') are under way. Since v0.7 they update once a step, and do not score with the
policy. A row has the mean length that they report, with a
log-normal spread of 0.9, and the layout of their recipe at that release. No number in the plan is derived from these rows, so that each of
them is one that is left out. Their rows became up to
38 % faster from v0.4 to v0.6 on the same GPUs, so that programs and not only GPUs are measured.

Phases, where they are published (v0.3; a user measured 116 s and 178 s for the same two):

{phases}

Packs of 4,096 tokens are trained as fast as planned where everything that is in them counts: padding between stages is up to 30 % of a
pack, and a gradient buffer is read and written once a pack, however short it is. Not explained: what is left of 70B, whose tensor ranks
do not divide the sequence, and 30B with engines of its own, both rows.

Generation alone, seconds of about a thousand requests of ShareGPT that come at once:

{generation}

Weight syncs. A plan is that of mgrpo's, which sends each worker its part; most others gather whole tensors and load them by name:

{sync}

Where NeMo RL sends parts as well, a plan takes twice as long for 30B, a quarter less than what was merged of it, and less than half for
235B and 671B. Links do not explain these two: a worker receives its part in 1.6 and 1.1 s. Their code sends one tensor after the other
and, of the 8 and 16 pipeline stages, those of two at a time (`NRL_REFIT_NUM_STREAMS`), where mgrpo's stages all send at once. The hosts'
work is planned by a CPU's time for each tensor, which no GPU has confirmed.

Not planned, because mean lengths of prompts or answers are not published: {unplanned}.

## Large runs on 128 and 256 H100

Half of the GPUs are learners; two models with answers of 8,704 tokens in the mean and at most 16,384, and two shipped
configurations, of Qwen2.5-32B and Qwen3-235B-A22B, the latter also with as many answers as the best public run of that model, as long in
the mean, which took 203 s one ahead (its step also scores with the policy and a reference, that of the configuration does not):

{large}

"2 ahead" is `async_steps` 2, `max_staleness` 4 and `inflight_updates`; "4 x 8 workers" are engines with 8 copies of their attention
on 4 GPUs each, over whose 32 GPUs the experts are spread (`vllm_enable_expert_parallel`). The best that others publish, which
`mgrpo plan` prints beside its own. Lengths and batches differ from run to run, and tokens a second with them: long answers cost more each,
and a small batch waits longer for its longest answer:

{public}
"""
SOURCES = """
## Sources

{table}
"""


def rows_table(compared: Iterable[Compared]) -> str:
    """One line a row."""
    head = ["| row | reported | planned | error | |", "|---|---|---|---|---|"]
    return "\n".join(
        head
        + [
            f"| {row.row} | {row.reported:,.4g} | {row.planned:,.4g} | {row.error:+.0%} | {row.note} |"
            for row in compared
        ]
    )


def steps_table(compared: Iterable[Compared], *, phases: bool = False) -> str:
    """One line a row, with the plan alone and with what the row's program does beside."""
    kind = " phase |" if phases else ""
    head = [f"| row |{kind} reported | mgrpo | with theirs | error | |", "|---|---|---|---|---|---|" + "---|" * phases]
    return "\n".join(
        head
        + [
            f"| {row.row} |{f' {row.figure} |' if phases else ''} {row.reported:,.4g} | {row.alone:,.4g} | {row.planned:,.4g} | {row.error:+.0%} | {row.note} |"
            for row in compared
        ]
    )


def held_table(held: Iterable[HeldOut]) -> str:
    """One line a source."""
    head = [
        "| source held out | rows | compute_efficiency | expert_efficiency | mean error of its rows |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(
        head
        + [
            f"| {own.source} | {own.rows} | {own.compute_efficiency} | {own.expert_efficiency} | {own.error:.1%} |"
            for own in held
        ]
    )


def settings_table() -> str:
    """One line for what is left out of all rows."""
    head = ["| left out | mean error of speed | median | mean error of memory |", "|---|---|---|---|"]
    return "\n".join(
        head
        + [f"| {name} | {speed:.1%} | {middle:+.1%} | {memory:.1%} |" for name, speed, middle, memory in sensitivity()]
    )


def sources_table() -> str:
    """Where the figures can be looked up."""
    head = ["| source | what | |", "|---|---|---|"]
    return "\n".join(
        head + [f"| {name} | {own['what']} | <{own['address']}> |" for name, own in FIGURES["sources"].items()]
    )


def page() -> str:
    """The whole page."""
    compared, own, (derived, held) = compare_training(), compare_own(), hold_out()
    steps = compare_steps()
    refits = sorted({row["theirs"]["by"] for row in rows("rl") if "by" in row.get("theirs", {})})
    speed, memory = of("tok_s_gpu", compared), of("mem_gib", compared)
    return HEAD + "".join(
        (
            TRAINING.format(
                rows=len(speed),
                mean=mean_error(speed),
                median=median_error(speed),
                table=rows_table(speed),
                products=derived[0],
                experts=derived[1],
                held=held_table(held),
                out=mean(out.error for out in held for _ in range(out.rows)),
                settings=settings_table(),
            ),
            MEMORY.format(
                rows=len(memory), mean=mean_error(memory), median=median_error(memory), table=rows_table(memory)
            ),
            OWN.format(
                speed=mean_error(judged(own)),
                speeds=rows_table(of("tok_s_gpu", own)),
                memory=mean_error(of("mem_gib", own)),
                memories=rows_table(of("mem_gib", own)),
            ),
            STEPS.format(
                rows=len(of("step_s", steps)),
                median=median_error(of("step_s", steps)),
                alone=median(alone_errors(steps)),
                alone_mean=mean(map(abs, alone_errors(steps))),
                mean=mean_error(of("step_s", steps)),
                table=steps_table(of("step_s", steps)),
                refits=", ".join(f"<{by}>" for by in refits),
                phases=steps_table((row for row in steps if row.figure in PHASES), phases=True),
                generation=rows_table(of("generation_s", steps)),
                sync=rows_table(of("sync_s", steps)),
                unplanned="; ".join(
                    f"`{row['id']}` ({row['reported']['step_s']:,.4g} s; {row['source']})"
                    for row in rows("rl")
                    if "model" not in row
                ),
                large=large_table(),
                public="\n".join(f"- {step.sentence}" for step in PUBLIC_STEPS),
            ),
            SOURCES.format(table=sources_table()),
        )
    )
