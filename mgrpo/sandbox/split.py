"""Splits a test in two: the program's computations, and the decision.

A test becomes code that runs outside of the program's process. In it, each largest expression that is the program's to
compute is a question, which carries the expression's text; comparisons, arithmetic and Python's own functions stay.
A variable of the test exists in the program's process only if a question needs it, and then also outside where its value
does not come from the program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from mgrpo.sandbox.plain_functions import BUILTINS
from mgrpo.sandbox.questions import (
    RAISES,
    RUN,
    Bound,
    Expressions,
    Names,
    UnsplittableError,
    binds_names,
    call,
    call_statement,
    root_name,
    target_names,
)

_APPROX = "approx"
"""pytest's object that is equal to numbers near its own: it cannot leave its process, and decides there."""


@dataclass(frozen=True, slots=True)
class SplitProgram:
    code: CodeType
    """Code for `exec` with the names of `plain_functions` and the functions that `questions` names."""
    decides_inside: bool
    """True if a part of the decision, such as a comparison of the program's objects, runs in the program's process."""


def split(test: str) -> SplitProgram | None:
    """None for a test that cannot be split: it must run in the program's process as a whole."""
    try:
        inside: frozenset[str] = frozenset()
        only_inside: frozenset[str] = frozenset()
        while True:
            tree = ast.parse(test)
            if any(_APPROX in (getattr(node, "id", ""), getattr(node, "attr", "")) for node in ast.walk(tree)):
                return None
            splitter = _Splitter(test, Names.of(tree, inside, only_inside))
            body = splitter.statements(_without_check(tree.body))
            if splitter.needed <= inside and splitter.only_inside <= only_inside:
                break
            inside |= splitter.needed
            only_inside |= splitter.only_inside
        body[:0] = [call_statement(RUN, name) for name in sorted(splitter.required)]
        module = ast.fix_missing_locations(ast.Module(body, []))
        return SplitProgram(compile(module, "<test>", "exec", dont_inherit=True), splitter.decides_inside)
    except (UnsplittableError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Splitter(Expressions):
    """Rewrites statements."""

    def statements(self, nodes: Iterable[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for node in nodes:
            new: Any = self.visit(node)
            found += new if isinstance(new, list) else [new]
        return found

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        claim = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if isinstance(claim, ast.Call) and self._is_inside(claim):
            # One function of the program checks the result of another.
            arguments = [*claim.args, *[keyword.value for keyword in claim.keywords]]
            self.decides_inside |= any(self._calls_program(argument) for argument in arguments)
        return ast.Assert(self._expression(node.test), None)

    def _calls_program(self, node: ast.expr) -> bool:
        return any(isinstance(part, ast.Call) and self._is_inside(part) for part in ast.walk(node))

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        match node.value:
            case ast.Call(func=ast.Name(id="print"), args=arguments) if "print" not in self._names.assigned:
                return ast.Expr(self._expression(ast.Tuple(arguments, ast.Load())))
        if not self._is_inside(node.value):
            name = root_name(node.value)
            if name is None or name not in self._names.inside & self._names.assigned:
                node.value = self._expression(node.value)
                return node
            # A method that may change a variable of both sides.
            return self._on_both_sides(node, {name}, self._run(node))
        if self._names_local(node):
            return ast.Expr(self._ask(node.value))
        self.decides_inside |= self._decides(node.value)
        self._program_ran = True
        return self._run(node)

    def _names_local(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self._local for part in ast.walk(node))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list[ast.stmt]:
        return self._assign(node, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | list[ast.stmt]:
        if node.value is None or not isinstance(node.target, ast.Name):
            raise UnsplittableError
        plain = ast.copy_location(ast.Assign([node.target], node.value), node)
        return self._assign(plain, plain.targets, shown=node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt | list[ast.stmt]:
        return self._assign(node, [node.target])

    def _assign(
        self, node: ast.Assign | ast.AugAssign, targets: Sequence[ast.expr], shown: ast.stmt | None = None
    ) -> ast.stmt | list[ast.stmt]:
        names = target_names(targets)
        is_outside = not any(map(self._involves_program, targets)) and not self._is_inside(node.value)
        if root_name(node.value) in self._names.inside:
            self.needed |= names & self._names.assigned  # another name of the same object
        if is_outside and not names & self._names.inside:
            node.value = self._expression(node.value)
            return node
        self.decides_inside |= self._decides(node.value)
        runs = self._run(shown or node)
        if is_outside and all(map(binds_names, targets)):
            return self._on_both_sides(node, names, runs)
        return self._only_inside(names, runs)

    def _on_both_sides(
        self, node: ast.Assign | ast.AugAssign | ast.Expr, names: set[str], runs: ast.stmt
    ) -> ast.stmt | list[ast.stmt]:
        """Run in both processes a statement that assigns or changes these names, unless the value is the program's."""
        if self._involves_program(node.value):
            return self._only_inside(names, runs)
        node.value = self._expression(node.value)
        return [runs, node]

    def _only_inside(self, names: set[str], runs: ast.stmt) -> ast.stmt:
        self._program_ran = True
        self.only_inside |= names & self._names.assigned
        return runs

    def _import(self, node: ast.Import | ast.ImportFrom) -> ast.stmt:
        bound = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if bound <= self._names.library.keys() and not bound & self._names.inside:
            return ast.Pass()
        self.needed |= bound - self._names.library.keys()
        self.only_inside |= bound - self._names.library.keys()
        return self._run(node)

    visit_Import = visit_ImportFrom = _import

    def _definition(self, node: ast.AST) -> ast.stmt:
        """A function or class of the test: its result may decide, and it runs among the program's names."""
        assert isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        if any(isinstance(part, ast.Assert) for part in ast.walk(node)):
            raise UnsplittableError
        self.needed.add(node.name)
        self.only_inside.add(node.name)
        self.decides_inside = True
        return self._run(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition

    def visit_For(self, node: ast.For) -> ast.stmt:
        names = target_names([node.target])
        if not binds_names(node.target):
            raise UnsplittableError
        node.iter = self._expression(node.iter)
        self._program_ran = True
        # A loop variable that questions need is handed over in each round.
        handed = [
            ast.Expr(call(RUN, ast.Constant(name), ast.Name(name, ast.Load())))
            for name in sorted(names & self._names.inside)
        ]
        node.body = [*handed, *self.statements(node.body)]
        node.orelse = self.statements(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        self._program_ran = True
        return self._branches(node)

    def visit_If(self, node: ast.If) -> ast.stmt:
        self._program_ran = True
        return self._branches(node)

    def _branches(self, node: ast.While | ast.If) -> ast.stmt:
        node.test = self._expression(node.test)
        node.body, node.orelse = self.statements(node.body), self.statements(node.orelse)
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        self._program_ran = True
        node.body = self.statements(node.body)
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if not all(kind is None or (isinstance(kind, ast.Name) and kind.id in BUILTINS) for kind in kinds):
                raise UnsplittableError
            with Bound(self._local, [handler.name] if handler.name else []):
                handler.body = self.statements(handler.body)
        node.orelse, node.finalbody = self.statements(node.orelse), self.statements(node.finalbody)
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        """Accept `with pytest.raises(...)` alone."""
        match node.items:
            case [ast.withitem(context_expr=ast.Call(func=function) as raises, optional_vars=None)]:
                if ast.unparse(function) not in ("pytest.raises", "raises"):
                    raise UnsplittableError
                self.required |= {root_name(function) or ""} - self._names.assigned
            case _:
                raise UnsplittableError
        self._program_ran = True
        if self._involves_program(
            ast.Tuple([*raises.args, *[keyword.value for keyword in raises.keywords]], ast.Load())
        ):
            raise UnsplittableError
        self._visit_arguments(raises)
        raises.func = ast.Name(RAISES, ast.Load())
        node.body = self.statements(node.body)
        return node


def _without_check(body: list[ast.stmt]) -> list[ast.stmt]:
    """`def check(candidate): ...` and `check(f)` as `candidate = f` and the function's body."""
    for position, node in enumerate(body):
        match node, body[-1]:
            case (
                ast.FunctionDef(name=name, args=ast.arguments(args=[argument]), decorator_list=[]),
                ast.Expr(value=ast.Call(func=ast.Name(id=called), args=[ast.Name() as program], keywords=[])),
            ) if name == called and _times_used(body, name) == 1:
                assign = ast.copy_location(ast.Assign([ast.Name(argument.arg, ast.Store())], program), program)
                assign.col_offset = 1  # not the text of the source
                return [*body[:position], *body[position + 1 : -1], assign, *node.body]
    return body


def _times_used(body: Sequence[ast.stmt], name: str) -> int:
    return sum(isinstance(part, ast.Name) and part.id == name for node in body for part in ast.walk(node))
