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
select rid, key, printf('%.9g', score) as expected, printf('%.9g', actual) as actual,
    'the score of another key of the step' as detail, null as severity
from changed_scores join keys using (id)
where moved
union all
select e.rid, e.key, printf('score %.9g, fingerprint %x', b.reward, b.reward_fp),
    printf('score %.9g, fingerprint %x', e."sum", e.fingerprint),
    'as it was first written, and as it stands under this key', null
from elements as e
join keys as k using (run, key)
join base as b using (id)
where e.fingerprint <> b.reward_fp and e.field in ('rm_scores', 'token_level_scores')
