-- code: REW001
-- name: one score a session, on the last token
-- severity: error
-- says: rm_scores are finite, with at most one value that is not zero a row, on the last token of the response; every output of a session carries the same, and it is the scorer's score.
-- needs: key, sum, nnz, last_nnz, valid_length, nonfinite
-- fields: rm_scores
-- examines: select count(*) from reward_cells where field = 'rm_scores' and op in ('score', 'produce', 'forward')
-- subsumed_by: KEY001, KEY002, PAD001, REW006
-- source: the seeds' session score on the last response token; verl's reward loop places it there
-- causes: The scorer divided by nothing, the score was put on the last token of a padded or a shifted row, a zero was taken for a missing score, or only one output of a session was given it.
-- reports: OpenRLHF/OpenRLHF#1219, alibaba/ROLL#390, verl-project/verl#5216
-- faults: a_zero_taken_for_a_missing_score, one_score_for_the_group, only_the_last_output_is_scored, overlong_penalty_over_nothing, rewards_stay_zeros_like, score_before_the_last_token, score_on_every_token, score_on_the_first_token, scores_in_half_precision, the_length_bonus_nobody_asked_for, the_logarithm_of_a_zero
create or replace temp table unlike_score as
select w.rid, w.step_id, w.id, w."sum" as actual, s."sum" as score, 'as the scorer said' as detail
from reward_cells as w
join reward_cells as s on s.id = w.id and s.step_id = w.step_id
where w.field = 'rm_scores' and w.op = 'produce' and w.stage in ('rollout', 'reward') and w.entity = 'trajectory'
    and s.field = 'rm_scores' and s.op = 'score' and isfinite(w."sum") and isfinite(s."sum")
    -- a scorer says float64, the field holds float32
    and abs(w."sum" - s."sum") > 6e-8 * abs(s."sum") + 1e-45
union all
-- an output that was not scored itself carries what its session's last output was given
select w.rid, w.step_id, w.id, w."sum", s."sum", 'as the scorer said of the last output of the session'
from reward_cells as w
join keys as k using (id)
join last_outputs as l on l.group_id = k.group_id and l.session_id = k.session_id and l.last > k."index"
join keys as f on f.group_id = l.group_id and f.session_id = l.session_id and f."index" = l.last
join reward_cells as s on s.id = f.id and s.step_id = w.step_id
where w.field = 'rm_scores' and w.op = 'produce' and w.stage in ('rollout', 'reward') and w.entity = 'trajectory'
    and s.field = 'rm_scores' and s.op = 'score' and isfinite(w."sum") and isfinite(s."sum")
    and abs(w."sum" - s."sum") > 6e-8 * abs(s."sum") + 1e-45
    and w.id not in (select id from reward_cells where op = 'score' and field = 'rm_scores')
union all
select w.rid, w.step_id, w.id, w."sum", s."sum", 'as the scorer said beside it'
from reward_cells as w
join reward_cells as s on s.id = w.id and s.step_id = w.step_id
where w.field = 'rm_scores' and w.op = 'score' and s.field = 'score' and s.op = 'produce' and s.stage = 'reward'
    and w.stage = 'reward' and isfinite(w."sum") and isfinite(s."sum") and abs(w."sum" - s."sum") > 6e-8 * abs(s."sum") + 1e-45;
with moved as (
    -- the same scores under other keys were moved, not changed: that is REW002's
    select step_id from unlike_score group by step_id
    having list_sort(list(printf('%.6g', actual))) = list_sort(list(printf('%.6g', score)))
)
select c.rid, key, 'a finite score' as expected, cast("sum" as varchar) as actual, null as detail, null as severity
from reward_cells as c join keys using (id)
where c.entity = 'trajectory' and c.field in ('rm_scores', 'token_level_scores') and not isfinite("sum")
union all
select c.rid, key, 'one score, on token ' || (valid_length - 1),
    case when nnz > 1 then nnz || ' tokens with a score, the last on token ' || last_nnz else 'on token ' || last_nnz end,
    'of a response of ' || valid_length, null
from reward_cells as c join keys using (id)
where c.entity = 'trajectory' and c.field = 'rm_scores' and (nnz > 1 or last_nnz <> valid_length - 1) and isfinite("sum")
union all
select rid, key, printf('%.9g', score), printf('%.9g', actual), detail, null
from unlike_score join keys using (id)
where step_id not in (select step_id from moved)
union all
select c.rid, key, 'on a token of the policy', 'on a token outside the mask', 'the estimator returns rewards token by token', 'warning'
from reward_cells as c join keys using (id) join estimators as e using (step_id)
where c.field = 'rm_scores' and c.op = 'produce' and c."sum" <> c.sum_in and c.mask_sum > 0
    and e.estimator in ('gae', 'reinforce_plus_plus', 'remax')
