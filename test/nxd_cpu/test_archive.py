"""A graph of somebody else's is data: what torch's own loader would run in it is refused, and nothing runs."""

import io
import json
import pickle
import zipfile

import pytest
import torch
from neuronx_distributed_inference._archive import load_program
from neuronx_distributed_inference._graph import export_graph, load_graphs, save_graphs

PROGRAM, EXAMPLES = "archive/models/model.json", "archive/data/sample_inputs/model.pt"


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4, device="meta"))

    def forward(self, x):
        return [torch.div(x * self.weight + torch.tensor([1.0, 2.0, 3.0, 4.0]), 2, rounding_mode="floor")]


class Payload:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def archive():
    program = io.BytesIO()
    torch.export.save(export_graph(Scaled(), "tag", 1, [torch.ones(4)]).program, program)
    return program.getvalue()


def forged(archive: bytes, changes: dict[str, bytes]) -> bytes:
    """The archive with other members, or more of them."""
    output = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as given, zipfile.ZipFile(output, "w") as written:
        for name in given.namelist():
            if name not in changes:
                written.writestr(name, given.read(name))
        for name, content in changes.items():
            written.writestr(name, content)
    return output.getvalue()


def program_of(archive: bytes) -> dict:
    return json.loads(zipfile.ZipFile(io.BytesIO(archive)).read(PROGRAM))


def test_what_this_runtime_writes_is_read(archive):
    program = load_program(archive)
    (constant,) = program.constants.values()
    assert constant.tolist() == [1, 2, 3, 4]
    output = program.graph_module.forward(constant, torch.full((4,), 4.0), torch.ones(4))[0]
    assert output.tolist() == [2, 3, 3, 4]


@pytest.mark.parametrize(
    "member",
    [
        EXAMPLES,
        "archive/data/weights/model.pt",
        "archive/data/constants/model.pt",
        "archive/data/constants/custom_obj_0",
        "archive/data/constants/opaque_obj_0",
    ],
)
def test_no_pickle_is_loaded(member, archive, tmp_path):
    payload = pickle.dumps(Payload(tmp_path / "ran"))
    with pytest.raises(ValueError, match="never writes and does not run"):
        load_program(forged(archive, {member: payload}))
    assert not (tmp_path / "ran").exists()


def test_a_pickled_constant_is_not_loaded(archive, tmp_path):
    constants = "archive/data/constants/model_constants_config.json"
    config = json.loads(zipfile.ZipFile(io.BytesIO(archive)).read(constants))
    (payload,) = config["config"].values()
    payload["use_pickle"] = True
    member = {f"archive/data/constants/{payload['path_name']}": pickle.dumps(Payload(tmp_path / "ran"))}
    with pytest.raises(ValueError, match="a tensor that torch would unpickle"):
        load_program(forged(archive, {constants: json.dumps(config).encode(), **member}))
    assert not (tmp_path / "ran").exists()


def test_the_old_format_is_not_read(tmp_path):
    """torch falls back to it where the new one cannot be read."""
    old = {"version": b"8.20", "serialized_exported_program.json": b"{}"}
    payload = pickle.dumps(Payload(tmp_path / "ran"))
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as written:
        for name, content in {**old, "serialized_state_dict.pt": payload}.items():
            written.writestr(name, content)
    with pytest.raises(ValueError, match="a member 'version'"):
        load_program(output.getvalue())
    assert not (tmp_path / "ran").exists()


def test_a_shared_library_in_it_is_not_opened(archive):
    with pytest.raises(ValueError, match="a member 'archive/data/aotinductor/model/model.so'"):
        load_program(forged(archive, {"archive/data/aotinductor/model/model.so": b"\x7fELF"}))


CODE = "__import__('os').system('touch {mark}')"


def node(program: dict) -> dict:
    return program["graph_module"]["graph"]["nodes"][-1]


@pytest.mark.parametrize(
    "forge",
    [
        lambda p, code: node(p).update(target="torch.os.system"),
        lambda p, code: node(p).update(target="math.sqrt"),
        lambda p, code: node(p).update(target="torch.ops.aten.from_file.default"),
        lambda p, code: node(p).update(metadata={"source_fn_stack": f"a,{code}"}),
        lambda p, code: p["graph_module"]["graph"]["inputs"][0]["as_tensor"].update(name=f"x={code}"),
        lambda p, code: node(p)["inputs"][0].update(arg={"as_sym_int": {"as_expr": {"expr_str": code, "hint": None}}}),
        lambda p, code: next(iter(p["graph_module"]["graph"]["tensor_values"].values())).update(
            sizes=[{"as_expr": {"expr_str": code, "hint": None}}]
        ),
        lambda p, code: p.update(guards_code=[code]),
        lambda p, code: p.update(range_constraints={code: {"min_val": 0, "max_val": 1}}),
        lambda p, code: p["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec=json.dumps(
                [1, {"type": "builtins.dict", "context": '{"__enum__": true, "fqn": "os:x"}', "children_spec": []}]
            )
        ),
    ],
)
def test_no_text_in_a_program_is_evaluated(forge, archive, tmp_path):
    program = program_of(archive)
    forge(program, CODE.format(mark=tmp_path / "ran"))
    with pytest.raises(ValueError, match="never writes and does not run"):
        load_program(forged(archive, {PROGRAM: json.dumps(program).encode()}))
    assert not (tmp_path / "ran").exists()


def test_a_file_of_graphs_says_so(archive, tmp_path):
    path = str(tmp_path / "model.pt")
    save_graphs([export_graph(Scaled(), "tag", 1, [torch.ones(4)])], path)
    load_graphs(path)
    with zipfile.ZipFile(path) as given:
        members = {name: given.read(name) for name in given.namelist()}
    members["tag/1.pt2"] = forged(archive, {EXAMPLES: pickle.dumps(Payload(tmp_path / "ran"))})
    with zipfile.ZipFile(path, "w") as written:
        for name, content in members.items():
            written.writestr(name, content)
    with pytest.raises(ValueError, match="model.pt cannot be loaded .* example inputs, which torch would unpickle"):
        load_graphs(path)
    assert not (tmp_path / "ran").exists()


def test_the_type_hints_that_are_kept_end_with_the_load(archive):
    import typing

    read = typing.get_type_hints
    load_program(archive)
    with pytest.raises(ValueError):
        load_program(archive[:-100])
    assert typing.get_type_hints is read
