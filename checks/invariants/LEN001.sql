-- code: LEN001
-- name: response fields share one length
-- severity: error
-- says: All fields of a trajectory whose span is response have one valid length, that of its responses.
-- needs: key, layout, valid_length
-- fields: responses
-- examines: select sum(n) from events where entity = 'trajectory' and span = 'response' and layout is distinct from 'scalar' and op <> 'compare' and v is not null
-- subsumed_by: QUE003, LEN003, REW003
-- backs_up: LEN003: it needs lengths alone, and holds for fields that nobody pads and nobody reads.
-- source: S1
-- causes: One of the companions was cut, padded or re-made without the others: a truncation applied to tokens only, log-probs kept from another attempt.
-- reports: PrimeIntellect-ai/prime-rl#2021, PrimeIntellect-ai/verifiers#37, THUDM/slime#1861, THUDM/slime#1995, huggingface/trl#5144
-- faults: drafts_without_log_probs, entropy_cut_too_long, log_probs_of_two_attempts, mask_of_the_engines_tokens, padding_forgets_a_field, short_log_probs
insert into suspects
select rid
from events left join expected using (k)
where entity = 'trajectory' and span = 'response' and layout is distinct from 'scalar' and op <> 'compare'
    and v is not null and v is distinct from response_v
    -- log_probs and entropy are re-used names: a row of theirs as long as its sequences is a sequence-span row.
    and not (field in ('log_probs', 'entropy') and v is not distinct from ids_v);
select e.rid, e.key, 'valid length ' || b.response_len as expected, 'valid length ' || e.valid_length as actual,
    'responses have ' || b.response_len || ' tokens' as detail, null as severity
from elements as e join keys using (run, key) join base as b using (id)
where e.valid_length <> b.response_len
