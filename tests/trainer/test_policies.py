"""Reference, KL in the reward, bypass and rollout correction through whole steps, and what their traces say."""

from __future__ import annotations

import asyncio
import json

import duckdb
import pytest

import lineage
from lineage import hooks
from lineage.checks.verdict import Kind
from lineage.hooks import UserError
from lineage.trainer.config import compose, need_reference_policy, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.lora import AdapterError

SMALL = (
    "data.train_batch_size=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=6",
    "trace.sidecar=false",
)
CORRECTION = "algorithm.rollout_correction"


class Run:
    """A traced run: its trainer, metrics by step and trace."""

    def __init__(self, folder, *overrides, steps=2):
        config = compose([*SMALL, f"trainer.total_training_steps={steps}", *overrides])
        self.warnings = validate_config(config)
        self.metrics = []
        with hooks.recording(folder, config=resolved(config), run={}):
            self.trainer = PPOTrainerSync(config, folder=folder, tracking=self)
            asyncio.run(self._go())
        self.path = folder / "trace.parquet"

    async def _go(self):
        await self.trainer.init()
        await self.trainer.fit()

    def log(self, metrics, step):
        """Keep a step's metrics."""
        self.metrics.append(dict(metrics))

    def sql(self, question):
        """Rows of the trace, as tuples."""
        return duckdb.sql(question.replace("{trace}", f"'{self.path}'")).fetchall()

    def passes(self, *codes):
        """These codes saw something and hold, and so do those of every run."""
        codes = (*codes, "ADV001", "MSK001", "MSK002", "LEN003", "PAD002", "QUE003")
        kinds = {verdict.code: verdict.kind for verdict in lineage.check(self.path, select=codes).verdicts}
        assert kinds == dict.fromkeys(codes, Kind.PASS)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """Two steps of an actor with an adapter."""
    return Run(tmp_path_factory.mktemp("lora"), "actor_rollout_ref.model.lora_rank=4")


def test_an_adapter_run_is_clean(lora_run):
    """What an adapter could break holds; both sides of each sync have the same tensors under the base model's names."""
    lora_run.passes("VER002", "VER003", "VER006", "LGP006")
    sides = lora_run.sql(
        "select global_steps, list(weights.phase order by seq), count(distinct fingerprint), count(distinct key) "
        "from {trace} where stage = 'weight_sync' and op = 'sync' group by all order by all"
    )
    assert sides == [(step, ["actor", "engine"], 1, 1) for step in (0, 1, 2)]
    names = {key for (keys,) in lora_run.sql("select key from {trace} where op = 'sync'") for key in keys}
    assert names == set(lora_run.trainer.parts.rollout.resident())


def test_an_adapter_moves_the_weights_the_rollout_has(lora_run):
    """Only tensors that carry the adapter change from sync to sync."""
    rows = lora_run.sql(
        "select key, fingerprint from {trace} where op = 'sync' and weights.phase = 'engine' order by global_steps"
    )
    (names, first), (_, last) = rows[0], rows[-1]
    changed = {name for name, old, new in zip(names, first, last, strict=True) if old != new}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)


def test_the_adapterless_actor_is_the_reference(lora_run):
    """In step 1 the reference's log-probs are the old ones; then they part. The trace says which weights scored."""
    gaps = lora_run.sql(
        "select list_max(absdiff_max) from {trace} where op = 'compare' and field = 'ref_log_prob' "
        "order by global_steps"
    )
    assert gaps[0] == (0.0,)
    assert gaps[1][0] > 1e-5
    scored = lora_run.sql(
        "select distinct stage, weights.phase, weights.adapter from {trace} "
        "where op = 'forward' and field = 'log_probs' order by all"
    )
    assert scored == [
        ("old_log_prob", "actor", "default"),
        ("ref_log_prob", "ref", None),
        ("update_actor", "actor", "default"),
    ]
    frozen = {
        name
        for name, tensor in lora_run.trainer.parts.worker.actor.module.named_parameters()
        if not tensor.requires_grad
    }
    assert not any("lora_" in name for name in frozen)


