"""nxd_cpu has nothing that the real library lacks, and the model's package uses nothing that a release lacks.

Against api.json, which extract_api.py reads from the sources of every supported release.
"""

import ast
import re

import pytest
from extract_api import (
    LIBRARY,
    NXD_CPU,
    PACKAGE,
    classes_of,
    imports_of,
    library_calls,
    library_imports,
    load,
    members,
    modules_in,
    parameters,
    parse,
    read,
    signature,
    statements,
)

API = load()
RELEASES = sorted(API)
STANDS_FOR = "0.8.0"  # the release that nxd_cpu is a part of


def look_up(release, module, name):
    """The signature of `name`, through imports; None if the release does not have it."""
    head, _, member = name.partition(".")
    text = API[release].get(module, {}).get(head)
    if text is not None and text.startswith("@") and text[1:] in API[release]:
        return look_up(release, text[1:], name)
    if text is not None and text.startswith("@"):
        return text
    return API[release].get(module, {}).get(name) if member else text


def difference(ours, real):
    """What `ours` has that `real` lacks, in words; None if it is a part of it."""
    if "(" not in ours or "(" not in real:
        return None if "" in (ours, real) or ours == real or real.startswith("@") else f"{ours!r} is {real!r} there"
    (our_kind, our_parameters), (real_kind, real_parameters) = parameters(ours), parameters(real)
    if our_kind != real_kind:
        return f"is {our_kind or 'plain'!r}, there {real_kind or 'plain'!r}"
    left = iter(real_parameters)
    for name, default in our_parameters:
        if not any(name == real_name and is_same(default, real_default) for real_name, real_default in left):
            return f"{name}{f'={default}' if default else ''} is not there, or not in this place, in {real}"
    return None


def is_same(default, other):
    """Also `nn.init.normal_` and `init.normal_`: the same thing by a longer way."""
    return default == other or bool(default and other and f".{default}".endswith(f".{other}"))


def definitions(file):
    """Public name -> signature of what a module of nxd_cpu itself defines."""
    found = {}
    for node in statements(parse(file).body):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = signature(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = "class"
            found.update({f"{node.name}.{member}": text for member, text in members(node).items()})
        elif isinstance(node, ast.Assign):
            found.update({target.id: "" for target in node.targets if isinstance(target, ast.Name)})
    return {name: text for name, text in found.items() if is_public(name)}


def is_public(name):
    return all(not part.startswith("_") or part == "__init__" for part in name.split("."))


def public_modules():
    """Dotted name -> file, of nxd_cpu's part of the library, to which its compiler does not belong."""
    modules = {module: file for module, file in modules_in(NXD_CPU).items() if is_public(module)}
    return {module: file for module, file in modules.items() if module.split(".")[0].startswith(LIBRARY)}


@pytest.mark.parametrize("module", sorted(public_modules()))
def test_nxd_cpu_is_a_part_of_the_library(module):
    faults = []
    for name, ours in definitions(public_modules()[module]).items():
        real = look_up(STANDS_FOR, module, name)
        fault = "is not there" if real is None else difference(ours, real)
        if fault:
            faults.append(f"{name}: {fault}")
    assert not faults, f"{module} against {STANDS_FOR}:\n" + "\n".join(faults)


PACKAGE_FILES = sorted(file for file in PACKAGE.rglob("*.py") if any(library_imports(ast.walk(parse(file)))))
over_package = pytest.mark.parametrize("file", PACKAGE_FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
over_releases = pytest.mark.parametrize("release", RELEASES)


@over_releases
@over_package
def test_what_the_package_imports_exists(file, release):
    missing = [
        f"{module}.{name}"
        for module, name in imports_of(file).values()
        if look_up(release, module, name) is None and f"{module}.{name}" not in API[release]
    ]
    assert not missing, f"not in {release}: {missing}"


@over_releases
@over_package
def test_what_the_package_calls_takes_these_keywords(file, release):
    faults = []
    for (module, name), call in library_calls(file):
        text = look_up(release, module, name)
        if text == "class":
            text = look_up(release, module, f"{name}.__init__")
        if text is None or "(" not in text:
            continue
        taken = {parameter for parameter, _ in parameters(text)[1]}
        if not any(parameter.startswith("**") for parameter in taken):
            faults += [f"line {call.lineno}: {name}({k.arg}=)" for k in call.keywords if k.arg and k.arg not in taken]
    assert not faults, f"not in {release}: {faults}"


@over_package
def test_private_hooks_are_listed(file):
    """A private method of the library that the package overrides stands in _PRIVATE_HOOKS, and every release has it."""
    overridden = {
        function.name
        for cls, bases in classes_of(file)
        for function in cls.body
        if isinstance(function, ast.FunctionDef) and re.match("_[^_]", function.name)
        for release in RELEASES
        for module, name in bases
        if look_up(release, module, f"{name}.{function.name}") is not None
    }
    listed = next(
        (
            ast.literal_eval(node.value)
            for node in parse(file).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PRIVATE_HOOKS"
        ),
        (),
    )
    assert overridden == set(listed)
    for hook in listed:
        for release in RELEASES:
            bases = [base for _, bases in classes_of(file) for base in bases]
            assert any(look_up(release, module, f"{name}.{hook}") for module, name in bases), f"{release} lacks {hook}"


def test_api_json_is_of_the_sources(nxd_releases):
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC")
    for release in nxd_releases:
        assert API[release.version] == read(release.nxd, release.nxdi), "run extract_api.py"


def test_a_foreign_name_is_noticed():
    """The comparison can fail."""
    assert RELEASES == ["0.7.0", "0.8.0", "0.9.0"] and look_up("0.8.0", LIBRARY, "no_such_name") is None
    assert difference("(self, a, b=1)", "(self, a, c=None, b=1)") is None
    for ours in ("(self, b=1, c=None)", "(self, a, b=2)", "(self, a, d)", "static (self, a)", "(self, a, **kwargs)"):
        assert difference(ours, "(self, a, c=None, b=1)"), ours
