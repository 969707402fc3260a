-- code: KEY001
-- name: trajectory keys parse
-- severity: error
-- says: Every trajectory key parses from the right as {uid}_{session_id}_{index}, and the uid field of a row equals the uid of its key.
-- needs: key
-- fields:
-- examines: select sum(n) from events where entity = 'trajectory'
-- subsumed_by:
-- source: S3; verl splits keys from the left in replay_buffer.py and from the right in trainer_base.py
-- causes: A custom agent loop built its own keys, or rows were written under another row's key.
-- faults: uid_of_the_first_group, uids_lose_their_dashes
with named as materialized (
    select id, key, uid, group_id, min(late) % 1000000000000 as ord
    from (select id, key, uid, group_id from keys where uid is null or contains(uid, '_'))
    join keyed using (id)
    join firsts using (k)
    where entity = 'trajectory'
    group by id, key, uid, group_id
),
uids as materialized (
    select group_id, uid, text_fingerprint(uid) as fp
    from (
        select group_id, any_value(uid) as uid
        from keys
        where group_id is not null and id in (select id from keyed semi join (select k from firsts where entity = 'trajectory') using (k))
        group by group_id
    )
)
select rid, key, '{uid}_{session_id}_{index}' as expected, key as actual, null as detail, null as severity
from named join events using (ord)
where uid is null
union all
select b.uid_rid, k.key, 'uid field ' || k.uid, coalesce('uid field ' || other.uid, 'another uid'),
    'the uid column and the key name different groups', null
from base as b
join uids as mine using (group_id)
join keys as k using (id)
left join uids as other on other.fp = b.uid_fp
where b.uid_fp is not null and b.uid_fp <> mine.fp
union all
select rid, key, 'a uid without _', uid, 'read from the left, this key names another uid', 'warning'
from (select uid, min(ord) as ord, min(key) as key from named where contains(uid, '_') group by group_id, uid)
join events using (ord)
