r"""The chat templates that have a name, as Jinja text: Open Instruct's 21 names, each rendering the same characters.

A family of templates is one body; the differences between its members are variables set in front of it. Every tag strips the white space
around it, so that a prompt holds printed expressions only. Finding and rendering is `templates`' work.

Words that members set:
    preamble    the beginning of a prompt, before the first message
    opening     the text that the model continues, printed only with a generation prompt
"""

from __future__ import annotations

import json
from dataclasses import dataclass

_CHATML_END = ("<|im_end|>",)
_ANSWER_END = ("</answer>",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A chat template and the end of an answer to it."""

    text: str
    """Jinja."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer, besides the model's own end token."""


def _setting(body: str, **values: str | bool) -> str:
    """`body` with variables set; JSON's strings and booleans are Jinja's too."""
    head = [f"{{%- set {name} = {json.dumps(value)} -%}}" for name, value in values.items()]
    return "".join(head) + body


_JOINED = r"""
{%- for message in messages -%}
  {{- '' if loop.first else separator -}}
  {{- message['role'].capitalize() + ': ' + message['content'] if says_role else message['content'] -}}
  {{- eos_token if loop.last and not add_generation_prompt else '' -}}
{%- endfor -%}
"""

_ASSISTANT_ONLY = r"""
{%- for message in messages if message['role'] == 'assistant' -%}
  {{- message['content'] -}}
{%- endfor -%}
"""

_ZEPHYR = r"""
{%- for message in messages -%}
  {%- if message['role'] in ('system', 'user', 'assistant') -%}
    {{- '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' -}}
  {%- endif -%}
  {{- '<|assistant|>\n' if loop.last and add_generation_prompt else '' -}}
{%- endfor -%}
"""

_TULU = r"""
{{- preamble -}}
{%- for message in messages -%}
  {%- set content = message['content'] -%}
  {%- if message['role'] in ('system', 'user') -%}
    {{- '<|' + message['role'] + '|>\n' + content + '\n' -}}
  {%- elif message['role'] == 'assistant' -%}
    {%- if drops_thoughts -%}
      {%- set content = content.split('</think>')[-1] -%}
    {%- endif -%}
    {{- '<|assistant|>\n' + content + eos_token + ('' if loop.last else '\n') -}}
  {%- endif -%}
  {{- opening if loop.last and add_generation_prompt else '' -}}
{%- endfor -%}
"""

# A last assistant turn ends with the end token, earlier ones with <|im_end|>.
_OLMO = r"""
{%- if not messages | selectattr('role', 'equalto', 'system') | list -%}
  {{- '<|im_start|>system\n' + default_system + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set role = message['role'] -%}
  {%- set functions = message.get('functions', none) -%}
  {%- if role == 'system' -%}
    {{- '<|im_start|>system\n' + message['content'] + ' ' -}}
    {{- no_functions if functions is none else '<functions>' + functions + '</functions>' -}}
    {{- '<|im_end|>\n' -}}
  {%- elif role == 'user' -%}
    {{- '<|im_start|>user\n' + message['content'] -}}
    {{- '' if functions is none else '\n<functions>' + functions + '</functions>' -}}
    {{- '<|im_end|>\n' -}}
  {%- elif role == 'assistant' -%}
    {%- set content = message.get('content', none) -%}
    {%- set calls = message.get('function_calls', none) -%}
    {%- if content is not none -%}
      {%- set content = content | string -%}
      {%- if drops_thoughts and not loop.last and '<think>' in content and '</think>' in content -%}
        {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
      {%- endif -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {{- '' if content is none else content -}}
    {{- '' if calls is none else '<function_calls>' + calls + '</function_calls>' -}}
    {{- eos_token if loop.last else '<|im_end|>\n' -}}
  {%- elif role == 'environment' -%}
    {{- '<|im_start|>environment\n' + message['content'] + '<|im_end|>\n' -}}
  {%- endif -%}
  {{- '<|im_start|>assistant\n' + opening if loop.last and add_generation_prompt else '' -}}
{%- endfor -%}
"""

_PROSE = r"""
{{- preamble + '\n\n' -}}
{%- for message in messages -%}
  {{- '' if loop.first else '\n\n' -}}
  {{- message['role'].capitalize() + ': ' if says_role else '' -}}
  {{- instruction + message['content'] + '\n' -}}
  {{- opening if loop.last and add_generation_prompt else '' -}}
{%- endfor -%}
"""

_QWEN_MATH = r"""
{%- for message in messages -%}
  {%- if message['role'] in ('user', 'assistant') -%}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] -}}
    {{- instruction if message['role'] == 'user' else '' -}}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
  {{- '<|im_start|>assistant\n' if loop.last and add_generation_prompt else '' -}}
{%- endfor -%}
"""

_THINK_THEN_ANSWER = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think> <answer> answer here </answer>."
)
# The first paragraph ends with a space.
_THINK_WITH_CODE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. "
    """

When given a question, the Assistant must conduct reasoning inside the <think> and </think> tags. During reasoning, \
the Assistant may write and execute python code using the <code> </code> tag, in order to solve the problem or verify \
the answer. Then the Assistant will get the stdout and stderr in the <output> and </output> tags. For example, the \
code could be
<code>
x, y = 1, 2
result = x + y
print(result)
</code>
or
<code>
import sympy as sp
from sympy import Symbol
x = Symbol('x')
y = Symbol('y')
solution = sp.solve(x**2 + y**2 - 1, (x, y))
print(solution)
</code>
The Assistant will always `print` the result of the code execution in order to see it in the <output> tag. The \
Assistant may use the <code> </code> tag multiple times. When the Assistant is done reasoning, it should provide the \
answer inside the <answer> and </answer> tag."""
)
_BOXED_ANSWER = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final "
    r"answer will be extracted automatically by the \boxed{} tag. This is the problem: "
)
_SOLVE_MATH = (
    "Solve the following problem step by step. The last line of your response should be the answer to the problem in "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
_SOLVE_CODE = (
    "Solve the following code problem step by step. The last part of your response should be the solution to the "
    "problem in form ```\npython\nCODE\n``` where CODE is the solution for the problem."
)
_NO_FUNCTIONS = "You do not currently have access to any functions. <functions></functions>"
_OLMO2_SYSTEM = (
    "You are OLMo, a helpful function-calling AI assistant built by Ai2. Your date cutoff is November 2024, and your "
    f"model weights are available at https://huggingface.co/allenai. {_NO_FUNCTIONS}"
)
_OLMO3_SYSTEM = (
    "You are Olmo, a helpful AI assistant built by Ai2. Your date cutoff is December 2024, and your model weights are "
    "available at https://huggingface.co/allenai."
)


def _joined(separator: str, *, says_role: bool = False) -> Template:
    return Template(text=_setting(_JOINED, separator=separator, says_role=says_role))


def _tulu(*, preamble: str = "", thought: str = "", drops_thoughts: bool = False) -> str:
    return _setting(_TULU, preamble=preamble, opening=f"<|assistant|>\n{thought}", drops_thoughts=drops_thoughts)


def _olmo(default_system: str, *, opening: str = "", drops_thoughts: bool = False) -> Template:
    text = _setting(
        _OLMO,
        default_system=default_system,
        no_functions=_NO_FUNCTIONS,
        opening=opening,
        drops_thoughts=drops_thoughts,
    )
    return Template(text=text, stop_strings=_CHATML_END)


def _r1(opening: str, *, preamble: str = _THINK_THEN_ANSWER, instruction: str = "") -> Template:
    text = _setting(_PROSE, preamble=preamble, says_role=True, instruction=instruction, opening=opening)
    return Template(text=text, stop_strings=_ANSWER_END)


def _rlzero(preamble: str, *, opening: str) -> Template:
    return Template(text=_setting(_PROSE, preamble=preamble, says_role=False, instruction="", opening=opening))


TEMPLATES: dict[str, Template] = {
    "simple_concat_with_space": _joined(" "),
    "simple_concat_with_new_line": _joined("\n"),
    "simple_chat": _joined("\n\n", says_role=True),
    "assistant_message_only": Template(text=_ASSISTANT_ONLY),
    "zephyr": Template(text=_ZEPHYR),
    "olmo": _olmo(_OLMO2_SYSTEM),
    "tulu": Template(text=_tulu()),
    "tulu_thinker": Template(text=_tulu(thought="<think>")),
    "tulu_thinker_r1_style": Template(
        text=_tulu(preamble=f"{_THINK_THEN_ANSWER}\n\n", thought="<think>", drops_thoughts=True),
        stop_strings=_ANSWER_END,
    ),
    "olmo_old": _olmo(_OLMO2_SYSTEM),
    "olmo_thinker": _olmo("You are a helpful AI assistant.", opening="<think>"),
    "olmo_thinker_no_think_7b": _olmo(_OLMO3_SYSTEM),
    "olmo_thinker_remove_intermediate_thinking": _olmo(
        "You are a helpful AI assistant.", opening="<think>", drops_thoughts=True
    ),
    "olmo_thinker_no_think_sft_tokenization": _olmo("You are a helpful AI assistant."),
    "olmo_thinker_rlzero": _rlzero(
        _SOLVE_MATH, opening='\nRemember to put your answer on its own line after "Answer:"'
    ),
    "olmo_thinker_code_rlzero": _rlzero(
        _SOLVE_CODE, opening="Remember to put your solution inside the ```\npython\nCODE\n``` tags"
    ),
    "r1_simple_chat": _r1("Assistant:"),
    "r1_simple_chat_postpend_think": _r1("Assistant: <think>"),
    "r1_simple_chat_postpend_think_orz_style": _r1("Assistant: <think>", instruction=_BOXED_ANSWER),
    "r1_simple_chat_postpend_think_tool_vllm": _r1(
        "Assistant: <think>", preamble=_THINK_WITH_CODE, instruction=_BOXED_ANSWER
    ),
    "qwen_instruct_user_boxed_math": Template(
        text=_setting(
            _QWEN_MATH,
            instruction="\n\nPlease reason step by step, and put your final answer within \\boxed{}",
        ),
        stop_strings=_CHATML_END,
    ),
}
