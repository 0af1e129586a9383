"""The rooms of the model's package: what may import what. Read from the sources, imports inside functions included."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from places import MODEL

SRC = MODEL / "src"
PACKAGE = "smollm3_neuron"
# From low to high: a room imports from itself and from those before it.
ORDER = (
    "errors",
    "model",
    "weights",
    "modeling_smollm3_3b",
    "machine",
    "generate",
    "artifact",
    "check",
    "batch",
    "vllm",
)


def module_of(file: Path, source: Path) -> str:
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, source: Path, modules: set[str]) -> set[str]:
    """The package's own modules that a file imports, anywhere in it."""
    name = module_of(file, source)
    folder = name.split(".") if file.name == "__init__.py" and name else name.split(".")[:-1]
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1]
            target = ".".join([*base, *filter(None, [node.module])])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            target = ".".join(node.module.split(".")[1:])
        else:
            continue
        for alias in node.names:
            whole = f"{target}.{alias.name}".strip(".")
            imported.add(whole if whole in modules else target)
    return {module for module in imported if module in modules and module != name}


def import_graph(source: Path) -> dict[str, set[str]]:
    """Module -> the modules of the same package that it imports; the package itself is "" and is left out."""
    files = {module_of(file, source): file for file in sorted(source.rglob("*.py"))}
    modules = set(files) - {""}
    return {name: imports(file, source, modules) for name, file in files.items() if name}


def room_of(module: str) -> str:
    return module.split(".")[0]


def pairs_between_rooms(graph: dict[str, set[str]], room=room_of) -> list[tuple[str, str]]:
    """Pairs (importing module, imported module) that lie in different rooms."""
    return sorted((a, b) for a, targets in graph.items() for b in targets if room(a) != room(b))


def upward(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    pairs = pairs_between_rooms(graph)
    return [(a, b) for a, b in pairs if ORDER.index(room_of(b)) > ORDER.index(room_of(a))]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports between modules; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for target in sorted(graph[module]):
            if ring := visit(target, [*path, module]):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(graph) if (ring := visit(module, []))), [])


def test_every_module_lies_in_a_room():
    assert {room_of(module) for module in import_graph(SRC)} == set(ORDER)


def test_nothing_imports_upward():
    graph = import_graph(SRC)
    assert len(pairs_between_rooms(graph)) > 20, "the reading of imports must see them"
    assert upward(graph) == []


def test_there_is_no_circle():
    assert circle(import_graph(SRC)) == []


def test_a_wrong_import_is_seen(tmp_path):
    """Late, relative and absolute imports count, and a circle is found."""
    for room in ("model", "vllm"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "model" / "config.py").write_text("def late():\n    from ..vllm import plugin\n")
    (tmp_path / "vllm" / "plugin.py").write_text(f"from {PACKAGE}.model.config import late\n")
    graph = import_graph(tmp_path)
    assert upward(graph) == [("model.config", "vllm.plugin")]
    assert sorted(circle(graph)) == ["model.config", "vllm.plugin"]


LOADED = f"""
import sys
{{before}}
import {{module}}
print(*sorted(name for name in sys.modules if name.startswith("{PACKAGE}")))
"""


def loaded_by(module: str, before: str = "") -> set[str]:
    """The package's modules that importing `module` loads in a fresh interpreter."""
    code = LOADED.format(before=before, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return {name.removeprefix(PACKAGE).lstrip(".") for name in done.stdout.split()}


def test_what_the_model_file_loads():
    """Nothing of the artifact, chat, machines or LoRA stands behind the model file."""
    from smollm3_neuron.machine.runtime import nxd_cpu_folder

    loaded = loaded_by(f"{PACKAGE}.modeling_smollm3_3b", f"sys.path.append({str(nxd_cpu_folder())!r})")
    assert loaded == {
        "", "errors", "modeling_smollm3_3b",
        "model", "model.config", "model.dtypes", "model.heads", "model.releases", "model.rope", "model.switches",
        "model.draft", "model.interfaces", "model.json_files", "model.windows",
        "weights", "weights.checkpoint", "weights.files", "weights.padding", "weights.projections",
        "weights.quantization", "weights.rank_layout",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["NeuronSmolLM3ForCausalLM", "SmolLM3InferenceConfig"])
def test_the_package_exports_the_classes_lazily(name):
    from smollm3_neuron.machine.runtime import nxd_cpu_folder

    code = (
        f"import sys, {PACKAGE}; assert 'torch' not in sys.modules and {PACKAGE}.__version__\n"
        f"sys.path.append({str(nxd_cpu_folder())!r})\n"
        f"from {PACKAGE} import {name}; print({name}.__module__, {name!r} in dir({PACKAGE}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout.split() == [f"{PACKAGE}.modeling_smollm3_3b", "True"], done.stderr
