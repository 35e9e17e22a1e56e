"""What mgrpo asks of vLLM's and torch's objects, read from its source, and what those objects are.

An owner is a class, a function or an object, "module:name". What a file imports from `PACKAGES` is one wherever its name stands;
of other expressions `OWNERS` says what they are; and what a class of ours does not define itself is its base's.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "mgrpo"
PACKAGES = ("vllm", "torch.nn.attention")
COMPLETION = "vllm.outputs:CompletionOutput"
NCCL = "torch.distributed:ProcessGroupNCCL"
PARSER = "vllm.tool_parsers:ToolParser"
STORAGE = "torch:UntypedStorage"
OWNERS: Mapping[str, Mapping[str, str]] = {
    "rollout/vllm/actor.py": {
        "self.engine": "vllm.v1.engine.async_llm:AsyncLLM",
        "self.engine.engine_core": "vllm.v1.engine.core_client:AsyncMPClient",
        "self.engine.engine_core.resources": "vllm.v1.engine.core_client:BackgroundResources",
        "coordinator": "vllm.v1.engine.coordinator:DPCoordinator",
        "coordinator.proc": "multiprocessing.process:BaseProcess",
        "request": "vllm.v1.engine.output_processor:RequestOutputCollector",
        "output": "vllm.outputs:RequestOutput",
        "(output := (await request.get()))": "vllm.outputs:RequestOutput",
        "completion": COMPLETION,
        "c": COMPLETION,
        "c.sampling_mask": "vllm.outputs:SamplingMask",
        "scheduler_stats": "vllm.v1.metrics.stats:SchedulerStats",
        "stats": "vllm.v1.spec_decode.metrics:SpecDecodingStats",
        "found": "vllm.logprobs:FlatLogprobs",
    },
    "rollout/vllm/calls.py": {"completion": COMPLETION, "c": COMPLETION, "span": "vllm.outputs:WeightVersionSpan"},
    "rollout/vllm/local_core.py": {
        "EngineCoreClient": "vllm.v1.engine.core_client:AsyncMPClient",  # whose place it takes
        "self.core": "vllm.v1.engine.core:EngineCore",
        "self.core.scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    },
    "environments/formats/vllm_door.py": {"parser_class": PARSER, "parser_class(tokenizer, parameters)": PARSER},
    "sync/vllm_plugin/transfer_engine.py": {
        "self.device": "torch:device",
        "self.parallel_config": "vllm.config.parallel:ParallelConfig",
        "self.vllm_config": "vllm.config.vllm:VllmConfig",
        "self.vllm_config.load_config": "vllm.config.load:LoadConfig",
    },
    "sync/group.py": {
        "nccl": NCCL,
        "backend": NCCL,
        "self.backend": NCCL,
        "start": f"{NCCL}.send",
        "work": "torch.distributed:Work",
    },
    "sync/device_memory.py": {"storage": STORAGE, "untyped": STORAGE},
    "parallel/packed/attention.py": {
        "backend.compiled(flex_attention)": "torch.nn.attention.flex_attention:flex_attention"
    },
}
"""File -> expression -> owner."""
RELAYS = ("self._call",)
"""Methods of ours that call their first argument with the others."""

Interfaces = dict[str, dict[str, list[str] | None]]
"""Owner -> name -> its signatures, None where it is not called or they are not known. The name "" is the owner itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A place where our code uses `name` of an owner."""

    place: str
    owner: str
    name: str
    call: ast.Call | None = None
    defined: ast.arguments | None = None
    """It is our own definition, in place of the owner's."""

    def misfit(self, interfaces: Interfaces) -> str | None:
        """Why the owner does not allow it."""
        names, what = interfaces.get(self.owner, {}), f"{self.place}: {self.owner} {self.name}".strip()
        if self.name not in names:
            return f"{what} does not exist"
        theirs = names[self.name]
        if theirs is None:
            return None
        if self.defined is not None:
            ours = _signature(self.defined)
            is_fit = all(_accepts_calls_of(ours, _parsed(each)) for each in theirs)
            return None if is_fit else f"{what} is {' or '.join(theirs)}, ours {ours}"
        if self.call is not None and not any(_binds(_parsed(each), self.call) for each in theirs):
            return f"{what} is {' or '.join(theirs)}, called as {ast.unparse(self.call)}"
        return None


