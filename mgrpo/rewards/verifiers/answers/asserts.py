"""Assert tests as their data sets write them, made into statements that run after a program.

Sets of pytest's form define functions and never call them, and import the program from `solution`. A test that checks
nothing, such as `add(1, 2) == 3` without `assert`, would be passed by every program.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

_PROGRAM = "solution"
"""The module's name by which tests import the program."""
_BUILTINS = frozenset(dir(builtins))
# Through these a test may use names of the program that it does not write.
_LOOK_UP = frozenset(("eval", "exec", "globals", "locals", "vars", "dir", "__import__"))
_RUNNERS = frozenset(("TextTestRunner", "TestLoader", "defaultTestLoader", "TestSuite", "makeSuite", "testmod"))
"""Names of unittest and doctest that run tests and raise nothing where one fails."""
_MARK = re.compile(r"(?<![\w.])(?:pytest\.)?mark\.(\w+)")
_NOT_RUN = frozenset(("skip", "skipif", "xfail"))
_CAUGHT = frozenset(("Exception", "BaseException", "AssertionError"))
"""Exceptions by which a failed assert is caught."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_COMPOUND = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.AsyncFor, ast.AsyncWith, ast.Match)
_NOT_UNFOLDED = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class AssertTest:
    source: str
    """The statements to run after the program."""
    called: frozenset[str]
    """Names that it expects of the program."""
    checks: bool
    """True if some program can fail the test."""
    is_python: bool = True
    has_uncalled: bool = False
    """True if it defines a test that cannot be called here, since its arguments are pytest's to make."""


@functools.lru_cache(maxsize=4096)
def read_test(source: str) -> AssertTest:
    """A test in the form in which it runs. A text that is not Python is returned as it is."""
    for text in (source, textwrap.dedent(source.removeprefix("\ufeff"))):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return _read(text, ast.parse(text).body)
    return AssertTest(source, frozenset(), True, is_python=False)


def _read(source: str, body: list[ast.stmt]) -> AssertTest:
    original = ast.dump(ast.Module(body, []))
    used = _without_import_of_program(ast.Module(_without_runners(body), []))
    used.body = _without_marks(_OfCases(body).visit(used).body)
    tests = list(_uncalled_tests(used.body))
    used.body = _with_calls(used.body)
    is_changed = ast.dump(used) != original
    called = _called(used)
    functions = {node.name: node for node in used.body if isinstance(node, _Function)}
    return AssertTest(
        ast.unparse(ast.fix_missing_locations(used)) if is_changed else source,
        called - _LOOK_UP,
        (bool(called) or any(map(_always_fails, used.body))) and any(_check(used.body, functions)),
        has_uncalled=not all(map(_can_be_called, tests)),
    )


