-- code: LGP003
-- name: log-probs belong to their tokens
-- severity: error
-- says: Two log-probs of the same tokens correlate best where they stand, unless one policy finds most of them likelier: shifted by one token they do not correlate by more than 0.5 and better by 0.2, over 256 tokens, or, up to a batch's first update, much better over 16. A warning where it is so on some rows only.
-- needs: key, corr0, corr_prev, corr_next
-- fields:
-- examines: select sum(c) from (select case when sum(n_in) >= 16 then count(*) end as c from pair_cells where against in ('rollout_log_probs', 'old_log_probs') and field in ('old_log_probs', 'ref_log_prob', 'log_probs') and n_in >= 4 and corr0 is not null and corr_prev is not null and corr_next is not null group by rid)
-- subsumed_by: LEN004, LEN001, TOK001, LGP009
-- source: seen in TRL and ROLL: logits[:, :-1][:, :K] for logits[:, -K-1:-1]; values one token late
-- causes: The position that predicts a token and the token's own were confused: logits or labels were shifted once too often, or not at all.
-- reports: huggingface/trl#3681
-- faults: sampler_log_probs_one_token_early, sampler_log_probs_one_token_late, trainer_shifts_once_more
create or replace temp table lagged as
with rows_of as (
    select rid, step_id, id, field, against, n_in, absdiff_sum, absdiff_max, corr0, greatest(corr_prev, corr_next) as shifted,
        corr_prev >= corr_next as earlier
    from pair_cells
    where against in ('rollout_log_probs', 'old_log_probs') and field in ('old_log_probs', 'ref_log_prob', 'log_probs')
        and n_in >= 4 and corr0 is not null and corr_prev is not null and corr_next is not null
),
batches as (
    select rid, sum(n_in) as tokens, sum(n_in * corr0) / sum(n_in) as here,
        sum(n_in * shifted) / sum(n_in) as there, bool_and(shifted > corr0 + 0.2) as everywhere
    from rows_of
    group by rid
),
late as (
    -- of a batch's later updates: few tokens of two policies may be alike anywhere
    select e.rid
    from events as e
    join update_batches as b
        on b.run_id is not distinct from e.run_id and b.global_steps = e.global_steps and b.update_index = e.update_index
    where e.op = 'compare' and e.field = 'log_probs' and e.update_index > b.first_update
)
select r.*, here, there, tokens, everywhere,
    (tokens >= 256 and there > greatest(0.5, here + 0.2))
        or (tokens >= 16 and there > 0.9 and here < 0.5 and rid not in (select rid from late)) as batch
from rows_of as r join batches as b using (rid)
where r.shifted > r.corr0 + 0.2;
create or replace temp table far_apart as
-- Rows of two policies, one of which finds most tokens likelier: a text that repeats itself may have them alike a token on.
-- A shift makes some tokens likelier and others less so, and moves the sum by those at the ends alone.
select l.rid, l.id
from lagged as l
join events as e using (rid)
join token_sum_cells as a on a.step_id = l.step_id and a.id = l.id and a.field = l.field
join events as f on f.rid = a.rid and f.update_index is not distinct from e.update_index
join token_sum_cells as b on b.step_id = l.step_id and b.id = l.id and b.field = l.against
where a.mask_sum = l.n_in and b.mask_sum = l.n_in
    and abs(a.sum_in - b.sum_in) > 0.5 * l.absdiff_sum + l.absdiff_max;
select rid, key, printf('correlation %.3f', corr0) as expected,
    printf('%.3f with the other side one token %s', shifted, case when earlier then 'earlier' else 'later' end) as actual,
    printf('over the batch %.3f and %.3f, %d tokens', here, there, cast(tokens as bigint)) as detail,
    case when batch and everywhere then 'error' else 'warning' end as severity
from lagged join keys using (id)
where (batch or (n_in >= 256 and shifted > 0.5)) and (rid, id) not in (select (rid, id) from far_apart)
