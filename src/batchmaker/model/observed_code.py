"""The code of a function with a question before each operation: are these operands known?

The source of a function is compiled once more, with calls of hooks around operands. `reads.Reads` answers them. A hook
is a global name that no program can have. Code without a source, or whose source has changed, has no such form.
"""

from __future__ import annotations
import __future__

import ast
import linecache
from collections.abc import Iterator
from copy import deepcopy
from functools import lru_cache, reduce
from operator import or_
from types import CodeType
from typing import Any, Final, final

MAX_CHARACTERS: Final = 1 << 20
"""The longest source that is read."""
_FUTURE: Final = reduce(or_, [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]) & ~0x10
"""The flags of code that `from __future__ import` sets, without one that today's compilers set for nested functions."""

_REFUSED: Final = {
    "With": "`with`", "AsyncWith": "`async with`", "AsyncFor": "`async for`", "Match": "`match`", "Import": "`import`",
    "ImportFrom": "`import`", "Global": "`global`", "Nonlocal": "`nonlocal`", "ClassDef": "a class of its own",
    "AsyncFunctionDef": "`async def`", "TypeAlias": "`type`", "Await": "`await`", "TemplateStr": "a template string",
}  # fmt: skip


def hook(name: str) -> str:
    """Return the global name of a hook."""
    return f".{name}"


def observed_code(code: CodeType) -> CodeType | None:
    """Return the code of a function in which each operation asks; None if its source is not known."""
    return _codes_around(code).get(code)


def read_source(function: Any) -> None:
    """Read the source of a function, so that `observed_code` need not. It takes some ten milliseconds, once."""
    code = getattr(function, "__code__", None)
    if type(code) is CodeType:
        observed_code(code)


@lru_cache(maxsize=512)
def _codes_around(code: CodeType) -> dict[CodeType, CodeType]:
    """Return the observed form of all code of the top-level definition that code is part of, itself included."""
    path, line = code.co_filename, code.co_firstlineno
    linecache.checkcache(path)
    try:
        statements = _statements("".join(linecache.getlines(path)))
        for statement in statements:
            if _first_line(statement) <= line <= (statement.end_lineno or statement.lineno):
                around = [one for one in statements if one is statement or not isinstance(one, _DEFINITIONS)]
                rewriter = _Rewriter()
                rewritten = rewriter.visit(ast.Module(deepcopy(around), []))
                if not all(node in rewriter.asking for node in ast.walk(rewritten) if isinstance(node, _FUNCTIONS)):
                    return {}
                plain, observed = [_compiled(tree, code) for tree in (ast.Module(around, []), rewritten)]
                return dict(zip(plain, observed, strict=True))
    except (SyntaxError, ValueError, RecursionError):  # the file has changed since, or is too deep
        pass
    return {}


