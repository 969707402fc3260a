-- code: PAD004
-- name: padding is no work and no sample
-- severity: warning
-- says: Throughput, sequence-length statistics and dumps leave padding rows out.
-- needs: key, is_padding
-- fields:
-- examines: select (select count(*) from measured where (starts_with(name, 'global_seqlen') or name = 'perf/total_num_tokens') and step_id in (select step_id from base where is_padding)) + (select coalesce(sum(n), 0) from events where field = 'dump' and op = 'produce' and step_id in (select step_id from base where is_padding))
-- subsumed_by: PAD001
-- source: S5; verl 0.9.1 counts padding in global_token_num and log_seqlen_unbalance
-- causes: The padded batch was handed to the statistics, or a dump was written of every key of the step.
-- faults: lengths_over_padding, padding_is_dumped, throughput_over_padding
select rid, name as key, printf('%.9g', over_real) as expected, printf('%.9g', value) as actual,
    'over real rows; as recorded, it is over the padding rows as well' as detail, null as severity
from measured
where wrong and with_padding and (starts_with(name, 'global_seqlen') or name = 'perf/total_num_tokens')
union all
select c.rid, k.key, 'no line of a padding row', 'dumped', null, null
from dump_cells as c join base as b using (id) join keys as k using (id)
where b.is_padding
