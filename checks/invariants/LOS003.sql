-- code: LOS003
-- name: the update begins where it was measured, and steps as configured
-- severity: error
-- says: In normal mode the log-probs of a batch's first update are the old ones within the band; loss and gradient norm are finite; every mini-batch reports its optimiser step, and one that was skipped is reported as skipped. A step is taken with the learning rate of the configured schedule at its place, which moves once a batch and goes on after a resume, with the configured decay, betas and eps, in each group of the optimiser's parameters; from the gradient as the backward passes left it, clipped; and once, by an optimiser whose own count of steps goes on.
-- needs: optim, seq
-- fields: grad_norm
-- examines: select count(*) from events where op = 'optim_step'
-- subsumed_by: LOS002, LGP001, LGP002, LGP003, LGP004, LGP005, LGP008, LGP009, LEN004, QUE003, VER004, LOS001, KEY003, VAL001
-- source: PPO (arXiv:1707.06347): the first ratio is 1; verl skips a step whose gradient is not finite
-- causes: The update scores under other conditions than the old log-probs were made under (dropout, temperature, positions, autocast), or a bad gradient was stepped on, or dropped without a word; the schedule moves with every mini-batch or began again, the optimiser's state was lost, it steps twice, some parameters are in a group with settings of its own, or the clip reaches nothing.
-- faults: clip_reaches_nothing, decay_of_the_default, gradient_divided_by_micro_batches, gradient_is_climbed, learning_rate_times_ten, optimizer_begins_again_at_a_step, optimizer_state_is_lost, optimizer_steps_twice, schedule_moves_with_every_mini_batch, second_group_does_not_decay, second_group_has_its_own_rate, skipped_steps_are_not_counted, skipped_without_a_word, update_under_autocast, warm_up_begins_again
create or replace temp table first_pairs as
select e.rid, band(e.run_id) as band, sum(p.absdiff_sum) as off, sum(p.n_in) as tokens
from events as e
join update_batches as f
    on f.run_id is not distinct from e.run_id and f.global_steps = e.global_steps and f.update_index = e.update_index
join pair_cells as p using (rid)
where e.op = 'compare' and e.stage = 'update_actor' and e.field = 'log_probs' and e.against = 'old_log_probs'
    and e.update_index = f.first_update and p.n_in > 0
    and coalesce(setting(e.run_id, 'algorithm.rollout_correction.bypass_mode'), 'false') <> 'true'
group by e.rid, band(e.run_id);
create or replace temp table optimizer_steps as
select e.rid, e.ord, e.run_id, e.process, e.global_steps, e.update_index, e.optim.lr as lr, e.optim.clip as clip,
    e.optim.grad_norm as norm, coalesce(e.optim.skipped, false) as skipped, e.attrs['gradient'] as given,
    try_cast(e.attrs['optimizer_steps'] as bigint) as taken, e.attrs as attrs,
    dense_rank() over (partition by e.run_id, e.global_steps order by b.first_update) - 1 as batch
from events as e
left join update_batches as b
    on b.run_id is not distinct from e.run_id and b.global_steps = e.global_steps and b.update_index = e.update_index
