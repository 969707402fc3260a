-- code: LGP004
-- name: old log-probs have their author
-- severity: error
-- says: In bypass mode old_log_probs are the rollout_log_probs; else the actor made them, in a forward pass of this batch.
-- needs: key, fingerprint
-- fields: old_log_probs
-- examines: select sum(n) from events where stage = 'old_log_prob' and op = 'produce' and field = 'old_log_probs'
-- subsumed_by: LGP001, QUE003, KEY003
-- source: verl's bypass_mode; a sampler's log-probs taken for the actor's
-- causes: The bypass switch reached one of the two places that ask it, or the sampler's log-probs were stored under the actor's name.
-- faults: bypass_clamps_its_anchor, sampler_stands_for_the_actor
create or replace temp table authored as
with made as (
    select e.*, setting(run_id, 'algorithm.rollout_correction.bypass_mode') as bypass, -- null where nobody says it
        lag(ord, 1, 0) over (partition by run_id, global_steps order by ord) as since
    from events as e
    where stage = 'old_log_prob' and op = 'produce' and field = 'old_log_probs' and entity = 'trajectory'
),
sampled as (
    select m.rid, arg_max(s.rid, s.ord) as sampler, arg_max(s.c, s.ord) as c
    from made as m
    join events as s
        on s.run_id is not distinct from m.run_id and s.global_steps = m.global_steps and s.k = m.k
        and s.field = 'rollout_log_probs' and s.entity = 'trajectory' and s.op <> 'compare'
    where m.bypass is distinct from 'false'
    group by m.rid
),
scored as (
    select m.rid, arg_max(f.weights.phase, f.ord) as phase, bool_or(f.weights.phase = 'actor') as by_actor
    from made as m
    join events as f
        on f.run_id is not distinct from m.run_id and f.global_steps = m.global_steps and f.stage = 'old_log_prob'
        and f.op = 'forward' and f.field = 'log_probs' and f.ord between m.since and m.ord
    where m.bypass is distinct from 'true' and f.weights is not null
    group by m.rid
)
select m.rid, m.run_id, m.bypass, sampler, s.c as sampler_c, m.c, f.phase, coalesce(f.by_actor, false) as by_actor
from made as m left join sampled as s using (rid) left join scored as f using (rid);
insert into suspects
select unnest([rid, sampler]) from authored where bypass = 'true' and sampler is not null and c <> sampler_c;
select a.rid, a.key, printf('the sampler''s, fingerprint %x', b.fingerprint) as expected,
    printf('fingerprint %x', a.fingerprint) as actual, 'bypass_mode is on' as detail, null as severity
from authored join elements as a on a.rid = authored.rid
join elements as b on b.rid = authored.sampler and b.key = a.key
where bypass = 'true' and (a.fingerprint <> b.fingerprint or a.valid_length <> b.valid_length)
union all
select rid, null, 'a forward pass of the actor', coalesce('of the ' || phase, 'none'),
    case when bypass = 'false' then 'bypass_mode is off' else 'they are not the sampler''s either' end, null
from authored
where bypass is distinct from 'true' and not by_actor and not (bypass is null and c is not distinct from sampler_c)
    -- a trace that never shows who scores says nothing of it
    and exists (
        select 1 from events as f
        where f.field = 'log_probs' and f.op = 'forward' and f.weights is not null
            and f.run_id is not distinct from authored.run_id
    )
