"""The text of every built-in template, worked by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.data.templates import NAMES, missing_stop_strings, render, stop_strings_for

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

ASKED = [{"role": "user", "content": "1+1?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>add</think>\n\n2"},
    {"role": "user", "content": "2+2?"},
]

THINK_THEN_ANSWER = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
    "The assistant first thinks about the reasoning process in the mind and then provides the user with the answer. "
    "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n\n"
)
THINK_WITH_CODE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
    "The Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. \n\n"
    "When given a question, the Assistant must conduct reasoning inside the <think> and </think> tags. "
    "During reasoning, the Assistant may write and execute python code using the <code> </code> tag, in order to solve "
    "the problem or verify the answer. Then the Assistant will get the stdout and stderr in the <output> and </output> "
    "tags. For example, the code could be\n"
    "<code>\nx, y = 1, 2\nresult = x + y\nprint(result)\n</code>\n"
    "or\n"
    "<code>\nimport sympy as sp\nfrom sympy import Symbol\nx = Symbol('x')\ny = Symbol('y')\n"
    "solution = sp.solve(x**2 + y**2 - 1, (x, y))\nprint(solution)\n</code>\n"
    "The Assistant will always `print` the result of the code execution in order to see it in the <output> tag. "
    "The Assistant may use the <code> </code> tag multiple times. When the Assistant is done reasoning, it should "
    "provide the answer inside the <answer> and </answer> tag.\n\n"
)
BOXED = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. "
    "And your final answer will be extracted automatically by the \\boxed{} tag. This is the problem: "
)
MATH = (
    "Solve the following problem step by step. The last line of your response should be the answer to the problem in "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
CODE = (
    "Solve the following code problem step by step. The last part of your response should be the solution to the "
    "problem in form ```\npython\nCODE\n``` where CODE is the solution for the problem.\n\n"
)
NO_FUNCTIONS = "You do not currently have access to any functions. <functions></functions>"
OLMO2 = (
    "<|im_start|>system\nYou are OLMo, a helpful function-calling AI assistant built by Ai2. Your date cutoff is November "
    f"2024, and your model weights are available at https://huggingface.co/allenai. {NO_FUNCTIONS}<|im_end|>\n"
)
OLMO3 = (
    "<|im_start|>system\nYou are Olmo, a helpful AI assistant built by Ai2. Your date cutoff is December 2024, and your "
    "model weights are available at https://huggingface.co/allenai.<|im_end|>\n"
)
PLAIN = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
CHATML_ASKED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
OLMO_TALK = (
    f"<|im_start|>system\nBe brief. {NO_FUNCTIONS}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    "<|im_start|>assistant\n%s<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
)
THOUGHT = "<think>add</think>\n\n2"
TULU_TALK = (
    "<|system|>\nBe brief.\n<|user|>\n1+1?\n<|assistant|>\n<think>add</think>\n\n2</s>\n<|user|>\n2+2?\n<|assistant|>\n"
)
R1_TALK = "System: Be brief.\n\n\nUser: 1+1?\n\n\nAssistant: <think>add</think>\n\n2\n\n\nUser: 2+2?\nAssistant:"
BOXED_TALK = (
    f"System: {BOXED}Be brief.\n\n\nUser: {BOXED}1+1?\n\n\nAssistant: {BOXED}{THOUGHT}\n\n\nUser: {BOXED}2+2?\n"
    "Assistant: <think>"
)
RLZERO_TALK = f"Be brief.\n\n\n1+1?\n\n\n{THOUGHT}\n\n\n2+2?\n"
BOXED_HINT = "\n\nPlease reason step by step, and put your final answer within \\boxed{}<|im_end|>\n"

# name: (prompt for ASKED, prompt for TALK), with </s> as the tokenizer's end token
GOLDEN = {
    "simple_concat_with_space": ("1+1?", f"Be brief. 1+1? {THOUGHT} 2+2?"),
    "simple_concat_with_new_line": ("1+1?", f"Be brief.\n1+1?\n{THOUGHT}\n2+2?"),
    "simple_chat": (
        "User: 1+1?",
        "System: Be brief.\n\nUser: 1+1?\n\nAssistant: <think>add</think>\n\n2\n\nUser: 2+2?",
    ),
    "assistant_message_only": ("", THOUGHT),
    "zephyr": (
        "<|user|>\n1+1?</s>\n<|assistant|>\n",
        "<|system|>\nBe brief.</s>\n<|user|>\n1+1?</s>\n<|assistant|>\n<think>add</think>\n\n2</s>\n"
        "<|user|>\n2+2?</s>\n<|assistant|>\n",
    ),
    "olmo": (OLMO2 + CHATML_ASKED, OLMO_TALK % THOUGHT),
    "tulu": ("<|user|>\n1+1?\n<|assistant|>\n", TULU_TALK),
    "tulu_thinker": ("<|user|>\n1+1?\n<|assistant|>\n<think>", TULU_TALK + "<think>"),
    "tulu_thinker_r1_style": (
        THINK_THEN_ANSWER + "<|user|>\n1+1?\n<|assistant|>\n<think>",
        THINK_THEN_ANSWER
        + "<|system|>\nBe brief.\n<|user|>\n1+1?\n<|assistant|>\n\n\n2</s>\n<|user|>\n2+2?\n<|assistant|>\n<think>",
    ),
    "olmo_old": (OLMO2 + CHATML_ASKED, OLMO_TALK % THOUGHT),
    "olmo_thinker": (PLAIN + CHATML_ASKED + "<think>", OLMO_TALK % THOUGHT + "<think>"),
    "olmo_thinker_no_think_7b": (OLMO3 + CHATML_ASKED, OLMO_TALK % THOUGHT),
    "olmo_thinker_remove_intermediate_thinking": (PLAIN + CHATML_ASKED + "<think>", OLMO_TALK % "2" + "<think>"),
    "olmo_thinker_no_think_sft_tokenization": (PLAIN + CHATML_ASKED, OLMO_TALK % THOUGHT),
    "olmo_thinker_rlzero": (
        MATH + '1+1?\n\nRemember to put your answer on its own line after "Answer:"',
        MATH + RLZERO_TALK + '\nRemember to put your answer on its own line after "Answer:"',
    ),
    "olmo_thinker_code_rlzero": (
        CODE + "1+1?\nRemember to put your solution inside the ```\npython\nCODE\n``` tags",
        CODE + RLZERO_TALK + "Remember to put your solution inside the ```\npython\nCODE\n``` tags",
    ),
    "r1_simple_chat": (THINK_THEN_ANSWER + "User: 1+1?\nAssistant:", THINK_THEN_ANSWER + R1_TALK),
    "r1_simple_chat_postpend_think": (
        THINK_THEN_ANSWER + "User: 1+1?\nAssistant: <think>",
        THINK_THEN_ANSWER + R1_TALK + " <think>",
    ),
    "r1_simple_chat_postpend_think_orz_style": (
        THINK_THEN_ANSWER + f"User: {BOXED}1+1?\nAssistant: <think>",
        THINK_THEN_ANSWER + BOXED_TALK,
    ),
    "r1_simple_chat_postpend_think_tool_vllm": (
        THINK_WITH_CODE + f"User: {BOXED}1+1?\nAssistant: <think>",
        THINK_WITH_CODE + BOXED_TALK,
    ),
    "qwen_instruct_user_boxed_math": (
        f"<|im_start|>user\n1+1?{BOXED_HINT}<|im_start|>assistant\n",
        f"<|im_start|>user\n1+1?{BOXED_HINT}<|im_start|>assistant\n{THOUGHT}<|im_end|>\n"
        f"<|im_start|>user\n2+2?{BOXED_HINT}<|im_start|>assistant\n",
    ),
}
BEGIN_WITH_IM_START = [name for name in GOLDEN if name.startswith("olmo") and "rlzero" not in name] + [
    "qwen_instruct_user_boxed_math"
]


@pytest.fixture(scope="module")
def plain() -> Any:
    """A tokenizer whose end token is </s>; rendering needs no vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), bos_token="<s>", eos_token="</s>")