where e.op = 'optim_step' and e.stage = 'update_actor';
create or replace temp table optimizers as
with read as (
    select run_id, coalesce(try_cast(setting(run_id, 'trainer.v1.sync.parameter_sync_step') as bigint), 1) as batches,
        greatest(coalesce(try_cast(setting(run_id, 'trainer.critic_warmup') as bigint), 0), 1) as first_step,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.total_training_steps') as bigint) as own_steps,
        try_cast(setting(run_id, 'trainer.total_training_steps') as bigint) as run_steps,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.lr') as double) as peak,
        coalesce(setting(run_id, 'actor_rollout_ref.actor.optim.lr_scheduler_type'), 'constant') as kind,
        coalesce(try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.lr_warmup_steps') as bigint), -1) as warmup,
        coalesce(try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.lr_warmup_steps_ratio') as double), 0) as ratio,
        coalesce(try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.min_lr_ratio') as double), 0) as least,
        coalesce(try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.num_cycles') as double), 0.5) as cycles,
        -- a schedule that counts from 1, warms up from more than 0 or is named by another engine's setting is another one
        synchronous(run_id)
            and coalesce(setting(run_id, 'actor_rollout_ref.actor.optim.lr_scheduler_type'), 'constant') in ('constant', 'cosine')
            and coalesce(setting(run_id, 'actor_rollout_ref.actor.optim.zero_indexed_step'), 'true') = 'true'
            and coalesce(try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.init_lr_ratio') as double), 0) = 0
            and coalesce(
                setting(run_id, 'actor_rollout_ref.actor.optim.warmup_style'),
                setting(run_id, 'actor_rollout_ref.actor.optim.lr_decay_style'),
                setting(run_id, 'actor_rollout_ref.actor.optim.lr_decay_ratio'),
                setting(run_id, 'actor_rollout_ref.actor.optim.decay_type')
            ) is null as known
    from (select distinct run_id from optimizer_steps)
),
made as (
    select run_id, max(try_cast(attrs['total_training_steps'] as bigint)) as made_steps
    from events where stage = 'init' and field = '_init_dataloader' group by run_id
),
counted as (
    select r.*, batches * case when own_steps > 0 then own_steps else coalesce(run_steps, made_steps) end as total
    from read as r left join made as m on m.run_id is not distinct from r.run_id
)
select *, case when warmup > said('schedule.ratio_from') then warmup * batches when ratio = 0 then 0
    else cast(trunc(ratio * total) as bigint) end as warm
from counted
where known;
with rates as (
    select s.rid, s.lr, s.which, s.groups, o.peak, o.kind, o.place, o.total,
        o.peak * case
            when o.warm is null then null
            when o.place < o.warm then o.place / greatest(o.warm, 1)
            when o.kind = 'constant' then 1
            when o.kind = 'cosine' and o.place <= o.total
                then o.least + (1 - o.least) * 0.5
                    * (1 + cos(2 * pi() * o.cycles * (o.place - o.warm) / greatest(o.total - o.warm, 1)))
        end as whole
    from (
        select rid, try_cast(unnest(of_groups) as double) as lr, generate_subscripts(of_groups, 1) as which,
            len(of_groups) as groups
        from (select rid, coalesce(string_split(attrs['lr'], ';'), [lr::varchar]) as of_groups from optimizer_steps)
    ) as s
    join (
        select p.rid, o.*, (p.global_steps - o.first_step) * o.batches + p.batch as place
        from optimizer_steps as p join optimizers as o on o.run_id is not distinct from p.run_id
    ) as o using (rid)
    where o.place >= 0
),
configured as (
    select rid, name, asked, generate_subscripts(of_groups, 1) as which, len(of_groups) as groups,
        case name when 'beta 1' then try_cast(split_part(unnest(of_groups), ',', 1) as double)
            when 'beta 2' then try_cast(split_part(unnest(of_groups), ',', 2) as double)
            else try_cast(replace(replace(unnest(of_groups), 'true', '1'), 'false', '0') as double) end as said
    from (
        select rid, unnest([
            {name: 'weight_decay', of_groups: string_split(attrs['weight_decay'], ';'),
                asked: try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.weight_decay') as double)},
            {name: 'eps', of_groups: string_split(attrs['eps'], ';'),
                asked: try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.eps') as double)},
            {name: 'beta 1', of_groups: string_split(attrs['betas'], ';'),
                asked: try_cast(split_part(trim(setting(run_id, 'actor_rollout_ref.actor.optim.betas'), '[] '), ',', 1) as double)},
            {name: 'beta 2', of_groups: string_split(attrs['betas'], ';'),
                asked: try_cast(split_part(trim(setting(run_id, 'actor_rollout_ref.actor.optim.betas'), '[] '), ',', 2) as double)},
            {name: 'maximize', of_groups: string_split(attrs['maximize'], ';'), asked: 0.0},
            {name: 'amsgrad', of_groups: string_split(attrs['amsgrad'], ';'), asked: 0.0}
        ], max_depth := 2)
        from optimizer_steps
    )
),
goes_on as (
    select *, case when last_step >= global_steps - 1 then last_taken when global_steps - 1 = resumed then restored end
        + if(skipped or given = 'none', 0, 1) as due
    from (
        select s.rid, s.global_steps, s.skipped, s.given, s.taken, r.resumed, r.restored,
            lag(s.taken) over before as last_taken, lag(s.global_steps) over before as last_step
        from optimizer_steps as s
        left join (
            select run_id, max(try_cast(attrs['global_steps'] as bigint)) as resumed,
                max(try_cast(attrs['optimizer_steps'] as bigint)) as restored
            from events where stage = 'init' and field = '_load_checkpoint' group by run_id
        ) as r on r.run_id is not distinct from s.run_id
        where s.taken is not null
        window before as (partition by s.run_id, s.process order by s.ord)
    )
),
stepped_from as (
    select s.rid, s.run_id, s.clip, s.norm, try_cast(s.given as double) as given, arg_max(l.after, l.ord) as left_behind
    from optimizer_steps as s
    join (
        select run_id, process, global_steps, update_index, ord, try_cast(attrs['gradient_after'] as double) as after
        from events where loss is not null and attrs['gradient_after'] is not null
    ) as l
        on l.run_id is not distinct from s.run_id and l.process is not distinct from s.process
        and l.global_steps = s.global_steps and l.update_index = s.update_index
    where s.given is not null and s.given <> 'none'
    group by s.rid, s.run_id, s.clip, s.norm, s.given
),
clipped as (
    -- float16 has no number nearer to 0 than 6e-8, and is coarse beside it
    select *, left_behind * least(1, clip / (norm + 1e-6)) as whole,
        if(setting(run_id, 'actor_rollout_ref.actor.fsdp_config.model_dtype') in ('fp16', 'float16'), 1e-7, 1e-30) as least
    from stepped_from
),
steps as (
    select run_id, global_steps, count(*) filter (optim.skipped) as skipped, max(rid) as rid
    from events
    where op = 'optim_step'
    group by run_id, global_steps
),
said_of as (
    select e.run_id, e.global_steps, c.rid, c."sum" as skipped
    from group_cells as c join keys using (id) join events as e on e.rid = c.rid
    where c.field = 'metrics' and keys.key = 'actor/skipped_steps'
)
select f.rid, keys.key, printf('within %g nats of old_log_probs', f.band) as expected,
    printf('%.6g', p.absdiff_sum / p.n_in) as actual, printf('mean over the micro-batch %.6g', f.off / f.tokens) as detail,
    null as severity
from first_pairs as f join pair_cells as p using (rid) join keys using (id)
where p.n_in > 0 and ((f.off / f.tokens > f.band and p.absdiff_sum / p.n_in > f.band)
    or (p.absdiff_sum / p.n_in > 10 * f.band and p.n_in >= 4))
union all
select rid, 'grad_norm', 'finite, or the step skipped', printf('%g', optim.grad_norm), null, null
from events
where op = 'optim_step' and not isfinite(optim.grad_norm) and not coalesce(optim.skipped, false)
union all
select rid, loss.term, 'finite', printf('%g', loss.numerator), null, null
from events
where loss is not null and not isfinite(loss.numerator)
union all
select s.rid, null, 'an optimiser step', 'none', printf('mini-batch %d', s.mini_batch), null
from events as s
where s.stage = 'update_actor' and s.op = 'split' and s.micro_batch is null and s.update_index is not null
    and not exists (
        select 1 from events as o
        where o.op = 'optim_step' and o.run_id is not distinct from s.run_id and o.global_steps = s.global_steps
            and o.update_index = s.update_index
    )
    and exists (select 1 from events as o where o.op = 'optim_step' and o.run_id is not distinct from s.run_id)
union all
select said_of.rid, 'actor/skipped_steps', printf('%d', steps.skipped), printf('%g', said_of.skipped), 'by the steps themselves', null
from said_of
join steps on steps.run_id is not distinct from said_of.run_id and steps.global_steps = said_of.global_steps
where said_of.skipped <> steps.skipped
union all
select rid, 'lr', printf('%.6g', whole), printf('%.6g', lr),
    printf('%s schedule of peak %g, at place %d%s', kind, peak, place, coalesce(printf(' of %d', total), ''))
        || if(groups > 1, printf('; group %d of %d', which, groups), ''), null
from rates
where abs(lr - whole) > 1e-6 * peak
union all
select rid, name, printf('%g', asked), printf('%g', said),
    if(groups > 1, printf('of group %d of %d of the optimiser, and as configured', which, groups),
        'of the optimiser, and as configured'), null
from configured
where abs(said - asked) > 1e-6 * abs(asked)
union all
select rid, 'clip', printf('%g', asked), printf('%g', clip), 'bound of the gradient norm, and as configured', null
from (
    select rid, clip, try_cast(setting(run_id, 'actor_rollout_ref.actor.grad_clip') as double) as asked,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.optim.clip_grad') as double) as asked_too
    from optimizer_steps
)
where abs(clip - asked) > 1e-6 * asked and clip is distinct from asked_too
union all
select rid, 'optimizer_steps', printf('%d', due), printf('%d', taken),
    case
        when taken > due then 'it has stepped more than once'
        when taken = due - 1 then 'it has not stepped'
        else 'its state was lost: it counts from the beginning'
    end,
    null
from goes_on
where taken <> due
union all
select rid, 'gradient', printf('%.6g', whole), printf('%.6g', given),
    case
        when abs(given + whole) <= 1e-2 * abs(whole) then 'with the other sign'
        when clip < norm and abs(given - left_behind) <= 1e-2 * abs(left_behind)
            then printf('not clipped: norm %.6g, bound %g', norm, clip)
        else printf('norm %.6g, clipped to %g, and what the step was given', norm, clip)
    end,
    null
from clipped
where abs(given - whole) > 1e-2 * abs(whole) + least
