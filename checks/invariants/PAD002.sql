-- code: PAD002
-- name: metrics leave padding out
-- severity: error
-- says: Score, reward, length, advantage, turn and divergence metrics recomputed without the padding rows are the recorded ones.
-- needs: key, is_padding, sum
-- fields: metrics
-- examines: select count(*) from measured where over_all is not null and step_id in (select step_id from base where is_padding) and not starts_with(name, 'global_seqlen') and name <> 'perf/total_num_tokens'
-- subsumed_by: PAD001, KEY003, LEN003, MSK002
-- source: S5
-- causes: The metrics were taken over the whole batch: padding rows count as samples of score 0 and length 1.
-- reports: verl-project/verl#7771
-- faults: metrics_over_padding, perplexity_over_padding
select rid, name as key, printf('%.9g', over_real) as expected, printf('%.9g', value) as actual,
    'over real rows; as recorded, it is over the padding rows as well' as detail, null as severity
from measured
where wrong and with_padding and not starts_with(name, 'global_seqlen') and name <> 'perf/total_num_tokens'