@pytest.fixture(scope="module")
def kl_run(tmp_path_factory):
    """Two steps with the KL in the reward and an adaptive coefficient."""
    return Run(
        tmp_path_factory.mktemp("kl"),
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.kl_ctrl.horizon=12",
        "algorithm.kl_ctrl.target_kl=10.0",
        "actor_rollout_ref.actor.use_kl_loss=false",
    )


def test_kl_in_the_reward_is_traced(kl_run):
    """The rewards are the scores while the policies agree, and less the KL afterwards; they are written back."""
    kl_run.passes("REW002", "REW005", "ADV002", "LOS005", "MET001")
    sums = kl_run.sql(
        "select global_steps, field, list_sum(sum) from {trace} where stage = 'advantage' and op = 'forward' "
        "and field like 'token_level_%' order by global_steps, field"
    )
    by_field = {(step, field): total for step, field, total in sums}
    assert by_field[1, "token_level_rewards"] == pytest.approx(by_field[1, "token_level_scores"])
    assert by_field[2, "token_level_rewards"] != pytest.approx(by_field[2, "token_level_scores"], abs=1e-6)
    stages = kl_run.sql(
        "select distinct stage, op from {trace} where field = 'token_level_rewards' and slot is not null order by all"
    )
    assert stages == [("advantage", "produce"), ("metrics", "consume")]
    assert not kl_run.sql("select 1 from {trace} where loss.term = 'kl_loss'")
    step = kl_run.metrics[1]
    assert step["critic/rewards/mean"] != pytest.approx(step["critic/score/mean"], abs=1e-9)


def test_the_coefficient_moves_and_is_saved_with_a_checkpoint(kl_run):
    """Far below its target it falls by 0.2 * trajectories / horizon a step; the padding row is no trajectory."""
    coefficients = [metrics["actor/reward_kl_penalty_coeff"] for metrics in kl_run.metrics]
    assert coefficients == pytest.approx([0.5, 0.45])
    assert kl_run.trainer.parts.stateful["kl_ctrl"].state_dict() == {"value": pytest.approx(0.405)}


@pytest.fixture(scope="module")
def bypass_run(tmp_path_factory):
    """One step whose old log-probs are the sampler's."""
    return Run(tmp_path_factory.mktemp("bypass"), f"{CORRECTION}.bypass_mode=true", steps=1)


def test_bypass_mode_computes_no_old_log_probs(bypass_run):
    """No forward pass and no entropy before the update; what is written is what the sampler gave."""
    bypass_run.passes("LGP004", "QUE006", "LOS005", "MET001")
    ops = bypass_run.sql("select distinct op, field from {trace} where stage = 'old_log_prob' order by all")
    assert ops == [("consume", "rollout_log_probs"), ("produce", "old_log_probs")]
    assert not bypass_run.sql("select 1 from {trace} where field = 'entropy'")
    contents = bypass_run.sql(
        "select count(distinct fingerprint) from {trace} where stage = 'old_log_prob' group by global_steps"
    )
    assert contents == [(1,)]
    assert "actor/entropy" not in bypass_run.metrics[0]
    assert abs(bypass_run.metrics[0]["rollout_corr/kl"]) < 1e-2


@pytest.fixture(scope="module")
def corrected_run(tmp_path_factory):
    """One step with weights, and a rejection so strict that rounding breaks it."""
    return Run(
        tmp_path_factory.mktemp("corrected"),
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=1.00000005",
        steps=1,
    )


