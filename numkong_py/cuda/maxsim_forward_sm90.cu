// Fused MaxSim for Hopper, depth <= 128: wgmma m64n64k16 (f32 accumulators, k ascending: the row's one chain C), TMA, warp specialisation.
//
// Query tokens are the A operand and stay in registers (RS form halves the shared-memory reads), document tokens stream through a ring of
// 64-token stages (128-byte swizzle), so max_j runs inside each thread's own accumulators. Each warpgroup keeps the next tile in flight
// while it reduces the last one. 64-token tiles: finest tail at full wgmma rate. Bench: bench/results/h200-cuda.jsonl.
//
//   stage   [64 tokens x 64 columns | 64 tokens x 64 columns]  8 KiB each; the rest of the structure is in forward.cuh
//
// It does not do: overflowing products (maxsim_sm80 recomputes those), cosine, depth above 128 (maxsim_deep_sm90).
// Compiled once per (ROWS, KSTEPS, MODE, BF16), all macros: see launch_table.py.
#define TILE_TOKENS 64
#include "forward.cuh"

constexpr int HALVES = (KSTEPS + 3) / 4;
constexpr int HALF_BYTES = 64 * 128;
constexpr int STAGE_BYTES = HALVES * HALF_BYTES;
constexpr int STAGES = RING_BYTES / STAGE_BYTES;

// A fragment of m64k16: register h holds row lane/4 + 8 h, columns 2 (lane % 4) + {0, 1}; register h + 2 the columns 8 further on.
DEVICE void load_queries(const Params& p, u32 (&a)[M_TILES][KSTEPS][4], Rows& rows, int block, int group, int lane) {
    i64 start[M_TILES];
    assign_rows(p, rows, start, block, group);
#pragma unroll
    for (int t = 0; t < M_TILES; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = rows.token[t] + (lane >> 2) + 8 * h;
            const bool valid = token < rows.count[t];
            const u16* row = p.queries + (start[t] + token) * p.stride + 2 * (lane & 3);
#pragma unroll
            for (int k = 0; k < KSTEPS; ++k) {
                a[t][k][h] = valid && 16 * k < p.stride ? *reinterpret_cast<const u32*>(row + 16 * k) : 0u;
                a[t][k][h + 2] = valid && 16 * k + 8 < p.stride ? *reinterpret_cast<const u32*>(row + 16 * k + 8) : 0u;
            }
        }
    if constexpr (!BF16) return;
    if (!p.loud) return;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
        u32 carry = 0;
#pragma unroll
        for (int i = 0; i < 4 * KSTEPS; ++i) carry |= (a[t][i >> 2][i & 3] & ~LOUD_BITS) + LOUD_CARRY;
        if (__any_sync(FULL_WARP, carry & LOUD_BITS) && lane == 0 && rows.query[t] < p.query_count) p.loud[rows.query[t]] = p.call;
    }
}

DEVICE void issue_tile(float (&acc)[M_TILES][32], const u32 (&a)[M_TILES][KSTEPS][4], u64 descriptor) {
    wgmma_fence();
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
        wgmma_64x64<BF16, 0>(acc[t], a[t][0], descriptor);
#pragma unroll
        for (int k = 1; k < KSTEPS; ++k)  // 32 bytes a k-step inside the swizzled 128-byte row, then the next 64 columns
            wgmma_64x64<BF16, 1>(acc[t], a[t][k], descriptor + (u64)((k & 3) * 2 + (k >> 2) * (HALF_BYTES >> 4)));
    }
    wgmma_commit();
}

