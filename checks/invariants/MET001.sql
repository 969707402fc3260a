-- code: MET001
-- name: metrics follow from the rows
-- severity: error
-- says: Score, reward, advantage, return, length, turn, entropy, policy drift and validation metrics are what the step's rows give by the profile's formulas.
-- needs: key, sum
-- fields: metrics
-- examines: select count(*) from measured where name <> 'perf/total_num_tokens'
-- subsumed_by: KEY003, LEN003, MSK002, QUE003, LEN001, VAL001
-- source: verl metric_utils.compute_data_metrics; what counts padding rows is PAD002's
-- causes: Lengths were taken from a mask after it was rewritten, ranks or micro-batches were averaged as if alike, only the last one was logged, or a value was changed in place before it was logged.
select rid, name as key, printf('%.9g', over_real) as expected, coalesce(printf('%.9g', value), 'not logged') as actual,
    'from the rows of the step, and as logged' as detail, null as severity
from measured
where wrong and not with_padding and name <> 'perf/total_num_tokens'
