"""Scripts that a shell would read in another way than their text suggests: each is read as it would be, or refused with its line."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest

from mgrpo.config import ConfigError
from mgrpo.moving.scripts.command_line import words_of

SHELL = shutil.which("bash")
STUBS = 'python() { [ "$1" = grpo.py ] && shift && printf "%s\\0" "$@" > words; }; sleep() { :; }; tee() { :; }\n'
"""Programs that a script starts: the trainer writes what it is given."""

READ = [
    "A=1\nA+=2\npython grpo.py --a $A",
    "export A=1 B='x y'\npython grpo.py --a $A --b $B --c \"$B\"",
    "A=1; B=2\npython grpo.py --a $A$B",
    'A=(--b 2)\nA+=(--c \'3 4\' # not this\n  --d "5")\npython grpo.py --a 1 "${A[@]}"',
    "A=(x 'y z')\npython grpo.py --a \"${A[*]}\" --b ${A[@]}",
    'A=\npython grpo.py --a ${A:-x} --b ${A-x} --c "${A:-p q}"',
    "python grpo.py --a $((-7 / 2)) --b $((-7 % 3)) --c $((2 * (3 + 4)))",
    "python grpo.py --a 1 > log --b 2 2>&1",
    "cat > other <<EOF\nA=9\npython grpo.py --a 3\nEOF\nA=1\npython grpo.py --a $A",
    "if true; then\n  python grpo.py --a 1\nfi",
    "for x in 1; do python grpo.py --a 1; done",
    "f() {\n  A=2\n}\npython grpo.py --a 1",
    "A=1\nB='$A'\npython grpo.py --a $B --b \\$A --c '$A' --d \"\\$A\"",
    "A='$B$B'\nB='$A$A'\npython grpo.py --exp_name $A",
    "python grpo.py --a ~/x --b x~ --c '~'",
    "python grpo.py --a $(seq 16 8 40) --b $(seq 3)",
    'set -euo pipefail\npython grpo.py --a 1 "$@"',
    "python grpo.py --a ['x','y'] --b {} --c 'a*' --d a#b",
    "A=1\nA=2 python grpo.py --a $A",
    "A=${1:-x}\npython grpo.py --a $A",
    "exit_code=1\npython grpo.py --a $exit_code\nexit 0\npython grpo.py --a 2",
    "A=1\n(A=2)\nA=3\npython grpo.py --a $A",
    "cat <<< 'A=9'\nA=1\npython grpo.py --a $A",
    "source ./none.sh\nA=1\nL=(--b 2)\npython grpo.py --a $A ${L[@]}",
    "python grpo.py --a 1 \\\n  --b 2 \\\n\necho --c 3",
]
REFUSED = {
    "A=1\nif [ -d x ]; then\n  A=2\nfi\npython grpo.py --a $A": "line 3: A is set in `if`",
    "if true; then A=1; else A=2; fi\npython grpo.py --a $A": "line 1: A is set in `if`",
    "while true; do A=1; break; done\npython grpo.py --a $A": "line 1: A is set in `while`",
    "case $X in\n  a) A=1 ;;\n  *) A=2 ;;\nesac\npython grpo.py --a $A": "line 3: A is set in `case`",
    "for A in 1 2; do\n  python grpo.py --a $A\ndone": "line 1: `for A` sets it",
    "for ((A=0; A<2; A++)); do\n  python grpo.py --a $A\ndone": "line 1: `for ((A=0; A<2; A++))` sets it",
    "A=1\n[ -d x ] && A=2\npython grpo.py --a $A": "line 2: A is set in a command that depends on another",
    "f() {\n  A=2\n}\nA=1\nf\npython grpo.py --a $A": "line 2: A is set in a function",
    "function f {\n  A=2\n}\nA=1\nf\npython grpo.py --a $A": "line 2: A is set in a function",
    'f() {\n  python grpo.py --a 1 "$@"\n}\nf --b 2': "line 2: $@ of a function",
    "f() {\n  python grpo.py --a $1\n}\nf 2": "the arguments are a function's",
    'set -- --b 2\npython grpo.py --a 1 "$@"': "line 1: `set` changes the script's arguments",
    "A=1\nsource env.sh\npython grpo.py --a $A": "line 2: `source env.sh` may set it",
    ". env.sh\npython grpo.py --a $HOME": "line 1: `. env.sh` may set it",
    "f() { source env.sh; }\nA=1\nf\npython grpo.py --a $A": "line 1: `source env.sh` may set it",
    'A=1\neval "$(cat x)"\npython grpo.py --a $A': "line 2: `eval",
    "A=1\nread -r A < x\npython grpo.py --a $A": "line 2: `read` sets it",
    "A=1\nIFS=, read -r A B < x\npython grpo.py --a $A": "line 2: `read` sets it",
    "A=1\nunset A\npython grpo.py --a $A": "line 2: `unset` sets it",
    "A=1\n((A++))\npython grpo.py --a $A": "line 2: ((A++)) may set it",
    "A=1\nlet A=2\npython grpo.py --a $A": "line 2: let may set it",
    "A=1\nprintf -v A %s 2\npython grpo.py --a $A": "line 2: `printf` sets it",
    "A=1\ndeclare -i A=1+1\npython grpo.py --a $A": "line 2: A is set in `declare -i`",
    "A=(1 2)\nA[0]=3\npython grpo.py ${A[@]}": "line 2: A[0]=3 sets a part of it",
    "cd /x\npython grpo.py --a $PWD": "line 1: `cd` changes it",
    "A=1\n: ${A:=2}\npython grpo.py --a $A": "line 2: ${A:=...} may set it",
    "python grpo.py \\\n  --a $NOT_SET_ANYWHERE": "line 2: $NOT_SET_ANYWHERE is set nowhere",
    "python grpo.py --a 1 \\\n  --b $(nproc)": "line 2: $(nproc) is a command",
    "A=`hostname`\npython grpo.py --a $A": "line 1: `hostname` is a command",
    "python grpo.py --a <(cat x)": "line 1: <(cat x) is a command",
    "A=xy\npython grpo.py --a ${A%y}": "line 2: ${A%y} is an expansion that is not read",
    "A=xy\npython grpo.py --a ${A:0:1}": "line 2: ${A:0:1} is an expansion that is not read",
    "A=xy\npython grpo.py --a ${A:+z}": "line 2: ${A:+z} is an expansion that is not read",
    "A=xy\npython grpo.py --a ${#A}": "line 2: ${#A} is an expansion that is not read",
    "A=B\nB=1\npython grpo.py --a ${!A}": "line 3: ${!A} is an expansion that is not read",
    "python grpo.py --a ${@:2}": "line 1: ${@:2} is an expansion that is not read",
    "python grpo.py --a $'x\\ny'": "line 1: $'x\\ny' is a quotation of its own kind",
    "python grpo.py --a /data/*.parquet": "line 1: /data/*.parquet is a pattern",
    "python grpo.py --a x{1,2}": "line 1: x{1,2} is a pattern",
    "A='*.py'\npython grpo.py --a $A": "line 2: *.py is a pattern without quotes",
    "IFS=,\nA='1 2'\npython grpo.py --a $A": "line 1: IFS is set",
    "A=010\npython grpo.py --a $((A + 1))": "line 2: $((A + 1)) is no sum of whole numbers",
    "python grpo.py --a $((2 ** 3))": "line 1: $((2 ** 3)) is no sum of whole numbers",
    "python grpo.py --a $((1 / 0))": "line 1: $((1 / 0)) is no sum of whole numbers",
    "python grpo.py --a $((NOT_SET_ANYWHERE + 1))": "NOT_SET_ANYWHERE is set nowhere",
    "python grpo.py --a $(date +%N)": "line 1: $(date +%N) is a command",
    "python grpo.py --a 1 ${MORE[@]}": "line 1: the list MORE is set nowhere",
    "A=(1)\npython grpo.py --a $A": "line 2: A is a list",
    'python prepare.py --x 1\nbash -c "python grpo.py --a 1"': "line 2: grpo.py is started in a way that is not read",
    "python one.py --x 1\npython two.py --x 1": "line 1: one.py is started in a way that is not read",
}
"""Scripts, and what is said of the construct."""


def bash_words(text, folder):
    """The words that bash itself gives the trainer; None where it starts none."""
    (folder / "words").unlink(missing_ok=True)
    subprocess.run(["bash", "-c", STUBS + text], capture_output=True, check=False, cwd=folder, timeout=30)
    found = (folder / "words").read_text().split("\0")[:-1] if (folder / "words").exists() else None
    return found and found[next((i for i, word in enumerate(found) if word.startswith("--")), len(found)) :]


@pytest.mark.skipif(SHELL is None, reason="compares with bash, which is not installed")
def test_what_the_text_decides_is_read_as_bash_reads_it(tmp_path):
    """A word that differs from the script's is another run."""
    wrong = {text: words_of(text) for text in READ if words_of(text) != bash_words(text, tmp_path)}
    assert wrong == {}