def prompt(messages: list, tokenizer: Any, name: str) -> str:
    return render(messages, tokenizer, TEMPLATES[name].text, add_bos=False, kwargs={})


@pytest.mark.parametrize("name", NAMES)
def test_every_template_prints_its_characters(plain: Any, name: str) -> None:
    """One space or newline more or less is another prompt than the one a checkpoint was trained with."""
    asked, talk = GOLDEN[name]
    assert prompt(ASKED, plain, name) == asked
    assert prompt(TALK, plain, name) == talk


def test_all_21_names_are_there() -> None:
    """A recipe that names a template must find it."""
    assert set(NAMES) == set(GOLDEN) and len(NAMES) == 21


def test_templates_do_not_depend_on_the_renderers_white_space_settings(plain: Any) -> None:
    """A checkpoint's template is also read by programs that trim blocks differently."""
    jinja2 = pytest.importorskip("jinja2")
    for name in NAMES:
        bare = jinja2.Environment().from_string(TEMPLATES[name].text)
        text = bare.render(messages=TALK, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
        assert text == GOLDEN[name][1], name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("simple_concat_with_space", "1+1? 2</s>"),
        ("simple_concat_with_new_line", "1+1?\n2</s>"),
        ("simple_chat", "User: 1+1?\n\nAssistant: 2</s>"),
        ("assistant_message_only", "2"),
        ("zephyr", "<|user|>\n1+1?</s>\n<|assistant|>\n2</s>\n"),
        ("tulu", "<|user|>\n1+1?\n<|assistant|>\n2</s>"),
        ("olmo_thinker", PLAIN + "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2</s>"),
        ("r1_simple_chat", THINK_THEN_ANSWER + "User: 1+1?\n\n\nAssistant: 2\n"),
    ],
)
def test_a_finished_conversation_ends_where_the_model_should(plain: Any, name: str, expected: str) -> None:
    """Without a generation prompt the end token, or its absence, teaches where an answer ends."""
    talk = [*ASKED, {"role": "assistant", "content": "2"}]
    text = plain.apply_chat_template(talk, tokenize=False, chat_template=TEMPLATES[name].text)
    assert text == expected


