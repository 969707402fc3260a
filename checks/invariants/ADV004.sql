-- code: ADV004
-- name: one advantage a session
-- severity: error
-- says: With an outcome estimator the advantages, and the returns, of a session have one value on all its policy tokens, the same in each of its outputs.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select count(*) from grouped join estimators using (step_id) where not is_padding and mask_sum > 0 and outcome
-- subsumed_by: REW001, VAL001, KEY001, KEY002, MSK002
-- source: verl compute_advantage_for_multi_trajectories: the final output's advantage is every output's
-- causes: Parts of one sequence were whitened apart, a return was scanned over observation tokens, or the masked advantage of the last output was laid over tokens of the others.
-- reports: NovaSky-AI/SkyRL#1492, THUDM/slime#2235, verl-project/verl#7300
-- faults: earlier_outputs_do_not_train, halves_whitened_apart, only_the_last_token_trains, the_advantage_fades, the_last_outputs_mask_on_all_outputs, the_return_scan_stops
create or replace temp table torn as
select step_id, field, group_id, session_id
from grouped join estimators using (step_id)
where outcome and not is_padding and mask_sum > 0 and min_in <> max_in
union
select x.step_id, x.field, x.group_id, x.session_id
from grouped as x join estimators using (step_id)
join grouped as f
    on f.step_id = x.step_id and f.field = x.field and f.group_id = x.group_id and f.session_id = x.session_id and f.final
where outcome and not x.final and not x.is_padding and x.mask_sum > 0
    and f.mask_sum > 0 and x.max_in <> f.max_in;
with finals as (
    select step_id, field, group_id, session_id, arg_max(max_in, "index") as value
    from grouped join torn using (step_id, field, group_id, session_id)
    where mask_sum > 0
    group by all
)
select x.rid, key, printf('%.9g on every policy token', f.value) as expected,
    case when x.min_in < x.max_in then printf('%.9g to %.9g', x.min_in, x.max_in) else printf('%.9g', x.min_in) end as actual,
    case when x.min_in < x.max_in then 'in one row' else 'another value than the last output of the session' end as detail,
    null as severity
from grouped as x
join finals as f using (step_id, field, group_id, session_id)
join keys using (id)
where x.mask_sum > 0 and (x.min_in < x.max_in or x.min_in <> f.value)
