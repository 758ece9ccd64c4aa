"""Times the ops against the fastest plain PyTorch that computes the same, and prints the ratios as a table.

    OMP_WAIT_POLICY=PASSIVE python -m benchmarks.ops [--device cpu] [--threads 2] [--rounds 15] [--parts ...] [--save D]

retrieval: a decode step that reads 1024 of 8192 or 16384 tokens by pages, choosing them included, against reading all.
draw: the next tokens of 32 sequences, with their log-probabilities.

Own op and rivals take turns within every round, so a busy machine slows all of them; a ratio is the median of the
rounds' ratios. "share" is the time of a plain sum (attention: reading) or copy (eviction: reading and writing) of as
many bytes as the op must move over the time of the op, also paired by round: 100 % is the speed of the memory itself,
or of the cache where so many bytes fit. On a GPU there are 256 slots, which no cache holds, the stream is always a
copy, and times are the GPU's own, without the time to launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import options
from benchmarks.common.pages import machine, page_name, save
from benchmarks.common.tables import label
from benchmarks.ops.drawing import drawing_rows
from benchmarks.ops.retrieval import retrieval_rows
from benchmarks.ops.timing import SHAPES, Bench, Call, Row, comparison
from sparse_rl_lightning import ops
from sparse_rl_lightning.ops import KVPools
from sparse_rl_lightning.ops.evict import compaction_order, select_entries

PARTS = ("attention", "redundancy", "eviction", "retrieval", "draw")


def make_pools(shape: tuple[int, ...], dtype: torch.dtype, device: str, layers: int = 1) -> KVPools:
    """Full slots of random keys with some common direction, so that similarities are moderate."""
    slots, _, heads, dim, entries = shape
    pools = KVPools.ragged(torch.full((layers, slots, heads), entries, dtype=torch.int32), dim, dtype, device)
    centers = torch.randn(64, dim, device=device)
    keys = centers[torch.randint(64, (len(pools.keys),), device=device)] + 0.8 * torch.randn(
        pools.keys.shape, device=device
    )
    pools.keys.copy_(keys)
    pools.values.normal_()
    pools.lengths.fill_(entries)
    pools.positions.copy_(torch.arange(entries, device=device).repeat(len(pools.keys) // entries))
    return pools


def bench_attention(bench: Bench, name: str, dtype: torch.dtype) -> Row:
    """One decode step of one layer, against SDPA in its two grouped forms, with and without a mask of live entries."""
    shape = bench.shape(name)
    slots, num_heads, heads, dim, entries = shape
    pools = make_pools(shape, dtype, bench.device).layer(0)
    query, chosen = (
        torch.randn(slots, num_heads, dim, device=bench.device).to(dtype),
        torch.arange(slots, device=bench.device),
    )
    keys, values = (t.view(slots, heads, entries, dim) for t in (pools.keys, pools.values))
    live = torch.ones(slots, 1, 1, entries, dtype=torch.bool, device=bench.device)
    grouped, single = query.view(slots, heads, -1, dim), query.unsqueeze(2)
    rivals: dict[str, Call] = {
        "sdpa grouped": lambda: F.scaled_dot_product_attention(grouped, keys, values),
        "sdpa gqa": lambda: F.scaled_dot_product_attention(single, keys, values, enable_gqa=True),
        "sdpa grouped, mask": lambda: F.scaled_dot_product_attention(grouped, keys, values, attn_mask=live),
        "sdpa gqa, mask": lambda: F.scaled_dot_product_attention(single, keys, values, attn_mask=live, enable_gqa=True),
    }
    goal = "never slower" if name == "small" else ">= 2" if dtype == torch.float32 else ">= 3"
    return bench.compare(
        f"decode attention, {num_heads} heads of {dim}, {label(dtype)}", goal,
        lambda: ops.decode_attention(pools, chosen, query, dim**-0.5, entries), rivals,
        moved=pools.nbytes, stream=lambda: [pool.view(torch.float32).sum() for pool in (pools.keys, pools.values)],
    )  # fmt: skip


def published_redundancy(keys: Tensor) -> Tensor:
    """R-KV's redundancy with its N x N matrix, for all heads at once."""
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    cosines = unit @ unit.mT
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    columns = torch.arange(keys.shape[2], device=keys.device)
    last = torch.where(cosines > 0.5, columns, 0).amax(dim=-1, keepdim=True)
    return cosines.scatter_(-1, last, 0.0).mean(dim=-2)


