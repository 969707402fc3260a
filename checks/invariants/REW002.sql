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
insert into suspects
select rid
from events join expected using (k)
where entity = 'trajectory' and field in ('rm_scores', 'token_level_scores') and span = 'response'
    and op not in ('produce', 'compare', 'score') and c is not null and c <> reward_c;
create or replace temp table swapped as
with scored as (
    select step_id, id, arg_max("sum", ord) as score
    from reward_cells
    where field = 'rm_scores' and op = 'score' and entity = 'trajectory' and isfinite("sum")
    group by step_id, id
),
final as (
    select step_id, group_id, session_id, arg_max(score, "index") as score
    from scored join keys using (id)
    where group_id is not null
    group by all
),
differing as (
    select w.rid, w.step_id, w.id, w."sum" as actual, coalesce(own.score, final.score) as score
    from reward_cells as w
    join keys as k using (id)
    left join scored as own on own.step_id = w.step_id and own.id = w.id
    left join final on final.step_id = w.step_id and final.group_id = k.group_id and final.session_id = k.session_id
    where w.field = 'rm_scores' and w.op = 'produce' and w.stage in ('rollout', 'reward') and w.entity = 'trajectory'
        and isfinite(w."sum") and abs(actual - coalesce(own.score, final.score)) > 6e-8 * abs(coalesce(own.score, final.score)) + 1e-45
)
select * from differing
where step_id in (
    select step_id from differing group by step_id
    having list_sort(list(printf('%.6g', actual))) = list_sort(list(printf('%.6g', score)))
);
select rid, key, printf('%.9g', score) as expected, printf('%.9g', actual) as actual,
    'the scorer''s score of another key of the step' as detail, null as severity
from swapped join keys using (id)
union all
select e.rid, e.key, printf('score %.9g, fingerprint %x', b.reward, b.reward_fp),
    printf('score %.9g, fingerprint %x', e."sum", e.fingerprint),
    coalesce('the score of ' || (
        select min(o.key) from elements as o join keys as ok on ok.key = o.key join base as ob on ob.id = ok.id
        where o.rid = e.rid and ob.reward_fp = e.fingerprint
    ), 'as it was first written'), null
from elements as e
join keys as k using (key)
join base as b using (id)
where e.fingerprint <> b.reward_fp and e.field in ('rm_scores', 'token_level_scores')
