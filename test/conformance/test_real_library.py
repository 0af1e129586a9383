"""The model file on the real NxD and NxDI sources, token for token against transformers. Needs --nxd-source."""

from dataclasses import dataclass

import pytest
from places import TINY
from reference import RANDOM, SEQ_LEN, reference_tokens, tiny_eos, tiny_prompts

from nxd_sources.release import run_real

NEW_TOKENS = 32
RANDOM_PROMPTS = [[7, 3, 201, 90, 14], [5, 9, 33, 121, 200, 17, 61, 2, 88, 150, 34, 99, 240, 18, 77, 45, 6]]


@dataclass(frozen=True)
class Cell:
    checkpoint: str
    tp: int
    fused: bool = False
    batch: int = 2

    @property
    def name(self):
        return f"{self.checkpoint}-tp{self.tp}-{'fused' if self.fused else 'split'}-batch{self.batch}"


TINY_CELLS = [Cell("tiny", tp, fused, batch) for tp in (1, 2, 4, 8) for fused in (False, True) for batch in (1, 2)]
# not in the matrix of TP 1 and 2; the second line: in test_features.py
ELSEWHERE = (
    "listed-inverted",
    "one-token",
    "8192-positions",
    "12-heads-4-kv",
    "long",
    "window",
    "window-listed",
    "window-everywhere",
    "gelu",
    "gelu_pytorch_tanh",
    "relu",
    "odd-intermediate",
    "odd-intermediate-biases",
)
RANDOM_CELLS = [Cell(name, tp, fused=tp == 2) for name in RANDOM if name not in ELSEWHERE for tp in (1, 2)] + [
    Cell("plain", 3),
    Cell("plain", 3, fused=True),
    Cell("9-heads-3-kv", 2),
    Cell("odd-vocabulary", 4),
    Cell("one-token", 1),
    Cell("one-token", 2, batch=1),
]
# the degrees that convert to MHA, and many ranks: minutes on few cores
SLOW_CELLS = [Cell("tiny", tp, fused) for tp in (3, 5, 6, 7, 12, 16) for fused in (False, True)] + [
    Cell("12-heads-4-kv", 6),
    Cell("12-heads-4-kv", 6, fused=True),
    Cell("9-heads-3-kv", 2, fused=True),
]
TWIN = Cell("listed-inverted", 1)  # the weights of "listed", and each flag the other way round


def pytest_generate_tests(metafunc):
    if "cell" not in metafunc.fixturenames:
        return
    if not metafunc.config.nxd_releases:
        skip = pytest.mark.skip(reason="needs --nxd-source NXD_SRC:NXDI_SRC, the sources of the real library")
        metafunc.parametrize("release, cell", [pytest.param(None, None, marks=skip, id="real-library")])
        return
    twin = metafunc.function is test_inverted_schedule_is_noticed
    metafunc.parametrize(
        "release, cell",
        [
            pytest.param(
                release, cell, id=f"{release.version}-{cell.name}", marks=pytest.mark.slow if cell in SLOW_CELLS else ()
            )
            for release in metafunc.config.nxd_releases
            for cell in ([TWIN] if twin else TINY_CELLS + RANDOM_CELLS + SLOW_CELLS)
        ],
    )


def prompts_of(cell):
    if cell.checkpoint == "one-token":
        return [[11], RANDOM_PROMPTS[0]]
    if cell.checkpoint != "tiny":
        return RANDOM_PROMPTS
    prompts = tiny_prompts()
    if cell.batch == 2:
        return [prompts[0], prompts[-1]]
    return prompts[::2] if cell.tp <= 2 else prompts[-1:]  # many ranks on few cores are slow


def checkpoint_of(cell, random_checkpoints):
    return str(TINY) if cell.checkpoint == "tiny" else random_checkpoints[cell.checkpoint]


def barred_in(cell):
    return tiny_eos() if cell.checkpoint == "tiny" else ()


@pytest.fixture(scope="session")
def real_tokens(request, random_checkpoints, tmp_path_factory):
    """The real library's tokens for (release, cell): one process per release for all the cells that were asked for."""
    results = {}

    def get(release, cell):
        if release not in results:
            params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            cells = dict.fromkeys(p["cell"] for p in params if "cell" in p and p["release"] == release)
            jobs = [
                {
                    "name": cell.name,
                    "kind": "generate",
                    "checkpoint": checkpoint_of(cell, random_checkpoints),
                    "neuron": {
                        "tp_degree": cell.tp,
                        "batch_size": cell.batch,
                        "seq_len": SEQ_LEN,
                        "fused_qkv": cell.fused,
                    },
                    "prompts": prompts_of(cell),
                    "barred": barred_in(cell),
                    "new_tokens": NEW_TOKENS,
                }
                for cell in cells
            ]
            try:
                results[release] = run_real(release, jobs, tmp_path_factory.mktemp(release.version))
            except RuntimeError as error:  # once, not for every cell
                results[release] = {job["name"]: {"error": str(error)} for job in jobs}
        result = results[release][cell.name]
        assert "error" not in result, result["error"]
        return result["tokens"]

    return get


def expected_tokens(cell, checkpoint):
    return [reference_tokens(checkpoint, tuple(p), NEW_TOKENS, barred_in(cell)) for p in prompts_of(cell)]


def test_tokens_equal_transformers(release, cell, real_tokens, random_checkpoints):
    assert real_tokens(release, cell) == expected_tokens(cell, checkpoint_of(cell, random_checkpoints))


def test_inverted_schedule_is_noticed(release, cell, real_tokens, random_checkpoints):
    """The harness can fail: a model that rotates exactly the wrong layers is not taken for the right one."""
    tokens = real_tokens(release, cell)
    assert tokens == expected_tokens(cell, random_checkpoints["listed-inverted"])
    assert tokens != expected_tokens(cell, random_checkpoints["listed"])
