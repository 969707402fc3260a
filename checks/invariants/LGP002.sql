-- code: LGP002
-- name: actor and sampler agree
-- severity: error
-- says: Where the sampler used the actor's weights and left no token out (top_p 1, no top_k, no penalties), old and rollout log-probs agree: mean difference at most 1e-3 in float32, 0.1 in fewer bits; of one row of four tokens or more ten times that.
-- needs: key, absdiff_sum, n_in
-- fields: old_log_probs
-- examines: select count(*) from pair_cells where field = 'old_log_probs' and against = 'rollout_log_probs' and n_in > 0 and rid in (select rid from events where op = 'compare' and field = 'old_log_probs' and coalesce(setting(run_id, 'actor_rollout_ref.rollout.top_p'), '1.0') in ('1', '1.0') and coalesce(setting(run_id, 'actor_rollout_ref.rollout.top_k'), '-1') in ('0', '-1'))
-- subsumed_by: LGP001, LGP003, LGP004, LGP005, LGP009, LEN004, LEN006, LEN008, TOK001, TOK002, TOK003, MSK003, MSK006, LEN001, QUE003, VER002, VER003
-- source: seen in TRL, verl and open-instruct: log-probs of another temperature, of other weights, of logits in bfloat16
-- causes: The trainer scores another distribution than the sampler drew from: logits not divided by the temperature, or in fewer bits; other weights; dropout.
-- reports: NVIDIA-NeMo/RL#935, NovaSky-AI/SkyRL#747, PrimeIntellect-ai/prime-rl#697, allenai/open-instruct#1387, unslothai/unsloth#3283, verl-project/verl#2088, verl-project/verl#4162
-- faults: one_session_scored_by_others, prompts_padded_right, sampler_divides_log_probs, sampler_head_in_bfloat16, sampler_log_probs_are_raw
create or replace temp table cut_support as
select distinct run_id
from events
where op = 'generate' and stage = 'rollout' and sampling is not null
    and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or sampling.repetition_penalty <> 1
        or (sampling.logprobs_mode like 'raw%' and sampling.temperature <> 1));
create or replace temp table on_policy as
with scored as (
    select run_id, global_steps, k, ord, weights.version as version
    from events
    where stage = 'old_log_prob' and op = 'forward' and field = 'log_probs' and weights is not null
)
select e.rid, e.run_id, e.global_steps, band(e.run_id) as band
from events as e
left join scored as s
    on s.run_id is not distinct from e.run_id and s.global_steps = e.global_steps and s.k = e.k and s.ord < e.ord
where e.op = 'compare' and e.field = 'old_log_probs' and e.against = 'rollout_log_probs'
    and e.partition is distinct from 'val'
    and not exists (select 1 from cut_support as c where c.run_id is not distinct from e.run_id)
    and coalesce(setting(e.run_id, 'actor_rollout_ref.rollout.top_p'), '1.0') in ('1', '1.0')
    and coalesce(setting(e.run_id, 'actor_rollout_ref.rollout.top_k'), '-1') in ('0', '-1')
    and coalesce(s.version, e.global_steps - 1) = e.global_steps - 1;
create or replace temp table aged as
select distinct c.id
from key_cells as c join events as e using (rid)
where c.max_global_steps <> e.global_steps - 1 or c.min_global_steps <> e.global_steps - 1;
with rows_of as (
    select p.rid, p.id, o.band, p.absdiff_sum, p.n_in, p.absdiff_sum / p.n_in as off
    from pair_cells as p join on_policy as o using (rid)
    where p.n_in > 0 and p.id not in (select id from aged)
),
batches as (
    select rid, sum(absdiff_sum) / sum(n_in) as off, sum(n_in) as tokens from rows_of group by rid
)
select r.rid, keys.key, printf('within %g nats of the sampler in the mean', r.band) as expected, printf('%.6g', r.off) as actual,
    printf('mean over the batch %.6g, %d policy tokens', b.off, cast(b.tokens as bigint)) as detail, null as severity
from rows_of as r join batches as b using (rid) join keys using (id)
where (b.off > r.band and r.off > r.band) or (r.off > 10 * r.band and r.n_in >= 4) or isnan(r.off)
