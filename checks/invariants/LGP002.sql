-- code: LGP002
-- name: actor and sampler agree
-- severity: error
-- says: Where the sampler used the actor's weights and left no token out (top_p 1, no top_k, no penalties), old and rollout log-probs agree: mean difference at most 1e-3 in float32, 0.1 in fewer bits; of one row of four tokens or more ten times that.
-- needs: key, absdiff_sum, n_in
-- fields: old_log_probs
-- examines: select count(*) from sampler_pairs
-- subsumed_by: LGP001, LGP003, LGP004, LGP005, LGP009, LEN004, LEN006, LEN008, TOK001, TOK002, TOK003, MSK003, MSK006, LEN001, QUE003, VER002, VER003, VER004
-- source: seen in TRL, verl and open-instruct: log-probs of another temperature, of other weights, of logits in bfloat16
-- causes: The trainer scores another distribution than the sampler drew from: logits not divided by the temperature, or in fewer bits; other weights; dropout; padding, attention mask or positions of the batch (a run with trace.probe=1 tells: LGP009 then leads).
-- reports: NVIDIA-NeMo/RL#935, NovaSky-AI/SkyRL#747, PrimeIntellect-ai/prime-rl#697, allenai/open-instruct#1387, huggingface/trl#5312, unslothai/unsloth#3283, verl-project/verl#2088, verl-project/verl#4162
-- faults: one_session_scored_by_others, prompts_padded_right, sampler_divides_log_probs, sampler_head_in_bfloat16, sampler_log_probs_are_raw, waking_loads_the_first_weights
with batches as (
    select rid, sum(absdiff_sum) / sum(n_in) as off, sum(n_in) as tokens from sampler_pairs group by rid
)
select r.rid, keys.key, printf('within %g nats of the sampler in the mean', r.band) as expected, printf('%.6g', r.off) as actual,
    printf('mean over the batch %.6g, %d policy tokens', b.off, cast(b.tokens as bigint)) as detail, null as severity
from sampler_pairs as r join batches as b using (rid) join keys using (id)
where (b.off > r.band and r.off > r.band) or (r.off > 10 * r.band and r.n_in >= 4) or isnan(r.off)
