"""Products of a dtype that the CPU has no instructions for are computed in float32, in both forms of CPU graphs."""

import json
from dataclasses import replace

import pytest
import torch
from test_compiled_ahead import SETTINGS, validate

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx

WITHOUT_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # of the environment: oneDNN keeps to AVX2, which has no bfloat16


@pytest.fixture(scope="module", autouse=True)
def library():
    ensure_neuronx()


@pytest.fixture
def widened(monkeypatch):
    """A CPU that has instructions for products of float32 only."""
    from neuronx_distributed_inference import _products

    from nxd_cpu_compiler import run

    for module in (_products, run):
        monkeypatch.setattr(module, "product_dtype", lambda dtype: torch.float32)


class Listed(torch.nn.Module):
    """A model whose output is in a list, as a graph has it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return [self.model(x)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widened_products_are_right_or_near_ties(dtype, widened, monkeypatch, tmp_path):
    from nxd_cpu_compiler import build

    monkeypatch.setattr(build, "LEAST_BYTES", 0)
    settings = replace(SETTINGS, torch_dtype=dtype, batch_size=8)  # a step of 8 rows is widened, too
    artifact = compile_artifact(tiny_folder(), tmp_path / "tiny", settings, "cpu")
    assert json.loads((artifact.path / "compiled/graphs.json").read_text())["products"] == {dtype: "float32"}
    assert artifact.exported_because is None
    assert validate(artifact, **WITHOUT_BFLOAT16)["verdict"] in ("identical", "near tie")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "tiny"
    return compile_artifact(tiny_folder(), folder, replace(SETTINGS, torch_dtype="bfloat16"), "cpu")


@pytest.mark.slow
def test_exported_graphs_with_widened_products_are_right_or_near_ties(exported):
    assert validate(exported, **WITHOUT_BFLOAT16)["verdict"] in ("identical", "near tie")


def test_exported_graphs_with_widened_products_give_the_same_tokens(exported, monkeypatch):
    from neuronx_distributed_inference import _products

    from smollm3_neuron.generate.generation import generate

    prompts = exported.tokenizer()(["The square root of 144 is", "7 * 8 ="])["input_ids"]
    products, widened_linear = [], _products.widened_linear
    tokens = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(_products, "product_dtype", lambda given, dtype=dtype: dtype)
        monkeypatch.setattr(_products, "widened_linear", lambda *args: products.append(args) or widened_linear(*args))
        tokens.append([row.tokens for row in generate(exported.load(), prompts, 8)])
        assert bool(products) == (dtype == torch.float32)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("rows", [7, 8])
def test_exported_graphs_are_widened_as_they_are_loaded(rows, widened, tmp_path):
    from neuronx_distributed_inference._graph import export_graph, load_graphs, save_graphs
    from neuronx_distributed_inference._products import widened_linear

    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16, device="meta")
    graph = export_graph(Listed(model), "tag", 1, [torch.empty(1, rows, 4, dtype=torch.bfloat16)])
    save_graphs([graph], str(tmp_path / "file"))
    (graph,) = load_graphs(str(tmp_path / "file"))
    called = {node.target for node in graph.program.graph.find_nodes(op="call_function", target=widened_linear)}
    assert bool(called) == (rows == 8)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_product_is_rounded_once(dtype, has_bias, monkeypatch):
    from neuronx_distributed_inference import _products

    monkeypatch.setattr(_products, "_PIECE", 64 * 20)  # pieces of 20, 20 and 10 rows
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=random).to(dtype) for size in ((2, 9, 64), (50, 64), (50,)))
    found = _products.widened_linear(x, weight, bias if has_bias else None)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert found.dtype == dtype and found.shape == (2, 9, 50)
    assert ((found.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 1e-5).all()


def test_a_part_for_another_cpu_is_refused(widened, monkeypatch, tmp_path):
    """One whose products were widened, where they need not be."""
    from neuronx_distributed_inference._graph import export_graph

    from nxd_cpu_compiler import run
    from nxd_cpu_compiler.build import compile_ahead

    x = torch.linspace(-1, 1, 8 * 64).reshape(1, 8, 64).bfloat16()
    model = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    weight, bias = model.weight.detach(), model.bias.detach()
    compile_ahead([export_graph(Listed(model), "tag", 1, [x])], str(tmp_path))
    found = run.load(str(tmp_path))[0](x, weight, bias)
    wanted = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert (found.float() - wanted).abs().max() <= wanted.abs().max() * torch.finfo(torch.bfloat16).eps / 2
    monkeypatch.setattr(run, "product_dtype", lambda dtype: dtype)
    with pytest.raises(ValueError, match="computes products of bfloat16 in float32, as another CPU needs it: compile"):
        run.load(str(tmp_path))
