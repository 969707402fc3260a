-- code: KEY007
-- name: an epoch draws each row once
-- severity: warning
-- says: Inside an epoch the stream of prompts has no hole and no repeat, across save and resume too: each draw goes on where the last one ended, and no dataset row is drawn twice before the next epoch.
-- needs: attrs, source_index
-- fields: index
-- examines: select sum(n) from events where stage = 'dataset' and field = 'index' and attrs['epoch'] is not null
-- subsumed_by:
-- looks: run
-- source: verl, NeMo-RL and open-instruct resumed at the loader's cursor instead of at what was trained, or at the beginning
-- causes: The saved place of the dataloader was not restored, was restored from where nobody saved it, was that of a prefetched batch, or was an exhausted iterator's, so that rows are trained on again or never.
-- reports: NVIDIA-NeMo/RL#3599, allenai/open-instruct#1523, verl-project/verl#5725
-- faults: counters_of_the_last_epoch, cursor_ahead_of_training, epoch_begins_used_up, loader_starts_over
create or replace temp table draws as
with init as (
    select run_id, max(try_cast(attrs['train_rows'] as bigint)) as train_rows,
        max(try_cast(attrs['gen_batch_size'] as bigint)) as fetched
    from events
    where stage = 'init' and field = '_init_dataloader'
    group by run_id
)
select e.rid, e.ord, e.run_id, e.global_steps, e.stage = 'init' as resumes,
    try_cast(attrs['epoch'] as bigint) as epoch, try_cast(attrs['drawn'] as bigint) as drawn,
    case when e.stage = 'init' then 0 else n end as n, attrs['again'] as again,
    case when e.stage = 'init' then try_cast(attrs['global_steps'] as bigint) else e.global_steps end as at_step,
    i.train_rows // i.fetched * i.fetched as epoch_rows
from events as e left join init as i on i.run_id is not distinct from e.run_id
where (e.stage = 'dataset' and e.field = 'index' and e.attrs['epoch'] is not null)
    or (e.stage = 'init' and e.field = '_load_checkpoint' and e.attrs['drawn'] is not null);
with placed as (
    select *, epoch * epoch_rows + drawn as place
    from draws
    where epoch_rows > 0
),
followed as (
    select *, lag(place + n) over run as due, lag(at_step) over run as last_step
    from placed
    window run as (partition by run_id order by ord)
),
saved as (
    -- a run that replaces no groups draws B prompts a step
    select p.rid, p.place, p.at_step * b as due
    from (
        select *, try_cast(setting(run_id, 'data.train_batch_size') as bigint) as b
        from placed
        where resumes and coalesce(setting(run_id, 'algorithm.filter_groups.enable'), 'false') = 'false'
            and coalesce(setting(run_id, 'trainer.v1.sampler.sync_refill_failed_groups'), 'false') = 'false'
    ) as p
),
repeats as (
    select run_id, epoch, source_index, max_by(rid, ord) as rid, count(*) as times
    from (
        select d.rid, d.ord, d.run_id, d.epoch, c.source_index
        from digest_dataset_cells as c join draws as d using (rid)
        where c.source_index is not null
    )
    group by all
    having count(*) > 1
),
told as (
    select rid, epoch, try_cast(unnest(string_split(again, ',')) as bigint) as source_index
    from draws where again is not null
)
select rid, null as key, printf('row %d of the stream, epoch %d', due % epoch_rows, due // epoch_rows) as expected,
    printf('row %d, epoch %d', drawn, epoch) as actual,
    case when place > due then printf('%d prompts are passed over', place - due) else printf('%d come again', due - place) end as detail,
    null as severity
from followed
where place <> due and at_step between last_step and last_step + 1
union all
select rid, null, printf('%d prompts drawn by step %d', due, at_step), printf('%d', place), 'the place that was restored', null
from saved join (select rid, at_step from placed) using (rid)
where place <> due
union all
select coalesce(r.rid, t.rid), coalesce(r.source_index, t.source_index), 'once an epoch',
    case when r.rid is null then 'again' else printf('%d times', r.times) end,
    printf('dataset row in epoch %d', epoch), null
from repeats as r full join told as t using (rid, epoch, source_index)
