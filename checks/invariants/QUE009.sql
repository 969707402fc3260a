-- code: QUE009
-- name: a stage writes its own outputs
-- severity: error
-- says: A stage writes to the queue only the fields it is there to make; any other it puts back unchanged. What is stored carries no gradient.
-- needs: key, seq, is_padding
-- fields:
-- examines: select coalesce(sum(n), 0) from events where queue and op = 'produce' and entity = 'trajectory'
-- subsumed_by: KEY001, QUE001, TOK004
-- source: the table of fields of the synchronous step, by the stage that produces them
-- causes: A stage put back the whole batch it held, with a field changed in place on the way; or a forward pass without no_grad left its graph in what is stored.
-- reports: verl-project/verl#6699
-- faults: graph_is_kept, reference_shifts_positions_in_place, stage_puts_back_all_it_held
create or replace temp table owners as
select * from (values
    ('prompts', ['rollout']), ('responses', ['rollout']), ('input_ids', ['rollout']),
    ('attention_mask', ['rollout']), ('position_ids', ['rollout']), ('loss_mask', ['rollout']),
    ('response_mask', ['rollout', 'old_log_prob', 'advantage']), ('uid', ['rollout', 'prompt']),
    ('num_turns', ['rollout']), ('raw_prompt', ['rollout']), ('data_source', ['rollout']),
    ('reward_model', ['rollout']), ('multi_modal_inputs', ['rollout']), ('index', ['rollout']),
    ('extra_fields', ['rollout', 'reward']), ('rm_scores', ['rollout', 'reward']),
    ('rollout_log_probs', ['rollout']), ('log_probs', ['old_log_prob', 'ref_log_prob']),
    ('entropy', ['old_log_prob']), ('old_log_probs', ['old_log_prob']), ('ref_log_prob', ['ref_log_prob']),
    ('values', ['values']), ('rollout_is_weights', ['old_log_prob', 'advantage']),
    ('token_level_scores', ['advantage']), ('token_level_rewards', ['advantage']),
    ('advantages', ['advantage']), ('returns', ['advantage'])
) as t(field, stages);
create or replace temp table written_fields as
select rid, ord, coalesce(run_id, '') || ' ' || field as place, stage, field, k, c
from events
where queue and op = 'produce' and entity = 'trajectory' and n > 0;
-- What stages of the step write that is not theirs; a stage of somebody's own may write what it likes.
create or replace temp table strays as
select w.*
from written_fields as w join owners as o using (field)
where not list_contains(o.stages, w.stage)
    and w.stage in (
        'dataset', 'prompt', 'sample', 'balance', 'reward', 'old_log_prob', 'ref_log_prob', 'values', 'advantage',
        'update_actor', 'checkpoint', 'weight_sync', 'metrics', 'dump', 'clear'
    );
-- Padding rows have every field, and are the balance stage's own.
delete from strays
where stage = 'balance' and k in (
    select k from keyed left join base using (id)
    where k in (select k from strays where stage = 'balance')
    group by k having bool_and(coalesce(is_padding, false))
);
delete from strays
where rid in (
    select s.rid
    from strays as s asof join written_fields as w on w.place = s.place and s.ord > w.ord
    where w.k = s.k and w.c = s.c
);
insert into suspects
select rid from strays
union
select w.rid from written_fields as w join strays as s on s.place = w.place and w.ord < s.ord;
with held as (
    select e.rid, e.key, e.valid_length, e.fingerprint, s.ord, s.place, s.stage
    from elements as e join strays as s using (rid)
),
before as (
    select h.rid, h.key, max_by(e.valid_length, w.ord) as valid_length, max_by(e.fingerprint, w.ord) as fingerprint,
        max_by(w.stage, w.ord) as stage
    from held as h
    join elements as e on e.key = h.key
    join written_fields as w on w.rid = e.rid and w.place = h.place and w.ord < h.ord
    group by all
)
select h.rid, h.key,
    case
        when b.rid is null then 'not written by ' || h.stage
        else printf('length %d, fingerprint %x', b.valid_length, b.fingerprint)
    end as expected,
    printf('length %d, fingerprint %x', h.valid_length, h.fingerprint) as actual,
    case
        when b.rid is null then 'no field of this stage'
        else 'as ' || b.stage || ' wrote it, and not this stage''s to change'
    end as detail,
    null as severity
from held as h left join before as b using (rid, key)
where b.rid is null or h.fingerprint is distinct from b.fingerprint or h.valid_length is distinct from b.valid_length
union all
select rid, null, 'detached', 'requires a gradient', 'the graph of a whole batch is kept as long as the field is', null
from events
where requires_grad and entity = 'trajectory' and (
    op = 'produce' or (op = 'forward' and stage in ('old_log_prob', 'ref_log_prob', 'values', 'advantage'))
)