def _without_runners(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without those that run a file's tests, and without those that use the results of these."""
    runners, kept = set(_RUNNERS), []
    for node in body:
        used = _names(node) | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        match node:
            case ast.ImportFrom(module="unittest" | "pytest", names=aliases):
                runners |= {alias.asname or alias.name for alias in aliases if alias.name == "main"}
            case ast.ImportFrom(module=module, names=aliases) if module == _PROGRAM:
                runners -= {alias.asname or alias.name for alias in aliases}
            case ast.If(test=test) if "__name__" in _names(test):
                continue
            case ast.Expr(value=ast.Call(func=function)) if ast.unparse(function) in ("unittest.main", "pytest.main"):
                continue
            case ast.ClassDef():
                pass
            case _ if used & runners:
                runners |= {node.name} if isinstance(node, _Function) else _bound(ast.Module([node], []))
                continue
        kept.append(node)
    return kept


def _without_marks(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without pytest's marks: parametrized tests are loops, skipped ones are missing."""
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            marks = [mark for mark in node.decorator_list if _MARK.match(ast.unparse(mark))]
            node.decorator_list = [mark for mark in node.decorator_list if mark not in marks]
            for test in node.body if marks else ():
                if isinstance(test, _Function) and test.name.startswith("test"):
                    test.decorator_list += marks
            node.body = _without_marks(node.body) or [ast.Pass()]
        elif isinstance(node, _Function):
            names = {mark: match[1] for mark in node.decorator_list if (match := _MARK.match(ast.unparse(mark)))}
            if not _NOT_RUN.isdisjoint(names.values()):
                continue
            left = [mark for mark, name in names.items() if name == "parametrize" and not _became_loop(node, mark)]
            node.decorator_list = [mark for mark in node.decorator_list if mark not in names or mark in left]
        kept.append(node)
    if any("pytest" in _names(node) for node in kept):
        return kept
    return [node for node in kept if not (isinstance(node, ast.Import) and ast.unparse(node) == "import pytest")]


def _became_loop(function: _Function, mark: ast.expr) -> bool:
    """Put a loop over the cases of `pytest.mark.parametrize` around a test's body; False for a form that is not read."""
    match mark:
        case ast.Call(args=arguments, keywords=keywords):
            given = {key: value for key, value in zip(("argnames", "argvalues"), arguments, strict=False)}
            given |= {keyword.arg or "**": keyword.value for keyword in keywords}
        case _:
            return False
    match given.get("argnames"):
        case ast.Constant(value=str(text)):
            names = [name for name in re.split(r"[\s,]+", text) if name]
            is_single = len(names) == 1
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            names = [element.value for element in elements if isinstance(element, ast.Constant)]
            if len(names) < len(elements):
                return False
            is_single = False
        case _:
            return False
    required = [argument.arg for argument in function.args.args[: _num_required(function)]]
    parts = list(ast.walk(function))
    has_exit = any(isinstance(part, ast.Return | ast.Yield | ast.YieldFrom) for part in parts)
    cases = given.get("argvalues")
    if (
        cases is None
        or has_exit
        or not set(names) <= set(required)
        or not given.keys() <= {"argnames", "argvalues", "ids"}
    ):
        return False
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    function.args.args = [argument for argument in function.args.args if argument.arg not in names]
    function.body = [ast.For(targets[0] if is_single else ast.Tuple(targets, ast.Store()), cases, function.body, [])]
    return True


class _OfCases(ast.NodeTransformer):
    """Replaces `pytest.param(1, 2, id="x")` by its values, and leaves out those that are not run."""

    def __init__(self, body: list[ast.stmt]) -> None:
        imported = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "pytest"]
        own = {alias.asname or alias.name for node in imported for alias in node.names if alias.name == "param"}
        self._names = own | {"pytest.param"}

    def visit_List(self, node: ast.List) -> ast.expr:
        marks = [_MARK.findall(ast.unparse(case)) if isinstance(case, ast.Call) else [] for case in node.elts]
        node.elts = [case for case, own in zip(node.elts, marks, strict=True) if _NOT_RUN.isdisjoint(own)]
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) not in self._names:
            return node
        return node.args[0] if len(node.args) == 1 else ast.Tuple(node.args, ast.Load())


def _without_import_of_program(module: ast.Module) -> ast.Module:
    """The test with the program's names in place of those that it imports."""
    modules: set[str] = set()
    body: list[ast.stmt] = []
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module == _PROGRAM:
            renamed = [alias for alias in node.names if alias.asname not in (None, alias.name)]
            body += [ast.parse(f"{alias.asname} = {alias.name}").body[0] for alias in renamed]
        elif isinstance(node, ast.Import) and any(alias.name == _PROGRAM for alias in node.names):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == _PROGRAM}
            if others := [alias for alias in node.names if alias.name != _PROGRAM]:
                body.append(ast.Import(others))
        else:
            body.append(node)
    return _OfProgram(modules).visit(ast.Module(body, []))


class _OfProgram(ast.NodeTransformer):
    """Replaces `solution.f` by `f`."""

    def __init__(self, modules: set[str]) -> None:
        self._modules = modules

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        self.generic_visit(node)
        return node


