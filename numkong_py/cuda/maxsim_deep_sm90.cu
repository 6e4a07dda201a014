// Fused MaxSim for Hopper, depth above 128: wgmma m64n128k16 with both operands in shared memory (f32 accumulators, k ascending, as at 128).
//
// An ordinary matrix main loop over 64-column steps with the maxima as its epilogue. The block of queries stays in shared memory where it
// fits in 128 KiB (RESIDENT: 256 rows to depth 256, 64 rows to depth 1024), so that only documents stream; otherwise it streams with them.
// 128-token tiles: shared memory is read 48 clocks for 64 of tensor work. One warpgroup's epilogue runs under the other's products.
//
//   stage   [ROWS rows x 64 columns (unless RESIDENT) | 128 tokens x 64 columns]  128-byte swizzle
//   query   [step 0: ROWS x 64 columns | step 1 | ...]  RESIDENT
//
// Compiled once per (ROWS, RESIDENT, MODE, BF16), all macros: see launch_table.py; any depth, any number of stages.
#define TILE_TOKENS 128
#include "forward.cuh"

constexpr int QUERY_BYTES = ROWS * 128, GROUP_BYTES = 16 * 128, DOCUMENT_BYTES = TILE_TOKENS * 128, MAX_STAGES = 14;
constexpr int STAGE_BYTES = DOCUMENT_BYTES + (RESIDENT ? 0 : QUERY_BYTES);

struct Resident { u32 address, full, empty; };  // the block of queries and its barriers

// One 64-column step of the block: in one box where its rows lie side by side in memory (padding to 16 included), else in 16-row boxes, one
// a group. Rows and groups beyond the last query hold other rows and count nothing.
DEVICE void load_query_step(const Params& p, u32 destination, u32 barrier, int block, int step) {
    if (p.query_box == ROWS) {
        load_box(destination, &p.query_map, barrier, step * 64, block * p.block_groups * 16);
        return;
    }
    for (int g = 0; g < GROUPS; ++g) {
        const int global = min(block * p.block_groups + g, p.query_count * p.query_groups - 1), query = global / p.query_groups;
        const i64 start = p.query_offsets ? p.query_offsets[query] : (i64)query * p.query_length;
        load_box(destination + g * GROUP_BYTES, &p.query_map, barrier, step * 64, (int)start + (global - query * p.query_groups) * 16);
    }
}

