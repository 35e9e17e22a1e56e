"""Finding and rendering templates, and the token ids of every built-in one on real tokenizers of four kinds."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.data.templates import (
    NAMES,
    check_kwargs,
    check_name,
    find_template,
    override_system,
    render,
    with_bos,
)
from tests.unit.data.real_tokenizers import QWEN_SPECIAL, QWEN_WORDS, REAL, packaged

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

ASKED = [{"role": "user", "content": "1+1?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>add</think>\n\n2"},
    {"role": "user", "content": "2+2?"},
]


def make_tokenizer(**special: Any) -> Any:
    """A transformers tokenizer without a vocabulary to speak of: enough to render."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {token: index for index, token in enumerate(["<unk>", *filter(None, special.values())])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), unk_token="<unk>", **special
    )


@pytest.fixture(scope="module")
def plain() -> Any:
    """Its first token is <s>, its end token </s>; it has no chat template."""
    return make_tokenizer(bos_token="<s>", eos_token="</s>")


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt(messages: list, tokenizer: Any, name: str, *, add_bos: bool = False, **kwargs: object) -> str:
    return render(messages, tokenizer, find_template(name, tokenizer), add_bos=add_bos, kwargs=kwargs)


def expected_ids(messages: list, tokenizer: Any, template: str, **kwargs: object) -> list[int]:
    """Transformers' own way from messages to ids."""
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs
    )


@pytest.mark.parametrize("kind", REAL)
def test_ids_equal_transformers_for_every_template(real: Callable[[str], Any], kind: str) -> None:
    """Ids that differ from transformers' are a prompt that no evaluation will ever give the model."""
    tokenizer = real(kind)
    for name in NAMES:
        template = TEMPLATES[name].text
        for messages in (ASKED, TALK, override_system(TALK, "Sei knapp. 漢 {{ x }}")):
            text = prompt(messages, tokenizer, name)
            assert ids(tokenizer, text) == expected_ids(messages, tokenizer, template), name
            if tokenizer.bos_token and not text.startswith(tokenizer.bos_token):
                first = prompt(messages, tokenizer, name, add_bos=True)
                found = ids(tokenizer, first)
                assert found == expected_ids(messages, tokenizer, "{{ bos_token }}" + template), name
                assert found.index(tokenizer.bos_token_id) == 0 and found.count(tokenizer.bos_token_id) == (
                    1 + ids(tokenizer, text).count(tokenizer.bos_token_id)
                ), name


@pytest.mark.parametrize("kind", ["smollm2", "deepseek", "qwen"])
def test_byte_level_ids_give_the_prompt_back(real: Callable[[str], Any], kind: str) -> None:
    """A tag that a tokenizer changes is a tag that the model never saw."""
    tokenizer = real(kind)
    for name in NAMES:
        text = prompt(TALK, tokenizer, name)
        assert tokenizer.decode(ids(tokenizer, text), clean_up_tokenization_spaces=False) == text, name


def test_ids_equal_the_sentencepiece_library(real: Callable[[str], Any]) -> None:
    """The library that made a vocabulary has the last word on its ids."""
    tokenizer = real("sentencepiece")
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_file=str(Path(tokenizer.name_or_path) / "tokenizer.model"))
    # The library reads no special token in a text, and only zephyr ends a question with one.
    for name in set(NAMES) - {"zephyr"}:
        text = prompt(ASKED, tokenizer, name)
        assert ids(tokenizer, text) == oracle.encode(text), name


