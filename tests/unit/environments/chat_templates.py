"""Chat templates of several manners, written for the tests, and a byte-level tokenizer that merges whatever it may."""

from __future__ import annotations

from typing import Any

TOKENS = (
    *("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>"),
    *("[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "<|turn|>"),
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_response>", "</tool_response>")


def changed(template: str, old: str, new: str) -> str:
    """A variant of a template."""
    assert old in template
    return template.replace(old, new)


def _opening(text: str) -> str:
    return "{%- if add_generation_prompt %}{{- '" + text + "' }}{%- endif %}"


# All answers of a turn in one message of the user.
JOINED = r"""
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {%- for call in m.tool_calls or [] %}{{ '\n<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}{% endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}""" + _opening(r"<|im_start|>assistant\n")
# As JOINED, and the last answer gets a thought even if it had none: the past is rewritten.
REWRITING = changed(
    JOINED,
    r"+ m.role + '\n' + m.content",
    r"+ m.role + '\n' + ('<think></think>' if m.role == 'assistant' and loop.index0 > messages | length - 3 else '') + m.content",
)
# One call a turn; answers are JSON, everything else is trimmed.
TRIMMED = r"""
{%- for m in messages %}
  {%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}
  {{- '<|start|>' + m.role + '<|message|>' }}
  {{- (m.tool_calls[0].function.arguments | tojson) if m.tool_calls else (m.content | tojson) if m.role == 'tool' else m.content | trim }}
  {{- '<|end|>' }}
{%- endfor %}""" + _opening("<|start|>assistant<|message|>")
# The next header ends a turn; arguments are text.
HEADERS = r"""
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}
  {%- else %}{{ '<|' + m.role + '|>\n' + m.content }}
  {%- endif %}
  {%- for call in m.tool_calls or [] %}{{ '\n' + call.function.name + ' ' + call.function.arguments }}{% endfor %}
{%- endfor %}""" + _opening("<|assistant|>")
# Names the tool that answers; calls end otherwise than answers, and a last answer otherwise than earlier ones.
NAMED = r"""
{%- for m in messages %}
  {%- if m.role == 'tool' %}{{ '<|start|>tools.' + m.name + ' to=assistant<|message|>' + m.content + '<|end|>' }}
  {%- elif m.tool_calls %}
    {%- for call in m.tool_calls %}{{ '<|start|>assistant to=' + call.function.name + '<|message|>' + call.function.arguments | tojson + '<|call|>' }}{% endfor %}
  {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + ('<eos>' if m.role == 'assistant' and loop.last else '<|end|>') }}
  {%- endif %}
{%- endfor %}""" + _opening("<|start|>assistant")
# No opening of the model's turn, and a first token.
BRACKETS = r"""{{ bos_token }}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
  {%- elif m.role == 'tool' %}{{ '[RESULT]{"content": ' + (m.content | tojson) + '}[/RESULT]' }}
  {%- elif m.tool_calls %}{{ m.tool_calls | tojson + eos_token }}
  {%- else %}{{ ' ' + m.content + eos_token }}
  {%- endif %}
{%- endfor %}"""
GOOD = {
    "joined": (JOINED, ("<|im_end|>", "<eos>")),
    "trimmed": (TRIMMED, ("<|end|>",)),
    "headers": (HEADERS, ("<|user|>", "<|observation|>", "<eos>")),
    "named": (NAMED, ("<eos>", "<|call|>")),
    "brackets": (BRACKETS, ("<eos>",)),
}
"""Append-only templates, and what ends a turn."""
# Thinks before it speaks; of the turns before the last question, only what was said is left.
FORGETTING = (
    r"""
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- set said = m.content %}
  {%- if m.role == 'assistant' and '</think>' in said and loop.index0 < ns.last %}
    {%- set said = said.split('</think>')[-1].lstrip('\n') %}
  {%- endif %}
  {{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}
{%- endfor %}"""
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + opening | default('') }}{% endif %}"
)
# As FORGETTING, but earlier turns begin with an empty thought.
EMPTYING = changed(
    FORGETTING,
    r"{{- '<|im_start|>' + m.role + '\n' + said",
    r"{{- '<|im_start|>' + m.role + '\n' + ('<think></think>' if m.role == 'assistant' else '') + said",
)


def end_token_of(bridges: Any) -> int:
    """The token that ends a turn which calls tools: a bridge after any other token begins with it."""
    return bridges.after_tools(["x"], ["x"], last=-1)[0]


def make_tokenizer(*, text: str = "".join(template for template, _ in GOOD.values()), **options: Any) -> Any:
    """Byte-level BPE whose merges cross lines and words; `options` are of its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = [f"{text}\n\n{other}\n" for text in ("", "to", "4", " 4") for other in ("to", "x", "4", '"')] * 9 + [text]
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>")
    for token in TOKENS:
        added = AddedToken(token, normalized=False, **options)
        tokenizer.add_tokens([added], special_tokens=token not in NOT_SPECIAL)
    return tokenizer
