"""Mutants of Triton kernels: one changed place in the body of a `@triton.jit` function.

Left alone are casts, because what is widened mostly meets fp32 anyway and no test has offsets above 2^31; what runs
compiled only or interpreted only; and what only decides about speed (compiler options, hints).
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from helpers.mutant import Edit, Mutant, digest_of, mutants_from

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
# Both operands alone as well: a mask forgotten, a factor forgotten.
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.LShift: ">>", ast.RShift: "<<"}
ALONE = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor)
OTHER_CALLS = {
    "tl.maximum": "tl.minimum",
    "tl.minimum": "tl.maximum",
    "tl.max": "tl.min",
    "tl.min": "tl.max",
    "tl.sum": "tl.max",
    "tl.exp": "tl.exp2",
    "tl.exp2": "tl.exp",
    "tl.log": "tl.log2",
    "tl.log2": "tl.log",
}
# Calls that one of their arguments stands in for.
UNWRAPPED = {"tl.sqrt_rn", "tl.sqrt", "tl.rsqrt", "tl.abs", "tl.erf", "round_to"}
SPEED_ONLY = {"tl.multiple_of", "tl.max_contiguous", "tl.max_constancy", "tl.assume", "tl.static_assert"}
# Arguments that are shapes, lengths of ranges or axes: another value does not run at all.
SHAPES = {"tl.arange", "tl.zeros", "tl.full", "tl.reshape", "tl.broadcast_to", "tl.permute", "tl.trans"}
KEYWORDS_LEFT_ALONE = {
    "axis",
    "dtype",
    "num_stages",
    "warp_specialize",
    "disable_licm",
    "eviction_policy",
    "cache_modifier",
    "bitcast",
}


def jit_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions whose decorator is `triton.jit`, called or not."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).partition("(")[0] == "triton.jit" for d in node.decorator_list)
    ]


def mutants_of(path: Path, file: str) -> list[Mutant]:
    """Every mutant of one kernel file, in the order of the source."""
    source = path.read_text()
    return list(mutants_from(file, path, source, _edits(source)))


def _edits(source: str) -> Iterator[Edit]:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for function in jit_functions(ast.parse(source)):
        digest = digest_of(ast.unparse(function))
        for node, replacement in _replacements(function.body):
            start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
            yield Edit(function.name, digest, start, end, replacement)


def install(mutant: Mutant, folder: Path, files: Iterable[str]) -> None:
    """Has this process use a mutant, written into `folder`; `files` are all, each after those that it imports."""
    import bertfast.kernels

    (folder / mutant.path.name).write_text(mutant.source)
    bertfast.kernels.__path__.insert(0, str(folder))
    for name in files:
        # What collecting the tests has imported.
        module = sys.modules.get(f"bertfast.kernels.{name}")
        if module is not None:
            importlib.reload(module)


def _replacements(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, str]]:
    """(node, source to put in its place) for every mutation of some statements."""
    for statement in body:
        if isinstance(statement, ast.If) and "INTERPRETED" in ast.unparse(statement.test):
            if ast.unparse(statement.test) == "INTERPRETED" and isinstance(statement.body[-1], ast.Return):
                yield from _replacements(statement.orelse)
                return
            yield from _replacements(statement.orelse)
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        yield from _of_statement(statement)
        for name, value in ast.iter_fields(statement):
            if name in ("body", "orelse") and isinstance(value, list):
                yield from _replacements(value)
            elif isinstance(value, ast.expr) and not (name == "test" and _is_static(value)):
                yield from _of_expression(value)


def _is_static(test: ast.expr) -> bool:
    """Whether a pointer is there, or a flag: negated, nothing runs."""
    is_none = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot))
    return isinstance(test, ast.Name) or is_none


def _of_statement(statement: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(statement, ast.AugAssign):
        target, value = ast.unparse(statement.target), ast.unparse(statement.value)
        yield statement, f"{target} = {value}"
        if isinstance(statement.op, ast.Add):
            yield statement, f"{target} -= {value}"
    elif isinstance(statement, ast.If):
        # A branch that gives a name its only value or a function its result cannot be left out.
        if not any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            yield statement.test, "False"
    elif isinstance(statement, ast.Expr) and _called(statement.value) == "tl.store":
        yield statement, "pass"


def _called(node: ast.AST) -> str | None:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else None


def _call(node: ast.Call, **changes) -> str:
    return ast.unparse(ast.Call(**{"func": node.func, "args": node.args, "keywords": node.keywords, **changes}))


def _of_expression(node: ast.expr) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
    elif isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if type(node.op) in OPERATORS:
            yield node, f"({left} {OPERATORS[type(node.op)]} {right})"
        elif type(node.op) in ALONE:
            yield node, f"({left})"
            if isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Mult)):
                yield node, f"({right})"
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({word.join(map(ast.unparse, node.values))})"
    elif isinstance(node, ast.IfExp):
        yield node, f"({ast.unparse(node.orelse)} if {ast.unparse(node.test)} else {ast.unparse(node.body)})"
    elif isinstance(node, ast.Constant):
        if type(node.value) is int:
            yield node, str(node.value + 1)
        elif type(node.value) is float:
            yield node, "1.0" if node.value == 0.0 else repr(node.value * 1.01)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    yield from _of_children(node)


def _of_call(node: ast.Call) -> Iterator[tuple[ast.AST, str]]:
    name, arguments = _called(node), list(map(ast.unparse, node.args))
    if name in OTHER_CALLS:
        yield node, _call(node, func=ast.parse(OTHER_CALLS[name], mode="eval").body)
    elif name in UNWRAPPED:
        yield node, f"({arguments[0]})"
    elif name == "tl.where":
        yield node, f"({arguments[1]})"
        yield node, f"({arguments[2]})"
    elif name == "tl.cdiv":
        yield node, f"({arguments[0]} // {arguments[1]})"
    elif name in ("tl.load", "tl.store") and any(k.arg == "mask" for k in node.keywords):
        yield node, _call(node, keywords=[k for k in node.keywords if k.arg not in ("mask", "other")])
    elif name in ("tl.interleave", "tl.join"):
        yield node, _call(node, args=node.args[::-1])
    elif name in ("range", "tl.range", "tl.static_range") and len(arguments) > 1:
        step = arguments[2] if len(arguments) > 2 else "1"
        changed = ast.parse(f"({arguments[1]}) - {step}", mode="eval").body
        yield node, _call(node, args=[node.args[0], changed, *node.args[2:]])
    elif name == "dot" and not arguments[2].startswith(("tl.zeros(", "zeros")):
        nothing = ast.parse(f"{arguments[2]} * 0.0", mode="eval").body
        yield node, _call(node, args=[*node.args[:2], nothing, *node.args[3:]])
    elif name == "keep_mask":
        # By a word of four: the column is a multiple of that.
        yield (
            node,
            _call(node, args=[*node.args[:2], ast.parse(f"{arguments[2]} + 4", mode="eval").body, *node.args[3:]]),
        )


def _of_children(node: ast.expr) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Call):
        name = _called(node)
        if name in SPEED_ONLY:
            return
        yield from _of_expression(node.func)
        # What is broadcast is mutated, what it is broadcast to is not.
        arguments = node.args[:1] if name in SHAPES - {"tl.arange", "tl.zeros", "tl.full"} else node.args
        for argument in [] if name in ("tl.arange", "tl.zeros", "tl.full") else arguments:
            if not (name == "keep_mask" and isinstance(argument, ast.Constant)):
                yield from _of_expression(argument)
        for keyword in node.keywords:
            if keyword.arg == "other" and ast.unparse(keyword.value) == "0.0":
                # NaN passes where any number is multiplied by 0.
                yield keyword.value, 'float("nan")'
            elif keyword.arg not in KEYWORDS_LEFT_ALONE:
                yield from _of_expression(keyword.value)
    elif isinstance(node, ast.Subscript):
        yield from _of_expression(node.value)
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _of_expression(child)
