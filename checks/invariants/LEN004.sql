-- code: LEN004
-- name: cut to the response at the right place
-- severity: error
-- says: A field cut from the sequence to the response is the window from prompt_len-1 to seq_len-1, not that window moved by a token.
-- needs: key, valid_length, fingerprint, marks
-- fields: log_probs
-- examines: select sum(r.n) from events as r where r.entity = 'trajectory' and r.op = 'produce' and r.span = 'response' and r.field in ('old_log_probs', 'ref_log_prob', 'entropy') and exists (select 1 from events as s where s.w is not null and s.k = r.k and s.step_id = r.step_id and s.stage = r.stage and s.ord < r.ord and (s.dtype is not distinct from r.dtype or r.dtype not in ('bfloat16', 'float16')))
-- subsumed_by: LEN001, LEN002, QUE003
-- source: verl's response window of full-sequence log-probs
-- causes: Log-probs of a token stand at the token before it; the cut began at prompt_len, or all rows were cut at one place although their prompts differ.
-- reports: modelscope/ms-swift#3069, modelscope/ms-swift#7066, verl-project/verl#1440
-- faults: cut_a_token_late, masked_before_the_order_was_undone, one_prompt_length_for_all, reference_cut_a_token_early
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
)
select rid, key, printf('window [%d, %d)', first.at, last.at) as expected,
    case
        when valid_length <> last.at - first.at then printf('%d values', valid_length)
        when compose(later.fp, later.at, fingerprint) = seq_fp then printf('window [%d, %d)', later.at, seq_len)
        else printf('other values, fingerprint %x', fingerprint)
    end as actual,
    null as detail, null as severity
from windows
where valid_length <> last.at - first.at or compose(first.fp, first.at, fingerprint) <> last.fp
