"""deploy/ray/serve_smollm3.yaml on a Ray cluster of two nodes: transformers' answers, whatever ends meanwhile."""

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from cluster import CORES, SETTINGS, Cluster, Memory, descendants_environment, kill, replicas, run, wait_for
from places import ROOT, TINY
from reference import reference_model
from serving import artifact_command
from transformers import AutoTokenizer

from smollm3_neuron.errors import SmolLM3Error

pytestmark = pytest.mark.ray
VLLM = ("0.13",)
CONFIG = ROOT / "deploy" / "ray" / "serve_smollm3.yaml"
PORT = 8399
URL = f"http://127.0.0.1:{PORT}/v1"


@pytest.fixture(scope="module")
def made(release, vllm_neuron, tmp_path_factory):
    """A cluster of two nodes, and the artifact that it serves."""
    folder = tmp_path_factory.mktemp("r")
    command = artifact_command(TINY, SETTINGS, release, vllm_neuron, folder)
    with Cluster(release, vllm_neuron, folder) as cluster:
        yield cluster, Path(command[0].partition("=")[2])


def deploy(made, least: int, most: int) -> None:
    """As the documents say, with the config of deploy/ray; waits until `least` replicas answer."""
    cluster, artifact = made
    config = yaml.safe_load(CONFIG.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": PORT}
    config["proxy_location"] = "HeadOnly"  # both nodes are this machine: their proxies would share the port
    (application,) = config["applications"]
    scaling = dict(min_replicas=least, max_replicas=most, upscale_delay_s=1, downscale_delay_s=5)
    application["args"] = {"artifact": str(artifact), "autoscaling_config": scaling}
    path = cluster.folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    run("serve", ["deploy", path], cluster.env)
    wait_for(lambda: is_running(cluster, least), f"{least} running replicas")


def is_running(cluster, count: int) -> bool:
    status = yaml.safe_load(run("serve", ["status"], cluster.env))["applications"].get("smollm3", {})
    servers = [d for name, d in status.get("deployments", {}).items() if name.startswith("LLMServer")]
    running = sum((d.get("replica_states") or {}).get("RUNNING", 0) for d in servers)
    return status.get("status") == "RUNNING" and running == count


def expected(prompt: str, new_tokens: int) -> str:
    """transformers' greedy continuation."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    inputs = torch.tensor([tokenizer(prompt)["input_ids"]])
    output = reference_model(str(TINY)).generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=new_tokens,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)


PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(4)]
NEW_TOKENS = 8


async def ask(count: int, at_once: int, during=None) -> list:
    """The answers, or the errors, of `count` requests; `during()` runs when a quarter of them is answered."""
    import httpx
    import openai

    client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)
    model = (await client.models.list()).data[0].id
    places, results = asyncio.Semaphore(at_once), [None] * count
    answered = 0

    async def one(number: int) -> None:
        nonlocal answered
        async with places:
            try:
                answer = await client.completions.create(
                    model=model, prompt=PROMPTS[number % len(PROMPTS)], temperature=0, max_tokens=NEW_TOKENS
                )
                results[number] = answer.choices[0].text
            except (openai.APIError, httpx.HTTPError) as error:
                results[number] = error
            answered += 1
            if during and answered == count // 4:
                await asyncio.to_thread(during)

    await asyncio.gather(*(one(number) for number in range(count)))
    return results


def check(results: list) -> list:
    """The errors among the results; every answer is transformers'."""
    wanted = {prompt: expected(prompt, NEW_TOKENS) for prompt in PROMPTS}
    errors = [result for result in results if isinstance(result, Exception)]
    for number, result in enumerate(results):
        if not isinstance(result, Exception):
            assert result == wanted[PROMPTS[number % len(PROMPTS)]]
    return errors


def calls(cluster) -> Counter:
    """How many requests each replica has answered, by its log."""
    logs = Path(cluster.session.name).glob("**/session_2*/logs/serve/replica_*LLMServer*.log")
    return Counter({log.name: log.read_text().count("CALL completions OK") for log in set(map(Path.resolve, logs))})


def test_two_replicas_share_200_requests(made):
    cluster, _ = made
    deploy(made, 2, 2)
    processes = wait_for(lambda: found if len(found := replicas()) == 2 else None, "two replicas")
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"):
        values = [descendants_environment(process, name) for process in processes]
        assert all(len(value) == 1 for value in values), (name, values)
    ports = set.union(*(descendants_environment(process, "NEURON_RT_ROOT_COMM_ID") for process in processes))
    assert len(ports) == 2
    with Memory(replicas) as memory:
        assert check(asyncio.run(ask(200, 16))) == []
    counts = [count for count in calls(cluster).values() if count]
    assert len(counts) == 2 and sum(counts) == 200, counts
    print(f"\ntwo replicas answered {counts}; {memory}")


def test_a_killed_replica_comes_back_and_the_others_go_on(made):
    cluster, _ = made
    deploy(made, 2, 2)
    before = replicas()
    with Memory(replicas) as memory:
        errors = check(asyncio.run(ask(200, 16, during=lambda: kill(replicas()[0]))))
        assert len(errors) <= 16  # those that were open
        assert all(getattr(error, "status_code", 0) >= 500 for error in errors)
        known = {p.pid for p in before}
        wait_for(lambda: len(replicas()) == 2 and {p.pid for p in replicas()} != known, "a new replica")
        wait_for(lambda: is_running(cluster, 2), "two running replicas")
        assert check(asyncio.run(ask(40, 8))) == []
    print(f"\na replica killed: {len(errors)} of 200 failed: {Counter(str(error)[:90] for error in errors)}; {memory}")


def test_a_lost_node_leaves_the_other_answering_and_returns(made):
    cluster, _ = made
    deploy(made, 3, 3)
    with Memory(replicas) as memory:
        try:
            errors = check(asyncio.run(ask(200, 16, during=cluster.lose_node)))
            assert check(asyncio.run(ask(20, 4))) == []
        finally:
            cluster.start_node(CORES[1])
        assert len(errors) <= 16
        assert all(getattr(error, "status_code", 0) >= 500 for error in errors)
        wait_for(lambda: is_running(cluster, 3), "three running replicas")
        assert check(asyncio.run(ask(20, 4))) == []
    print(f"\na node lost: {len(errors)} of 200 failed: {Counter(str(error)[:90] for error in errors)}; {memory}")


def test_it_scales_from_one_to_three_and_back(made):
    deploy(made, 1, 3)
    wait_for(lambda: len(replicas()) == 1, "one replica")
    most = 0

    async def load() -> None:
        nonlocal most
        while most < 3:
            assert check(await ask(100, 48)) == []
            most = max(most, len(replicas()))

    with Memory(replicas) as memory:
        asyncio.run(asyncio.wait_for(load(), 600))
        wait_for(lambda: len(replicas()) == 1, "one replica again")
    print(f"\nscaled to {most} and back; {memory}")


def test_what_is_refused_before_anything_is_loaded(made):
    cluster, artifact = made
    command = [sys.executable, ROOT / "scripts" / "serve.py", "--artifact", artifact]
    done = subprocess.run([*command, "--replicas", "9"], env=cluster.env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "9 groups of 2 neuron_cores are asked for, the Ray cluster has 3 (nodes with 2, 4 cores)" in done.stderr
    from smollm3_neuron.vllm.ray_serving import build

    for args, said in (
        ({"artifact": str(artifact), "replicas": 2}, "args has 'replicas'"),
        ({}, "args has no artifact"),
    ):
        with pytest.raises(SmolLM3Error, match=said):
            build(args)


def test_one_core_is_refused(release, vllm_neuron, tmp_path):
    command = artifact_command(TINY, {**SETTINGS, "tp_degree": 1}, release, vllm_neuron, tmp_path)
    from smollm3_neuron.vllm.ray_serving import artifact_to_serve

    with pytest.raises(SmolLM3Error, match="tp_degree is 1, behind Ray Serve it is to be at least 2"):
        artifact_to_serve(Path(command[0].partition("=")[2]))
