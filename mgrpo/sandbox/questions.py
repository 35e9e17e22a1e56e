"""The expressions of a test: their parts that the program computes become questions, the rest stays as it is."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mgrpo.sandbox.plain_functions import BARE_NAMES, BUILTINS, EXCEPTIONS, METHODS, MODULES

ASK, RUN, READ, RAISES = "<ask>", "<run>", "<read>", "<raises>"
"""Names of the functions that the code calls: the value of an expression; a statement; the value of a name that exists
on both sides; pytest's context manager."""
_FOREIGN = frozenset({"np", "numpy", "pd", "pandas", "pytest", "scipy", "sympy", "tf", "torch", "unittest"})
_ALL_BUILTINS = frozenset(dir(builtins))
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class UnsplittableError(Exception):
    """The test has a form that only the program's process can run."""


@dataclass(slots=True)
class Names:
    """The meaning of a test's names."""

    inside: frozenset[str]
    """Names of the test that exist in the program's process."""
    only_inside: frozenset[str]
    """Names of `inside` that do not exist outside as well."""
    assigned: set[str] = field(default_factory=set)
    """All names that the test itself binds, except those of lambdas and comprehensions."""
    library: dict[str, str] = field(default_factory=dict)
    """Imported by the test: its name -> "module" or "module.name"."""
    instances: set[str] = field(default_factory=set)
    """Bound to an object of one of the program's classes."""
    foreign: set[str] = field(default_factory=lambda: set(_FOREIGN))
    """Names of modules that are neither the program's nor in the library."""
    functions: dict[str, object] = field(default_factory=lambda: dict(BUILTINS))
    """Python's functions; empty where the program can only be meant by such a name, as in `assert sum(1, 2) == 3`."""
    mentions_program: bool = True

    @classmethod
    def of(cls, tree: ast.Module, inside: frozenset[str], only_inside: frozenset[str]) -> Names:
        names = cls(inside, only_inside)
        made, with_attributes, loaded, bound = (set[str]() for _ in range(4))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else names.assigned).add(node.id)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names._import(node)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                names.assigned.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                with_attributes.add(node.value.id)
            elif isinstance(node, ast.Assign) and _makes_instance(node.value):
                made |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
        names.instances = made & with_attributes - names.library.keys()
        own = names.assigned | names.library.keys() | names.foreign | bound
        names.mentions_program = bool(loaded - own - BUILTINS.keys() - MODULES.keys() - BARE_NAMES.keys())
        if not names.mentions_program:
            names.functions = {name: BUILTINS[name] for name in EXCEPTIONS}
        for name in names.assigned:
            names.functions.pop(name, None)
        return names

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom):
                known = alias.name in MODULES.get(node.module or "", {}) and node.level == 0
                source = f"{node.module}.{alias.name}"
            else:
                known, source = alias.name in MODULES, alias.name
            if known:
                self.library[bound] = source
            else:
                self.assigned.add(bound)
                self.foreign.add(bound)


