-- code: ADV004
-- name: one advantage a session
-- severity: error
-- says: With an outcome estimator the advantages, and the returns, of a session have one value on all its policy tokens, the same in each of its outputs.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select count(*) from advantage_cells as a join events as e using (rid) join base as b using (id) where not b.is_padding and a.mask_sum > 0 and coalesce(setting(e.run_id, 'algorithm.adv_estimator'), case when setting(e.run_id, 'scale_rewards') is not null then 'grpo' end) in ('grpo', 'grpo_passk', 'grpo_vectorized', 'rloo', 'rloo_vectorized', 'opo', 'gpg')
-- subsumed_by: REW001, KEY001, KEY002, MSK002
-- source: verl compute_advantage_for_multi_trajectories: the final output's advantage is every output's
-- causes: Parts of one sequence were whitened apart, a return was scanned over observation tokens, or the masked advantage of the last output was laid over tokens of the others.
create or replace temp table session_values as
select a.rid, a.step_id, a.ord, a.field, a.id, a.min_in, a.max_in, k.group_id, k.session_id, k."index"
from advantage_cells as a
join events as e using (rid)
join (
    select run_id
    from (
        select run_id, coalesce(
            setting(run_id, 'algorithm.adv_estimator'), case when setting(run_id, 'scale_rewards') is not null then 'grpo' end
        ) as estimator
        from (select distinct run_id from events)
    )
    where estimator in ('grpo', 'grpo_passk', 'grpo_vectorized', 'rloo', 'rloo_vectorized', 'opo', 'gpg')
) as s on s.run_id is not distinct from e.run_id
join keys as k using (id)
join base as b using (id)
where not b.is_padding and k.group_id is not null and a.mask_sum > 0 and a.stage = 'advantage';
with torn as (
    select step_id, field, group_id, session_id, arg_max(max_in, "index") as final
    from session_values
    group by step_id, field, group_id, session_id
    having min(min_in) <> max(max_in)
)
select v.rid, key, printf('%.9g on every policy token', t.final) as expected,
    case when v.min_in < v.max_in then printf('%.9g to %.9g', v.min_in, v.max_in) else printf('%.9g', v.min_in) end as actual,
    case when v.min_in < v.max_in then 'in one row' else 'another value than the last output of the session' end as detail,
    null as severity
from session_values as v
join torn as t
    on t.step_id = v.step_id and t.field = v.field and t.group_id = v.group_id and t.session_id = v.session_id
join keys using (id)
where v.min_in < v.max_in or v.min_in <> t.final
