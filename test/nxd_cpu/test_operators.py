"""What a token costs: with every feature off the decode graph has these operators and no other."""

from collections import Counter

# three layers (the middle one NoPE), as recorded before there were optional features; since then heads are views by
# flatten and unflatten, which suit steps of several tokens, too
RECORDED = {
    "aten.add.Tensor": 19,
    "aten.alias.default": 7,
    "aten.arange.default": 3,
    "aten.arange.start_step": 1,
    "aten.cat.default": 5,
    "aten.chunk.default": 4,
    "aten.cos.default": 1,
    "aten.div.Tensor": 1,
    "aten.embedding.default": 1,
    "aten.flatten.using_ints": 13,
    "aten.index_copy_.default": 6,
    "aten.le.Tensor": 1,
    "aten.linear.default": 22,
    "aten.lt.Scalar": 2,
    "aten.mean.dim": 7,
    "aten.mul.Tensor": 29,
    "aten.neg.default": 4,
    "aten.pow.Scalar": 1,
    "aten.pow.Tensor_Scalar": 7,
    "aten.reciprocal.default": 1,
    "aten.reshape.default": 3,
    "aten.rsqrt.default": 7,
    "aten.rsub.Scalar": 1,
    "aten.scaled_dot_product_attention.default": 3,
    "aten.silu.default": 3,
    "aten.sin.default": 1,
    "aten.slice.Tensor": 1,
    "aten.to.dtype": 43,
    "aten.transpose.int": 12,
    "aten.unflatten.int": 6,
    "aten.unsqueeze.default": 10,
    "aten.view.default": 15,
    "aten.where.ScalarOther": 1,
    "aten.where.self": 1,
    "nxd_cpu.all_gather.default": 2,
    "nxd_cpu.all_reduce.default": 6,
}


def test_the_decode_graph_has_the_recorded_operators(build):
    app = build(batch_size=1, ctx_batch_size=1, is_continuous_batching=False, max_context_length=32, tp_degree=2)
    (graph,) = app.token_generation_model._export()
    targets = [str(node.target) for node in graph.program.graph.nodes if node.op == "call_function"]
    assert (
        Counter(name for name in targets if name.startswith(("aten.", "nxd_cpu.")) and "_assert_" not in name)
        == RECORDED
    )