def test_ids_equal_tiktoken(real: Callable[[str], Any]) -> None:
    """Qwen's ids are defined by tiktoken; a chat tag in pieces is not a chat tag."""
    tokenizer = real("qwen")
    import tiktoken

    lines = packaged("dashscope", "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in lines)}
    special = {token: len(ranks) + index for index, token in enumerate(QWEN_SPECIAL)}
    oracle = tiktoken.Encoding("qwen", pat_str=QWEN_WORDS, mergeable_ranks=ranks, special_tokens=special)
    for name in NAMES:
        text = prompt(TALK, tokenizer, name)
        assert ids(tokenizer, text) == oracle.encode(text, allowed_special="all"), name


def test_auto_is_the_tokenizers_own_template(real: Callable[[str], Any]) -> None:
    """A chat model trained with another template than its own unlearns how to chat."""
    tokenizer = real("smollm2")
    text = prompt(ASKED, tokenizer, "auto")
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids(tokenizer, text) == expected_ids(ASKED, tokenizer, tokenizer.chat_template)
    assert prompt(override_system(ASKED, "Count."), tokenizer, "auto").startswith(
        "<|im_start|>system\nCount.<|im_end|>"
    )


def test_a_template_that_writes_bos_gives_it_once(real: Callable[[str], Any], tmp_path: Path) -> None:
    """Two first tokens are a beginning that the model was never trained on; its loss starts far off."""
    tokenizer = real("deepseek")
    file = tmp_path / "v3.jinja"
    file.write_text(
        "{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}\n",
        encoding="utf-8",
    )
    text = prompt(ASKED, tokenizer, str(file), thinking=True)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜><think>"
    found = ids(tokenizer, text)
    user, assistant, think = tokenizer.convert_tokens_to_ids(["<｜User｜>", "<｜Assistant｜>", "<think>"])
    assert found == [tokenizer.bos_token_id, user, *ids(tokenizer, "1+1?"), assistant, think]
    assert prompt(ASKED, tokenizer, str(file)).endswith("<｜Assistant｜></think>")
    with pytest.raises(ValueError, match=r"twice.*leave add_bos out"):
        prompt(ASKED, tokenizer, str(file), add_bos=True, thinking=True)


def test_add_bos_is_refused_where_the_first_tag_is_the_bos_token(real: Callable[[str], Any]) -> None:
    """SmolLM2's bos is <|im_start|>: in front of a ChatML template it would open an empty turn."""
    tokenizer = real("smollm2")
    for name in NAMES:
        if name.startswith("qwen") or (name.startswith("olmo") and "rlzero" not in name):
            with pytest.raises(ValueError, match=r"add_bos=true would write '<\|im_start\|>' twice"):
                prompt(ASKED, tokenizer, name, add_bos=True)
        else:
            assert prompt(ASKED, tokenizer, name, add_bos=True) == "<|im_start|>" + prompt(ASKED, tokenizer, name)


def test_add_bos_needs_a_bos_token(real: Callable[[str], Any]) -> None:
    """Qwen has none; a token picked in its stead would be noise."""
    with pytest.raises(ValueError, match=r"no bos_token.*leave add_bos out"):
        prompt(ASKED, real("qwen"), "tulu", add_bos=True)


def test_with_bos_sees_a_bos_behind_white_space(plain: Any) -> None:
    """A template file that begins with a newline would get a second first token."""
    assert with_bos("1+1", plain) == "<s>1+1"
    for text in ("<s>1+1", "\n <s>1+1"):
        with pytest.raises(ValueError, match="'<s>' twice"):
            with_bos(text, plain)


def test_unknown_names_are_refused_with_the_nearest_ones(plain: Any) -> None:
    """A misspelt name that falls back to another template trains hours on the wrong prompts."""
    for check in (check_name, lambda name: find_template(name, plain)):
        with pytest.raises(
            ValueError, match=r"chat_template_name='olmo_thinking' is unknown; did you mean olmo_thinker"
        ):
            check("olmo_thinking")
        with pytest.raises(ValueError, match="did you mean auto"):
            check("Auto")
        with pytest.raises(ValueError, match="did you mean tulu"):
            check("TULU")
        with pytest.raises(ValueError, match=r"did you mean qwen_\w+( or qwen_\w+)*\?$"):
            check("qwen7")
        with pytest.raises(ValueError, match="expected a Jinja file or one of auto, none, simple_concat_with_space, "):
            check("xyzzy")
        with pytest.raises(ValueError, match="is unknown"):
            check("")


def test_names_need_no_file_and_no_template_is_none(plain: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A file that happens to have a template's name must not take its place."""
    monkeypatch.chdir(tmp_path)
    Path("tulu").write_text("another")
    for name in ("auto", "none", *NAMES):
        check_name(name)
    assert find_template("none", plain) is None
    assert find_template("tulu", plain) == TEMPLATES["tulu"].text


@pytest.mark.parametrize("name", ["mine.jinja", "mine.j2", "template", "folder/mine.txt"])
def test_a_file_is_a_template(plain: Any, tmp_path: Path, monkeypatch: Any, name: str) -> None:
    """A user's own format is one file, not a change of the program."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path(name).write_text("{{ messages[0]['content'] }} → {{ mood }}", encoding="utf-8")
    check_name(name)
    assert prompt(ASKED, plain, name, mood="calm") == "1+1? → calm"


def test_files_that_are_no_template_are_refused(plain: Any, tmp_path: Path) -> None:
    """A wrong path is found before an engine starts, and says where it was looked for."""
    for missing in (tmp_path / "absent.jinja", tmp_path / "absent", "absent.j2"):
        for check in (check_name, lambda name: find_template(name, plain)):
            with pytest.raises(ValueError, match=r"this file does not exist \(looked for /.*absent"):
                check(str(missing))
    with pytest.raises(ValueError, match="is a folder"):
        check_name(str(tmp_path))
    for content, words in ((b" \n", "empty file"), (b"\xff\xfe", "not UTF-8 text")):
        (tmp_path / "bad.jinja").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            find_template(str(tmp_path / "bad.jinja"), plain)


def test_auto_without_an_own_template_says_what_to_do(plain: Any) -> None:
    """A base model has none; the message must name the ways on."""
    check_name("auto")
    with pytest.raises(ValueError, match=r"no chat template; pass chat_template_name none .* or a Jinja file"):
        find_template("auto", plain)


def test_a_tokenizer_with_several_templates_uses_its_default() -> None:
    """Command-R and others store templates by name."""
    tokenizer = make_tokenizer(eos_token="</s>")
    tokenizer.chat_template = {"default": "D", "tool_use": "T"}
    assert find_template("auto", tokenizer) == "D"
    tokenizer.chat_template = {"rag": "R", "tool_use": "T"}
    with pytest.raises(ValueError, match="chat templates rag, tool_use and no default"):
        find_template("auto", tokenizer)


def test_a_templates_refusal_is_told_in_its_own_words(plain: Any) -> None:
    """`raise_exception` in a template is the model's maker speaking to the user."""
    strict = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(ValueError, match=r"\(roles: user\): TemplateError: Conversation roles must alternate"):
        render(ASKED, plain, strict, add_bos=False, kwargs={})
    with pytest.raises(ValueError, match=r"TemplateSyntaxError: .*\(line 2\)"):
        render(ASKED, plain, "\n{% if %}", add_bos=False, kwargs={})
    with pytest.raises(ValueError, match="refused the messages"):
        render([{"role": "user", "content": None}], plain, TEMPLATES["tulu"].text, add_bos=False, kwargs={})
    with pytest.raises(ValueError, match=r"refused the messages.*empty conversation"):
        render([], plain, TEMPLATES["tulu"].text, add_bos=False, kwargs={})


def test_kwargs_reach_the_template_but_not_the_tokenizer(plain: Any) -> None:
    """`tokenize` among them would return ids where a text is expected, `add_generation_prompt` would end the turn."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = "{{ tools[0].function.name }} {{ enable_thinking }}"
    assert render(ASKED, plain, template, add_bos=False, kwargs={"tools": tools, "enable_thinking": False}) == "f False"
    check_kwargs({"enable_thinking": False, "tools": tools, "documents": []})
    for key in ("tokenize", "add_generation_prompt", "messages", "conversation", "chat_template", "max_length"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs has {key}, which the trainer sets itself"):
            render(ASKED, plain, template, add_bos=False, kwargs={key: 1})


def test_the_system_prompt_is_replaced_or_put_first() -> None:
    """Two system messages contradict each other; a later one belongs to the conversation."""
    system = {"role": "system", "content": "New."}
    before = [dict(message) for message in TALK]
    assert override_system(TALK, "New.") == [system, *TALK[1:]] and before == TALK
    assert override_system(ASKED, "New.") == [system, *ASKED]
    later = [*ASKED, {"role": "system", "content": "Later."}]
    assert override_system(later, "New.") == [system, *later]
    assert override_system([{"role": "system", "content": "Old.", "functions": "f"}], "New.") == [system]


def test_checking_a_name_loads_neither_transformers_nor_jinja() -> None:
    """A mistake in a configuration must show in a moment, not after seconds of imports."""
    program = (
        "import sys; from mgrpo.data.templates import check_name; check_name('tulu'); "
        "print(sorted({'transformers', 'jinja2', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
