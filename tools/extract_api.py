"""Signatures of NxD and NxDI, read from their sources: `python tools/extract_api.py NXD_SRC:NXDI_SRC RELEASE`.

Rewrites RELEASE's part of api.json: the modules that nxd_cpu has or that the model's package imports.

    {"releases": [...], "modules": {module: {name: signature, or {signature: [releases]} where they differ}}}

name: "function", "Class", "Class.method" (inherited ones too), "Class.MEMBER" of an enum, "NeuronConfig.attribute".
signature: parameters and defaults without annotations, with "static", "class" or "property" before them; "class"; an
enum's value or an attribute's default after "="; "@module" for what is imported from there; "" for anything else.
Private names are left out, but for the private methods of the classes that the model's package imports.
"""

import ast
import json
import sys
from collections import ChainMap
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "test" / "conformance" / "api.json"
NXD_CPU = ROOT / "contrib" / "nxd_cpu"
PACKAGE = ROOT / "contrib" / "models" / "SmolLM3-3B" / "src"
LIBRARY = "neuronx_distributed"  # the other package's name starts with it
DECORATIONS = {"staticmethod": "static ", "classmethod": "class ", "property": "property "}


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def modules_in(folder: Path) -> dict[str, Path]:
    """Dotted name -> file, of all modules below a source folder."""
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


def statements(body):
    """The statements that run when a module is imported, `if` and `try` opened."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
                yield from statements(getattr(statement, part, []))


def library_imports(nodes, module: str = "", is_package: bool = False):
    """(local name, module, name) of every `from neuronx... import ...`; relative ones resolved against `module`."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                source = ".".join([*above, source] if source else above)
            if source.startswith(LIBRARY):
                yield from ((alias.asname or alias.name, source, alias.name) for alias in node.names)


def signature(function: ast.FunctionDef) -> str:
    kinds = [DECORATIONS.get(ast.unparse(decorator), "") for decorator in function.decorator_list]
    return "".join(kinds) + f"({_plain(function.args)})"


def _plain(arguments: ast.arguments) -> str:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [(argument, argument.annotation) for argument in every if argument]
    for argument, _ in annotations:
        argument.annotation = None
    text = ast.unparse(arguments)
    for argument, annotation in annotations:
        argument.annotation = annotation
    return text


def members(cls: ast.ClassDef) -> dict[str, str]:
    """What a class itself defines."""
    signatures = {}
    is_enum = any("Enum" in ast.unparse(base) for base in cls.bases)
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list)
    fields = []
    for statement in cls.body:
        if isinstance(statement, ast.FunctionDef):
            signatures.setdefault(statement.name, signature(statement))
            if cls.name == "NeuronConfig" and statement.name == "__init__":
                signatures.update(attributes(statement))
            if statement.name == "__getattribute__":  # attributes that it answers by name
                compared = (node for node in ast.walk(statement) if isinstance(node, ast.Compare))
                constants = (c.value for node in compared for c in node.comparators if isinstance(c, ast.Constant))
                signatures.update({value: "" for value in constants if isinstance(value, str)})
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            signatures[statement.targets[0].id] = f"= {ast.unparse(statement.value)}" if is_enum else ""
        elif isinstance(statement, ast.AnnAssign) and is_dataclass:
            default = f"={ast.unparse(statement.value)}" if statement.value else ""
            fields.append(ast.unparse(statement.target) + default)
    if is_dataclass:
        signatures.setdefault("__init__", f"({', '.join(['self', *fields])})")
    return signatures


def attributes(init: ast.FunctionDef) -> dict[str, str]:
    """NeuronConfig declares its attributes by `self.name = kwargs.pop("name", default)`."""
    defaults = {}
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("self."):
            name, value = ast.unparse(node.targets[0]).removeprefix("self."), node.value
            is_popped = isinstance(value, ast.Call) and ast.unparse(value.func) == "kwargs.pop" and len(value.args) == 2
            defaults.setdefault(name, f"= {ast.unparse(value.args[1])}" if is_popped else "")
    return defaults


