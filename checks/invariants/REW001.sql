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
from changed_scores join keys using (id)
where not moved -- which is REW002's
union all
select c.rid, key, 'on a token of the policy', 'on a token outside the mask', 'the estimator returns rewards token by token', 'warning'
from reward_cells as c join keys using (id) join estimators as e using (step_id)
where c.field = 'rm_scores' and c.op = 'produce' and c."sum" <> c.sum_in and c.mask_sum > 0
    and e.estimator in ('gae', 'reinforce_plus_plus', 'remax')