_FUNCTIONS: Final = (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef)
_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""The statements beside a definition that do not decide how it is compiled. Imports do."""


@lru_cache(maxsize=16)
def _statements(source: str) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(source).body) if len(source) <= MAX_CHARACTERS else ()


def _first_line(statement: ast.stmt) -> int:
    first: int = min([statement.lineno, *[one.lineno for one in getattr(statement, "decorator_list", ())]])
    return first


def _compiled(module: ast.Module, code: CodeType) -> list[CodeType]:
    """Return the code of each function in a module, in order."""
    flags = code.co_flags & _FUTURE
    whole = compile(ast.fix_missing_locations(module), code.co_filename, "exec", flags, dont_inherit=True)
    return list(_nested(whole))


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


@final
class _Rewriter(ast.NodeTransformer):
    """Puts calls of hooks around operands. It adds and removes no function, so codes stay in order.

    asking: the functions of which each operation asks, now.
    """

    def __init__(self) -> None:
        self.asking: set[ast.AST] = set()
        self._classes: list[str] = []
        self._firsts: list[str | None] = []  # the first parameter of each function around

    # --- what may not happen ------------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> Any:
        why = _REFUSED.get(type(node).__name__) if self._firsts else None
        changed = super().visit(node)  # functions inside may be called from elsewhere
        if why is None:
            return changed
        return [_statement("refuse", node, why), changed] if isinstance(node, ast.stmt) else _refused(changed, why)

    def visit_MatchValue(self, node: ast.MatchValue) -> Any:
        return node

    def visit_MatchMapping(self, node: ast.MatchMapping) -> Any:
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> Any:
        return node

    # --- definitions -----------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self._classes.append(node.name)
        around, self._firsts = self._firsts, []
        self.generic_visit(node)
        self._firsts = around
        self._classes.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        is_refused = self._firsts and (node.decorator_list or getattr(node, "type_params", None))
        self._function(node)
        return [_statement("refuse", node, "a decorator"), node] if is_refused else node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return self._function(node)

    def _function(self, node: Any) -> Any:
        node.args = self.visit(node.args)
        node.decorator_list = [self.visit(one) for one in getattr(node, "decorator_list", ())]
        parameters = [*node.args.posonlyargs, *node.args.args]
        self._firsts.append(parameters[0].arg if parameters else None)
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            node.body = self._block(node.body)
        self._firsts.pop()
        self.asking.add(node)
        return node

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in statements:
            changed = self.visit(statement)
            made += changed if isinstance(changed, list) else [changed]
        return made

    # --- statements ------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> Any:
        value = self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                if len(node.targets) > 1:
                    value = _refused(value, "several targets")
                value = _call("unpacked", node.value, value, ast.Constant(_pattern(target)))
        node.value = value
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.target = self.visit(node.target)
        if node.value is not None:
            node.value = self.visit(node.value)
        return node  # annotations in functions are not evaluated

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if not self._firsts:
            return node
        operator, value = ast.Constant(type(node.op).__name__), self.visit(node.value)
        if isinstance(node.target, ast.Name):
            name = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            changed = _call("augmented", node, operator, name, value)
            return ast.copy_location(ast.Assign([node.target], changed), node)
        if isinstance(node.target, ast.Subscript):
            owner, index = self.visit(node.target.value), self.visit(node.target.slice)
            return ast.copy_location(ast.Expr(_call("augmented_item", node, owner, index, operator, value)), node)
        node.target, node.value = self.visit(node.target), value
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        node.iter = self._each(node)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        self.generic_visit(node)
        node.iter = self._each(node)
        node.ifs = [_call("truth", one, one) for one in node.ifs]
        return node

    def _each(self, node: ast.For | ast.comprehension) -> ast.expr:
        if isinstance(node.target, ast.Tuple | ast.List):
            return _call("each", node.iter, node.iter, ast.Constant(_pattern(node.target)))
        return _call("iterated", node.iter, node.iter)

    def visit_If(self, node: ast.If) -> Any:
        return self._tested(node)

    def visit_While(self, node: ast.While) -> Any:
        return self._tested(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self._tested(node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        return self._tested(node)

    def _tested(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = _call("truth", node.test, node.test)
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        self.generic_visit(node)
        if node.exc is not None:
            node.exc = _call("raised", node.exc, node.exc)
        return node

    # --- expressions -----------------------------------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if not isinstance(node.ctx, ast.Load):
            node.value = _refused(node.value, "sets an attribute")
            return node
        name = node.attr
        if self._classes and name.startswith("__") and not name.endswith("__"):
            name = f"_{self._classes[-1].lstrip('_')}{name}" if self._classes[-1].strip("_") else name
        return _call("attribute", node, self.visit(node.value), ast.Constant(name))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        value, index = self.visit(node.value), self.visit(node.slice)
        if isinstance(node.ctx, ast.Load):
            return _call("item", node, value, index)
        node.value, node.slice = _call("target", node.value, value), _call("key", node.slice, index)
        return node

    def visit_Slice(self, node: ast.Slice) -> Any:
        parts = [
            ast.Constant(None) if part is None else self.visit(part) for part in (node.lower, node.upper, node.step)
        ]
        return _call("slice", node, *parts)

    def visit_Starred(self, node: ast.Starred) -> Any:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = _call("iterated", node.value, node.value)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        if isinstance(function, ast.Name) and function.id == "super" and not node.args and not node.keywords:
            if not (self._classes and self._firsts and self._firsts[0]):
                return _refused(node, "super()")
            if len(self._firsts) > 1:  # `super` in a function inside a method
                return _refused(node, "super()")
            names = [ast.copy_location(ast.Name(name, ast.Load()), node) for name in ("__class__", self._firsts[0])]
            return _call("call", node, function, *names)
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg is None:
                keyword.value = _call("mapping", keyword.value, keyword.value)
        return ast.copy_location(ast.Call(_hook("call", node), [node.func, *node.args], node.keywords), node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        question = _ASKED.get(type(node.op), "known")
        node.left, node.right = _call(question, node.left, node.left), _call(question, node.right, node.right)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        node.operand = _call("truth" if isinstance(node.op, ast.Not) else "known", node.operand, node.operand)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        node.values = [*[_call("truth", one, one) for one in node.values[:-1]], node.values[-1]]
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            if len(node.ops) > 1:
                return _refused(node, "a chain of `is`")
            same = _call("same", node, node.left, node.comparators[0])
            is_same = isinstance(node.ops[0], ast.Is)
            return same if is_same else ast.copy_location(ast.UnaryOp(ast.Not(), same), node)
        node.left, *node.comparators = [_call("compared", one, one) for one in (node.left, *node.comparators)]
        return node

    def visit_Dict(self, node: ast.Dict) -> Any:
        keys: list[ast.expr | None] = []
        for place, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            changed = self.visit(value)
            node.values[place] = _call("mapping", value, changed) if key is None else changed
            keys.append(None if key is None else _call("key", key, self.visit(key)))
        node.keys = keys
        return node

    def visit_Set(self, node: ast.Set) -> Any:
        self.generic_visit(node)
        node.elts = [one if isinstance(one, ast.Starred) else _call("key", one, one) for one in node.elts]
        if any(isinstance(one, ast.Starred) for one in node.elts):
            return _refused(node, "a set of unpacked values")
        return node

    def visit_SetComp(self, node: ast.SetComp) -> Any:
        self.generic_visit(node)
        node.elt = _call("key", node.elt, node.elt)
        return node

    def visit_DictComp(self, node: ast.DictComp) -> Any:
        self.generic_visit(node)
        node.key = _call("key", node.key, node.key)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        self.generic_visit(node)
        node.value = _call("known", node.value, node.value)
        return node

    def visit_YieldFrom(self, node: ast.YieldFrom) -> Any:
        self.generic_visit(node)
        node.value = _call("iterated", node.value, node.value)
        return node


_ASKED: Final = {ast.Add: "joined", ast.Mult: "joined", ast.BitOr: "united"}
"""The hooks for operands of binary operations that are not arithmetic alone."""


def _pattern(target: ast.expr) -> Any:
    """Return how a value is unpacked: None for a name, a tuple of such, "*" for the rest, "?" if it is not known."""
    if isinstance(target, ast.Starred):
        return "*" if isinstance(target.value, ast.Name) else "?"
    return tuple([_pattern(one) for one in target.elts]) if isinstance(target, ast.Tuple | ast.List) else None


def _hook(name: str, at: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Name(hook(name), ast.Load()), at)


def _call(name: str, at: Any, *arguments: Any) -> ast.expr:
    placed = [ast.copy_location(one, at) if isinstance(one, ast.Constant) else one for one in arguments]
    return ast.copy_location(ast.Call(_hook(name, at), placed, []), at)


def _statement(name: str, at: Any, why: str) -> ast.stmt:
    return ast.copy_location(ast.Expr(_call(name, at, ast.Constant(why))), at)


def _refused(node: Any, why: str) -> ast.expr:
    """Return an expression that refuses before the node is evaluated."""
    return ast.copy_location(ast.BoolOp(ast.Or(), [_call("refuse", node, ast.Constant(why)), node]), node)
