-- code: PAD002
-- name: metrics leave padding out
-- severity: error
-- says: Score, reward, length, advantage and turn metrics recomputed without the padding rows are the recorded ones.
-- needs: key, is_padding, sum
-- fields: metrics
-- examines: select count(*) from group_cells where field = 'metrics' and step_id in (select step_id from base where is_padding)
-- subsumed_by: PAD001, KEY003, LEN003, MSK002
-- source: S5
-- causes: The metrics were taken over the whole batch: padding rows count as samples of score 0 and length 1.
create or replace temp table padded as
select distinct step_id from base where is_padding;
insert into suspects
-- a step may be trained on in several batches, each of keys of its own
select max(rid)
from events join padded using (step_id)
where entity = 'trajectory' and field in ('token_level_rewards', 'advantages', 'returns') and op = 'forward'
    and stage = 'advantage'
group by step_id, process, field, k;
with handed as (
    select distinct step_id, id from key_cells
    where op = 'produce' and stage = 'sample' and field = 'key' and partition is distinct from 'val'
),
real as (
    -- what the step was handed: a group left out on purpose, or lost, or a validation's, is in no metric
    select b.step_id, b.reward, b.response_len, b.prompt_len, b.num_turns
    from base as b join padded using (step_id)
    where not is_padding
        and (b.id in (select id from handed) or b.step_id not in (select step_id from handed))
),
tokens as (
    select e.*, b.step_id
    from elements as e join keys using (key) join base as b using (id)
    where not b.is_padding
),
rows_of as (
    select step_id, 'critic/score' as name, reward as value from real
    union all select step_id, 'critic/rewards', "sum" from tokens where field = 'token_level_rewards'
    union all select step_id, 'response_length', response_len from real
    union all select step_id, 'prompt_length', prompt_len from real
    union all select step_id, 'num_turns', num_turns from real
),
recomputed as (
    select step_id, name, avg(value) as mean, max(value) as max, min(value) as min
    from rows_of where value is not null group by all
    union all
    select step_id, 'critic/' || field, sum(sum_in) / nullif(sum(mask_sum), 0), max(max_in), min(min_in)
    from tokens where field in ('advantages', 'returns') and mask_sum > 0 group by all
),
said as (
    select c.rid, c.step_id, k.key, c."sum" as value
    from group_cells as c join keys as k using (id) join padded using (step_id)
    where c.field = 'metrics' and c.entity = 'metric'
),
compared as (
    select s.*, case
        when s.key = r.name || '/mean' then r.mean
        when s.key = r.name || '/max' then r.max
        when s.key = r.name || '/min' then r.min
    end as real_value
    from said as s join recomputed as r using (step_id)
    where s.key in (r.name || '/mean', r.name || '/max', r.name || '/min')
)
select rid, key, printf('%.9g', real_value) as expected, printf('%.9g', value) as actual,
    'over real rows, and as recorded' as detail, null as severity
from compared
where abs(value - real_value) > said('metrics.absolute') + said('metrics.relative') * abs(real_value) or isnan(value) <> isnan(real_value)
