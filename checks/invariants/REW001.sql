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
create or replace temp table scored as
select r.step_id, r.id, r."sum" as score, k.group_id, k.session_id, k."index"
from (
    select step_id, id, arg_max("sum", ord) as "sum"
    from reward_cells
    where field = 'rm_scores' and op = 'score' and entity = 'trajectory' and isfinite("sum")
    group by step_id, id
) as r join keys as k using (id);
create or replace temp table unlike_score as
with final as (
    select step_id, group_id, session_id, arg_max(score, "index") as score
    from scored
    where group_id is not null
    group by all
),
held as (
    -- a row that was scored itself carries its own score, the other outputs of a session that of its last one
    select w.rid, w.step_id, w.id, w."sum" as actual, coalesce(own.score, final.score) as score, own.id is not null as own
    from reward_cells as w
    join keys as k using (id)
    left join scored as own on own.step_id = w.step_id and own.id = w.id
    left join final on final.step_id = w.step_id and final.group_id = k.group_id and final.session_id = k.session_id
    where w.field = 'rm_scores' and w.op = 'produce' and w.stage in ('rollout', 'reward') and w.entity = 'trajectory'
        and isfinite(w."sum")
),
-- a scorer says float64, the field holds float32
differing as (select * from held where abs(actual - score) > 6e-8 * abs(score) + 1e-45),
-- the same scores under other keys were moved, not changed: that is REW002's
moved as (
    select step_id from differing group by step_id
    having list_sort(list(printf('%.6g', actual))) = list_sort(list(printf('%.6g', score)))
)
select d.*, m.step_id is not null as moved from differing as d left join moved as m using (step_id);
with written as (
    select c.*, e.nonfinite as bad from reward_cells as c join events as e using (rid)
    where c.field in ('rm_scores', 'token_level_scores') and c.entity = 'trajectory'
)
select rid, key, 'a finite score' as expected, printf('%s', "sum") as actual, null as detail, null as severity
from written join keys using (id)
where bad > 0 and not isfinite("sum")
union all
select rid, key, 'one score, on token ' || (valid_length - 1),
    case when nnz > 1 then nnz || ' tokens with a score, the last on token ' || last_nnz else 'on token ' || last_nnz end,
    'of a response of ' || valid_length, null
from written join keys using (id)
where field = 'rm_scores' and isfinite("sum") and (nnz > 1 or last_nnz <> valid_length - 1)
union all
select rid, key, printf('%.9g', score), printf('%.9g', actual),
    case when own then 'as the scorer said' else 'as the scorer said of the last output of the session' end, null
from unlike_score join keys using (id)
where not moved
union all
select w.rid, k.key, 'on a token of the policy', 'on a token outside the mask', 'the estimator returns rewards token by token',
    'warning'
from written as w join keys as k using (id)
join (
    select distinct step_id, setting(run_id, 'algorithm.adv_estimator') as estimator
    from (select distinct run_id, step_id from events)
) as s using (step_id)
where s.estimator in ('gae', 'reinforce_plus_plus', 'remax') and w.field = 'rm_scores' and w.op = 'produce'
    and w.mask_sum > 0 and w."sum" <> w.sum_in