class Sources:
    """The sources of one release."""

    def __init__(self, *folders: Path):
        self.files = dict(ChainMap(*map(modules_in, folders)))
        self.scopes = {}

    def scope(self, module):
        """Name -> its definition, or (module, name) if imported from the library."""
        if module not in self.scopes:
            self.scopes[module] = self._scope(module)
        return self.scopes[module]

    def _scope(self, module):
        file = self.files[module]
        body = list(statements(parse(file).body))
        imported = library_imports(body, module, file.name == "__init__.py")
        definitions = {local: (source, name) for local, source, name in imported}
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                definitions[statement.name] = statement
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                definitions.update({target.id: statement for target in targets if isinstance(target, ast.Name)})
        return definitions

    def inherited(self, module, cls):
        texts = {}
        for base in reversed(cls.bases):
            definition = self.definition(module, ast.unparse(base))
            if definition and isinstance(definition[1], ast.ClassDef):
                texts.update(self.inherited(*definition))
        return {**texts, **members(cls)}

    def definition(self, module, name):
        """(module, node) of a name, through imports; None if it is not the library's."""
        if module not in self.files or f"{module}.{name}" in self.files:
            return None
        value = self.scope(module).get(name)
        if isinstance(value, tuple):
            return self.definition(*value)
        return value and (module, value)

    def module_api(self, module, with_hooks):
        """`with_hooks`: the classes whose private methods are kept."""
        api = {}
        for name, value in self.scope(module).items():
            if name.startswith("_"):
                continue
            if isinstance(value, tuple):
                api[name] = f"@{value[0]}"
            elif isinstance(value, ast.FunctionDef):
                api[name] = signature(value)
            elif isinstance(value, ast.ClassDef):
                api[name] = "class"
                api.update(
                    {
                        f"{name}.{member}": text
                        for member, text in self.inherited(module, value).items()
                        if not member.startswith("_")
                        or member == "__init__"
                        or (name in with_hooks and not member.startswith("__"))
                    }
                )
            else:
                api[name] = ""
        return api


def imported_by_package() -> set[tuple[str, str]]:
    """(module, name) of what the model's package imports from the library."""
    files = PACKAGE.rglob("*.py")
    return {(module, name) for file in files for _, module, name in library_imports(ast.walk(parse(file)))}


def imports_of(file):
    return {local: (module, name) for local, module, name in library_imports(ast.walk(parse(file)))}


def classes_of(file):
    """(class, the library's classes that it is derived from)."""
    imported = imports_of(file)
    classes = [node for node in ast.walk(parse(file)) if isinstance(node, ast.ClassDef)]
    return [(cls, [imported[b] for b in map(ast.unparse, cls.bases) if b in imported]) for cls in classes]


def library_calls(file):
    """((module, name of the callable), its keywords, line) of the calls that can be told from the text."""
    imported = imports_of(file)
    for call in (node for node in ast.walk(parse(file)) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in imported:
            yield imported[call.func.id], call
        elif isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in imported:
            module, name = imported[ast.unparse(call.func.value)]
            yield (module, f"{name}.{call.func.attr}"), call
    for cls, bases in classes_of(file):
        for call in (node for node in ast.walk(cls) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "super()":
                yield from (((module, f"{name}.{call.func.attr}"), call) for module, name in bases)


def parameters(text):
    """("static" or the like, [(name, default)], has **) of a signature."""
    kind, _, arguments = text.partition("(")
    arguments = ast.parse(f"def f({arguments}: pass").body[0].args
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
    named = [(a.arg, d and ast.unparse(d)) for a, d in zip(positional + arguments.kwonlyargs, defaults)]
    starred = [(f"{stars}{a.arg}", None) for stars, a in (("*", arguments.vararg), ("**", arguments.kwarg)) if a]
    return kind, named + starred


def load() -> dict[str, dict]:
    """Release -> module -> name -> signature."""
    content = json.loads(API.read_text()) if API.exists() else {"releases": [], "modules": {}}
    by_release = {release: {} for release in content["releases"]}
    for module, names in content["modules"].items():
        for name, texts in names.items():
            texts = {texts: content["releases"]} if isinstance(texts, str) else texts
            for text, releases in texts.items():
                for release in releases:
                    by_release[release].setdefault(module, {})[name] = text
    return by_release


def save(by_release: dict[str, dict]) -> None:
    merged = {}
    for release, modules in sorted(by_release.items()):
        for module, names in modules.items():
            for name, text in names.items():
                merged.setdefault(module, {}).setdefault(name, {}).setdefault(text, []).append(release)
    lines = []
    for module, names in sorted(merged.items()):
        short = {
            name: next(iter(texts)) if len(texts) == 1 and len(*texts.values()) == len(by_release) else texts
            for name, texts in sorted(names.items())
        }
        lines.append(f"{json.dumps(module)}: {json.dumps(short, separators=(',', ':'))}")
    modules = ",\n".join(lines)
    API.write_text(f'{{"releases": {json.dumps(sorted(by_release))}, "modules": {{\n{modules}\n}}}}\n')


def read(*folders: str) -> dict[str, dict[str, str]]:
    """Module -> name -> signature, from the sources of one release."""
    sources = Sources(*map(Path, folders))
    imported = imported_by_package()
    wanted = {*modules_in(NXD_CPU), *(module for module, _ in imported)} & set(sources.files)
    with_hooks = {name for _, name in imported}
    api = {module: sources.module_api(module, with_hooks) for module in wanted}
    return {module: names for module, names in api.items() if names}


if __name__ == "__main__":
    save({**load(), sys.argv[2]: read(*sys.argv[1].split(":"))})
