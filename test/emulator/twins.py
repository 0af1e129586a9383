"""Broken twins of the device path, one fault each; `artifact` is the folder that is compiled, or loaded."""

import shutil

from safetensors.torch import load_file, save_file


def rows_in_the_callers_order(artifact):
    """Rows of a full batch are fed as they come, and line i of the cache is taken for row i."""
    from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    def forward(self, *args, **kwargs):
        rows = (args or (kwargs["input_ids"],))[0]
        return NeuronBaseForCausalLM.forward(
            self, *args, **{**kwargs, "sampling_params": self.default_sampling_params[: len(rows)]}
        )

    NeuronSmolLM3ForCausalLM.forward = forward


def _executables(change):
    from neuron_emulator import runtime

    init = runtime.Executable.__init__

    def changed(self, *args):
        init(self, *args)
        change(self)

    runtime.Executable.__init__ = changed


def a_cache_is_not_written_back(artifact):
    def forget(executable):
        last = max(executable.aliases)
        executable.aliases = {output: state for output, state in executable.aliases.items() if output != last}

    _executables(forget)


def one_is_accepted_too_far(artifact):
    """In the graph: what follows the first token that the draft guessed wrong is taken for right, too."""
    from neuronx_distributed_inference.models.model_base import NeuronFusedSpecModel

    judged = NeuronFusedSpecModel._tkg_postprocessor

    def lenient(self, outputs, attention_mask, position_ids):
        accepted, *_, positions = judged(self, outputs, attention_mask, position_ids)
        further = (positions + 1).minimum(position_ids + accepted.shape[1]).to(positions.dtype)
        return [outputs[1].to(accepted.dtype), accepted[:, :1], attention_mask, further]

    NeuronFusedSpecModel._tkg_postprocessor = lenient


def _forget_caches_of(model):
    """K and V of one of the two models are not written back by the graph of a step."""

    def forget(executable):
        inputs = executable.meta.input_tensors
        if inputs[executable.inputs[0]].shape[1] == 1:
            executable.aliases = {
                output: state
                for output, state in executable.aliases.items()
                if not inputs[state].checkpoint_key.decode().startswith(model)
            }

    _executables(forget)


def the_drafts_cache_is_not_rolled_over(artifact):
    _forget_caches_of("draft_model.")


def the_models_cache_is_not_rolled_over(artifact):
    _forget_caches_of("target_model.")


def draft_and_model_change_places(artifact):
    """In rank 1's shard, of two models of one shape."""

    def swap(tensors):
        for name in [name for name in tensors if name.startswith("draft_model.")]:
            other = name.replace("draft_model.", "target_model.")
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()

    _changed_shard(artifact, swap)


def the_bucket_is_one_too_small(artifact):
    """In token generation, from the second bucket on."""
    from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

    chosen = ModelWrapper.get_target_bucket

    def smaller(self, *args, **kwargs):
        bucket = chosen(self, *args, **kwargs)
        buckets = self.neuron_config.buckets
        at = buckets.index(bucket)
        return buckets[at - 1] if self.tag.startswith("token") and at else bucket

    ModelWrapper.get_target_bucket = smaller


def an_output_is_read_before_its_execution_ended(artifact):
    import time

    from neuron_emulator import runtime

    def submit(self, job, outputs):
        execution = runtime.extension.Execution(outputs)
        execution.finish("")
        self.jobs.put(((lambda: (time.sleep(0.02), job())), runtime.extension.Execution([])))

    runtime.Queue.submit = submit


def a_rank_has_anothers_shard(artifact):
    weights = artifact / "weights"
    if weights.exists():
        shutil.copyfile(weights / "tp0_sharded_checkpoint.safetensors", weights / "tp1_sharded_checkpoint.safetensors")


def _changed_shard(artifact, change):
    file = artifact / "weights/tp1_sharded_checkpoint.safetensors"
    if file.exists():
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


def a_tensor_is_missing(artifact):
    _changed_shard(artifact, lambda tensors: tensors.pop("layers.3.mlp.up_proj.weight"))


def a_tensor_has_another_dtype(artifact):
    _changed_shard(artifact, lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].bfloat16()}))


def a_tensor_has_another_shape(artifact):
    _changed_shard(artifact, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][1:].clone()}))


def keys_and_values_are_swapped_on_a_rank(artifact):
    def swap(tensors):
        for name in [name for name in tensors if ".k_proj." in name]:
            other = name.replace(".k_proj.", ".v_proj.")
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()

    _changed_shard(artifact, swap)


def tokens_stay_int64(artifact):
    from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

    ModelWrapper.convert_int64_to_int32 = lambda self, *args: list(args)