def _with_calls(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements with calls of the test functions and methods that nothing calls."""
    functions = [node for node in _uncalled_tests(body) if _can_be_called(node)]
    if functions and _can_be_unfolded(body, functions):
        return [part for node in body for part in (node.body if node in functions else [node])]
    calls = [_call_of(node, f"{node.name}()") for node in functions]
    used = set().union(*map(_names, body))
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name not in used:
            calls += _calls_of_class(node)
    return [*body, *ast.parse("\n".join(calls)).body]


def _uncalled_tests(body: Sequence[ast.stmt]) -> Iterator[_Function]:
    """The test functions that nothing calls."""
    used = set().union(*map(_names, body))
    for node in body:
        if isinstance(node, _Function) and node.name.startswith("test") and node.name not in used:
            yield node


def _can_be_called(function: _Function) -> bool:
    is_generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(function))
    return not is_generator and _num_required(function) == 0


def _call_of(function: _Function, call: str) -> str:
    return f"__import__('asyncio').run({call})" if isinstance(function, ast.AsyncFunctionDef) else call


def _can_be_unfolded(body: Sequence[ast.stmt], functions: Sequence[_Function]) -> bool:
    """True if bodies in place of functions do the same: asserts inside a function would be decided by the program."""
    for function in functions:
        if isinstance(function, ast.AsyncFunctionDef):
            return False
        parts = [part for node in function.body for part in ast.walk(node)]
        has_arguments = any(isinstance(part, ast.arg) for part in ast.walk(function.args))
        if has_arguments or function.decorator_list or any(isinstance(part, _NOT_UNFOLDED) for part in parts):
            return False
        own = _bound(ast.Module(function.body, []))
        if any(own & _free(node, functions) for node in body if node is not function):
            return False
    return True


def _free(node: ast.stmt, functions: Sequence[_Function]) -> set[str]:
    """The names of a statement, without those that a test function binds itself."""
    own = [_bound(ast.Module(function.body, [])) for function in functions if function is node]
    return _names(node).difference(*own)


def _calls_of_class(node: ast.ClassDef) -> Iterator[str]:
    methods = {method.name: method for method in node.body if isinstance(method, _Function)}
    is_case = any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    for name in ("setUpClass", "setup_class"):
        if name in methods:
            yield f"{node.name}.{name}({'' if methods[name].decorator_list else node.name})"
    for name, method in methods.items():
        is_static = "staticmethod" in map(ast.unparse, method.decorator_list)
        if not name.startswith("test") or _num_required(method) != (not is_static) or not any(_check(method.body, {})):
            continue
        if is_case:
            yield f"{node.name}({name!r}).debug()"
        elif node.name.startswith("Test"):
            instance = f"{node.name}()"
            if "setup_method" in methods:
                yield f"_instance = {instance}"
                yield f"_instance.setup_method({'None' if _num_required(methods['setup_method']) > 1 else ''})"
                instance = "_instance"
            yield _call_of(method, f"{instance}.{name}()")


def _num_required(function: _Function) -> int:
    arguments = function.args
    needed = sum(default is None for default in arguments.kw_defaults)
    return len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults) + needed


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _bound(module: ast.AST) -> set[str]:
    """Names that the test itself binds."""
    bound: set[str] = set()
    for part in ast.walk(module):
        match part:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    return bound


def _called(module: ast.Module) -> frozenset[str]:
    return frozenset(_names(module) - _bound(module) - (_BUILTINS - _LOOK_UP))


def _always_fails(node: ast.stmt) -> bool:
    match node:
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
    return isinstance(node, ast.Raise)


def _is_caught(node: ast.ExceptHandler | ast.withitem) -> bool:
    """True if a failed assert in the body of this `try` or `with` is caught."""
    if isinstance(node, ast.withitem):
        return "suppress" in ast.unparse(node.context_expr) and not _CAUGHT.isdisjoint(_names(node.context_expr))
    return node.type is None or not _CAUGHT.isdisjoint(_names(node.type))


def _check(nodes: Iterable[ast.AST], functions: dict[str, _Function]) -> Iterator[bool]:
    """Yield for each statement, nested ones included, True if the program can make it fail."""
    for node in nodes:
        match node:
            case ast.Return():
                return
            case ast.If(test=ast.Constant(value=value)):
                yield from _check(node.body if value else node.orelse, functions)
            case ast.For(iter=ast.List(elts=[]) | ast.Tuple(elts=[])):
                yield False
            case ast.Try(handlers=handlers) if any(map(_is_caught, handlers)):
                yield from _check(chain(handlers, node.orelse, node.finalbody), functions)
            case ast.With(items=items) if any(map(_is_caught, items)):
                yield False
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="run"), args=[ast.Call(func=ast.Name(id=name))])) if (
                name in functions
            ):
                yield from _check(functions[name].body, {})
            case ast.Assert(test=ast.Constant(value=value)):
                yield not value
            case ast.Assert(test=ast.Tuple(elts=elements)):
                yield not elements
            case ast.Assert() | ast.Raise():
                yield True
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in functions:
                others = {other: function for other, function in functions.items() if other != name}
                yield from _check(functions[name].body, others)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
                yield name not in _BUILTINS or name in _LOOK_UP or name in ("exit", "quit")
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield True
            case ast.With(items=items) if any("aises" in ast.unparse(item.context_expr) for item in items):
                yield True
            case _ if isinstance(node, _COMPOUND):
                yield from _check(ast.iter_child_nodes(node), functions)
            case ast.ExceptHandler() | ast.match_case():
                yield from _check(node.body, functions)
            case _:
                yield False
