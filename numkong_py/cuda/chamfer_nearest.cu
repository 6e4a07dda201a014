// Nearest neighbours of clouds of up to three coordinates, both directions in one launch: f32 differences, the lowest index among equals.
//
// A warp takes 32 points that lie close together (chamfer_cells) and visits the other cloud's tiles of 32 points, but for those whose box is
// farther from every lane's point than what the lane has found: box distances are made of the same rounded operations as distances, so
// what is passed by could not have won, and the result is that of all pairs, bit for bit. |d - exact| <= 6 2^-24 d for the squares.
#include "chamfer.cuh"

constexpr int THREADS = 128;

struct Params {
    Clouds clouds;
    const float4* sorted;  // {x, y, z, index within the set}
    const Box* tiles;
    const Box* supers;
    int* nearest[2];       // a point, each side
    i64 slots;             // tiles, with the gaps of their numbers
    int both;
};

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step >= 1; step >>= 1) {
        const float other = __shfl_xor_sync(FULL_WARP, x, step);
        x = other > x || other != other ? other : x;
    }
    return x;
}
DEVICE Box lanes_box(const float4& p) {
    Box box = {p, p};
#pragma unroll
    for (int step = 16; step >= 1; step >>= 1) {
        box.low.x = fminf(box.low.x, __shfl_xor_sync(FULL_WARP, box.low.x, step)), box.high.x = fmaxf(box.high.x, __shfl_xor_sync(FULL_WARP, box.high.x, step));
        box.low.y = fminf(box.low.y, __shfl_xor_sync(FULL_WARP, box.low.y, step)), box.high.y = fmaxf(box.high.y, __shfl_xor_sync(FULL_WARP, box.high.y, step));
        box.low.z = fminf(box.low.z, __shfl_xor_sync(FULL_WARP, box.low.z, step)), box.high.z = fmaxf(box.high.z, __shfl_xor_sync(FULL_WARP, box.high.z, step));
    }
    return box;
}
// Lane with the box whose centre is nearest to `mine`'s; only where to begin.
DEVICE float squared_between_centres(const Box& a, const Box& b) {
    return squared(a.low.x + a.high.x - b.low.x - b.high.x, a.low.y + a.high.y - b.low.y - b.high.y, a.low.z + a.high.z - b.low.z - b.high.z);
}
DEVICE int nearest_of_lanes(float distance, int index) {
    if (distance != distance) distance = -negative_infinity();
#pragma unroll
    for (int step = 16; step >= 1; step >>= 1) {
        const float other = __shfl_xor_sync(FULL_WARP, distance, step);
        const int other_index = __shfl_xor_sync(FULL_WARP, index, step);
        if (other < distance || (other == distance && other_index < index)) distance = other, index = other_index;
    }
    return index;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) chamfer_nearest(const __grid_constant__ Params p) {
    __shared__ float4 shared_points[THREADS / 32][TILE];
    const Clouds& c = p.clouds;
    const int lane = threadIdx.x & 31;
    float4* const others = shared_points[threadIdx.x >> 5];
    const i64 slot = (i64)blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
    if (slot >= p.slots) return;
    const int set = c.set_of_tile(slot, TILE), target = c.other(set);
    const int first = (int)(slot - c.first_tile(set, TILE)) * TILE, count = c.count(set), other_count = c.count(target);
    if (first >= count || other_count == 0 || (set >= c.clouds && !p.both)) return;
    const float4* const points = p.sorted + c.start(target);
    const Box* const tiles = p.tiles + c.first_tile(target, TILE);
    const Box* const supers = p.supers + c.first_tile(target, SUPER);
    const int super_count = (other_count + SUPER - 1) / SUPER, tile_count = (other_count + TILE - 1) / TILE;

    const float4 mine = p.sorted[c.start(set) + min(first + lane, count - 1)];
    const Box self = {mine, mine}, together = lanes_box(mine);
    float best = -negative_infinity(), reach = best;
    int best_index = 0x7fffffff;
    auto visit = [&](int tile) {
        __syncwarp();
        others[lane] = points[min(tile * TILE + lane, other_count - 1)];
        __syncwarp();
        float least = -negative_infinity();
#pragma unroll 8
        for (int i = 0; i < TILE; ++i) least = min_nan(least, squared_distance(mine, others[i]));
        const bool improves = !(least > best);
        if (!__any_sync(FULL_WARP, improves)) return;
        if (improves)
#pragma unroll 4
            for (int i = 0; i < TILE; ++i) {
                const float4 q = others[i];
                const float distance = squared_distance(mine, q);
                if (nearer(distance, __float_as_int(q.w), best, best_index)) best = distance, best_index = __float_as_int(q.w);
            }
        __syncwarp();
        reach = warp_max(best);
    };

    float begin_distance = -negative_infinity();
    int begin_super = 0;
    for (int super = lane; super < super_count; super += 32) {
        const float distance = squared_between_centres(together, supers[super]);
        if (distance < begin_distance) begin_distance = distance, begin_super = super;
    }
    begin_super = nearest_of_lanes(begin_distance, begin_super);
    const int near_tile = begin_super * (SUPER / TILE) + lane;
    const int begin_tile = nearest_of_lanes(near_tile < tile_count ? squared_between_centres(together, tiles[near_tile]) : -negative_infinity(), near_tile);
    visit(min(begin_tile, tile_count - 1));
    for (int base = 0; base < super_count; base += 32) {
        const bool near_super = base + lane < super_count && !(squared_gap(together, supers[min(base + lane, super_count - 1)]) > reach);
        for (u32 left = __ballot_sync(FULL_WARP, near_super); left; left &= left - 1) {
            const int super = base + __ffs(left) - 1, tile = super * (SUPER / TILE) + lane;
            if (!__any_sync(FULL_WARP, !(squared_gap(self, supers[super]) > best))) continue;
            const bool near = tile < tile_count && !(squared_gap(together, tiles[min(tile, tile_count - 1)]) > reach);
            for (u32 chosen = __ballot_sync(FULL_WARP, near); chosen; chosen &= chosen - 1) {
                const int next = super * (SUPER / TILE) + __ffs(chosen) - 1;
                if (next != begin_tile && __any_sync(FULL_WARP, !(squared_gap(self, tiles[next]) > best))) visit(next);
            }
        }
    }
    if (first + lane < count) *c.result(p.nearest, set, __float_as_int(mine.w)) = best_index;
}
