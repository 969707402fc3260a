-- code: REW002
-- name: a score stays with its key
-- severity: error
-- says: A score stays with its key through gather, reorder, split and write-back: what is written, padded, cut, read and handed to the estimator under a key is that key's score.
-- needs: key, valid_length, fingerprint
-- fields: rm_scores
-- examines: select coalesce((select sum(events.n) from events join expected using (k) where entity = 'trajectory' and field in ('rm_scores', 'token_level_scores') and span = 'response' and op not in ('produce', 'compare', 'score') and c is not null and reward_c is not null), 0) + (select count(*) from reward_cells where op = 'score')
-- subsumed_by: REW001, QUE003, LEN003, LEN001, KEY001, KEY002
-- source: S3; verl writes rewards of a gathered batch back by position
-- causes: Scores of a batch that was gathered, sorted or split came back in another order, or the estimator was handed the scores of another batch.
-- faults: gathered_as_they_became_ready, scores_of_a_group_in_another_order, scores_of_the_order_before_balance, the_penalty_is_taken_off_in_place
insert into suspects
select rid
from events join expected using (k)
where entity = 'trajectory' and field in ('rm_scores', 'token_level_scores') and span = 'response'
    and op not in ('produce', 'compare', 'score') and c is not null and c <> reward_c;
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
    select step_id from unlike_score group by step_id
    having list_sort(list(printf('%.6g', actual))) = list_sort(list(printf('%.6g', score)))
)
select rid, key, printf('%.9g', score) as expected, printf('%.9g', actual) as actual,
    'the score of another key of the step' as detail, null as severity
from unlike_score join keys using (id)
where step_id in (select step_id from moved)
union all
select e.rid, e.key, printf('score %.9g, fingerprint %x', b.reward, b.reward_fp),
    printf('score %.9g, fingerprint %x', e."sum", e.fingerprint),
    'as it was first written, and as it stands under this key', null
from elements as e
join keys as k using (key)
join base as b using (id)
where e.fingerprint <> b.reward_fp and e.field in ('rm_scores', 'token_level_scores')
