// Reduces nearest-neighbour distances to a number a pair of clouds, in f64 and a fixed order: half a CTA a direction.
//
// An empty cloud is 0 from its own points and +inf from the points of another.
#include "chamfer.cuh"

constexpr int THREADS = 1024, HALF = THREADS / 2;

struct Params {
    Clouds clouds;
    const double* squares[2];  // a point, each side
    double* out;               // [clouds]
    int both, plain, mean;
};

extern "C" __global__ void __launch_bounds__(THREADS) chamfer_sum(const __grid_constant__ Params p) {
    __shared__ double partial[2][HALF / 32];
    const Clouds& c = p.clouds;
    const int cloud = blockIdx.x, side = threadIdx.x / HALF, thread = threadIdx.x % HALF;
    const int count = side && !p.both ? 0 : c.sides[side].count(cloud), other_count = c.sides[1 - side].count(cloud);
    const double* squares = p.squares[side] + (c.sides[side].start(cloud) - c.sides[side].first());
    double sum = 0.0;
#pragma unroll 8
    for (int i = thread; other_count && i < count; i += HALF) sum += p.plain ? sqrt(squares[i]) : squares[i];
#pragma unroll
    for (int step = 16; step >= 1; step >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if ((thread & 31) == 0) partial[side][thread >> 5] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double total = 0.0;
    for (int s = 0; s < 2; ++s) {
        const int own = s && !p.both ? 0 : c.sides[s].count(cloud), others = c.sides[1 - s].count(cloud);
        double of_side = 0.0;
        for (int w = 0; w < HALF / 32; ++w) of_side += partial[s][w];
        if (own > 0) total += others == 0 ? -(double)negative_infinity() : p.mean ? of_side / own : of_side;
    }
    p.out[cloud] = total;
}
