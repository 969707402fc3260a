-- code: ADV006
-- name: padding joins no group
-- severity: error
-- says: Padding rows join no group: no advantage is taken against their zeros, and they have none.
-- needs: key, is_padding, min_in, max_in
-- fields: advantages
-- examines: select count(*) from advantage_cells join base as b using (id) where b.is_padding and field = 'advantages'
-- subsumed_by: PAD001, KEY001, REW001, REW002
-- backs_up: ADV002: it says that the padding was counted, where ADV002 only says that the numbers are not the group's.
-- source: S5
-- causes: The padding was made with the uid of the row it was copied from, or groups were read from a batch that holds it.
create or replace temp table real_sessions as
select a.step_id, k.group_id, k.session_id, min(a.rid) as rid, arg_max(a.id, k."index") as id,
    arg_max(a.max_in, k."index") as advantage, arg_max(b.reward, k."index") as score
from advantage_cells as a
join keys as k using (id)
join base as b using (id)
where not b.is_padding and k.group_id is not null and a.field = 'advantages' and a.stage = 'advantage'
    and a.step_id in (select step_id from base where is_padding)
group by a.step_id, k.group_id, k.session_id;
with padding as (
    select a.step_id, count(*) as rows
    from advantage_cells as a join base as b using (id)
    where b.is_padding and a.field = 'advantages'
    group by a.step_id
),
-- groups out of balance, and only those, are tried with 1, 2, ... zeros of padding beside them
doubtful as (
    select step_id, group_id, count(*) as n, sum(score) as total, sum(score * score) as squares
    from real_sessions
    group by step_id, group_id
    having abs(avg(advantage)) > 1e-3 * (1 + max(abs(advantage))) and bool_and(isfinite(score)) and bool_and(isfinite(advantage))
        and count(*) > 1
),
tried as (
    select d.*, p as pads, d.total / (d.n + p) as mean,
        sqrt(greatest(d.squares - d.total * d.total / (d.n + p), 0) / (d.n + p - 1)) as std
    from doubtful as d join padding using (step_id), range(1, padding.rows + 1) as t(p)
),
explained as (
    select t.step_id, t.group_id, min(t.pads) as pads
    from (
        select t.step_id, t.group_id, t.pads
        from tried as t join real_sessions as s using (step_id, group_id)
        group by t.step_id, t.group_id, t.pads
        having bool_and(abs(s.advantage - (s.score - t.mean) / (t.std + said('advantage.epsilon'))) <= 1e-3 * (1 + abs(s.advantage)))
            or bool_and(abs(s.advantage - (s.score - t.mean)) <= 1e-3 * (1 + abs(s.advantage)))
    ) as t
    group by t.step_id, t.group_id
)
select s.rid, key, 'a mean over real sessions' as expected, 'a mean over ' || e.pads || ' padding rows as well' as actual,
    printf('advantage %.9g of score %.9g', s.advantage, s.score) as detail, null as severity
from explained as e join real_sessions as s using (step_id, group_id) join keys using (id)
union all
select a.rid, key, 'no advantage', printf('advantages of sum %.9g', a.sum_in), 'a padding row', null
from advantage_cells as a join base as b using (id) join keys using (id)
where b.is_padding and a.sum_in <> 0
