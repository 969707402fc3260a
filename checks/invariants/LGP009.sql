-- code: LGP009
-- name: a row alone scores the same
-- severity: error
-- says: A row scored alone, by tokens only, has the log-probs and the entropy it had in its batch: padding, attention mask, positions, packing and the batch's own arithmetic leak nothing.
-- needs: absdiff_sum, absdiff_max
-- fields:
-- examines: select count(*) from events where op = 'compare' and against = 'probe' and field <> 'probe_log_probs' and n > 0
-- subsumed_by: LEN006, LEN008, LGP001, LGP005, TOK001
-- source: the batch and micro-batch invariance of a causal model; log-probs of packed and padded rows seen to differ
-- causes: Positions that count padding, a mask that lets rows of a pack see each other, logits in fewer bits, a temperature applied to one output and not to the other.
-- reports: OpenRLHF/OpenRLHF#1319, OpenRLHF/OpenRLHF#913, PrimeIntellect-ai/prime-rl#606, THUDM/slime#833, verl-project/verl#6268
-- faults: entropy_before_temperature, labels_shifted_inside_shards, log_softmax_under_autocast, logits_of_the_tokens_own_position, positions_begin_anew, reference_numbers_positions_itself, rows_packed_without_borders, shifted_once_a_pack, temperature_applied_twice
select p.rid, keys.key, printf('within %g nats of the row alone', band(e.run_id)) as expected,
    printf('mean %.6g, greatest %.6g', p.absdiff_sum / p.n_in, p.absdiff_max) as actual,
    printf('%d of %d tokens are equal', p.n_equal, p.n_in) as detail, null as severity
from pair_cells as p join events as e using (rid) join keys using (id)
where p.against = 'probe' and p.field <> 'probe_log_probs' and p.n_in > 0
    and (p.absdiff_sum / p.n_in > band(e.run_id) or p.absdiff_max > 10 * band(e.run_id))
