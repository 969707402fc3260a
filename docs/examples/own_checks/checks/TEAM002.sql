-- code: TEAM002
-- name: the old log-probs are over whole responses
-- severity: warning
-- says: The log-probs of the old policy have the response's length for every trajectory.
-- needs: key, valid_length
-- fields: old_log_probs, responses
-- examines: select sum(n) from events where field = 'old_log_probs' and v is not null
-- subsumed_by: LEN001
-- source: our trainer truncates before it computes log-probs, never after
-- causes: The batch was cut to a shorter length between the rollout and the log-probs.
-- A row that agrees with the rollout has the signature expected of its keys; the elements of the others are read.
insert into suspects
select rid
from events left join expected using (k)
where field = 'old_log_probs' and v is distinct from response_v;
select e.rid, e.key, b.response_len as expected, e.valid_length as actual, null as detail, null as severity
from elements as e
join keys using (run, key)
join base as b using (id)
where e.valid_length <> b.response_len