def uses(package: Path = PACKAGE) -> list[Use]:
    """All of them."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file, tree = str(path.relative_to(package)), ast.parse(path.read_text())
        imported = _imported(tree)
        owners = imported | OWNERS.get(file, {})
        if owners:
            reader = _Reader(file, owners)
            reader.visit(tree)
            found += [Use(place=file, owner=owner, name="") for owner in imported.values()] + reader.found
    return found


def _imported(tree: ast.AST) -> dict[str, str]:
    """Name in the file -> owner."""
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(tuple(f"{each}." for each in PACKAGES))
        for alias in node.names
    }


class _Reader(ast.NodeVisitor):
    """Finds the uses in a file, or in a class of it that has the owner `owners["self"]` as its base.

    Args:
        own: attributes of `self` that are not the base's.
    """

    def __init__(self, file: str, owners: Mapping[str, str], own: frozenset[str] = frozenset()) -> None:
        self.file, self.owners, self.own = file, owners, own
        self.found: list[Use] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        owner = next(filter(None, (self.owners.get(ast.unparse(base)) for base in bases)), None)
        if owner is None:
            self.generic_visit(node)
            return
        inner = _Reader(self.file, {**self.owners, "self": owner}, _own_names(node))
        inner.generic_visit(node)
        methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.found += inner.found + [
            Use(place=f"{self.file}:{method.lineno}", owner=owner, name=method.name, defined=method.args)
            for method in methods
            if not method.name.startswith("_")
        ]

    def visit_Call(self, node: ast.Call) -> None:
        self._use(node.func, node)
        if ast.unparse(node.func) in RELAYS:
            self._use(node.args[0], ast.Call(func=node.args[0], args=node.args[1:], keywords=node.keywords))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node, None)
        self.generic_visit(node)

    def _use(self, node: ast.expr, call: ast.Call | None) -> None:
        place = f"{self.file}:{getattr(node, 'lineno', 0)}"
        if call is not None and (owner := self.owners.get(ast.unparse(node))) is not None:
            self.found.append(Use(place=place, owner=owner, name="", call=call))
        if isinstance(node, ast.Attribute) and (owner := self._owner(node)) is not None:
            self.found.append(Use(place=place, owner=owner, name=node.attr, call=call))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            assert self._owner(node.value) is None, f"{place}: say in OWNERS what {ast.unparse(node.value)} is"

    def _owner(self, node: ast.Attribute) -> str | None:
        is_own = ast.unparse(node.value) == "self" and node.attr in self.own
        return None if is_own else self.owners.get(ast.unparse(node.value))


def _own_names(node: ast.ClassDef) -> frozenset[str]:
    """What a class defines and assigns."""
    assigned = [each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute))]
    names = {each.id for each in assigned if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    names |= {each.attr for each in assigned if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
    return frozenset(
        names | {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
    )


# ---- signatures, written as in a definition: without annotations and `self`, every default as `...`


def _parsed(text: str) -> inspect.Signature:
    (definition,) = ast.parse(f"def f{text}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    return _signature(definition.args)


def _signature(args: ast.arguments) -> inspect.Signature:
    """Without `self`."""
    kinds, places = inspect.Parameter, [*args.posonlyargs, *args.args]
    first_default = len(places) - len(args.defaults)
    found = [
        kinds(
            arg.arg,
            kinds.POSITIONAL_ONLY if number < len(args.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if number < first_default else ...,
        )
        for number, arg in enumerate(places)
    ]
    found += [kinds(args.vararg.arg, kinds.VAR_POSITIONAL)] if args.vararg else []
    found += [
        kinds(arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ...)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    found += [kinds(args.kwarg.arg, kinds.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature([each for each in found if each.name != "self"])


def _binds(signature: inspect.Signature, call: ast.Call) -> bool:
    """Whether a call has the arguments that it needs, and no others; of those after a star nothing is known."""
    given = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
    named = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    is_whole = len(given) == len(call.args) and len(named) == len(call.keywords)
    try:
        (signature.bind if is_whole else signature.bind_partial)(*given, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


def _accepts_calls_of(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Whether what may be called with `theirs`, all of it in order or all of it by name, may be called with `ours`."""
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, parameter in theirs.parameters.items() if parameter.kind not in stars]
    try:
        in_order = ours.bind(*names).arguments
        ours.bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return all(in_order.get(name, name) == name for name in names)


# ---- what the installed packages are


def described(asked: list[Use]) -> Interfaces:
    """What is used of each owner that is installed here, as far as it exists; signatures of what is called."""
    names: dict[str, dict[str, bool]] = {}
    for use in asked:
        is_called = use.call is not None or use.defined is not None
        own = names.setdefault(use.owner, {})
        own[use.name] = own.get(use.name, False) or is_called
    loaded = {owner: _loaded(owner) for owner in sorted(names)}
    return {owner: _described(found, names[owner]) for owner, found in loaded.items() if found is not None}


def _loaded(owner: str) -> Any:
    module, _, name = owner.partition(":")
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _described(owner: Any, names: Mapping[str, bool]) -> dict[str, list[str] | None]:
    known = {"", *dir(owner), *_instance_names(owner if isinstance(owner, type) else type(owner))}
    return {
        name: _signatures(getattr(owner, name, None) if name else owner) if names[name] else None
        for name in sorted(names.keys() & known)
    }


def _instance_names(owner: type) -> set[str]:
    """What the class's instances have besides: fields, and what its methods assign to `self`."""
    found = {name for base in owner.__mro__ for name in getattr(base, "__annotations__", {})}
    for base in owner.__mro__:
        try:
            found |= set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base)))
        except (TypeError, OSError):
            continue  # It is compiled.
    return found


class _Default:
    def __repr__(self) -> str:
        return "..."


def _signatures(called: Any) -> list[str] | None:
    """All ways to call it."""
    if not callable(called):
        return None
    compiled = called.__init__ if isinstance(called, type) else called
    if found := re.findall(r"^(?:\d+\. )?\w+(\(.*\)) -> ", compiled.__doc__ or "", re.MULTILINE):
        return [_plain(text) for text in found]  # pybind11 writes them there.
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return None
    bare = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else _Default())
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    return [str(inspect.Signature(bare))]


def _plain(text: str) -> str:
    """Of pybind11's text: names and defaults alone."""
    parts, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([<{") - (letter in ")]>}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    names = [f"{part.partition(':')[0].strip()}{'=...' if ' = ' in part else ''}" for part in parts if part.strip()]
    return f"({', '.join(name for name in names if name != 'self')})"
