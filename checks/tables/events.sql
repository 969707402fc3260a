-- Where each row of a complete step stands in the whole trace, in the order of events: by the process's own numbering,
-- by clock across processes. A trace judged in slices is placed once, as a whole.
create or replace table places as
select rid,
    dense_rank() over (order by run_id, global_steps) as step_id,
    dense_rank() over (order by run_id, coalesce(partition, '')) as scope,
    row_number() over (order by run_id, case when one then seq else time_ns end, process, seq) as ord
from digest_events, (select count(distinct process) <= 1 as one from digest_events)
where (coalesce(run_id, ''), global_steps) not in (select (run_id, step) from unseen);

-- What rows are asked by, again and again, is a number each; in order, so that words sort as their text does.
drop type if exists word;

create type word as enum (
    select word
    from (select distinct unnest([stage, op, entity, field, against, partition]) as word from digest_events)
    where word is not null
    order by word
);

create or replace table events as
select e.* replace (
        cast(stage as word) as stage, cast(op as word) as op, cast(entity as word) as entity,
        cast(field as word) as field, cast(against as word) as against, cast(partition as word) as partition
    ),
    p.step_id, p.scope, p.ord,
    -- of the ranks that hold the same rows the first one
    coalesce(coord.sp, 0) = 0 and coalesce(coord.tp, 0) = 0 and coalesce(coord.pp, 0) = 0 and coalesce(coord.cp, 0) = 0
        as leads
from digest_events as e join places as p using (rid)
order by p.ord;

-- A match without captures, then a split from the right: five times as fast as extracting the groups.
create or replace table keys as
select
    id, key, run, uid,
    -- of its uid, and of itself where it is one; two runs may have the same uids
    case when uid is not null then hash(run, uid) end as group_id,
    hash(run, key) as prompt_id,
    case when uid is not null then try_cast(session as bigint) end as session_id,
    case when uid is not null then try_cast("index" as bigint) end as "index"
from (
    select *, case when whole then left(key, length(key) - length(session) - length("index") - 2) end as uid
    from (
        select id, key, run, split_part(key, '_', -2) as session, split_part(key, '_', -1) as "index",
            regexp_matches(key, '^(.+)_(0|[1-9][0-9]*)_(0|[1-9][0-9]*)$') as whole
        from (select distinct id, key, run from digest_names where key is not null)
    )
);
