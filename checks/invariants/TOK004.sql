-- code: TOK004
-- name: responses stay what they were
-- severity: error
-- says: The responses of a trajectory do not change between rollout and clear.
-- needs: key, valid_length, fingerprint
-- fields: responses
-- examines: select sum(n) from events where entity = 'trajectory' and field = 'responses' and op <> 'compare' and stage <> 'reward' and c is not null and not said
-- subsumed_by: QUE003, LEN001
-- source: 03 Data Protocol: responses are written by the rollout and by nobody else
-- causes: A later stage cleaned the responses and wrote them back, or a second attempt of a session was written over the first: log-probs, masks and scores belong to other tokens.
-- faults: hook_cleans_the_responses, responses_written_back_clean
insert into suspects
select rid
from events left join expected using (k)
where entity = 'trajectory' and field = 'responses' and op <> 'compare' and stage <> 'reward' and not said
    and c is not null and c is distinct from response_c;
select e.rid, e.key, printf('%d tokens, fingerprint %x', b.response_len, b.responses_fp) as expected,
    printf('%d tokens, fingerprint %x', e.valid_length, e.fingerprint) as actual, 'as the rollout wrote them' as detail,
    null as severity
from elements as e join keys using (run, key) join base as b using (id)
where e.valid_length <> b.response_len or e.fingerprint <> b.responses_fp