def test_rejection_is_declared_and_weights_are_written_back(corrected_run):
    """The smaller mask names its rows; the update reads it and the weights; no code fails."""
    corrected_run.passes("MSK005", "REW007", "LOS001", "LOS005")
    ((reasons, before, after),) = corrected_run.sql(
        "select m.reason, p.mask_sum, m.mask_sum "
        "from {trace} as m join {trace} as p on p.op = 'pad' and p.field = m.field "
        "where m.stage = 'advantage' and m.op = 'forward' and m.field = 'response_mask'"
    )
    assert [reason == "rejected" for reason in reasons] == [b > a for b, a in zip(before, after, strict=True)]
    assert "rejected" in reasons
    read = corrected_run.sql("select field from {trace} where stage = 'update_actor' and op = 'consume'")
    assert {"response_mask", "loss_mask", "rollout_is_weights"} <= {field for (field,) in read}
    assert corrected_run.metrics[0]["rollout_corr/rollout_rs_masked_fraction"] > 0
    counted = corrected_run.sql(
        "select sum(loss.tokens), max(loss.denominator) from {trace} where loss.term = 'pg_loss' group by mini_batch"
    )
    assert sum(tokens for tokens, _ in counted) == sum(after)
    assert sum(denominator for _, denominator in counted) == sum(before)


def test_the_stage_of_a_critic_never_appears(lora_run, kl_run, bypass_run):
    """GRPO has no values; asking for GAE says so in one line."""
    for run in (lora_run, kl_run, bypass_run):
        assert not run.sql("select 1 from {trace} where stage = 'values' or field = 'values'")
    with pytest.raises(UserError, match="GRPO has no critic, so no values and no GAE") as caught:
        validate_config(compose(["algorithm.adv_estimator=gae"]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{CORRECTION}.bypass_mode=true", "bypass_mode=true needs .*calculate_log_probs=true"),
        (f"{CORRECTION}.rollout_is=token", "rollout_is=token needs .*calculate_log_probs=true"),
        (f"{CORRECTION}.rollout_is=group", "use one of: null, token, sequence"),
        (f"{CORRECTION}.rollout_rs=token_k1", "needs one bound"),
        (f"{CORRECTION}.loss_type=reinforce", "use one of: ppo_clip"),
        ("algorithm.kl_ctrl.type=pid", "use one of: fixed, adaptive"),
        ("algorithm.kl_ctrl.target_kl=0", "target_kl=0.* must be greater than 0"),
        ("algorithm.kl_ctrl.kl_coef=-1", "must not be negative"),
        ("actor_rollout_ref.model.lora_rank=-1", "or greater"),
        ("actor_rollout_ref.model.target_modules=[]", "a name or a list of names"),
        ("actor_rollout_ref.model.target_modules=3", "a name or a list of names"),
        ("actor_rollout_ref.actor.kl_loss_type=k9", "low_var_kl"),
    ],
)
def test_what_cannot_run_is_one_line(override, says):
    """Each rule names the key, and what to set."""
    config = compose([override, "actor_rollout_ref.rollout.calculate_log_probs=false"])
    with pytest.raises(UserError, match=says) as caught:
        validate_config(config)
    assert "\n" not in str(caught.value)


def test_log_probs_of_another_temperature_are_refused():
    """Raw log-probs at a temperature are no anchor of a ratio."""
    overrides = ["actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "actor_rollout_ref.rollout.temperature=0.7"]
    with pytest.raises(UserError, match="processed_logprobs"):
        validate_config(compose([*overrides, f"{CORRECTION}.bypass_mode=true"]))


def test_wrong_targets_end_the_run_before_it_starts(tmp_path):
    """peft's reason, in one line."""
    with pytest.raises(AdapterError, match="not found in the base model"):
        Run(tmp_path, "actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.model.target_modules=nothing")


@pytest.mark.parametrize(
    ("loss", "reward", "needed"), [(False, False, False), (True, False, True), (False, True, True), (True, True, True)]
)
def test_a_reference_is_kept_for_either_kl(loss, reward, needed):
    """In the loss, in the reward, or both (verl ``need_reference_policy``)."""
    config = compose(
        [f"actor_rollout_ref.actor.use_kl_loss={json.dumps(loss)}", f"algorithm.use_kl_in_reward={json.dumps(reward)}"]
    )
    assert need_reference_policy(config) is needed
