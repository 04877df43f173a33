"""Small changes of a Python source that its tests should notice.

Owns the list of mutants of one file. Works on the syntax tree, but replaces only the text of the node that changes, so
that the difference is one expression. Docstrings, annotations, decorators, class options, log calls and the texts of
raised errors stay: changing them does not change behaviour.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_SILENT = re.compile(r"_log\.|logging\.|warnings\.")


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    begin: int
    """Offset in the source, in characters, where the replaced text begins."""
    end: int
    """Offset where the replaced text ends."""
    new: str

    def apply(self, source: str) -> str:
        """The changed source."""
        return source[: self.begin] + self.new + source[self.end :]

    def diff(self, source: str) -> str:
        """The change as a unified diff without context."""
        changed = self.apply(source)
        lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
        return "\n".join(
            [f"{self.path}:{self.line}", *[line for line in lines if not re.match(r"---|\+\+\+|@@", line)]]
        )


def mutants(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file that still compiles, in the order of the source."""
    found = _Finder(path, source).found
    return sorted((each for each in set(found) if _compiles(each.apply(source))), key=lambda m: (m.begin, m.end, m.new))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder:
    """Walks one tree and collects its mutants in `found`."""

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._source = source
        lines = source.splitlines(keepends=True)
        self._line_starts = [0]
        for line in lines:
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._lines = [line.encode() for line in lines]
        self.found: list[Mutant] = []
        self._visit(ast.parse(source))

    def _offset(self, line: int, column: int) -> int:
        # The tree counts columns in bytes of UTF-8.
        return self._line_starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _bounds(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        begin, end = self._bounds(node)
        self.found.append(Mutant(self._path, node.lineno, begin, end, new))

    def _text(self, node: ast.expr | ast.stmt) -> str:
        begin, end = self._bounds(node)
        return self._source[begin:end]

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator that stands between two operands."""
        begin, end = self._bounds(left)[1], self._bounds(right)[0]
        match = re.search(old, self._source[begin:end])
        if match is not None:
            self.found.append(Mutant(self._path, left.lineno, begin + match.start(), begin + match.end(), new))

    def _visit(self, node: ast.AST) -> None:
        for child in _mutable_children(node):
            if not _is_inert(child):
                self._mutate(child)
                self._visit(child)

    def _mutate(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                    for new in _COMPARISONS[type(op)]:
                        self._between(left, right, r"not\s+in|is\s+not|is|in|[<>=!]=|[<>]", new)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                self._between(node.left, node.right, r"\*\*|//|<<|>>|[-+*/%&|]", _OPERATORS[type(node.op)])
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self._between(left, right, old, new)
            case ast.UnaryOp(op=ast.Not() | ast.USub()) if not isinstance(node.operand, ast.Constant):
                self._replace(node, self._text(node.operand))
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                self._replace(node.func, _CALLS[name])
            case ast.Call(func=ast.Attribute(attr=name)) if (
                name in _CALLS and "." not in self._text(node.func)[: -len(name) - 1]
            ):
                self._replace(node.func, f"{self._text(node.func)[: -len(name)]}{_CALLS[name]}")
            case ast.If() | ast.While() | ast.IfExp():
                if not isinstance(node.test, ast.Compare) and not _is_not(node.test):  # those have mutants already
                    self._replace(node.test, f"(not ({self._text(node.test)}))")
            case ast.Constant():
                self._mutate_constant(node)
            case ast.AugAssign():
                self._replace(node, "pass")
                old, new = type(node.op), _OPERATORS.get(type(node.op))
                if new is not None and old in (ast.Add, ast.Sub, ast.Mult, ast.Div):
                    self._between(node.target, node.value, r"[-+*/]", new)
            case ast.Expr(value=ast.Call()) | ast.Raise():
                self._replace(node, "pass")
            case ast.Delete() if not all(isinstance(target, ast.Name) for target in node.targets):
                self._replace(node, "pass")  # deleting a name only says that it is not used
            case ast.Break():
                self._replace(node, "continue")
            case ast.Continue():
                self._replace(node, "break")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                self._replace(value, "None")

    def _mutate_constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            self._replace(node, str(value + 1))
            if value > 0:
                self._replace(node, str(value - 1))
        elif isinstance(value, float):
            self._replace(node, repr(value * 2 if value else 1.0))
            if value:
                self._replace(node, repr(value / 2))
        elif isinstance(value, str) and value and not self._text(node).startswith(("f", "r")):
            self._replace(node, repr(f"{value}~"))


def _mutable_children(node: ast.AST) -> Iterable[ast.AST]:
    """Children whose change would change behaviour."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [*node.args.defaults, *[default for default in node.args.kw_defaults if default], *node.body]
        case ast.ClassDef() | ast.Module():
            return node.body
        case ast.AnnAssign():
            return [node.value] if node.value is not None else []
        case ast.Assign():
            return [] if _is_type(node.value) else [*node.targets, node.value]
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return []
        case ast.Call():
            # `strict` of a zip and the like guard against bugs elsewhere.
            keywords = [each.value for each in node.keywords if each.arg != "strict"]
            return [] if _SILENT.match(ast.unparse(node.func)) else [node.func, *node.args, *keywords]
        case _:
            return list(ast.iter_child_nodes(node))


def _is_inert(node: ast.AST) -> bool:
    """Whether a statement is a docstring, an attribute docstring, a log call, `__all__` or an import of types."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return _SILENT.match(ast.unparse(function)) is not None
        case ast.If(test=test):
            return ast.unparse(test) == "TYPE_CHECKING"
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return False


def _is_not(value: ast.expr) -> bool:
    return isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)


def _is_type(value: ast.expr) -> bool:
    """Whether an assigned value is a type alias, such as a Literal."""
    return isinstance(value, ast.Subscript) and bool(
        re.match(r"(Literal|Callable|tuple|dict|list)\[", ast.unparse(value))
    )
