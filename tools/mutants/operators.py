"""Which small errors can be put into a source file. Nothing is run here.

A mutant is an edit of the text, so that the rest of the file keeps its lines. Left out is what nobody would miss or
every run would see: docstrings, annotations, the text of errors, logging, imports, decorators, `assert`, and keyword
arguments that must be given (their loss is a TypeError, and mypy's to find).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMPARISONS = {
    **{ast.Lt: ("<", ["<=", ">="]), ast.LtE: ("<=", ["<", ">"]), ast.Gt: (">", [">=", "<="])},
    **{ast.GtE: (">=", [">", "<"]), ast.Eq: ("==", ["!="]), ast.NotEq: ("!=", ["=="])},
    **{ast.Is: ("is", ["is not"]), ast.IsNot: ("is not", ["is"]), ast.In: ("in", ["not in"])},
    ast.NotIn: ("not in", ["in"]),
}
ARITHMETIC = {
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*")},
    **{ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<")},
    **{ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&")},
}
OPPOSITES = {"min": "max", "max": "min", "all": "any", "any": "all"}
# What only a person reads, and what has no effect on a result.
TALK = re.compile(r"(^|[._])(print|log|warn\w*|info|debug|progress|tell|say|cast|[A-Z]\w*(Error|Warning))$")
IDLE_KEYWORDS = {"encoding", "strict", "stacklevel", "daemon", "doc", "desc", "thread_name_prefix", "repair", "where"}
# How much is remembered or done at a time; what a library prints; whether what cannot be cleaned up ends a run.
IDLE_KEYWORDS |= {"maxsize", "max_workers", "verbose", "ignore_errors"}
SYMMETRIC = {"isinstance", "min", "max"}
KEYED = {"get", "pop", "setdefault"}
# The names of scratch files are random: how many letters of them are taken does not matter.
# A type that is named by a Literal is an annotation.
IDLE = re.compile(r"uuid4|^\w+ = Literal\[|__slots__|__all__|__name__ ==|TYPE_CHECKING|filterwarnings")


@dataclass(frozen=True, slots=True)
class Mutant:
    """Bytes `start` to `end` of a file are replaced by `text`.

    `lines` are those of which one is run when it is: of the statement or its head, or of the whole function for the
    default of an argument. `names` are what a statement outside of functions defines: whoever uses them runs it.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    text: str
    source: str
    lines: tuple[int, int]
    names: tuple[str, ...] = ()

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def required_keywords(sources: Mapping[str, str]) -> set[tuple[str, str]]:
    """(function or class, argument) of every argument that has no default, over all files."""

    def without_default(node: ast.FunctionDef) -> list[str]:
        named = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return [arg.arg for arg in [*named, *(arg for arg, value in only if value is None)]]

    found = set()
    for node in (node for text in sources.values() for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.FunctionDef):
            found |= {(node.name, name) for name in without_default(node)}
        for item in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(item, ast.AnnAssign) and item.value is None and isinstance(item.target, ast.Name):
                found.add((node.name, item.target.id))
            elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
                found |= {(node.name, name) for name in without_default(item)}
    return found


def candidates(file: str, text: str, required: set[tuple[str, str]] | None = None) -> list[Mutant]:
    """All mutants of a file, each text once; some are no Python, which takes long to see of so many."""
    source = text.encode()
    finder = _Finder(file, source, required or set())
    finder.statements(ast.parse(text).body, scope=None)
    return list({mutant.applied(source): mutant for mutant in finder.found}.values())


def is_python(mutant: Mutant, text: str) -> bool:
    """Whether a file with the mutant can be parsed."""
    try:
        ast.parse(mutant.applied(text.encode()))
    except SyntaxError:
        return False
    return True


def mutants(file: str, text: str) -> list[Mutant]:
    """All mutants of a file that are Python."""
    return [mutant for mutant in candidates(file, text) if is_python(mutant, text)]


