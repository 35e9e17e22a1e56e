"""Assert tests as their data sets write them, made into statements that run after a program.

Sets of pytest's form define functions and never call them, and import the program from `solution`. A test that checks
nothing, such as `add(1, 2) == 3` without `assert`, would be passed by every program.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_PROGRAM = "solution"
"""The module's name by which tests import the program."""
_BUILTINS = frozenset(dir(builtins))
# Through these a test may use names of the program that it does not write.
_LOOK_UP = frozenset(("eval", "exec", "globals", "locals", "vars", "dir", "__import__"))
_RUNNERS = ("unittest.main", "pytest.main")
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


@functools.lru_cache(maxsize=4096)
def read_test(source: str) -> AssertTest:
    """A test as it is to be run. A text that is not Python is returned as it is."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return AssertTest(source, frozenset(), True, is_python=False)
    own = ast.Module([node for node in body if not _is_for_scripts(node)], [])
    used = _without_import_of_program(own)
    used.body = _with_calls(used.body)
    is_changed = ast.dump(used) != ast.dump(ast.Module(body, []))
    called = _called(used)
    functions = {node.name: node for node in used.body if isinstance(node, ast.FunctionDef)}
    return AssertTest(
        ast.unparse(ast.fix_missing_locations(used)) if is_changed else source,
        called - _LOOK_UP,
        (bool(called) or any(map(_always_fails, used.body))) and any(_check(used.body, functions)),
    )


def _is_for_scripts(node: ast.stmt) -> bool:
    """True for a statement that runs a file's tests when the file is started as a script."""
    if isinstance(node, ast.If):
        return "__name__" in (ast.unparse(part) for part in ast.walk(node.test) if isinstance(part, ast.Name))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in _RUNNERS


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
    used = {part.id for node in body for part in ast.walk(node) if isinstance(part, ast.Name)}
    functions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and node.name not in used
        and _num_required(node) == 0
    ]
    if functions and _can_be_unfolded(body, functions):
        return [part for node in body for part in (node.body if node in functions else [node])]
    calls = [f"{function.name}()" for function in functions]
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name not in used:
            calls += _calls_of_class(node)
    return [*body, *ast.parse("\n".join(calls)).body]


def _can_be_unfolded(body: Sequence[ast.stmt], functions: Sequence[ast.FunctionDef]) -> bool:
    """True if bodies in place of functions do the same: asserts inside a function would be decided by the program."""
    for function in functions:
        parts = [part for node in function.body for part in ast.walk(node)]
        has_arguments = any(isinstance(part, ast.arg) for part in ast.walk(function.args))
        if has_arguments or function.decorator_list or any(isinstance(part, _NOT_UNFOLDED) for part in parts):
            return False
        own = _bound(ast.Module(function.body, []))
        if any(own & _free(node, functions) for node in body if node is not function):
            return False
    return True


def _free(node: ast.stmt, functions: Sequence[ast.FunctionDef]) -> set[str]:
    """The names of a statement, without what a test function binds for itself."""
    own = [_bound(ast.Module(function.body, [])) for function in functions if function is node]
    return _names(node).difference(*own)


def _calls_of_class(node: ast.ClassDef) -> Iterator[str]:
    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
    is_case = any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    if is_case and "setUpClass" in methods:
        yield f"{node.name}.setUpClass()"
    for name, method in methods.items():
        if not name.startswith("test") or _num_required(method) != 1:
            continue
        if is_case:
            yield f"{node.name}({name!r}).debug()"
        elif node.name.startswith("Test"):
            instance = f"{node.name}()"
            if "setup_method" in methods:
                yield f"_instance = {instance}"
                yield f"_instance.setup_method({'None' if _num_required(methods['setup_method']) > 1 else ''})"
                instance = "_instance"
            yield f"{instance}.{name}()"


def _num_required(function: ast.FunctionDef) -> int:
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


def _check(nodes: Iterable[ast.AST], functions: dict[str, ast.FunctionDef]) -> Iterator[bool]:
    """Yield for each statement, nested ones included, True if the program can make it fail."""
    for node in nodes:
        match node:
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
                yield name not in _BUILTINS or name in _LOOK_UP
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
