-- code: MET002
-- name: throughput counts real tokens
-- severity: warning
-- says: perf/total_num_tokens is the tokens of the step's real rows, and perf/throughput is that many by second and rank.
-- needs: key, sum
-- fields: metrics
-- examines: select count(*) from measured where name = 'perf/total_num_tokens'
-- subsumed_by: LEN002, QUE003
-- source: verl metric_utils.compute_throughout_metrics; what counts padding rows is PAD004's
-- causes: Tokens were counted over the padded width, over responses alone, or of one rank or batch of several; or time and ranks are those of another part of the step.
-- faults: throughput_of_all_ranks, throughput_of_responses, throughput_of_the_padded_width
with ranks as (
    select run_id, max(topology.reported_dp) as dp, max(topology.world_size) as world
    from events where topology is not null group by run_id
),
timed as (
    select c.rid, c.step_id, e.run_id,
        max(c."sum") filter (k.key = 'perf/total_num_tokens') as tokens,
        max(c."sum") filter (k.key = 'perf/time_per_step') as seconds,
        max(c."sum") filter (k.key = 'perf/throughput') as throughput
    from group_cells as c join keys as k using (id) join events as e using (rid)
    where c.field = 'metrics' and starts_with(k.key, 'perf/')
    group by all
)
select rid, name as key, printf('%d tokens', cast(over_real as bigint)) as expected,
    printf('%.9g tokens', value) as actual, 'prompts and responses of the real rows' as detail, null as severity
from measured
where wrong and not with_padding and name = 'perf/total_num_tokens'
union all
select t.rid, 'perf/throughput', printf('%.9g', tokens / seconds / dp), printf('%.9g', throughput),
    printf('%.9g tokens in %.9g s on %d ranks', tokens, seconds, dp), null
from timed as t join ranks as r on t.run_id is not distinct from r.run_id
where seconds > 0 and dp > 0 and throughput is not null
    and abs(throughput * seconds * dp - tokens) > said('metrics.relative') * tokens
    and abs(throughput * seconds * world - tokens) > said('metrics.relative') * tokens
