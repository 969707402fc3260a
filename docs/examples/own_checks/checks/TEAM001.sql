-- code: TEAM001
-- name: rewards lie between 0 and 1
-- severity: error
-- says: The reward of a trajectory is between 0 and 1; a padding row has none to judge.
-- needs: sum
-- fields: rm_scores
-- examines: select count(*) from base where reward is not null and not is_padding
-- subsumed_by: PAD001
-- source: our reward functions, which all score a share of what was asked
-- causes: A shaping term was added to the score, or a score was given once for every token.
select reward_rid as rid, key, 'a reward in [0, 1]' as expected, reward as actual, null as detail, null as severity
from base join keys using (id)
where not is_padding and reward not between 0 and 1
