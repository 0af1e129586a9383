"""What the model uses of the newest release's interfaces: `python tools/extract_interfaces.py`, after extract_api.py.

Rewrites model/interfaces.json of the model's package, which model/interfaces.py compares with a release that has no
public sources. {"release": ..., "names": {"module:name": null for what is imported alone, or for what is called or
overridden {"given": parameters that are given by name, "overridden": the parameters of what a class of ours overrides,
those that it names where it is "open", which is to take any others too}}}
"""

import ast
import json

from extract_api import PACKAGE, classes_of, imports_of, library_calls, load, parameters

RECORD = PACKAGE / "model" / "interfaces.json"


def used(release: str) -> dict:
    """The record, for `release`."""
    api, names = load()[release], {}
    files = [PACKAGE / "modeling_smollm3_3b.py", *PACKAGE.glob("model/*.py"), *PACKAGE.glob("weights/*.py")]

    def text_of(module: str, name: str) -> str | None:
        text = api.get(module, {}).get(name)
        head = api.get(module, {}).get(name.partition(".")[0], "")
        return text_of(head[1:], name) if head.startswith("@") and head[1:] in api else text

    def entry(module: str, name: str) -> dict:
        key = f"{module}:{name}"
        names[key] = names.get(key) or {"given": []}
        return names[key]

    for file in sorted(files):
        for module, name in imports_of(file).values():
            names.setdefault(f"{module}:{name}", None)
        for (module, name), call in library_calls(file):
            name = f"{name}.__init__" if text_of(module, name) == "class" else name
            if "(" in (text_of(module, name) or ""):
                given, named = entry(module, name)["given"], dict(parameters(text_of(module, name))[1])
                given += sorted({k.arg for k in call.keywords if k.arg in named} - {*given})
        for cls, bases in classes_of(file):
            for function in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
                for module, name in bases:
                    text = text_of(module, f"{name}.{function.name}")
                    if text and "(" in text and function.name != "__init__":
                        of_base = entry(module, f"{name}.{function.name}")
                        theirs = [parameter for parameter, _ in parameters(text)[1]]
                        ours = {argument.arg for argument in function.args.args}
                        is_open = function.args.kwarg is not None
                        of_base["overridden"] = [name for name in theirs if name in ours or not is_open]
                        of_base["open"] = is_open
    return {"release": release, "names": dict(sorted(names.items()))}


def newest(releases) -> str:
    """Returns the release with the highest number, "0.11.0" being above "0.9.0"."""
    return max(releases, key=lambda release: [int(part) for part in release.split(".")])


def text(record: dict) -> str:
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record["names"].items())
    return f'{{"release": {json.dumps(record["release"])}, "names": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    RECORD.write_text(text(used(newest(load()))))
