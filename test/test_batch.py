"""scripts/batch.py: rows of every form, bad rows with their reasons, and a batch that is interrupted and goes on."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import run
from places import ROOT, TINY
from reference import reference_model
from transformers import AutoTokenizer

from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.batch.journal import Journal
from smollm3_neuron.batch.requests import Preparation
from smollm3_neuron.batch.rows import BadRow, parse_row, read_rows
from smollm3_neuron.errors import SmolLM3Error

BATCH = ROOT / "scripts" / "batch.py"
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
QUESTION = [{"role": "user", "content": "What is 3+4?"}]


def expected(prompt: str, new_tokens: int, special: bool = True) -> list[int]:
    inputs = torch.tensor([TOKENIZER(prompt, add_special_tokens=special)["input_ids"]])
    output = reference_model(str(TINY)).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    return output[0, inputs.shape[1] :].tolist()


def text(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "artifact"
    settings = ["--tp", 2, "--seq-len", 128, "--batch-size", 2, "--dtype", "float32", "--device", "cpu"]
    done = run(ROOT / "scripts" / "compile.py", "--model", "tiny", *settings, "--output", path)
    assert done.returncode == 0, done.stderr
    return path


def batch(given, output, artifact, *more):
    return run(BATCH, given, output, "--artifact", artifact, "--engine", "local", *more)


def test_every_form_of_row_is_answered_as_transformers_does(artifact, tmp_path):
    rows = [
        {"prompt": "3+4=", "max_tokens": 7},
        {"id": 5, "prompt": "7 * 8 =", "label": "of the user's own"},
        {"id": "chat", "messages": QUESTION, "temperature": 0, "max_tokens": 50},
        {"custom_id": "o", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "m", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 9, "n": 1}},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "3+4=", "max_tokens": 7, "stop": "\n"}},
    ]  # fmt: skip
    done = batch(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", artifact, "--max-new-tokens", 11)
    assert done.returncode == 0, done.stderr
    assert "5 rows: 5 answered, 0 answered before, 0 bad" in done.stdout
    answers = {answer.get("custom_id") or answer["id"]: answer for answer in lines(tmp_path / "out.jsonl")}
    assert sorted(answers) == ["5", "c", "chat", "in.jsonl:1", "o"]
    prompt = TOKENIZER.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    for identity, told, new_tokens, special in (
        ("in.jsonl:1", "3+4=", 7, True), ("5", "7 * 8 =", 11, True), ("chat", prompt, 50, False),
    ):  # fmt: skip
        tokens, answer = expected(told, new_tokens, special), answers[identity]
        assert answer["text"] == text(tokens) and answer["completion_tokens"] == len(tokens)
        assert answer["finish_reason"] == ("stop" if tokens[-1] == TOKENIZER.eos_token_id else "length")
        assert answer["prompt_tokens"] == len(TOKENIZER(told, add_special_tokens=special)["input_ids"])
    assert answers["chat"]["finish_reason"] == "stop", "a row must end at the EOS"
    body = answers["o"]["response"]["body"]
    assert answers["o"]["error"] is None and answers["o"]["response"]["status_code"] == 200
    message = {"role": "assistant", "content": text(expected(prompt, 9, False))}
    assert body["choices"] == [{"index": 0, "finish_reason": "length", "message": message}]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 9
    (choice,) = answers["c"]["response"]["body"]["choices"]
    assert choice["text"] == "7" and choice["finish_reason"] == "stop", "without the stop string, as OpenAI's API"
    assert not (tmp_path / "out.bad.jsonl").exists()


BAD = [
    ('{"prompt": "a", "id": "x"}', None),
    ("{", "it is not valid JSON"),
    ('{"prompt": NaN}', "NaN is no number of JSON"),
    ('"a"', "a JSON object is expected"),
    ('{"id": "x", "prompt": "b"}', "its id is that of in.jsonl:1"),
    ('{"text": "a"}', "it needs a prompt or messages, and not both"),
    ('{"prompt": "a", "messages": []}', "it needs a prompt or messages, and not both"),
    ('{"prompt": ["a"]}', 'prompt is ["a"], allowed is a text'),
    ('{"messages": "a"}', "allowed is a list of objects with a role"),
    ('{"messages": [{"content": "a"}]}', "allowed is a list of objects with a role"),
    ('{"messages": []}', "there are no messages"),
    ('{"prompt": ""}', "the prompt has no tokens"),
    ('{"prompt": "%s"}' % ("a " * 200), "max_context_length is 128"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0, allowed is a whole number of at least 1"),
    ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
    ('{"prompt": "a", "temperature": 1, "top_p": 2}', "top_p is 2"),
    ('{"prompt": "a", "seed": "s"}', "seed is 's'"),
    ('{"prompt": "a", "stop": 3}', "stop_strings is 3"),
    ('{"id": {}, "prompt": "a"}', "its id is {}, allowed is a text or a whole number"),
    ('{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 1}', "chat_template_kwargs is 1"),
    ('{"messages": [{"role": "developer", "content": "a"}]}', "developer"),
    ('{"body": {"prompt": "a"}}', "it has a body and no custom_id"),
    ('{"custom_id": "a", "body": 1}', "body is 1, allowed is an object"),
    ('{"custom_id": "b", "url": "/v1/embeddings", "body": {"prompt": "a"}}', "allowed is POST and"),
    ('{"custom_id": "c", "body": {"prompt": "a", "n": 2}}', "n is 2, which a batch does not do"),
    ('{"custom_id": "d", "body": {"prompt": "a", "logprobs": 3}}', "logprobs is 3, which a batch does not do"),
]


def test_a_bad_row_is_written_with_its_reason_and_the_others_are_answered(artifact, tmp_path):
    given = tmp_path / "in.jsonl"
    given.write_text("\n".join(line for line, _ in BAD) + "\n\n", encoding="utf-8")
    with open(given, "ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    done = batch(given, tmp_path / "out.jsonl", artifact, "--max-new-tokens", 2)
    assert done.returncode == 1 and f"{len(BAD)} bad rows, with the reasons" in done.stderr
    assert [answer["id"] for answer in lines(tmp_path / "out.jsonl")] == ["x"]
    reasons = {row["place"]: row["reason"] for row in lines(tmp_path / "out.bad.jsonl")}
    wanted = {f"in.jsonl:{n}": reason for n, (_, reason) in enumerate(BAD, 1) if reason}
    wanted[f"in.jsonl:{len(BAD) + 2}"] = "it is not UTF-8"
    assert reasons.keys() == wanted.keys()
    for place, reason in wanted.items():
        assert reason in reasons[place], place
    assert "Traceback" not in done.stderr


def test_a_killed_batch_goes_on_without_losing_or_doubling_a_row(artifact, tmp_path):
    rows = [{"id": str(n), "prompt": f"{n % 10}+{n // 10}=", "max_tokens": 5} for n in range(60)]
    given, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, BATCH, given, output, "--artifact", artifact, "--engine", "local"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (output.exists() and output.read_bytes().count(b"\n") >= 6):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = output.read_bytes()
    done_before = before.count(b"\n")
    assert 6 <= done_before < 60
    output.write_bytes(before[: before.rindex(b"\n") + 1] + b'{"id": "59", "te')  # as a crash leaves a line
    done = batch(given, output, artifact)
    assert done.returncode == 0, done.stderr
    assert f"60 rows: {60 - done_before} answered, {done_before} answered before, 0 bad" in done.stdout
    answers = lines(output)
    assert [answer["id"] for answer in answers] == [row["id"] for row in rows]
    assert [answer["text"] for answer in answers] == [text(expected(row["prompt"], 5)) for row in rows]


def test_two_batches_do_not_write_one_output(tmp_path):
    with Journal(tmp_path / "out.jsonl") as journal:
        journal.write_bad(BadRow("x", "in:1", "reason"))
        with pytest.raises(SmolLM3Error, match="another batch is writing it"):
            Journal(tmp_path / "out.jsonl")
        journal.write([{"id": "a"}])
    assert lines(tmp_path / "out.jsonl") == [{"id": "a"}] and len(lines(tmp_path / "out.bad.jsonl")) == 1


def test_an_output_without_an_answer_is_not_left_behind(tmp_path):
    with pytest.raises(SmolLM3Error), Journal(tmp_path / "out.jsonl"):
        raise SmolLM3Error("the engine does not start")
    assert not list(tmp_path.iterdir())


def test_a_row_is_sampled_as_the_device_can(artifact):
    """On a greedy device a chat is answered greedily though the checkpoint samples; a row's temperature is refused."""
    prepare, row = Preparation(open_artifact(artifact, "cpu")), {"messages": QUESTION}
    prepare.generation_config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    assert prepare(parse_row(row, "in:1")).sampling.temperature == 0.6
    prepare.settings = dataclasses.replace(prepare.settings, on_device_sampling_config={"global_topk": 256})
    assert prepare(parse_row(row, "in:1")).sampling.temperature == 0
    with pytest.raises(SmolLM3Error, match="temperature is 0.5, but on_device_sampling_config is greedy"):
        prepare(parse_row({**row, "temperature": 0.5}, "in:2"))