class _Finder:
    def __init__(self, file: str, source: bytes, required: set[tuple[str, str]]) -> None:
        self.file, self.source, self.required = file, source, required
        self.starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        self.found: list[Mutant] = []
        self.at: dict[str, object] = {}

    def begin(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def add(self, kind: str, start: int, end: int, text: str) -> None:
        line = self.source.count(b"\n", 0, start) + 1
        shown = self.source[self.starts[line - 1] :].split(b"\n", 1)[0].decode().strip()
        old = self.source[start:end].decode()
        if old != text and not IDLE.search(shown):
            self.found.append(Mutant(self.file, line, kind, start, end, old, text, shown, **self.at))  # type: ignore[arg-type]

    def replace(self, kind: str, node: ast.AST, text: str) -> None:
        self.add(kind, self.begin(node), self.end(node), text)

    def text(self, node: ast.AST) -> str:
        return self.source[self.begin(node) : self.end(node)].decode()

    # --- statements -------------------------------------------------------------------------------------------------

    def statements(self, body: list[ast.stmt], scope: ast.FunctionDef | None) -> None:
        for node in body:
            self.statement(node, scope)

    def statement(self, node: ast.stmt, scope: ast.FunctionDef | None) -> None:
        inner = getattr(node, "body", None)
        last = (inner[0].lineno - 1 if inner[0].lineno > node.lineno else node.lineno) if inner else node.end_lineno
        names = () if scope else _defined(node)
        self.at = {"lines": (node.lineno, max(node.lineno, int(last or 0))), "names": names}
        if isinstance(node, ast.FunctionDef):
            if all(isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in node.body):
                return None  # of a protocol
            self.at = {"lines": (node.body[0].lineno, node.end_lineno), "names": ()}
            for value in [*node.args.defaults, *node.args.kw_defaults]:
                self.expression(value)
            return self.statements(node.body, scope or node)
        if isinstance(node, ast.ClassDef):
            return self.statements(node.body, scope)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal):
            return None
        if isinstance(node, ast.If | ast.While) and "TYPE_CHECKING" in self.text(node.test):
            return None
        self.removed(node, scope)
        if isinstance(node, ast.Raise):
            return None
        if isinstance(node, ast.If):
            self.condition(node.test)
        if isinstance(node, ast.While):
            self.replace("condition", node.test, "False")
        if isinstance(node, ast.AugAssign):
            self.augmented(node)
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and field != "annotation":
                self.expression(value)
        for item in getattr(node, "items", []):
            self.expression(item.context_expr)
        self.statements(getattr(node, "body", []), scope)
        self.statements(getattr(node, "orelse", []), scope)
        for handler in getattr(node, "handlers", []):
            if handler.type is not None:
                self.at = {"lines": (handler.lineno, handler.lineno), "names": names}
                self.replace("except", handler.type, "()")
            self.statements(handler.body, scope)
        self.statements(getattr(node, "finalbody", []), scope)
        for case in getattr(node, "cases", []):
            self.statements(case.body, scope)
        return None

    def removed(self, node: ast.stmt, scope: ast.FunctionDef | None) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        fresh = scope is not None and scope.name in ("__init__", "__post_init__")
        if (
            (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not self.is_talk(node.value))
            or isinstance(node, ast.Raise | ast.Delete | ast.Continue | ast.Break | ast.AugAssign)
            or isinstance(target, ast.Subscript)
            or (isinstance(target, ast.Attribute) and not fresh)
        ):
            self.replace("removed statement", node, "pass")

    def augmented(self, node: ast.AugAssign) -> None:
        sign, other = ARITHMETIC.get(type(node.op), ("", ""))
        if sign:
            self.between("augmented", node.target, node.value, f"{sign}=", "=")
            self.between("augmented", node.target, node.value, f"{sign}=", f"{other}=")

    # --- expressions ------------------------------------------------------------------------------------------------

    def is_talk(self, call: ast.Call) -> bool:
        return bool(TALK.search(self.text(call.func)))

    def between(self, kind: str, left: ast.AST, right: ast.AST, sign: str, other: str) -> None:
        """Replace the operator that stands between two nodes, where there may be brackets and line ends too."""
        pattern = re.escape(sign).replace(r"\ ", r"\s+")
        pattern = rf"\b{pattern}\b" if sign[0].isalpha() else pattern
        match = re.search(pattern.encode(), self.source[self.end(left) : self.begin(right)])
        if match:
            self.add(kind, self.end(left) + match.start(), self.end(left) + match.end(), other)

    def condition(self, node: ast.expr) -> None:
        self.replace("condition", node, "True")
        self.replace("condition", node, "False")

    def expression(self, node: ast.expr | None) -> None:
        if node is None or isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and self.is_talk(node)):
            return
        method = getattr(self, f"on_{type(node).__name__}", None)
        if method is not None:
            method(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword):
                if child.arg not in IDLE_KEYWORDS:
                    self.expression(child.value)
            elif isinstance(child, ast.comprehension):
                self.expression(child.iter)
                for test in child.ifs:
                    self.condition(test)
                    self.expression(test)
            elif isinstance(child, ast.expr) and not _is_type_test(node, child):
                self.expression(child)

    def on_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            sign, others = COMPARISONS[type(operator)]
            for other in others:
                self.between("comparison", left, right, sign, other)
            for side in (left, right):
                self.key(side)

    def on_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        text = any(isinstance(one, ast.JoinedStr) or isinstance(getattr(one, "value", 0), str) for one in sides)
        if type(node.op) in ARITHMETIC and not text:
            self.between("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])

    def on_BoolOp(self, node: ast.BoolOp) -> None:
        sign, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("boolean", left, right, sign, other)
            self.add("operand", self.begin(left), self.begin(right), "")
        self.add("operand", self.end(node.values[-2]), self.end(node.values[-1]), "")

    def on_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.add("unary", self.begin(node), self.begin(node.operand), "")

    def on_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)

    def on_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.replace("constant", node, repr(node.value + 1))
            self.replace("constant", node, repr(node.value - 1) if node.value else "-1")

    def key(self, node: ast.expr) -> None:
        """A string by which something is looked up, or with which something is compared."""
        for one in node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                self.replace("key", one, repr(one.value + "_"))

    def on_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            if key is not None:
                self.key(key)

    def on_Subscript(self, node: ast.Subscript) -> None:
        self.key(node.slice)

    def on_Slice(self, node: ast.Slice) -> None:
        for part in (node.lower, node.upper):
            if part is not None:
                self.replace("slice", part, "")

    def on_Call(self, node: ast.Call) -> None:
        name = self.text(node.func).rpartition(".")[2]
        if isinstance(node.func, ast.Name) and name in OPPOSITES:
            self.replace("opposite", node.func, OPPOSITES[name])
        if name in KEYED and node.args:
            self.key(node.args[0])
        first = node.args[:2]
        if len(first) == 2 and not any(isinstance(one, ast.Starred) for one in first) and name not in SYMMETRIC:
            one, two = first
            middle = self.source[self.end(one) : self.begin(two)].decode()
            self.add("swapped", self.begin(one), self.end(two), self.text(two) + middle + self.text(one))
        arguments: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=self.begin)
        for index, keyword in enumerate(arguments):
            if not isinstance(keyword, ast.keyword) or keyword.arg is None or keyword.arg in IDLE_KEYWORDS:
                continue
            if (name, keyword.arg) in self.required:
                continue
            if index:
                self.add("removed keyword", self.end(arguments[index - 1]), self.end(keyword), "")
            elif len(arguments) > 1:
                self.add("removed keyword", self.begin(keyword), self.begin(arguments[1]), "")
            else:
                self.replace("removed keyword", keyword, "")


def _is_type_test(node: ast.expr, child: ast.expr) -> bool:
    """The types of an `isinstance`: another operator between them is a TypeError."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and child is node.args[-1]


def _defined(node: ast.stmt) -> tuple[str, ...]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return tuple(one.id for target in targets if target for one in ast.walk(target) if isinstance(one, ast.Name))


def all_candidates(sources: Mapping[str, str], rooms: tuple[str, ...]) -> Iterator[Mutant]:
    """Of every file in the rooms; `sources` are all files by their path under `src/finray`."""
    required = required_keywords(sources)
    for file in sorted(sources):
        if file.startswith(tuple(f"{room}/" for room in rooms)):
            yield from candidates(file, sources[file], required)