DEVICE void consume(const Params& p, const Ring& ring, const Sums& sums, int warp, int lane) {
    const int group = (warp >> 2) * (4 * M_TILES) + (warp & 3);
    const u64 descriptor = operand_descriptor(ring.tiles);
    u32 a[M_TILES][KSTEPS][4];
    float acc_a[M_TILES][32], acc_b[M_TILES][32];
    Best best[M_TILES];
    Rows rows;
    SumPlace place = {0, 0};
    int stage = 0, retired = 0, failed = 0;  // stages to launch and to retire next
    u32 phase = 0;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) reset(best[t]);

    // Headers stay in shared memory until the stage is given back: registers are short. A wait that ran out makes its tile the last one, so
    // that the kernel leaves by its normal path with no wgmma in flight.
    auto header = [&](int at) {
        int4 tile = ring.tile[at];
        if (failed) tile.y = LAST_OF_DOCUMENT | LAST_OF_ITEM;
        return tile;
    };
    auto launch = [&](float (&acc)[M_TILES][32]) {
        const bool arrived = barrier_wait(ring.full + 8 * stage, phase);
        if (__any_sync(FULL_WARP, !arrived)) failed = 1, *p.error = 2;
        const int flags = __shfl_sync(FULL_WARP, header(stage).y, 0);
        issue_tile(acc, a, descriptor + (u64)(stage * (STAGE_BYTES >> 4)));
        if (++stage == STAGES) { stage = 0; phase ^= 1u; }
        return (flags & LAST_OF_ITEM) != 0;
    };
    auto retire = [&](float (&acc)[M_TILES][32]) {
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) pin(acc[t]);
        const int4 tile = header(retired);  // valid tokens, flags, slot, first token
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty + 8 * retired);
        if (++retired == STAGES) retired = 0;
        reduce_tiles(acc, best, tile, 2 * (lane & 3), p.one);
        if (tile.y & LAST_OF_DOCUMENT) end_document(p, sums, place, best, rows, tile, group, warp, lane);
    };

    for (int item = blockIdx.x; item < p.blocks * p.chunks; item += gridDim.x) {
        load_queries(p, a, rows, item % p.blocks, group, lane);
        bool last_a = launch(acc_a);
        while (true) {
            if (last_a) { wgmma_wait<0>(); retire(acc_a); break; }
            const bool last_b = launch(acc_b);
            wgmma_wait<1>();
            retire(acc_a);
            if (last_b) { wgmma_wait<0>(); retire(acc_b); break; }
            last_a = launch(acc_a);
            wgmma_wait<1>();
            retire(acc_b);
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS * 128 + 128, CTAS) maxsim_forward_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char dynamic_shared[];
    __shared__ alignas(16) u64 barriers[2 * STAGES + 2 * SUM_SLOTS];
    __shared__ alignas(16) int4 tiles[STAGES];
    __shared__ alignas(16) int4 documents[SUM_SLOTS];
    __shared__ double group_sums[SUM_SLOTS][GROUPS];

    const u32 base = shared_address(barriers);
    const Ring ring = {(shared_address(dynamic_shared) + 1023u) & ~1023u, base, base + 8 * STAGES, tiles};  // the swizzle needs 1024-byte alignment
    const Sums sums = {base + 16 * STAGES, base + 16 * STAGES + 8 * SUM_SLOTS, group_sums, documents};
    const int warp = __shfl_sync(FULL_WARP, (int)(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;

    init_barriers(ring, sums, STAGES);
    __syncthreads();

    if (warp >= CONSUMERS * 4) {
        if constexpr (MANY_REGISTERS) registers_shrink<PRODUCER_REGISTERS>();
        if (warp == CONSUMERS * 4 && lane == 0) {
            prefetch_map(&p.map);
            auto load = [&](int stage, int, int token) {
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    load_box(ring.tiles + stage * STAGE_BYTES + half * HALF_BYTES, &p.map, ring.full + 8 * stage, half * 64, token);
            };
            produce(p, ring, STAGES, 1, STAGE_BYTES, [](int) {}, load);
        }
        if (MODE != MODE_SCREEN && warp == CONSUMERS * 4 + 1 && p.scores) sum_queries(p, sums, lane);
    } else {
        if constexpr (MANY_REGISTERS) registers_grow<CONSUMER_REGISTERS>();
        consume(p, ring, sums, warp, lane);
    }
}
