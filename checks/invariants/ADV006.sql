-- code: ADV006
-- name: padding joins no group
-- severity: error
-- says: Padding rows join no group: no advantage is taken against their zeros, and they have none.
-- needs: key, is_padding, min_in, max_in
-- fields: advantages
-- examines: select count(*) from grouped where is_padding and field = 'advantages'
-- subsumed_by: PAD001, KEY001, REW001, VAL001, REW002
-- backs_up: ADV002: it says that the padding was counted, where ADV002 only says that the numbers are not the group's.
-- source: S5
-- causes: The padding was made with the uid of the row it was copied from, or groups were read from a batch that holds it.
-- faults: padding_is_spread_over_the_groups, padding_with_the_uid_it_was_copied_from
create or replace temp table real_sessions as
select step_id, group_id, session_id, rid, id, max_in as advantage, reward as score
from grouped
where final and not is_padding and field = 'advantages' and step_id in (select step_id from grouped where is_padding);
with padding as (
    select step_id, count(*) as rows from grouped where is_padding and field = 'advantages' group by step_id
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
-- a baseline of the whole batch may look like a group and zeros, where the other groups earned none
batch as (
    select step_id, avg(score) as mean, sum(score * score) as squares, sum(score) as total, count(*) as n
    from real_sessions
    where isfinite(score)
    group by step_id
),
of_the_batch as (
    select s.step_id, s.group_id
    from real_sessions as s
    join (
        select step_id, mean, sqrt(greatest(squares - total * total / n, 0) / greatest(n - 1, 1)) as std from batch
    ) as b using (step_id)
    where (s.step_id, s.group_id) in (select (step_id, group_id) from doubtful)
    group by s.step_id, s.group_id
    having bool_and(abs(s.advantage - (s.score - b.mean) / (b.std + said('advantage.epsilon'))) <= 1e-3 * (1 + abs(s.advantage)))
        or bool_and(abs(s.advantage - (s.score - b.mean)) <= 1e-3 * (1 + abs(s.advantage)))
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
    where (t.step_id, t.group_id) not in (select (step_id, group_id) from of_the_batch)
    group by t.step_id, t.group_id
)
select s.rid, key, 'a mean over real sessions' as expected, 'a mean over ' || e.pads || ' padding rows as well' as actual,
    printf('advantage %.9g of score %.9g', s.advantage, s.score) as detail, null as severity
from explained as e join real_sessions as s using (step_id, group_id) join keys using (id)
union all
select rid, key, 'no advantage', printf('%.9g to %.9g', min_in, max_in), 'a padding row', null
from grouped join keys using (id)
where is_padding and (min_in <> 0 or max_in <> 0)
