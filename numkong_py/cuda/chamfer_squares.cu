// Squared distance of every point to its nearest neighbour, in f64 from differences: a thread a point, or half a warp from depth 8 on.
#include "chamfer.cuh"

constexpr int THREADS = 256;

struct Params {
    Clouds clouds;
    const int* nearest[2];  // a point, each side; a side without is left out
    double* squares[2];
    int lanes;              // 1 or 16 a point
};

extern "C" __global__ void __launch_bounds__(THREADS) chamfer_squares(const __grid_constant__ Params p) {
    const Clouds& c = p.clouds;
    const int set = c.set_of_tile(blockIdx.x, THREADS), first = (int)(blockIdx.x - c.first_tile(set, THREADS)) * THREADS;
    const int end = min(first + THREADS, c.count(set)), other_count = c.count(c.other(set)), lane = threadIdx.x & (p.lanes - 1);
    if (other_count == 0 || !p.nearest[set >= c.clouds]) return;
    for (int point = first + threadIdx.x / p.lanes; point < end; point += THREADS / p.lanes) {
        const int found = *c.result(p.nearest, set, point);
        if ((u32)found >= (u32)other_count) continue;
        const Side &own = c.side(set), &other = c.side(c.other(set));
        const i64 mine = c.token(set, point) * own.stride, its = c.token(c.other(set), found) * other.stride;
        double sum = 0.0;
        for (int d = lane; d < c.depth; d += p.lanes) {
            const double difference = (double)coordinate<DTYPE>(own.points, mine + d) - (double)coordinate<DTYPE>(other.points, its + d);
            sum = fma(difference, difference, sum);
        }
        const u32 group = p.lanes == 1 ? 1u << (threadIdx.x & 31) : 0xffffu << (threadIdx.x & 16);
        for (int step = p.lanes / 2; step >= 1; step >>= 1) sum += __shfl_xor_sync(group, sum, step);
        if (lane == 0) *c.result(p.squares, set, point) = sum;
    }
}
