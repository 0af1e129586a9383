"""Mutants of a Python file: for each place where a small change is possible, the tree with that change."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change: at a node of the file, counted as `ast.walk` does, the `variant` of what is possible there."""

    line: int
    function: str  # the outermost, or an empty string
    node: int
    variant: int
    what: str  # before -> after
    number: int  # of this change in the function: the same one may be possible more than once

    @property
    def name(self) -> str:
        """The same as long as the function has the same such changes."""
        return f"{self.function or 'the module'}: {self.what}" + f" ({self.number})" * (self.number > 1)


def variants(node: ast.AST) -> list[ast.AST]:
    """The changed nodes that can stand in a node's place."""
    found = []
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            if new := COMPARED.get(type(operator)):
                changed = copy.deepcopy(node)
                changed.ops[at] = new()
                found.append(changed)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in COMPUTED and not has_text(node):
        found.append(replaced(node, op=COMPUTED[type(node.op)]()))
    elif isinstance(node, ast.BoolOp):
        found.append(replaced(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        found.append(copy.deepcopy(node.operand))
    elif isinstance(node, ast.Constant) and not isinstance(node.value, (str, bytes, type(None), type(...))):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        found.append(ast.Constant(value))
    elif isinstance(node, ast.IfExp):
        found += [copy.deepcopy(node.body), copy.deepcopy(node.orelse)]
    elif isinstance(node, ast.If):
        found += [replaced(node, test=ast.Constant(value)) for value in (True, False)]
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            found.append(replaced(node, func=ast.Name(NAMES[node.func.id], ast.Load())))
        for at in range(len(node.keywords)):
            found.append(replaced(node, keywords=node.keywords[:at] + node.keywords[at + 1 :]))
    elif isinstance(node, (ast.Assign, ast.Expr)) and isinstance(node.value, ast.Call):
        if isinstance(node, ast.Expr):
            found.append(ast.Pass())
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        found.append(ast.Return(ast.Constant(None)))
    return found


def has_text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether it joins texts or paths, which no other operator takes: such a mutant is noticed by all."""
    if isinstance(node, ast.AugAssign):
        return False
    sides = (node.left, node.right)
    texts = any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)
    return texts or (isinstance(node.op, ast.Div) and "folder" in ast.unparse(node.left))


def replaced(node: ast.AST, **fields) -> ast.AST:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def skipped(tree: ast.AST) -> set[int]:
    """The nodes that no test is about: annotations, docstrings, messages of errors, decorators."""
    found = set()
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, FUNCTIONS):
            parts = [
                *node.decorator_list,
                node.returns,
                *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg)),
            ]
        elif isinstance(node, ast.ClassDef):
            parts = node.decorator_list
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, (ast.Raise, ast.JoinedStr)):
            parts = [node]
        found.update(id(inner) for part in parts if part is not None for inner in ast.walk(part))
    return found


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, by name; not those inside of them."""
    found = [(node.name, node) for node in tree.body if isinstance(node, FUNCTIONS)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return found + [
        (f"{one.name}.{node.name}", node) for one in classes for node in one.body if isinstance(node, FUNCTIONS)
    ]


def places(tree: ast.Module) -> Iterator[tuple[int, ast.AST, str]]:
    """(number, node, function that it is in) of all nodes that may be changed."""
    left_out = skipped(tree)
    inside = {id(node): name for name, function in functions(tree) for node in ast.walk(function)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in left_out:
            yield number, node, inside.get(id(node), "")


def mutants(source: str) -> list[Mutant]:
    found, seen = [], {}
    for number, node, function in places(ast.parse(source)):
        for variant, changed in enumerate(variants(node)):
            what = said(node, changed)
            count = seen[function, what] = seen.get((function, what), 0) + 1
            found.append(Mutant(node.lineno, function, number, variant, what, count))
    return found


def said(node: ast.AST, changed: ast.AST) -> str:
    """The change in words: of a call, which may be long, the argument that is left out."""
    if isinstance(node, ast.Call) and len(changed.keywords) < len(node.keywords):
        left_out = next(keyword for keyword in node.keywords if keyword not in changed.keywords)
        return f"{shown(node.func)}(...) without {shown(left_out)}"
    return f"{shown(node)} -> {shown(changed)}"


def shown(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split("\n")[0]
    return text if len(text) < 90 else text[:87] + "..."


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The file's tree with that change."""
    tree = ast.parse(source)
    target = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.node)
    new = ast.copy_location(variants(target)[mutant.variant], target)

    class Change(ast.NodeTransformer):
        def visit(self, node):
            return new if node is target else self.generic_visit(node)

    return ast.fix_missing_locations(Change().visit(tree))