def test_olmo_templates_write_functions_calls_and_the_environment(plain: Any) -> None:
    """Tool-using conversations lose their tools when a key of a message is overlooked."""
    talk = [
        {"role": "system", "content": "S", "functions": "f(x)"},
        {"role": "user", "content": "U", "functions": "g()"},
        {"role": "assistant", "content": None, "function_calls": "f(1)"},
        {"role": "environment", "content": "2"},
    ]
    for name in BEGIN_WITH_IM_START[:-1]:
        opening = "<think>" if name in ("olmo_thinker", "olmo_thinker_remove_intermediate_thinking") else ""
        assert prompt(talk, plain, name) == (
            "<|im_start|>system\nS <functions>f(x)</functions><|im_end|>\n"
            "<|im_start|>user\nU\n<functions>g()</functions><|im_end|>\n"
            "<|im_start|>assistant\n<function_calls>f(1)</function_calls><|im_end|>\n"
            f"<|im_start|>environment\n2<|im_end|>\n<|im_start|>assistant\n{opening}"
        )


def test_only_whole_thoughts_of_earlier_turns_are_removed(plain: Any) -> None:
    """Open Instruct keeps the thought of a last turn, and one whose `<think>` stood in the prompt of its time."""
    template = TEMPLATES["olmo_thinker_remove_intermediate_thinking"].text
    turn = {"role": "assistant", "content": THOUGHT}
    text = plain.apply_chat_template([*ASKED, turn], tokenize=False, chat_template=template)
    assert text.endswith(f"<|im_start|>assistant\n{THOUGHT}</s>")
    half = {"role": "assistant", "content": "add</think>\n\n2"}
    text = prompt([*ASKED, half, turn, *ASKED], plain, "olmo_thinker_remove_intermediate_thinking")
    assert "<|im_start|>assistant\nadd</think>\n\n2<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n" in text


@pytest.mark.parametrize("content", ["{{ 7*7 }}{% raw %}", "\\boxed{4}\\n", "漢字 🙂\r\n", "", "'\"<|user|>"])
def test_contents_pass_unchanged(plain: Any, content: str) -> None:
    """A question with braces or backslashes must reach the model as it is, never be executed."""
    for name in NAMES:
        text = prompt([{"role": "user", "content": content}], plain, name)
        mark = prompt([{"role": "user", "content": "#"}], plain, name)
        # The one "#" of the prompt with this content in its place; assistant_message_only prints nothing.
        assert text == mark.replace("#", content), name


def test_these_templates_open_the_thought_themselves(plain: Any) -> None:
    """The completion then holds `</think>` alone, so that a format reward asking for `<think>` would never be paid."""
    opens = {name for name in NAMES if prompt(ASKED, plain, name).endswith("<think>")}
    assert opens == {
        "tulu_thinker",
        "tulu_thinker_r1_style",
        "olmo_thinker",
        "olmo_thinker_remove_intermediate_thinking",
        "r1_simple_chat_postpend_think",
        "r1_simple_chat_postpend_think_orz_style",
        "r1_simple_chat_postpend_think_tool_vllm",
    }


def test_stop_strings_pair_with_templates() -> None:
    """Without them a base model answers, and goes on with a question of its own until its tokens run out."""
    answer = {name for name in NAMES if stop_strings_for(name) == ("</answer>",)}
    assert answer == {name for name in NAMES if "r1_s" in name} and len(answer) == 5
    assert {name for name in NAMES if stop_strings_for(name) == ("<|im_end|>",)} == set(BEGIN_WITH_IM_START)
    assert all(
        stop_strings_for(name) == () for name in {*NAMES, "auto", "none", "a.jinja"} - answer - {*BEGIN_WITH_IM_START}
    )

    missing = functools.partial(missing_stop_strings, "r1_simple_chat_postpend_think")
    assert missing(stop_strings=(), stop_tokens=("<|im_end|>",)) == ("</answer>",)
    assert missing(stop_strings=("</answer>",), stop_tokens=()) == ()
    assert missing_stop_strings("olmo", stop_strings=(), stop_tokens=("<|endoftext|>",)) == ("<|im_end|>",)
    assert missing_stop_strings("olmo", stop_strings=(), stop_tokens=("<|im_end|>",)) == ()
    assert missing_stop_strings("auto", stop_strings=(), stop_tokens=()) == ()
