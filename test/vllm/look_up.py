"""What real vllm-neuron makes of a server's flags: python look_up.py JOB.json

JOB.json: {"engine": EngineArgs' keywords, "out": FILE}.
"""

import hashlib
import json
import sys
from pathlib import Path


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**job["engine"]).create_engine_config()
    before = sorted(name for name in ("neuronx_distributed", "neuronx_distributed_inference") if name in sys.modules)
    from neuronx_distributed_inference.models.config import to_dict
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
    from vllm_neuron.worker import neuronx_distributed_model_loader as loader

    defaults = loader._get_default_neuron_config(
        config.model_config, config.cache_config, config.parallel_config, config.scheduler_config, None, None
    )
    keywords = loader._get_neuron_config_after_override(
        dict(defaults), config.additional_config.get("override_neuron_config")
    )
    model_cls = loader._get_neuron_model_cls(config.model_config.hf_config.architectures[0])
    neuron_config = model_cls.get_neuron_config_cls()(**keywords)
    built = model_cls.get_config_cls()(neuron_config, load_config=load_pretrained_config(job["engine"]["model"]))
    Path(job["out"]).write_text(
        json.dumps(
            {
                "imported_before": before,
                "model": f"{model_cls.__module__}.{model_cls.__name__}",
                "keywords": to_dict(defaults),
                "md5": hashlib.md5(built.to_json_string().encode("utf-8")).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
