-- code: TOK001
-- name: input_ids are prompts ++ responses
-- severity: error
-- says: The fingerprint of input_ids is that of prompts followed by responses, by composition.
-- needs: key, valid_length, fingerprint
-- fields: input_ids, prompts, responses
-- examines: select sum(n) from events where entity = 'trajectory' and field = 'input_ids' and op <> 'compare'
-- subsumed_by: LEN001, LEN002, QUE003
-- source: 03 Data Protocol: input_ids = concat(prompts, responses)
-- causes: Tokens were decoded and encoded again, or input_ids were built before the response was cut or edited.
-- faults: retokenised_input_ids
insert into suspects
select rid
from events left join expected using (k)
where entity = 'trajectory' and field = 'input_ids' and op <> 'compare' and c is not null and c is distinct from ids_c;
with whole as (
    select id, ids_rid as rid, ids_fp, ids_len, prompt_len, response_len,
        compose(prompts_fp, prompt_len, responses_fp) as fp
    from base
    where ids_fp is not null and prompts_fp is not null and responses_fp is not null
)
select rid, key, printf('%x', fp) as expected, printf('%x', ids_fp) as actual,
    case when ids_len = prompt_len + response_len then 'same length, other tokens' end as detail, null as severity
from whole join keys using (id)
where ids_fp <> fp
union all
select e.rid, e.key, printf('%x', w.fp), printf('%x', e.fingerprint), 'read later', null
from elements as e join keys as k using (run, key) join whole as w on w.id = k.id
where e.fingerprint <> w.fp
