import gc
import threading

import pytest
import torch
from neuronx_distributed._cpu import RankThreads, all_gather, all_reduce


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives_agree_with_one_process(size):
    parts = [torch.randn(4, 2 * size) for _ in range(size)]
    ranks = RankThreads(size)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    for output in ranks.run(lambda rank: all_reduce(parts[rank], size)):
        assert torch.equal(output, total)
    for output in ranks.run(lambda rank: all_gather(parts[rank], 1, size)):
        assert torch.equal(output, torch.cat(parts, 1))


def test_many_exchanges_do_not_mix():
    def work(rank):
        return [all_reduce(torch.tensor([float(10**rank * step)]), 3).item() for step in range(200)]

    assert RankThreads(3).run(work) == [[111.0 * step for step in range(200)]] * 3


def test_failing_rank_raises_its_error_and_hangs_nobody():
    ranks = RankThreads(3)

    def work(rank):
        if rank == 1:
            raise KeyError("rank 1")
        return all_reduce(torch.ones(1), 3)

    with pytest.raises(KeyError, match="rank 1"):
        ranks.run(work)
    assert [output.item() for output in ranks.run(lambda rank: all_reduce(torch.ones(1), 3))] == [3, 3, 3]


def test_collective_outside_of_its_ranks():
    with pytest.raises(RuntimeError, match="RankThreads"):
        all_reduce(torch.ones(1), 2)
    with pytest.raises(RuntimeError, match="RankThreads"):
        RankThreads(3).run(lambda rank: all_reduce(torch.ones(1), 2))


def test_threads_end_with_their_ranks():
    before = set(threading.enumerate())
    ranks = RankThreads(4)
    ranks.run(lambda rank: rank)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 4
    del ranks
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_number_of_threads_is_restored():
    before = torch.get_num_threads()
    RankThreads(4).run(lambda rank: None)
    assert torch.get_num_threads() == before
