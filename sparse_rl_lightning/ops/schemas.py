"""The signatures of all ops, nothing else: setup.py and the loader read them to tell matching builds from stale ones.

Conventions, the same in every op. Keys, values and positions live in flat pools of R rows: ``key_pool`` and
``value_pool`` (R, D), ``position_pool`` (R) int32. ``offsets`` int64, ``capacities`` int32 and ``lengths`` int32 say
for each slot and KV head at which row its entries start, how many fit and how many are live: (S, H) in ops on one
layer, (L, S, H) in ops on all layers. Live entries stand first, in the order of their positions. State is indexed by
slot; inputs and outputs of a call are indexed by row b of ``slots`` (B) int64. ``slots[b] = -1`` is a row to skip:
nothing of it is read or written, except that outputs get zeros. A slot may be listed once. ``seen`` (S) int64 counts
the tokens fed to each slot so far: the position of the token being appended, and the death step of what is evicted.

``errors`` (1) int32 is where CUDA kernels, which cannot raise, say what they had to leave out (``ops/faults.py``); all
others raise instead.

Everything is contiguous and on one device. Pools, queries and their like share one floating type T; scores, sums
and probabilities are float32 (float64 if T is). Pools may also be float8_e4m3fn whatever T is (ops/float8.py). Ops
return nothing, allocate nothing and do not wait for the device.
"""

SCHEMAS = {
    # query (B, Hq, D), key and value (B, H, D), cos and sin (B, r) float32 with r <= D, query_ring (S, Hq, A, D)
    "append": """(
        Tensor(a!) query, Tensor key, Tensor value, Tensor? cos, Tensor? sin, Tensor slots, Tensor seen,
        Tensor offsets, Tensor capacities, Tensor(b!) key_pool, Tensor(c!) value_pool, Tensor(d!) position_pool,
        Tensor(e!) lengths, Tensor(f!)? query_ring, Tensor(g!)? errors=None) -> ()""",
    # query, out (B, Hq, D), lse (B, Hq), probs (B, Hq, M) with M >= max_length >= lengths
    "decode_attention": """(
        Tensor query, Tensor key_pool, Tensor value_pool, Tensor slots, Tensor offsets, Tensor lengths, float scale,
        int max_length, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? probs, Tensor(d!)? errors=None) -> ()""",
    # queries (S, Hq, A, D), query_positions (S, A) int64, scores (B, H, N), scratch (B, H, A + 1, N)
    "window_importance": """(
        Tensor queries, Tensor query_positions, Tensor key_pool, Tensor position_pool, Tensor slots, Tensor offsets,
        Tensor lengths, float scale, int window, bool exclude_window, str group_reduction, str query_reduction,
        str pooling, int kernel_size, Tensor(a!) scores, Tensor(b!) scratch, Tensor(c!)? errors=None) -> ()""",
    # redundancy (B, H, N), scratch (B, H, 2, N)
    "key_redundancy": """(
        Tensor key_pool, Tensor slots, Tensor offsets, Tensor lengths, float threshold, Tensor(a!) redundancy,
        Tensor(b!) scratch, Tensor(c!)? errors=None) -> ()""",
    # scores (L, B, H, N) float32, budgets (L, B, H) int32, death (L, S, H, T) int32, state_pool (R, C) float32
    "select_and_compact": """(
        Tensor scores, Tensor budgets, int num_sinks, int window, Tensor slots, Tensor seen, Tensor offsets,
        Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor(c!) position_pool, Tensor(d!) lengths, Tensor(e!)? death,
        Tensor(f!)? state_pool, Tensor(g!)? errors=None) -> ()""",
    # the same from other memory: source_offsets int64 and source_lengths int32 (L, B, H); entry i has position i
    "select_and_store": """(
        Tensor scores, Tensor budgets, int num_sinks, int window, Tensor source_keys, Tensor source_values,
        Tensor source_offsets, Tensor source_lengths, Tensor slots, Tensor seen, Tensor offsets, Tensor capacities,
        Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor(c!) position_pool, Tensor(d!) lengths, Tensor(e!)? death,
        Tensor(f!)? errors=None) -> ()""",
    # sources, destinations (B) int64 slots, query_ring (L, S, Hq, A, D), death (L, S, H, T), state_pool (R, C)
    "fork": """(
        Tensor sources, Tensor destinations, Tensor offsets, Tensor capacities, Tensor(a!) key_pool,
        Tensor(b!) value_pool, Tensor(c!) position_pool, Tensor(d!) lengths, Tensor(e!)? query_ring,
        Tensor(f!)? death, Tensor(g!)? state_pool, Tensor(h!)? errors=None) -> ()""",
    # summaries (S, H, C, P, D) of type T: of each complete page its mean key (C = 1), or largest and smallest (C = 2)
    "summarize_pages": """(
        Tensor key_pool, Tensor slots, Tensor offsets, Tensor lengths, int page_size, bool newest_only,
        Tensor(a!) summaries, Tensor(b!)? errors=None) -> ()""",
    # query (B, Hq, D), limits (B) int32 pages to read, scores (B, H, P), pages (B, H, K) int32 ascending, then -1
    "select_pages": """(
        Tensor query, Tensor summaries, Tensor slots, Tensor lengths, Tensor limits, int page_size, int num_first,
        int num_last, bool group_max, Tensor(a!) scores, Tensor(b!) pages, Tensor(c!)? errors=None) -> ()""",
    # query, out (B, Hq, D), pages (B, H, K) int32 ascending, the first -1 ends a list, lse (B, Hq)
    "page_attention": """(
        Tensor query, Tensor key_pool, Tensor value_pool, Tensor slots, Tensor offsets, Tensor lengths, Tensor pages,
        int page_size, float scale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? errors=None) -> ()""",
}
