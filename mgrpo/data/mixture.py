"""The data of a run, in two steps: `open_data` reads and checks rows, `Mixture.encode` makes prompts of them.

The first needs neither tokenizer nor torch. Both are done before anything is started, so that bad data end a run at once.
Their results are cached, those of the first for large sources only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mgrpo.config.schema import Data
from mgrpo.data.amounts import Entry, entries
from mgrpo.data.building import Selection, build
from mgrpo.data.cache import Cache, digest
from mgrpo.data.checking import MOST_SHOWN
from mgrpo.data.encoding import REMARKS, Recipe, ToolSchemas
from mgrpo.data.prompt_set import PromptSet
from mgrpo.data.rows import Contract
from mgrpo.data.sources import DataSource, SourceReader
from mgrpo.data.templates import check_kwargs, find_template
from mgrpo.data.tokenizer import fingerprint
from mgrpo.data.trial import exceeded

_log = logging.getLogger(__name__)

# Part of every key of the cache: another number where the same rows would become other prompts.
_TRANSFORM_VERSION = 5

T = TypeVar("T")


def open_data(
    data: Data,
    *,
    need_verifiers: bool = True,
    dataset: Iterable[Mapping[str, object]] | None = None,
    eval_dataset: Iterable[Mapping[str, object]] | Mapping[str, Iterable[Mapping[str, object]]] | None = None,
) -> tuple[Mixture, Mixture]:
    """The training mix and the held-out mix, with every row read and checked; a mix that is not configured is empty.

    Args:
        need_verifiers: False for runs without verifiers, which ignore `dataset` and need no ground truth.
        dataset: rows to train on, in place of `dataset_mixer_list`.
        eval_dataset: held-out rows, in place of `dataset_mixer_eval_list`; or several such sets by name.
    Raises:
        BadData: everything that is wrong; of bad rows one sentence for each mistake, with the first row's file and line.
    """
    opening = _Opening(data, need_verifiers)
    if dataset is None:
        train = opening.read("data mix", data.dataset_mixer_list, data.dataset_mixer_list_splits)
    else:
        train = opening.take([("dataset", dataset)])
    if eval_dataset is None:
        held_out = opening.read("held-out mix", data.dataset_mixer_eval_list, data.dataset_mixer_eval_list_splits)
    else:
        held_out = opening.take(
            [(f"eval_dataset/{name}", rows) for name, rows in eval_dataset.items()]
            if isinstance(eval_dataset, Mapping)
            else [("eval_dataset", eval_dataset)]
        )
    opening.finish()
    return Mixture(train, data, opening.reader), Mixture(held_out, data, opening.reader)


class Mixture:
    """Checked rows of a mix."""

    def __init__(self, selection: Selection, data: Data, reader: SourceReader) -> None:
        """Made by `open_data`."""
        self._selection, self._data = selection, data
        self._contract, self._cache = reader.contract, reader.cache

    def __len__(self) -> int:
        """Rows that are taken, including those whose prompts will be over the limit."""
        return sum(self._selection.num_taken)

    @property
    def verifiers(self) -> dict[str, str]:
        """Names of the verifiers in the sources that rows are taken from, with the "file:line" of their first use."""
        found: dict[str, str] = {}
        for number, num_taken in zip(self._selection.numbers, self._selection.num_taken, strict=True):
            found = _verifiers(self._selection.sources[number]) | found if num_taken else found
        return found

    @property
    def columns(self) -> list[str]:
        """Names of the columns that at least one row has, except those of the prompt; for reward functions."""
        found = dict.fromkeys(name for source in self._selection.sources for name in source.summary.columns)
        return list(self._contract.columns(found))

    def rows(self) -> Iterator[tuple[str, str, dict[str, object]]]:
        """The source, the "file:line" and the columns, except those of the prompt, of all rows of the sources."""
        for source in self._selection.sources:
            for origin, columns in self._rows(source):
                yield source.name, origin, columns

    def _rows(self, source: DataSource) -> Iterator[tuple[str, dict[str, object]]]:
        for row in source.rows():
            yield source.origin(row.line), self._contract.columns(json.loads(row.text))

    def labels(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, str, object]]:
        """The "file:line", the verifier and the ground truth of each label of the sources in which a verifier is wanted."""
        for source in self._selection.sources:
            for origin, columns in self._rows(source) if any(map(is_wanted, source.summary.verifiers)) else ():
                for verifier, truth in zip(*self._contract.labels(columns), strict=True):
                    yield origin, verifier, truth

    @property
    def counts(self) -> list[dict[str, Any]]:
        """Counts for each line of the mix: source, split, amount, rows, taken."""
        selection = self._selection
        return [
            {"source": line.source, "split": line.split, "amount": line.amount, "rows": num_rows, "taken": num_taken}
            for line, num_rows, num_taken in zip(selection.lines, selection.num_rows, selection.num_taken, strict=True)
        ]

    @property
    def content(self) -> list[dict[str, Any]]:
        """Content of each line of the mix, in JSON: source, rows, taken, and a digest of its rows.

        The digest is None for a dataset that `datasets` finds by name, whose fingerprint differs from machine to machine.
        """
        sources = [self._selection.sources[number] for number in self._selection.numbers]
        contents = [source.key["content"] for source in sources]
        return [
            {name: count[name] for name in ("source", "rows", "taken")}
            | {"digest": None if "fingerprint" in content else digest(content)}
            for count, content in zip(self.counts, contents, strict=True)
        ]

    def try_out(self, tokenizer: Any, *, tools: ToolSchemas | None = None) -> None:
        """Render one conversation with the chat template, which is untrusted, in a forked process with limits.

        Args:
            tools: as `encode` takes them.
        Raises:
            ValueError: the template is not found, or takes too much time or memory.
        """
        recipe = self._recipe(tokenizer, tools)
        if recipe.template is None:
            return
        row = next(
            row
            for source in self._selection.sources
            for row in source.rows()
            if row.line == source.summary.first_conversation
        )
        if excess := exceeded(lambda: recipe.text(json.loads(row.text), tokenizer)):
            raise ValueError(
                f"the chat template {excess} for one prompt; look at it, or name another: --chat_template_name"
            )

    def encode(self, tokenizer: Any, *, tools: ToolSchemas | None = None, has_row_tools: bool = True) -> PromptSet:
        """Render and tokenize the rows, or load the results of an earlier run.

        Text prompts are encoded verbatim, without special tokens; messages go through the chat template, which
        writes the special tokens itself. An answer that ends the messages is dropped, because the model is to write it.

        Args:
            tools: schemas for the template, by row.
            has_row_tools: True to give it the schemas in rows' column `tools`; only without `tools`.
        """
        if not len(self):
            raise ValueError("there are no data; name them in dataset_mixer_list")
        selection, recipe = self._selection, self._recipe(tokenizer, tools, has_row_tools=has_row_tools)
        if tools is not None and (recipe.template is None or "tools" not in recipe.template):
            _log.warning(
                "the prompts do not tell the model of its tools: %s; describe them in a system message",
                "there is no chat template" if recipe.template is None else "the chat template has no place for them",
            )
        if "strftime_now" in (recipe.template or "") and "date_string" not in recipe.template_kwargs:
            _log.warning(
                "the chat template writes the date (strftime_now): prepared prompts keep the day on which they were made, and another "
                "day makes others; set it in chat_template_kwargs (date_string, in most templates)"
            )
        key = {
            "version": _TRANSFORM_VERSION,
            "sources": [source.key for source in selection.sources],
            "taken": [list(pair) for pair in zip(selection.numbers, selection.num_taken, strict=True)],
            "tokenizer": fingerprint(tokenizer),
            "recipe": recipe.to_json(),
        }

        def write(folder: Path) -> None:
            build(
                folder,
                selection,
                recipe,
                tokenizer,
                fingerprint=digest(key)[:32],
            )

        folder = self._cache.find("prompts", key) or self._cache.make("prompts", key, write)
        prompts = PromptSet(folder, recipe, [source.name for source in selection.sources], named=self.counts)
        _warn_of_long_prompts(prompts.statistics)
        _warn_of_lost_text(prompts.statistics, selection.sources, recipe.template_name)
        return prompts

    def _recipe(self, tokenizer: Any, tools: ToolSchemas | None, *, has_row_tools: bool = True) -> Recipe:
        data, template = self._data, None
        sources = self._selection.sources
        conversation = next(
            (s.origin(s.summary.first_conversation) for s in sources if s.summary.first_conversation), None
        )
        if conversation is not None:
            try:
                template = find_template(data.chat_template_name, tokenizer)
            except ValueError as err:
                raise ValueError(f"{conversation} has messages: {err}") from err
        return Recipe(
            template=template,
            template_kwargs=_template_kwargs(data.chat_template_kwargs),
            add_bos=data.add_bos,
            system_prompt=_system_prompt(data.system_prompt_override_file),
            max_tokens=data.max_prompt_token_length,
            overlong=data.overlong_prompt_policy,
            contract=self._contract,
            tools=tools,
            has_row_tools=has_row_tools,
            template_name=data.chat_template_name,
        )


class BadData(ValueError):
    """Everything that is wrong with the rows of a run.

    Attributes:
        verifiers: names in the rows that could be read, with the "file:line" of their first use.
    """

    def __init__(self, message: str, sources: Sequence[DataSource]) -> None:
        super().__init__(message)
        self.verifiers = {name: origin for source in sources for name, origin in _verifiers(source).items()}


def _verifiers(source: DataSource) -> dict[str, str]:
    return {name: source.origin(line) for name, line in source.summary.verifiers.items()}


class _Opening:
    """Reads each source once, and collects the problems of all."""

    def __init__(self, data: Data, need_verifiers: bool) -> None:
        contract = Contract(
            messages_key=data.sft_messages_key, ground_truths_key=data.ground_truths_key, need_verifiers=need_verifiers
        )
        cache = Cache(data.dataset_local_cache_dir, skip=data.dataset_skip_cache)
        self.reader = SourceReader(contract=contract, cache=cache)
        self._sources: dict[tuple[str, str], DataSource | None] = {}
        self._failures: list[str] = []
        self._overrides_system = self._tried(lambda: _system_prompt(data.system_prompt_override_file)) is not None
        self._tried(lambda: _template_kwargs(data.chat_template_kwargs))

    def read(self, what: str, mixer_list: Sequence[object], splits: Sequence[str]) -> Selection:
        """The sources of a mix that can be read."""
        lines = self._tried(lambda: entries(mixer_list, splits)) or []
        selection = self._select(lines, lambda line: self.reader.named(line.source, line.split))
        if lines and len(selection.lines) == len(lines) and not sum(selection.num_taken):
            words = " ".join(f"{line.source} {line.amount}" for line in lines)
            self._failures.append(f"the {what} {words} selects no rows; ask for more")
        return selection

    def take(self, named: Sequence[tuple[str, Iterable[Mapping]]]) -> Selection:
        """The rows that the caller passed, each part with its name."""
        lines, rows = [Entry(source=name, amount="1.0", split="") for name, _ in named], dict(named)
        return self._select(lines, lambda line: self.reader.given(line.source, rows[line.source]))

    def finish(self) -> None:
        """Raise everything that is wrong, in one error."""
        sources = [source for source in self._sources.values() if source is not None]
        problems, num_bad = list(self._failures), sum(source.summary.num_problems for source in sources)
        found = [(source, mistake) for source in sources for mistake in source.summary.mistakes.values()]
        problems += [f"{source.origin(mistake.lines[0])}: {mistake}" for source, mistake in found[:MOST_SHOWN]]
        if unnamed := num_bad - sum(mistake.num_rows for _, mistake in found[:MOST_SHOWN]):
            problems.append(f"... and {unnamed:,} more")
        if num_bad:
            where = f" in {sources[0].name}" if len(self._sources) == 1 else ""
            count = "1 malformed row" if num_bad == 1 else f"{num_bad} malformed rows"
            also = f" and {len(self._failures)} more problems" if self._failures else ""
            raise BadData(f"{count}{also}{where}:\n  " + "\n  ".join(problems), sources)
        if problems:
            raise BadData("\n  ".join(problems), sources)
        for source in sources if not self.reader.contract.need_verifiers else ():
            if lost := source.summary.lost_columns:
                _log.warning(
                    "reward functions get None for %s of %s: the values cannot be JSON", ", ".join(lost), source.name
                )

    def _select(self, lines: Sequence[Entry], read: Callable[[Entry], DataSource]) -> Selection:
        kept: list[tuple[Entry, DataSource]] = []
        for line in lines:
            # A file is the same under every split.
            place = (line.source, "" if Path(line.source).is_file() else line.split)
            if place not in self._sources:
                self._sources[place] = self._tried(partial(self._checked, read, line))
            if (source := self._sources[place]) is not None and source.summary.num_rows:
                line.warn_if_few(source.summary.num_rows)
                kept.append((line, source))
        unique = {id(source): source for _, source in kept}
        return Selection(
            lines=tuple(line for line, _ in kept),
            sources=tuple(unique.values()),
            numbers=tuple(list(unique).index(id(source)) for _, source in kept),
        )

    def _checked(self, read: Callable[[Entry], DataSource], line: Entry) -> DataSource:
        source = read(line)
        if not source.summary.num_rows and not source.summary.num_problems:
            raise ValueError(f"{source.name} has no rows")
        if self._overrides_system and source.summary.first_text is not None:
            raise ValueError(
                "system_prompt_override_file needs rows with messages, "
                f"and {source.origin(source.summary.first_text)} has a text prompt"
            )
        return source

    def _tried(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (ValueError, OSError) as err:
            self._failures.append(str(err))
            return None


def _system_prompt(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as err:
        raise ValueError(f"system_prompt_override_file={path} cannot be read: {err}") from err
    if not text:
        raise ValueError(f"system_prompt_override_file={path} is empty; expected the system prompt")
    return text


def _template_kwargs(text: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(text)
    except ValueError as err:
        raise ValueError(f"chat_template_kwargs={text} is not JSON: {err}") from err
    if not isinstance(kwargs, dict):
        raise ValueError(
            f'chat_template_kwargs={text}; expected a JSON object, for example {{"enable_thinking": false}}'
        )
    check_kwargs(kwargs)
    return kwargs


def _warn_of_long_prompts(statistics: Mapping[str, Any]) -> None:
    fate = (
        "cut to their last"
        if statistics["overlong_prompt_policy"] == "truncate_left"
        else "left out: they have more than"
    )
    for part in statistics["sources"]:
        if part["too_long"]:
            _log.warning(
                "%d of %d prompts of %s are %s %d tokens",
                part["too_long"],
                part["taken"],
                part["source"],
                fate,
                statistics["max_prompt_token_length"],
            )


def _warn_of_lost_text(statistics: Mapping[str, Any], sources: Sequence[DataSource], template: str) -> None:
    for name in REMARKS:
        for found in statistics[name]:
            source, what = sources[found["source"]], found["what"]
            rows, origin = f"{found['rows']} rows of {source.name}", source.origin(found["line"])
            sentences = {
                "left_out": f"the chat template ({template}) leaves out text of {rows}, first in {origin}: {what}",
                "unnamed_roles": f"{rows}, first {origin}, have messages of the role {what}, which the chat template ({template}) "
                "writes and does not name: the model may not know it; rename it to system, user, assistant or tool",
                "dropped_answer": f"{rows}, first {origin}, end with a message of the {what}, which is left out of the prompt: "
                "the model answers in its place",
            }
            _log.warning("%s", sentences[name])
    if same := statistics["same_text"]:
        first, second = (sources[number].origin(line) for number, line in same["first"])
        _log.warning(
            "%d rows have other messages than an earlier row and the same prompt, first %s after %s; what tells them apart is not "
            "in the prompt",
            same["rows"],
            second,
            first,
        )
