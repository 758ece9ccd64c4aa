"""Signatures of all ops, and nothing else: setup.py and the loader read them to detect stale builds.

Keys, values and positions are in flat pools of R rows. ``offsets``, ``capacities`` and ``lengths`` are the first row,
the room and the number of live entries of each slot and KV head. Live entries come first, in the order of their
positions. State is indexed by slot; inputs and outputs of a call are indexed by row b of ``slots``. ``slots[b] = -1``
skips a row: nothing of it is read or written, except that outputs get zeros. A slot may be listed once. ``seen`` is
the number of tokens fed to each slot so far: the position of the token being appended, and the death step of evicted
entries. ``death`` has the number of the event at which each token died, ``event_steps`` the step of each event.

``draw`` reads logits, ``rms_norm`` and ``silu_mul`` hidden states, and nothing of the cache.

CUDA kernels cannot raise: they report to ``errors`` what they had to skip (``ops/pools.py``); all others raise.
Ops return nothing, allocate nothing and do not wait for the device.
"""

import hashlib

SHAPES = {
    # Sizes and type of every tensor, in all ops. L layers (only in ops on all layers), S slots, B rows of a call, H KV
    # heads, Hq query heads, D head size, R rows of the pools, N entries, T tokens of a sequence, A recent queries,
    # r rotated elements, P pages, C vectors kept of a page, K pages read. `query` is the type of queries, new keys and
    # new values, `pool` that of the pools (the same, or float8_e4m3fn of ops/pools.py) or of the logits. `sum` is
    # float32, or float64 for float64. `event` is uint8, int16 or int32; its largest number says never.
    "key_pool": "R D pool", "value_pool": "R D pool", "position_pool": "R int32", "state_pool": "R f float32",
    "offsets": "L S H int64", "capacities": "L S H int32", "lengths": "L S H int32",
    "slots": "B int64", "sources": "B int64", "destinations": "B int64", "seen": "S int64", "errors": "1 int32",
    "query": "B Hq D query", "key": "B H D query", "value": "B H D query", "cos": "B r sum", "sin": "B r sum",
    "query_ring": "L S Hq A D query", "death": "L S H T event", "event_steps": "S E int32",
    "out": "B Hq D query", "lse": "B Hq sum", "probs": "B Hq M sum", "partials": "B Hq P E sum",
    "scores": "L B H N float32", "budgets": "L B H int32",
    "source_keys": "Q D pool", "source_values": "Q D pool",
    "source_offsets": "L B H int64", "source_lengths": "L B H int32",
    "summaries": "S H C P D pool", "limits": "B int32", "page_scores": "B H P sum", "pages": "B H K int32",
    "query_positions": "S A int64", "importance": "L B H N sum", "redundancy": "L B H N sum", "scratch": "X Y N sum",
    "given": "L B H N sum", "entry_scores": "L B H N sum", "held": "S T int32",
    "prompt_lengths": "S int64", "prompt_keys": "S int64", "slot_keys": "S int64",
    "projected": "B G D query", "query_norm": "D sum", "key_norm": "D sum",
    "hidden": "B E pool", "addend": "B E query", "norm_weight": "E sum", "normed": "B E query",
    "gate_and_up": "B F2 pool", "gated": "B F pool",
    "logits": "B V pool", "drawn_from": "B V pool", "sequence_keys": "B int64", "steps": "B int64",
    "end_ids": "E int64", "tokens": "B int64", "token_logprobs": "B sum", "behavior": "B sum", "top_ids": "B K int32",
    "top_logprobs": "B K sum", "chunks": "B G C 2 float64", "row_params": "B 6 float64", "row_ends": "B F int64",
    "support": "B int32", "masses": "B M int64",
}  # fmt: skip
ON_ALL_LAYERS = ("evict", "fork", "window_importance", "key_redundancy", "score_entries")

