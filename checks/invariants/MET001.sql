-- code: MET001
-- name: metrics follow from the rows
-- severity: error
-- says: Score, reward, advantage, return, length, turn, entropy, policy drift and validation metrics are what the step's rows give by the profile's formulas, and a step at which trainer.test_freq falls due has its validation. Policy drift only where no log ratio passes 20, at which the loss cuts it.
-- needs: key, sum, update_index, is_padding
-- fields: metrics
-- examines: select count(*) from measured where name <> 'perf/total_num_tokens'
-- subsumed_by: KEY003, LEN003, MSK002, QUE003, LEN001, VAL001, LGP001, LGP008, LOS005
-- source: verl metric_utils.compute_data_metrics; what counts padding rows is PAD002's
-- causes: Lengths were taken from a mask after it was rewritten, ranks or micro-batches were averaged as if alike, only the last one was logged, a value was changed in place before it was logged, or a validation that is due never runs.
-- reports: NovaSky-AI/SkyRL#462, OpenRLHF/OpenRLHF@feeb0283, THUDM/slime#2114, huggingface/trl#3476, huggingface/trl#6380, modelscope/ms-swift#3844, verl-project/verl#2259, verl-project/verl#3280
-- faults: entropy_over_the_padded_tensor, kl_of_the_last_micro_batch, kl_of_the_ratio, lengths_of_the_mask, mean_of_rank_means, mean_of_row_means, metrics_of_one_rank, metrics_of_the_kept_rows, score_less_the_kl, validation_grouped_by_text, validation_never_runs
select rid, name as key, printf('%.9g', over_real) as expected, coalesce(printf('%.9g', value), 'not logged') as actual,
    'from the rows of the step, and as logged' as detail, null as severity
from measured
where wrong and not with_padding and name <> 'perf/total_num_tokens'
union all
-- of a run whose first rows say which prompts it is to be validated with
select e.rid, null, 'a validation', 'none', printf('trainer.test_freq %d', t.every), null
from events as e
join (
    select run_id, try_cast(setting(run_id, 'trainer.test_freq') as bigint) as every,
        try_cast(setting(run_id, 'trainer.total_training_steps') as bigint) as total
    from events where stage = 'init' and field = '_init_dataloader' and try_cast(attrs['val_rows'] as bigint) > 0
) as t on t.run_id is not distinct from e.run_id
where e.stage = 'metrics' and e.entity = 'metric' and e.field = 'metrics' and e.global_steps > 0 and t.every > 0
    and (e.global_steps % t.every = 0 or e.global_steps = t.total)
    and not exists (
        select 1 from events as v
        where (v.stage = 'validate' or v.partition = 'val') and v.run_id is not distinct from e.run_id
            and v.global_steps = e.global_steps
    )
