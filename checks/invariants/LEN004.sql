-- code: LEN004
-- name: cut to the response at the right place
-- severity: error
-- says: A field cut from the sequence to the response is that row's window from prompt_len-1 to seq_len-1, not that window moved by a token, and not another row's.
-- needs: key, valid_length, fingerprint, marks
-- fields: log_probs
-- examines: select sum(r.n) from events as r where r.entity = 'trajectory' and r.op = 'produce' and r.span = 'response' and r.field in ('old_log_probs', 'ref_log_prob', 'entropy') and exists (select 1 from events as s where s.w is not null and s.k = r.k and s.step_id = r.step_id and s.stage = r.stage and s.ord < r.ord and (s.dtype is not distinct from r.dtype or r.dtype not in ('bfloat16', 'float16')))
-- subsumed_by: LEN001, LEN002, QUE003
-- source: verl's response window of full-sequence log-probs
-- causes: Log-probs of a token stand at the token before it; the cut began at prompt_len, or all rows were cut at one place although their prompts differ; what was cut was put back in another order than the keys.
-- reports: modelscope/ms-swift#3069, modelscope/ms-swift#7066, verl-project/verl#1440
-- faults: cut_a_token_late, masked_before_the_order_was_undone, old_log_probs_of_the_next_row, one_prompt_length_for_all, reference_cut_a_token_early, reference_of_the_next_row, rolled_after_the_cut
create or replace temp table windows_cut as
select r.rid, arg_max(s.rid, s.ord) as was
from events as r
join events as s on s.step_id = r.step_id and s.stage = r.stage and s.k = r.k and s.ord < r.ord
where r.entity = 'trajectory' and r.op = 'produce' and r.span = 'response' and s.op in ('forward', 'produce') and s.w is not null
    -- values that were made narrower are others (LGP007)
    and (s.dtype is not distinct from r.dtype or r.dtype not in ('bfloat16', 'float16'))
    and (r.field, s.field) in (('old_log_probs', 'log_probs'), ('ref_log_prob', 'log_probs'), ('entropy', 'entropy'))
group by r.rid;
insert into suspects
select unnest([r.rid, s.rid])
from windows_cut as cut
join events as r using (rid)
join events as s on s.rid = cut.was
where r.c is distinct from s.w;
with windows as (
    select a.rid, a.key, a.valid_length, a.fingerprint, s.marks[1] as first, s.marks[2] as later, s.marks[3] as last,
        s.valid_length as seq_len, s.fingerprint as seq_fp
    from elements as a
    join windows_cut as c using (rid)
    join elements as s on s.rid = c.was and s.key = a.key
),
broken as (
    select * from windows
    where valid_length <> last.at - first.at or compose(first.fp, first.at, fingerprint) <> last.fp
),
right_ones as (
    -- the fingerprint of each window itself: what its prefix adds is taken off, by the power that undoes its own
    select rid, min(key) as key, last.at - first.at as size,
        compose(0, 4611686018427387904 - first.at,
            cast((18446744073709551616::uhugeint + last.fp - first.fp) % 18446744073709551616 as ubigint)) as fp
    from windows
    where rid in (select rid from broken)
    group by all
)
select b.rid, b.key, printf('window [%d, %d)', b.first.at, b.last.at) as expected,
    case
        when o.key is not null then 'the window of ' || o.key
        when b.valid_length <> b.last.at - b.first.at then printf('%d values', b.valid_length)
        when compose(b.later.fp, b.later.at, b.fingerprint) = b.seq_fp then printf('window [%d, %d)', b.later.at, b.seq_len)
        else printf('other values, fingerprint %x', b.fingerprint)
    end as actual,
    null as detail, null as severity
from broken as b left join right_ones as o on o.rid = b.rid and o.fp = b.fingerprint and o.size = b.valid_length