SCHEMAS = {
    # G = Hq + 2 H: queries, keys and values
    "append": """(
        Tensor projected, Tensor? query_norm, Tensor? key_norm, float epsilon, Tensor? cos, Tensor? sin, Tensor slots,
        Tensor seen, Tensor offsets, Tensor capacities, Tensor(a!) key_pool, Tensor(b!) value_pool,
        Tensor(c!) position_pool, Tensor(d!) lengths, Tensor(e!)? query_ring, Tensor(f!) query,
        Tensor(g!)? errors=None) -> ()""",
    # M >= max_length >= lengths. P splits of a head of max_length, E = D + 2: what the splits of a head leave; only the
    # CUDA kernels split, and only then it must be there
    "decode_attention": """(
        Tensor query, Tensor key_pool, Tensor value_pool, Tensor slots, Tensor offsets, Tensor lengths, float scale,
        int max_length, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? probs, Tensor(d!)? partials=None,
        Tensor(e!)? errors=None) -> ()""",
    # both, with the attention's max_length counting the new entry
    "append_attend": """(
        Tensor projected, Tensor? query_norm, Tensor? key_norm, float epsilon, Tensor? cos, Tensor? sin, Tensor slots,
        Tensor seen, Tensor offsets, Tensor capacities, Tensor(a!) key_pool, Tensor(b!) value_pool,
        Tensor(c!) position_pool, Tensor(d!) lengths, Tensor(e!)? query_ring, Tensor(f!) query, float scale,
        int max_length, Tensor(g!) out, Tensor(h!)? partials=None, Tensor(i!)? errors=None) -> ()""",
    # scratch with Y = A + 1, X heads at a time; without query_positions the place of a query in the ring tells it
    "window_importance": """(
        Tensor query_ring, Tensor key_pool, Tensor position_pool, Tensor slots, Tensor seen, Tensor offsets,
        Tensor lengths, float scale, int window, bool exclude_window, str group_reduction, str query_reduction,
        str pooling, int kernel_size, Tensor? query_positions, Tensor(a!) importance, Tensor(b!) scratch,
        Tensor(c!)? errors=None) -> ()""",
    # scratch with Y = 3; with an importance R-KV's mixture of both
    "key_redundancy": """(
        Tensor key_pool, Tensor slots, Tensor offsets, Tensor lengths, float threshold, Tensor? importance,
        float mix_lambda, Tensor(a!) redundancy, Tensor(b!) scratch, Tensor(c!)? errors=None) -> ()""",
    # given: of "shared" the scores that heads share, of the others none
    "score_entries": """(
        Tensor key_pool, Tensor value_pool, Tensor position_pool, Tensor? state_pool, Tensor slots, Tensor seen,
        Tensor offsets, Tensor lengths, Tensor prompt_lengths, Tensor prompt_keys, Tensor slot_keys, str method,
        bool by_age, bool by_value, Tensor? given, Tensor(a!) entry_scores, Tensor(b!)? errors=None) -> ()""",
    # In this order: what is kept (scores to window), the slots (slots, seen), their place (offsets,
    # capacities), the memory (key_pool to lengths), what else changes (death, state_pool). With the four tensors of a
    # source, entries are copied from there and entry i has position i; without them they close up in place.
    "evict": """(
        Tensor scores, Tensor budgets, int num_sinks, int window, Tensor slots, Tensor seen, Tensor offsets,
        Tensor capacities, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor(c!) position_pool, Tensor(d!) lengths,
        Tensor(e!)? death, Tensor(f!)? state_pool, Tensor? source_keys, Tensor? source_values, Tensor? source_offsets,
        Tensor? source_lengths, Tensor(g!)? errors=None, Tensor(h!)? held=None,
        Tensor(i!)? event_steps=None) -> ()""",
    "fork": """(
        Tensor sources, Tensor destinations, Tensor offsets, Tensor capacities, Tensor(a!) key_pool,
        Tensor(b!) value_pool, Tensor(c!) position_pool, Tensor(d!) lengths, Tensor(e!)? query_ring,
        Tensor(f!)? death, Tensor(g!)? state_pool, Tensor(h!)? errors=None) -> ()""",
    # of each complete page its mean key (C = 1), or the largest and the smallest elements of its keys (C = 2)
    "summarize_pages": """(
        Tensor key_pool, Tensor slots, Tensor offsets, Tensor lengths, int page_size, bool newest_only,
        Tensor(a!) summaries, Tensor(b!)? errors=None) -> ()""",
    # limits are numbers of pages; pages ascend, then -1
    "select_pages": """(
        Tensor query, Tensor summaries, Tensor slots, Tensor lengths, Tensor limits, int page_size, int num_first,
        int num_last, bool group_max, Tensor(a!) page_scores, Tensor(b!) pages, Tensor(c!)? errors=None) -> ()""",
    # pages ascend, the first -1 ends a list; partials as above, for K page_size entries
    "page_attention": """(
        Tensor query, Tensor key_pool, Tensor value_pool, Tensor slots, Tensor offsets, Tensor lengths, Tensor pages,
        int page_size, float scale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? partials=None,
        Tensor(d!)? errors=None) -> ()""",
    # C = ceil(V / 512): of each chunk of logits the maximum and the sum of exponentials. G = 2 with end_ids that are
    # forbidden before min_length, or with logits to draw from that are not the policy's. row_params have a row's own
    # temperature, top_k, top_p, min_p, min_length and number of top log-probs, row_ends its end_ids, padded with -1.
    # support is the number of tokens that a row may draw, 0 for all; masses is room for kernels that need it, none yet
    "draw": """(
        Tensor logits, Tensor? drawn_from, Tensor sequence_keys, Tensor steps, Tensor end_ids, int min_length,
        float temperature, int top_k, float top_p, float min_p, Tensor(a!) tokens, Tensor(b!) token_logprobs,
        Tensor(c!)? behavior, Tensor(d!)? top_ids, Tensor(e!)? top_logprobs, Tensor(f!) chunks,
        Tensor? row_params=None, Tensor? row_ends=None, Tensor(g!)? support=None,
        Tensor(h!)? masses=None) -> ()""",
    # the addend is added to `hidden` first
    "rms_norm": """(
        Tensor(a!) hidden, Tensor? addend, Tensor norm_weight, float epsilon, Tensor(b!) normed) -> ()""",
    "silu_mul": "(Tensor gate_and_up, Tensor(a!) gated) -> ()",
}


def schema_hash() -> str:
    """Twelve characters of all signatures, sizes and types: compiled into a library, checked before it is loaded."""
    return hashlib.sha256(repr([sorted(SCHEMAS.items()), sorted(SHAPES.items())]).encode()).hexdigest()[:12]
