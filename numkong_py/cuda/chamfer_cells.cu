// Puts the points of clouds of up to three coordinates in an order that keeps neighbours together: three kernels, chosen by STEP.
//
//   0  the box of each pair of clouds, by atomicMax on ordered bits (the order of arrival does not matter)
//   1  keys for stable_sort: set, then the cell's bits interleaved (Morton order)
//   2  after the sort: {x, y, z, index within the set} in that order, boxes of 32 and of 1024 points
// A tile with a NaN or an infinity gets a box without bounds, so that no search passes it by.
#include "chamfer.cuh"

struct Params {
    Clouds clouds;
    int* extent;        // [clouds, 6]: ordered bits of the largest x, y, z, -x, -y, -z
    u64* keys;
    u32* values;
    float4* sorted;
    Box* tiles;         // numbered as first_tile(set, TILE)
    Box* supers;
    int cell_bits;      // a coordinate
};

DEVICE int ordered(float x) {
    const int bits = __float_as_int(x);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
DEVICE float number(int bits) { return __int_as_float(bits >= 0 ? bits : bits ^ 0x7fffffff); }
DEVICE float4 point_at(const Clouds& c, int set, int point) {
    const Side& side = c.side(set);
    const i64 at = c.token(set, point) * side.stride;
    float4 r = make_float4(0.0f, 0.0f, 0.0f, __int_as_float(point));
    r.x = coordinate<DTYPE>(side.points, at);
    if (c.depth > 1) r.y = coordinate<DTYPE>(side.points, at + 1);
    if (c.depth > 2) r.z = coordinate<DTYPE>(side.points, at + 2);
    return r;
}
DEVICE bool finite(const float4& p) { return fabsf(p.x) < -negative_infinity() && fabsf(p.y) < -negative_infinity() && fabsf(p.z) < -negative_infinity(); }
DEVICE u32 spread(u32 bits) {  // to every third place
    bits = (bits | bits << 16) & 0x030000ffu;
    bits = (bits | bits << 8) & 0x0300f00fu;
    bits = (bits | bits << 4) & 0x030c30c3u;
    return (bits | bits << 2) & 0x09249249u;
}
DEVICE Box join(const Box& a, const Box& b) {
    return {make_float4(fminf(a.low.x, b.low.x), fminf(a.low.y, b.low.y), fminf(a.low.z, b.low.z), 0.0f),
            make_float4(fmaxf(a.high.x, b.high.x), fmaxf(a.high.y, b.high.y), fmaxf(a.high.z, b.high.z), 0.0f)};
}
DEVICE Box join_lanes(Box box) {
#pragma unroll
    for (int step = 16; step >= 1; step >>= 1) {
        Box other;
        other.low = make_float4(__shfl_xor_sync(FULL_WARP, box.low.x, step), __shfl_xor_sync(FULL_WARP, box.low.y, step), __shfl_xor_sync(FULL_WARP, box.low.z, step), 0.0f);
        other.high = make_float4(__shfl_xor_sync(FULL_WARP, box.high.x, step), __shfl_xor_sync(FULL_WARP, box.high.y, step), __shfl_xor_sync(FULL_WARP, box.high.z, step), 0.0f);
        box = join(box, other);
    }
    return box;
}

extern "C" __global__ void __launch_bounds__(1024) chamfer_cells(const __grid_constant__ Params p) {
    const Clouds& c = p.clouds;
    const i64 slot = blockIdx.x;
    const int set = c.set_of_tile(slot, SUPER);
    const int first = (int)(slot - c.first_tile(set, SUPER)) * SUPER, count = c.count(set), point = first + threadIdx.x;
    if (first >= count) return;
    const bool inside = point < count;
    const i64 at = c.start(set) + point;
    const float endless = -negative_infinity();
    [[maybe_unused]] const Box nowhere = {make_float4(endless, endless, endless, 0.0f), make_float4(-endless, -endless, -endless, 0.0f)};
#if STEP == 0
    Box box = nowhere;
    if (inside) {
        const float4 x = point_at(c, set, point);
        if (finite(x)) box = {x, x};
    }
    box = join_lanes(box);
    if ((threadIdx.x & 31) || box.low.x > box.high.x) return;
    int* extent = p.extent + 6 * (set < c.clouds ? set : set - c.clouds);
    atomicMax(extent, ordered(box.high.x)), atomicMax(extent + 1, ordered(box.high.y)), atomicMax(extent + 2, ordered(box.high.z));
    atomicMax(extent + 3, ordered(-box.low.x)), atomicMax(extent + 4, ordered(-box.low.y)), atomicMax(extent + 5, ordered(-box.low.z));
#elif STEP == 1
    if (!inside) return;
    const int* extent = p.extent + 6 * (set < c.clouds ? set : set - c.clouds);
    const float3 high = make_float3(number(extent[0]), number(extent[1]), number(extent[2]));
    const float3 low = make_float3(-number(extent[3]), -number(extent[4]), -number(extent[5]));
    const float widest = fmaxf(fmaxf(high.x - low.x, high.y - low.y), high.z - low.z), cells = (float)(1 << p.cell_bits);
    const float scale = widest > 0.0f ? cells / widest : 0.0f;
    const float4 x = point_at(c, set, point);
    auto cell = [&](float value, float from) { return (u32)fminf(fmaxf((value - from) * scale, 0.0f), cells - 1.0f); };
    const u32 morton = spread(cell(x.x, low.x)) | spread(cell(x.y, low.y)) << 1 | spread(cell(x.z, low.z)) << 2;
    p.keys[at] = (u64)set << (3 * p.cell_bits) | morton;
    p.values[at] = (u32)point;
#else
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __shared__ Box boxes[SUPER / TILE];
    Box box = nowhere;
    if (inside) {
        const float4 x = point_at(c, set, (int)p.values[at]);
        p.sorted[at] = x;
        const Box everywhere = {nowhere.high, nowhere.low};
        box = finite(x) ? Box{x, x} : everywhere;
    }
    box = join_lanes(box);
    if (lane == 0) {
        boxes[warp] = box;
        if (first + warp * TILE < count) p.tiles[c.first_tile(set, TILE) + first / TILE + warp] = box;
    }
    __syncthreads();
    if (warp != 0) return;
    box = join_lanes(boxes[lane]);
    if (lane == 0) p.supers[slot] = box;
#endif
}
