r"""LaTeX answers as strings: the normal forms of Hendrycks et al. (2021) and of Minerva (Lewkowycz et al., 2022).

Both are sequences of replacements that the literature fixes, including their oddities; results are comparable only if every step
is kept, in its order. All of it is linear in the length of the text.
"""

from __future__ import annotations

import re

# Appendix D of Lewkowycz et al. (2022); the order matters.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_UNITS_AND_WORDS = (
    "square ways integers dollars mph inches ft hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_REMOVED = (
    *_UNITS_AND_WORDS.split(" "),
    r"\text{s}",
    r"\text{.}",
    "\\text{\ns}",
    r"\text{}^2",
    r"\text{}^3",
    "\\text{\n}",
    r"\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    r"\dots",
)
_UNWRAPPED = (r"\text{", r"\textbf{", r"\overline{")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")

# Hendrycks et al. (2021), up to the removal of units; the order matters.
_STRIPPED = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\$", ""),
)


def minerva_form(answer: str) -> str:
    """Minerva's normal form: the text after the last "=", without spaces, units, text commands and dollar signs."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for old in _REMOVED:
        text = text.replace(old, "")
    text = "\n".join(_bare_line(line) for line in text.split("\n"))
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text


def is_same_string(answer: str, label: str) -> bool:
    """True if the texts or their Hendrycks normal forms are equal."""
    if answer == label:
        return True
    answer_form = _hendrycks_form(answer)
    return answer_form is not None and answer_form == _hendrycks_form(label)


def _bare_line(line: str) -> str:
    """The formula of a line if it holds one, without the commands around text and boxes."""
    start = line.find("$")
    end = line.find("$", start + 1)
    if 0 <= start < end:
        line = line[start : end + 1]
    for command in _UNWRAPPED:
        line = _without_command(line, command)
    before, _, rest = line.partition(r"\boxed{")
    contents, brace, after = rest.rpartition("}")
    return before + contents + after if brace else line


def _without_command(line: str, command: str) -> str:
    r"""The line with every `\command{x}` replaced by x, up to the first closing brace."""
    parts: list[str] = []
    position = 0
    while (start := line.find(command, position)) >= 0 and (end := line.find("}", start)) >= 0:
        parts += line[position:start], line[start + len(command) : end]
        position = end + 1
    return "".join(parts) + line[position:]


def _hendrycks_form(text: str) -> str | None:
    """Hendrycks' normal form; None where his steps fail (a root or fraction of nothing, two units, a letter over 2)."""
    for old, new in _STRIPPED:
        text = text.replace(old, new)
    # Only units are written with a space at the start of the text command.
    if text.count(r"\text{ ") > 1:
        return None
    text = text.partition(r"\text{ ")[0].replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = f"0{text}"
    name, _, value = text.partition("=")
    if text.count("=") == 1 and len(name) <= 2:
        text = value
    rooted = _with_braced_roots(text)
    fractioned = None if rooted is None else _with_braced_fractions(rooted.replace(" ", ""))
    if fractioned is None:
        return None
    return _as_fraction(r"\frac{1}{2}" if fractioned == "0.5" else fractioned)


def _with_braced_roots(text: str) -> str | None:
    before, *roots = text.split(r"\sqrt")
    if "" in roots:
        return None
    return before + "".join(rf"\sqrt{root}" if root[0] == "{" else rf"\sqrt{{{root[0]}}}{root[1:]}" for root in roots)


def _with_braced_fractions(text: str) -> str | None:
    before, *fractions = text.split(r"\frac")
    parts = [before]
    for fraction in fractions:
        if not fraction:
            return None
        if fraction[0] == "{":
            parts.append(rf"\frac{fraction}")
        elif len(fraction) == 1:
            return text
        elif fraction[1] == "{":
            parts.append(rf"\frac{{{fraction[0]}}}{fraction[1:]}")
        else:
            parts.append(rf"\frac{{{fraction[0]}}}{{{fraction[1]}}}{fraction[2:]}")
    return "".join(parts)


def _as_fraction(text: str) -> str | None:
    """`a/b` of whole numbers as a LaTeX fraction."""
    if text.count("/") != 1:
        return text
    above, below = text.split("/")
    try:
        fraction = int(above), int(below)
    except ValueError:
        return None
    return rf"\frac{{{fraction[0]}}}{{{fraction[1]}}}" if text == f"{fraction[0]}/{fraction[1]}" else text