def test_a_folder_is_read_file_by_file(tmp_path):
    write(tmp_path / "b.jsonl", [{"prompt": "b"}])
    write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"id": 0, "prompt": "c"}])
    (tmp_path / "notes.txt").write_text("no rows")
    assert [(row.id, row.prompt) for row in read_rows(tmp_path)] == [("a.jsonl:1", "a"), ("0", "c"), ("b.jsonl:1", "b")]
    with pytest.raises(SmolLM3Error, match="needs a prompt or messages"):
        parse_row({}, "a:1")


@pytest.mark.parametrize(
    ("given", "output", "more", "said"),
    [
        ("none.jsonl", "out.jsonl", (), "no such file or folder"),
        ("in.txt", "out.jsonl", (), "allowed is .jsonl or .parquet"),
        (".", "../out.jsonl", (), "no file in it ends with"),
        ("in.jsonl", "out.txt", (), "allowed is .jsonl"),
        ("in.jsonl", "in.jsonl", (), "lies where the input is read"),
        ("in.jsonl", "no/out.jsonl", (), "no such folder"),
        ("in.jsonl", "out.jsonl", ("--max-new-tokens", 0), "--max-new-tokens is 0"),
        ("in.jsonl", "out.jsonl", ("--replicas", 2), "--replicas is 2"),
        ("in.jsonl", "other.jsonl", (), "other.jsonl:1: no answer of a batch"),
        ("in.jsonl", "out.jsonl", ("--engine", "ray"), "Ray is not installed: pip install"),
    ],
)
def test_what_is_refused(artifact, tmp_path, given, output, more, said):
    folder = tmp_path / "d"
    folder.mkdir()
    if given.endswith("jsonl") and given != "none.jsonl":
        write(folder / given, [{"prompt": "a"}])
    (folder / "in.txt").write_text("a")
    if output == "other.jsonl":
        write(folder / output, [{"name": "of something else"}])
    before = sorted(folder.iterdir())
    done = batch(folder / given, folder / output, artifact, *more)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert sorted(folder.iterdir()) == before
