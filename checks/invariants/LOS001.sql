-- code: LOS001
-- name: one denominator for a mini-batch
-- severity: error
-- says: Each term is divided by what its mode says of the whole mini-batch over all ranks: token-mean by its policy tokens, a mean over sequences by its rows; the mode is the configured one. So it is the same on every micro-batch and rank.
-- needs: loss
-- fields: loss, loss_mask
-- stored: micro_batch
-- examines: select count(*) from events where loss is not null and update_index is not null and loss.mode in ('token-mean', 'dapo', 'cispo', 'vespo', 'seq-mean-token-sum', 'seq-mean-token-mean', 'grpo', 'sapo', 'luspo', 'dr_grpo') and (coalesce(run_id, ''), global_steps) in (select (coalesce(run_id, ''), global_steps) from events where stage = 'update_actor' and op = 'split' and micro_batch is null)
-- subsumed_by: MSK001, MSK002, BAT003, KEY003
-- source: verl's agg_loss, TRL's loss_type; means of means seen in TRL, open-instruct, SkyRL, slime and verl
-- causes: Each micro-batch or rank took its own mean and the means were added or averaged: the weight of a token then depends on who stood beside it.
-- reports: NovaSky-AI/SkyRL#1296, OpenRLHF/OpenRLHF@1b23ecf0, allenai/open-instruct#1161, huggingface/trl#3021, huggingface/trl#7249, modelscope/ms-swift#10104, verl-project/verl#141, verl-project/verl#6957, verl-project/verl#7225
-- faults: denominator_of_the_step_before, fixed_accumulation_of_packed_micro_batches, mean_of_each_micro_batch, mean_of_means, mean_over_padding, mode_of_the_default, token_mean_under_another_name
create or replace temp table mini_batches as
select s.run_id, s.global_steps, s.update_index,
    sum(e.loss_tokens) as tokens, sum(e.loss_rows) as rows_with_tokens,
    coalesce(max(try_cast(s.attrs['global_batch_size'] as bigint)), sum(s.n)) as rows_of
from events as s join expected as e using (k)
where s.stage = 'update_actor' and s.op = 'split' and s.micro_batch is null
group by s.run_id, s.global_steps, s.update_index
having count(e.loss_tokens) = count(*);
with formulas as (
    -- seq-mean-token-sum-norm and bnpo divide by what a trace does not say of the whole mini-batch
    select * from (values
        ('token-mean', 'tokens'), ('dapo', 'tokens'), ('cispo', 'tokens'), ('vespo', 'tokens'),
        ('seq-mean-token-sum', 'rows'), ('seq-mean-token-mean', 'rows'), ('grpo', 'rows'), ('sapo', 'rows'),
        ('luspo', 'rows'), ('dr_grpo', 'lengths')
    ) as f(mode, counts)
),
ledger as (
    select e.rid, e.loss.term as term, e.loss.denominator as denominator, e.loss.mode as mode, f.counts, m.tokens,
        greatest(case f.counts
            when 'tokens' then m.tokens
            when 'rows' then case when said('loss.empty_rows') = 1 then m.rows_of else m.rows_with_tokens end
            else m.rows_of * try_cast(setting(e.run_id, 'max_completion_length') as double)
        end, 1) as whole,
        coalesce(setting(e.run_id, 'actor_rollout_ref.actor.loss_agg_mode'), setting(e.run_id, 'loss_type')) as configured
    from events as e
    join formulas as f on f.mode = e.loss.mode
    join mini_batches as m
        on m.run_id is not distinct from e.run_id and m.global_steps = e.global_steps and m.update_index = e.update_index
    where e.loss is not null
)
select rid, term as key, printf('divided by %g', whole) as expected, printf('divided by %g', denominator) as actual,
    printf('%s over a mini-batch of %d tokens', mode, cast(tokens as bigint)) as detail, null as severity
from ledger
where abs(denominator - whole) > 1e-6 * whole or isnan(denominator)
union all
select rid, term, configured || ', as configured', mode, null, null
from ledger
where mode <> configured