@pytest.mark.parametrize("text", REFUSED)
def test_what_it_does_not_decide_is_refused_with_its_line(text):
    """A guess would be found in the results, if at all."""
    with pytest.raises(ConfigError) as caught:
        words_of(text)
    assert REFUSED[text] in str(caught.value)


VALUES = [
    *("1", "2", '"x y"', "'$A'", "$A", '"$B"', "${B:-7}", '"${C:-p q}"', "$((2*3))", "$((A+1))", "a{b,c}", "*", '"*"', "~/x"),
    *("$(echo hi)", "`echo hi`", "a\"b\"'c'", '""', "x\\ y", "$A$B", "${A%1}", "${A-5}", "${#A}", "$1", "${1:-d}", '"$@"'),
    *("$((-7/2))", "$((010))", "[a,b]", "x#y", "\\$A", "a=b", "$'a\\nb'", '"${L[@]}"', "${L[@]}", '"${L[*]}"', "$HOME", '"a;b"'),
]  # fmt: skip
STATEMENTS = [
    *["{v}={x}"] * 6,
    *("export {v}={x}", "{v}+={x}", "L=({x} {y})", "L+=({x} # c\n {y})", "if true; then {v}={x}; else {v}={y}; fi"),
    *("for {v} in 1 2; do {v}={x}; done", "true && {v}={x}", "false || {v}={x}", "f() {{ {v}={x}; }}\nf", "unset {v}"),
    *("case $A in 1) {v}={x};; *) {v}={y} ;; esac", "(({v}++)) || true", "set -- {x}", "eval '{v}=9'", "({v}={x})"),
    *(
        "cat > /dev/null <<EOF\n{v}=77\nEOF",
        "{{ {v}={x}; }}",
        "read {v} <<< 5",
        "IFS= read {v} <<< 5",
        "true | {v}={x}",
    ),
]


@pytest.mark.skipif(SHELL is None, reason="compares with bash, which is not installed")
def test_scripts_by_chance_are_read_as_bash_reads_them_or_refused(tmp_path):
    """Constructs meet in more ways than a list of them shows: whatever is not refused has bash's words."""
    chance, read = random.Random(0), 0
    for _ in range(400):
        lines = [
            chance.choice(STATEMENTS).format(v=chance.choice("ABC"), x=chance.choice(VALUES), y=chance.choice(VALUES))
            for _ in range(chance.randrange(4))
        ]
        flags = " ".join(f"--{name} {chance.choice(VALUES)}" for name in "abc"[: chance.randrange(1, 4)])
        end = chance.choice(["", " > log --z 1", " | tee log", " && echo", " \\\n --y 2 \\\n # c\n", ' "$@"'])
        frame = chance.choice(["{}", "if true; then\n{}\nfi", "for s in 1; do {}\ndone"])
        text = "\n".join([*lines, frame.format(f"python grpo.py {flags}{end}")])
        try:
            found = words_of(text)
        except ConfigError:
            continue
        assert found == bash_words(text, tmp_path), text
        read += 1
    assert read > 50
