-- code: VER008
-- name: aborted rows do not train
-- severity: error
-- says: In a synchronous run no trajectory whose generation was aborted is trained on.
-- needs: key, finish_reason
-- fields: response_mask
-- examines: select count(*) from tag_cells where finish_reason is not null
-- subsumed_by:
-- source: an engine that is told to load weights aborts what it was generating
-- causes: A second sync cut requests short, and what they had so far was taken for an answer.
-- reports: THUDM/slime#327, verl-project/verl#5698
-- faults: one_session_is_aborted, requests_cut_short_are_answers
with aborted as (
    select c.rid, c.id
    from tag_cells as c join events as e using (rid)
    where c.finish_reason in ('abort', 'aborted', 'error')
        and synchronous(e.run_id)
        and e.partition is distinct from 'val'
)
select a.rid, k.key, 'no token that trains' as expected, b.mask_sum || ' of ' || b.response_len || ' tokens' as actual,
    'its generation was aborted' as detail, null as severity
from aborted as a join base as b using (id) join keys as k using (id)
where b.mask_sum > 0 and not b.is_padding
    and a.id not in (select id from key_cells where reason is not null)
