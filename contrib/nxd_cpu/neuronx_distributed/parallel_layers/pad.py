from neuronx_distributed.parallel_layers.utils import get_padding_length


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add so that every rank has the same number."""
    return get_padding_length(n_head, tp_degree)
