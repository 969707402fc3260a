-- code: REW005
-- name: rewards are scores, less a KL under the mask
-- severity: error
-- says: With algorithm.use_kl_in_reward=false token_level_rewards are token_level_scores; with true they differ under the mask only.
-- needs: key, fingerprint, nnz_out
-- fields: token_level_scores, token_level_rewards
-- examines: select sum(n) from events where field = 'token_level_rewards' and op = 'forward' and entity = 'trajectory' and setting(run_id, 'algorithm.use_kl_in_reward') is not null
-- subsumed_by: REW001, REW002, VAL001
-- source: verl's fit: apply_kl_penalty, or token_level_rewards = token_level_scores
-- causes: A penalty was taken off although the run has none, the KL was not masked, or the rewards were shaped in place and the scores with them.
create or replace temp table rewarded as
select r.rid, s.rid as scores_rid, q.kl, r.c, s.c as scores_c, r.outside, s.outside as scores_outside,
    -- where a rejection took tokens out since, what the KL left there is REW007's
    r.m is not distinct from x.mask_m as whole
from events as r
left join expected as x on x.k = r.k
join (
    select run_id, setting(run_id, 'algorithm.use_kl_in_reward') as kl
    from (select distinct run_id from events)
) as q on q.run_id is not distinct from r.run_id
join events as s
    on s.step_id = r.step_id and s.k = r.k and s.stage = r.stage and s.op = r.op and s.process = r.process
where r.field = 'token_level_rewards' and s.field = 'token_level_scores' and r.op = 'forward'
    and r.entity = 'trajectory';
create or replace temp table unlike_scores as
select rid, scores_rid, kl
from rewarded
where (kl = 'false' and c is distinct from scores_c) or (kl = 'true' and whole and outside is distinct from scores_outside);
insert into suspects
select rid from unlike_scores union select scores_rid from unlike_scores;
select r.rid, r.key,
    case when u.kl = 'true' then printf('%d tokens outside the mask with a reward', s.nnz_out)
        else printf('sum %.9g, fingerprint %x', s."sum", s.fingerprint) end as expected,
    case when u.kl = 'true' then printf('%d tokens', r.nnz_out)
        else printf('sum %.9g, fingerprint %x', r."sum", r.fingerprint) end as actual,
    case when u.kl = 'true' then 'as the scores have' else 'the scores, and the rewards; algorithm.use_kl_in_reward=false' end as detail,
    null as severity
from unlike_scores as u
join elements as r on r.rid = u.rid
join elements as s on s.rid = u.scores_rid and s.key = r.key
where (u.kl = 'false' and r.fingerprint <> s.fingerprint) or (u.kl = 'true' and r.nnz_out <> s.nnz_out)
