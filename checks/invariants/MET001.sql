-- code: MET001
-- name: metrics follow from the rows
-- severity: error
-- says: Score, reward, advantage, return, length, turn, entropy, policy drift and validation metrics are what the step's rows give by the profile's formulas. Policy drift only where no log ratio passes 20, at which the loss cuts it.
-- needs: key, sum, update_index, is_padding
-- fields: metrics
-- examines: select count(*) from measured where name <> 'perf/total_num_tokens'
-- subsumed_by: KEY003, LEN003, MSK002, QUE003, LEN001, VAL001, LGP001, LGP008, LOS005
-- source: verl metric_utils.compute_data_metrics; what counts padding rows is PAD002's
-- causes: Lengths were taken from a mask after it was rewritten, ranks or micro-batches were averaged as if alike, only the last one was logged, or a value was changed in place before it was logged.
-- reports: NovaSky-AI/SkyRL#462, OpenRLHF/OpenRLHF@feeb0283, THUDM/slime#2114, huggingface/trl#3476, huggingface/trl#6380, modelscope/ms-swift#3844, verl-project/verl#2259, verl-project/verl#3280
-- faults: entropy_over_the_padded_tensor, kl_of_the_last_micro_batch, kl_of_the_ratio, lengths_of_the_mask, mean_of_rank_means, mean_of_row_means, metrics_of_one_rank, metrics_of_the_kept_rows, score_less_the_kl, validation_grouped_by_text
select rid, name as key, printf('%.9g', over_real) as expected, coalesce(printf('%.9g', value), 'not logged') as actual,
    'from the rows of the step, and as logged' as detail, null as severity
from measured
where wrong and not with_padding and name <> 'perf/total_num_tokens'
