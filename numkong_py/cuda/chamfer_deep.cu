// Nearest neighbours of clouds of any depth, all pairs, both directions in one launch: f32 differences, the lowest index among equals.
//
// 64 x 64 points a step, 4 x 4 a thread, 16 columns at a time through shared memory: a subtraction and a multiply-add an element, so clouds
// far from the origin lose nothing. |d - exact| <= (depth + 3) 2^-24 d for the squares.
#include "chamfer.cuh"

constexpr int THREADS = 256, POINTS = 64, CHUNK = 16, PADDED = POINTS + 4;

struct Params {
    Clouds clouds;
    int* nearest[2];  // a point, each side
    int both;
};

extern "C" __global__ void __launch_bounds__(THREADS, 3) chamfer_deep(const __grid_constant__ Params p) {
    __shared__ alignas(16) float rows[CHUNK][PADDED], columns[CHUNK][PADDED];
    const Clouds& c = p.clouds;
    const int set = c.set_of_tile(blockIdx.x, POINTS), target = c.other(set);
    const int first = (int)(blockIdx.x - c.first_tile(set, POINTS)) * POINTS, count = c.count(set), other_count = c.count(target);
    if (first >= count || other_count == 0 || (set >= c.clouds && !p.both)) return;
    const Side &own = c.side(set), &other = c.side(target);
    const i64 own_start = c.token(set, 0), other_start = c.token(target, 0);
    const int across = threadIdx.x & 15, down = threadIdx.x >> 4;  // this thread's 4 x 4 pairs
    float best[4];
    int index[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) best[r] = -negative_infinity(), index[r] = 0x7fffffff;
    for (int begin = 0; begin < other_count; begin += POINTS) {
        float sums[4][4] = {};
        for (int column = 0; column < c.depth; column += CHUNK) {
            __syncthreads();
#pragma unroll
            for (int k = 0; k < POINTS * CHUNK / THREADS; ++k) {
                const int at = k * (THREADS / CHUNK) + down, d = column + across;
                const bool inside = d < c.depth;
                rows[across][at] = inside && first + at < count ? coordinate<DTYPE>(own.points, (own_start + first + at) * own.stride + d) : 0.0f;
                columns[across][at] = inside && begin + at < other_count ? coordinate<DTYPE>(other.points, (other_start + begin + at) * other.stride + d) : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < CHUNK; ++k) {
                const float4 a = *reinterpret_cast<const float4*>(&rows[k][4 * down]), b = *reinterpret_cast<const float4*>(&columns[k][4 * across]);
                const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int r = 0; r < 4; ++r)
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const float difference = x[r] - y[s];
                        sums[r][s] = fmaf(difference, difference, sums[r][s]);
                    }
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int candidate = begin + 4 * across + s;
                if (candidate < other_count && nearer(sums[r][s], candidate, best[r], index[r])) best[r] = sums[r][s], index[r] = candidate;
            }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int step = 8; step >= 1; step >>= 1) {
            const float distance = __shfl_xor_sync(FULL_WARP, best[r], step);
            const int candidate = __shfl_xor_sync(FULL_WARP, index[r], step);
            if (nearer(distance, candidate, best[r], index[r])) best[r] = distance, index[r] = candidate;
        }
        const int point = first + 4 * down + r;
        if (point < count && across == 0) *c.result(p.nearest, set, point) = index[r];
    }
}