def bench_redundancy(bench: Bench, dtype: torch.dtype, skew: str) -> Row:
    """One layer's redundancy, on keys of moderate, no or great similarity."""
    shape = bench.shape("large")
    slots, _, heads, dim, entries = shape
    pools = make_pools(shape, dtype, bench.device).layer(0)
    if skew == "no":
        pools.keys.normal_()
    if skew == "great":
        pools.keys.normal_().add_(3)
    keys, lengths = pools.keys.view(slots, heads, entries, dim), pools.lengths
    return bench.compare(
        f"R-KV redundancy, {skew} similarity, {label(dtype)}", ">= 10" if skew == "moderate" else "never slower",
        lambda: ops.key_redundancy(keys, lengths), {"N x N": lambda: published_redundancy(keys.float())},
    )  # fmt: skip


def bench_eviction(bench: Bench, dtype: torch.dtype) -> Row:
    """Select 512 of 640 entries and close ranks, two layers, against topk + sort + gather + copy."""
    slots, _, heads, dim, entries = bench.shape("large")
    layers, budget, window = 2, 512, 8
    pools = make_pools(bench.shape("large"), dtype, bench.device, layers)
    shape = (layers, slots, heads, entries)
    scores = torch.randn(shape, device=bench.device)
    chosen, seen = torch.arange(slots, device=bench.device), torch.full((slots,), entries, device=bench.device)
    budgets = torch.full(shape[:3], budget, dtype=torch.int32, device=bench.device)
    death = torch.zeros(*shape[:3], 1024, dtype=torch.uint8, device=bench.device)
    steps = torch.full((slots, 255), 2**31 - 1, dtype=torch.int32, device=bench.device)
    keys, values = (t.view(*shape, dim) for t in (pools.keys, pools.values))
    positions = pools.positions.view(shape)
    full_positions = positions.clone()

    def rival() -> None:
        for layer in range(layers):
            ranked = scores[layer].clone()
            ranked[..., -window:] = torch.inf
            index = ranked.topk(budget, dim=-1).indices.sort(dim=-1).values
            wide = index.unsqueeze(-1).expand(-1, -1, -1, dim)
            keys[layer, :, :, :budget] = keys[layer].gather(2, wide)
            values[layer, :, :, :budget] = values[layer].gather(2, wide)
            gone = torch.ones_like(ranked, dtype=torch.bool).scatter_(-1, index, False)
            at = torch.where(gone, positions[layer].long(), 1023)
            death[layer].scatter_(2, at, torch.zeros_like(at, dtype=torch.uint8))
            positions[layer, :, :, :budget] = positions[layer].gather(2, index)

    def careful() -> None:
        """The package's own PyTorch functions: exact ties and order."""
        live = torch.ones(shape[1:], dtype=torch.bool, device=bench.device)
        for layer in range(layers):
            keep = select_entries(scores[layer], live, positions[layer], budget, 0, window)
            order = compaction_order(keep)[0][..., :budget]
            wide = order.unsqueeze(-1).expand(-1, -1, -1, dim)
            keys[layer, :, :, :budget] = keys[layer].gather(2, wide)
            values[layer, :, :, :budget] = values[layer].gather(2, wide)

    def prepare() -> None:
        pools.lengths.fill_(entries)
        positions.copy_(full_positions)

    moved = pools.nbytes * budget // entries
    return bench.compare(
        f"select + compact, 640 to 512, {label(dtype)}", ">= 3",
        lambda: ops.evict(pools, chosen, scores, budgets, 0, window, seen, death, event_steps=steps),
        {"topk + sort + gather + copy": rival, "stable sort + gather + copy": careful}, prepare,
        2 * moved, bench.copy(moved),
    )  # fmt: skip


def rows_of(part: str, bench: Bench, dtype: torch.dtype, quick: bool) -> list[Row]:
    """The lines of one of :data:`PARTS`."""
    if part == "attention":
        return [bench_attention(bench, name, dtype) for name in SHAPES]
    if part == "redundancy":
        return [bench_redundancy(bench, dtype, skew) for skew in ("moderate", "no", "great")]
    if part == "draw":
        return drawing_rows(bench, dtype, quick)
    return [bench_eviction(bench, dtype)] if part == "eviction" else retrieval_rows(bench, dtype, quick)


def main() -> None:
    """Measure everything and print the table."""
    parser = options.parser(
        __doc__, "ops-cpu.md, gpu-ops.md, or by its parts", device=options.here(), threads=2, rounds=15, quick=True
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = options.parsed(parser)
    torch.manual_seed(0)
    bench = Bench(args.device, args.rounds)
    heading, rows = machine(args.device), list[Row]()
    parts = ["ops"] if args.parts == list(PARTS) else args.parts
    for dtype in (torch.float32, torch.bfloat16):
        for part in args.parts:
            rows += rows_of(part, bench, dtype, args.quick)
            text = f"{heading}\n\n{comparison(rows).untitled}"
            save(args.save, page_name("-".join(parts), args.device), "benchmarks.ops", text)
    print(text)


if __name__ == "__main__":
    main()