DEVICE void consume(const Params& p, const Ring& ring, const Sums& sums, const Resident& resident, int steps, int warp, int lane) {
    const int group = (warp >> 2) * (4 * M_TILES) + (warp & 3);
    const u32 first_row = (warp >> 2) * (64 * M_TILES) * 128;
    float acc[M_TILES][64];
    Best best[M_TILES];
    Rows rows;
    SumPlace place = {0, 0};
    int stage = 0, failed = 0;
    u32 phase = 0, resident_phase = 0;
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) reset(best[t]);

    for (int item = blockIdx.x; item < p.blocks * p.chunks; item += gridDim.x) {
        i64 start[M_TILES];
        assign_rows(p, rows, start, item % p.blocks, group);
        if (RESIDENT && !barrier_wait(resident.full, resident_phase)) failed = 1;
        resident_phase ^= 1u;
        int4 tile;
        do {
            for (int step = 0; step < steps; ++step) {
                if (!barrier_wait(ring.full + 8 * stage, phase)) failed = 1;
                tile = ring.tile[stage];
                const u32 base = ring.tiles + stage * STAGE_BYTES;
                const u64 b = operand_descriptor(base + (RESIDENT ? 0 : QUERY_BYTES));
                const u64 a = operand_descriptor((RESIDENT ? resident.address + step * QUERY_BYTES : base) + first_row);
#pragma unroll
                for (int t = 0; t < M_TILES; ++t) pin(acc[t]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < M_TILES; ++t) wgmma_64x128<BF16>(acc[t], a + 2 * k + t * (64 * 128 >> 4), b + 2 * k, step + k);
                wgmma_commit();
                // Nothing stays in flight around the loop: the compiler may move accumulators there, which reads them. The other
                // warpgroup keeps the matrix unit busy.
                wgmma_wait<0>();
#pragma unroll
                for (int t = 0; t < M_TILES; ++t) pin(acc[t]);
                __syncwarp();
                if (lane == 0) barrier_arrive(ring.empty + 8 * stage);
                if (++stage == p.stages) { stage = 0; phase ^= 1u; }
            }
            if (__any_sync(FULL_WARP, failed)) { *p.error = 2; tile.y = LAST_OF_DOCUMENT | LAST_OF_ITEM; }
            reduce_tiles(acc, best, tile, 2 * (lane & 3), p.one);
            if (tile.y & LAST_OF_DOCUMENT) end_document(p, sums, place, best, rows, tile, group, warp, lane);
        } while (!(tile.y & LAST_OF_ITEM));
        if (RESIDENT && lane == 0) barrier_arrive(resident.empty);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS * 128 + 128, 1) maxsim_deep_sm90(const __grid_constant__ Params p) {
    extern __shared__ unsigned char dynamic_shared[];
    __shared__ alignas(16) u64 barriers[2 * MAX_STAGES + 2 * SUM_SLOTS + 2];
    __shared__ alignas(16) int4 tiles[MAX_STAGES];
    __shared__ alignas(16) int4 documents[SUM_SLOTS];
    __shared__ double group_sums[SUM_SLOTS][GROUPS];

    const int steps = (p.stride + 63) / 64;
    const u32 memory = (shared_address(dynamic_shared) + 1023u) & ~1023u, base = shared_address(barriers);  // the swizzle needs 1024-byte alignment
    const Ring ring = {memory + (RESIDENT ? steps * QUERY_BYTES : 0), base, base + 8 * MAX_STAGES, tiles};
    const Sums sums = {base + 16 * MAX_STAGES, base + 16 * MAX_STAGES + 8 * SUM_SLOTS, group_sums, documents};
    const Resident resident = {memory, base + 16 * MAX_STAGES + 16 * SUM_SLOTS, base + 16 * MAX_STAGES + 16 * SUM_SLOTS + 8};
    const int warp = __shfl_sync(FULL_WARP, (int)(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;

    if (threadIdx.x == 0) {
        barrier_init(resident.full, 1);
        barrier_init(resident.empty, CONSUMERS * 4);
    }
    init_barriers(ring, sums, p.stages);
    __syncthreads();

    if (warp >= CONSUMERS * 4) {
        if constexpr (MANY_REGISTERS) registers_shrink<PRODUCER_REGISTERS>();
        if (warp == CONSUMERS * 4 && lane == 0) {
            prefetch_map(&p.map);
            prefetch_map(&p.query_map);
            u32 phase = 1;
            int block = 0;
            auto begin_item = [&](int next) {
                block = next;
                if constexpr (RESIDENT) {
                    if (!barrier_wait(resident.empty, phase)) *p.error = 5;
                    phase ^= 1u;
                    barrier_arrive_expect(resident.full, steps * QUERY_BYTES);
                    for (int step = 0; step < steps; ++step) load_query_step(p, resident.address + step * QUERY_BYTES, resident.full, block, step);
                }
            };
            auto load = [&](int stage, int step, int token) {
                const u32 full = ring.full + 8 * stage;
                u32 destination = ring.tiles + stage * STAGE_BYTES;
                if constexpr (!RESIDENT) {
                    load_query_step(p, destination, full, block, step);
                    destination += QUERY_BYTES;
                }
                load_box(destination, &p.map, full, step * 64, token);
                load_box(destination + DOCUMENT_BYTES / 2, &p.map, full, step * 64, token + 64);
            };
            produce(p, ring, p.stages, steps, STAGE_BYTES, begin_item, load);
        }
        if (MODE != MODE_SCREEN && warp == CONSUMERS * 4 + 1 && p.scores) sum_queries(p, sums, lane);
    } else {
        if constexpr (MANY_REGISTERS) registers_grow<CONSUMER_REGISTERS>();
        consume(p, ring, sums, resident, steps, warp, lane);
    }
}