class Expressions(ast.NodeTransformer):
    """Rewrites statements. Nodes keep their positions until they are rewritten, for the text of questions."""

    def __init__(self, source: str, names: Names) -> None:
        self._source, self._names = source, names
        self.needed: set[str] = set()
        """Names of the test that questions need."""
        self.only_inside: set[str] = set()
        """Names of the test whose value exists in the program's process only."""
        self.required: set[str] = set()
        """Names that the test uses without importing them: the program must have them."""
        self.decides_inside = False
        self._local: list[str] = []
        """Bound by the surrounding lambdas, comprehensions and handlers."""
        self._program_ran = False
        self._in_text = False

    # Values that the program computes

    def _is_inside(self, node: ast.expr) -> bool:
        """True if the program must compute the value."""
        match node:
            case ast.Name(id=name):
                return self._is_name_inside(name)
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                return self._is_inside(node.func) or self._involves_program(kinds)
            case ast.Call(func=function, args=[value]) if _is_text_of(node) and not self._is_inside(function):
                return self._is_inside(value)
            case ast.Call(func=ast.Attribute(value=value, attr=attr) as function):
                if self._library_name(function) is not None:
                    return False
                return attr not in METHODS or self._is_inside(value)
            case ast.Call(func=function):
                return self._library_name(node) is None and self._is_inside(function)
            case ast.Attribute(value=ast.Name(id=name), attr="args") if name in self._local:
                return False  # of an exception
            case ast.Attribute(value=ast.Call(args=[value]) as kind, attr="__name__") if _is_type_of(kind):
                return self._is_inside(value)
            case ast.Attribute():
                return self._library_name(node) is None
            case ast.Subscript(value=value):
                return self._is_inside(value)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compares_inside([left, *comparators], ops)
            case ast.BinOp(left=left, right=right):
                return any(self._is_instance(side) or self._makes_instance(side) for side in (left, right))
            case (
                ast.ListComp(elt=element, generators=generators)
                | ast.SetComp(elt=element, generators=generators)
                | ast.GeneratorExp(elt=element, generators=generators)
            ):
                if not isinstance(element, ast.Call) or not self._is_inside(element) or _compares(node):
                    return False
                # The iterable of the test stays outside if it can.
                own = self._names.assigned - self._names.only_inside
                return not any(target_names([generator.iter]) & own for generator in generators)
        return False

    def _is_name_inside(self, name: str) -> bool:
        if name in self._local or name in self._names.functions or name in self._names.library:
            return False
        if name in self._names.assigned:
            return name in self._names.only_inside
        return True

    def _compares_inside(self, sides: Sequence[ast.expr], ops: Sequence[ast.cmpop]) -> bool:
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
            return not any(isinstance(side, ast.Constant) for side in sides) and any(map(self._is_inside, sides))
        if any(map(_is_type_of, sides)) and any(map(self._is_inside, sides)):
            return True
        if any(map(self._is_instance, sides)):
            return True
        return isinstance(ops[0], (ast.In, ast.NotIn)) and self._makes_instance(sides[1])

    def _is_instance(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._names.instances

    def _makes_instance(self, node: ast.expr) -> bool:
        return _makes_instance(node) and self._is_inside(node)

    def _involves_program(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.expr) and self._is_inside(part) for part in ast.walk(node))

    def _library_name(self, node: ast.expr) -> str | None:
        """ "module.name" of a function or constant of the library."""
        match node:
            case ast.Attribute(value=ast.Name(id=root), attr=attr) if root not in self._names.assigned:
                module = self._names.library.get(root, root)
                if root not in self._local and attr in MODULES.get(module, {}):
                    return f"{module}.{attr}"
            case ast.Call(func=ast.Name(id=name)) if name in BARE_NAMES and self._names.mentions_program:
                if name not in self._names.assigned and name not in self._local:
                    return f"{BARE_NAMES[name]}.{name}"
            case ast.Name(id=name) if name in self._names.library and name not in self._local:
                source = self._names.library[name]
                return source if "." in source else None
        return None

    # Questions

    def _ask(self, node: ast.expr) -> ast.expr:
        """The call that requests the node's value; names that exist outside only travel with it."""
        kind = "ask"
        self.decides_inside |= self._decides(node)
        if _is_text_of(node):
            assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            kind, node = node.func.id, node.args[0]
        text = ast.unparse(node) if self._in_text else ast.get_source_segment(self._source, node)
        local = sorted(self._use(node) & set(self._local))
        question = f"lambda {', '.join(local)}: (\n{text}\n)" if local else f"(\n{text}\n)"
        self._program_ran = True
        return call(ASK, ast.Constant(kind), ast.Constant(question), *[ast.Name(name, ast.Load()) for name in local])

    def _run(self, node: ast.stmt) -> ast.stmt:
        """The call that runs the statement in the program's process."""
        used = self._use(node)
        if used & set(self._local):
            raise UnsplittableError
        if node.col_offset or isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            return call_statement(RUN, ast.unparse(node))
        return call_statement(RUN, ast.get_source_segment(self._source, node) or "")

    def _use(self, node: ast.AST) -> set[str]:
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        self.needed |= used & (self._names.assigned | self._names.library.keys()) - set(self._local)
        return used

    def _decides(self, node: ast.expr) -> bool:
        """True if the question is more than the program's result for an input: it compares, or a module checks."""
        root: ast.AST = node
        while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(node, (ast.Compare, ast.BinOp)) or _compares(node):
            return True
        if not isinstance(root, ast.Name) or not isinstance(node, ast.Call):
            return False
        is_unknown_builtin = root.id in _ALL_BUILTINS and root.id not in BUILTINS
        is_check = isinstance(node.func, ast.Name) and root.id in ("isinstance", "issubclass")
        modules = self._names.foreign | MODULES.keys()
        others = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - modules
        is_checked_by_module = root.id in modules and any(map(self._is_name_inside, others))
        return is_checked_by_module or is_unknown_builtin or is_check

    # Expressions

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, ast.expr) or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return super().visit(node)
        library_name = self._library_name(node)
        if library_name is not None:
            return self._use_library(node, library_name)
        if self._is_inside(node):
            return self._ask(node)
        return super().visit(node)

    def _use_library(self, node: ast.expr, name: str) -> ast.expr:
        root = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            root, arguments = node.func.id, node
            self._visit_arguments(arguments)
            node.func = ast.Name(name, ast.Load())
        if root and root not in self._names.library:
            self.required.add(root)
        return node if isinstance(node, ast.Call) else ast.Name(name, ast.Load())

    def _visit_arguments(self, node: ast.Call) -> None:
        node.args = [self._expression(part) for part in node.args]
        for keyword in node.keywords:
            keyword.value = self._expression(keyword.value)

    def _expression(self, node: ast.expr) -> ast.expr:
        new = self.visit(node)
        assert isinstance(new, ast.expr)
        return new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_on_both_sides = node.id in self._names.inside & self._names.assigned and node.id not in self._local
        if isinstance(node.ctx, ast.Load) and is_on_both_sides and self._program_ran:
            return call(READ, ast.Constant(node.id), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Accept methods of plain values alone, which `_is_inside` lets through, where they are called."""
        if node.attr not in METHODS and node.attr not in ("args", "__name__"):
            raise UnsplittableError
        node.value = self._expression(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = node.func
        if isinstance(function, ast.Attribute) and self._library_name(function) is None:
            node.func = self.visit_Attribute(function)
        else:
            node.func = self._expression(function)
        self._visit_arguments(node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        # Positions within such a literal are not those of the source before Python 3.12.
        before, self._in_text = self._in_text, True
        self.generic_visit(node)
        self._in_text = before
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        arguments = node.args
        names = [argument.arg for argument in ast.walk(arguments) if isinstance(argument, ast.arg)]
        arguments.defaults = [self._expression(default) for default in arguments.defaults]
        self._program_ran = True
        with Bound(self._local, names):
            node.body = self._expression(node.body)
        return node

    def _comprehension(self, node: ast.AST) -> ast.AST:
        assert isinstance(node, _COMPREHENSIONS)
        names = [
            part.id
            for generator in node.generators
            for part in ast.walk(generator.target)
            if isinstance(part, ast.Name)
        ]
        self._program_ran = True
        with Bound(self._local, names):
            return self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        if node.target.id in self._names.inside:
            raise UnsplittableError
        node.value = self._expression(node.value)
        return node

    def _refuse(self, node: ast.AST) -> ast.AST:
        raise UnsplittableError

    visit_Await = visit_Yield = visit_YieldFrom = visit_Global = visit_Nonlocal = visit_Match = _refuse
    visit_AsyncFor = visit_AsyncWith = visit_Delete = visit_TryStar = visit_Return = _refuse


class Bound:
    """Names that are bound within a context."""

    def __init__(self, names: list[str], more: Sequence[str]) -> None:
        self._names, self._more = names, more

    def __enter__(self) -> None:
        self._names.extend(self._more)

    def __exit__(self, *_: object) -> None:
        del self._names[len(self._names) - len(self._more) :]


def _makes_instance(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _is_class(node.func.id)


def _is_class(name: str) -> bool:
    return name[:1].isupper() and name not in BARE_NAMES


def _compares(node: ast.AST) -> bool:
    """True if a comparison is part of the value itself, not of a lambda or of a comprehension's condition."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.Lambda):
            continue
        if isinstance(part, ast.comprehension):
            if _compares(part.iter):
                return True
        elif isinstance(part, ast.Compare) or _compares(part):
            return True
    return False


def target_names(targets: Iterable[ast.expr]) -> set[str]:
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def root_name(node: ast.expr) -> str | None:
    """The variable at the root of an expression: the expression is its value, a part of it, or a call of its method."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def binds_names(target: ast.expr) -> bool:
    return all(isinstance(part, (ast.Name, ast.Tuple, ast.List, ast.expr_context)) for part in ast.walk(target))


def _is_type_of(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def _is_text_of(node: ast.expr) -> bool:
    """`str(value)` or `repr(value)`: of a subclass of a plain type, only the program can compute it."""
    match node:
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[value], keywords=[]):
            return not isinstance(value, ast.Starred)
    return False


def call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def call_statement(name: str, text: str) -> ast.stmt:
    return ast.Expr(call(name, ast.Constant(text)))
