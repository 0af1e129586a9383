"""vLLM's offline engine: python offline.py JOB.json

JOB.json: {"engine": LLM's keywords, "prompts": token ids, "params": SamplingParams' keywords per prompt, "rounds",
"out"}. Each round generates all prompts and adds [tokens, ...] to OUT.
"""

import json
import sys
from pathlib import Path


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    rounds = []
    for _ in range(job.get("rounds", 1)):
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs = llm.generate(prompts, [SamplingParams(**params) for params in job["params"]], use_tqdm=False)
        rounds.append(
            [{"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens} for output in outputs]
        )
    Path(job["out"]).write_text(json.dumps(rounds))


if __name__ == "__main__":
    main(sys.argv[1])
