// One digit of a stable radix sort of 64-bit keys with 32-bit values, and where each key's run begins: four kernels, chosen by STEP.
//
//   0  counts the 256 digits of every block of 2048 keys         tally[digit][block]
//   1  a CTA a digit: exclusive prefix sum over the blocks       in place, total[digit]
//   2  every block writes its keys in order to their places
//   3  after the last digit: begin[k] = keys below k, for k = 0 .. groups
// Ranks come from match_any, not from the order of arrival: the result is the same in every run, and the host is asked nothing.
#include "inverse.cuh"

constexpr int BINS = 256;

struct Params {
    const u64* keys;
    const u32* values;
    u64* keys_out;
    u32* values_out;
    u32* tally;  // [BINS][blocks]
    u32* total;  // [BINS]
    u32* begin;  // [groups + 1]
    u32 count, groups;
    int shift, blocks;
};

DEVICE u32 digit(u64 key, int shift) { return (u32)(key >> shift) & (BINS - 1); }

extern "C" __global__ void __launch_bounds__(MAP_THREADS) stable_sort(const __grid_constant__ Params p) {
#if STEP == 0
    __shared__ u32 bins[BINS];
    bins[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 i = blockIdx.x * WINDOW + k * MAP_THREADS + threadIdx.x;
        if (i < p.count) atomicAdd(bins + digit(p.keys[i], p.shift), 1u);
    }
    __syncthreads();
    p.tally[threadIdx.x * p.blocks + blockIdx.x] = bins[threadIdx.x];
#elif STEP == 1
    __shared__ int sums[MAP_WARPS];
    u32* const row = p.tally + blockIdx.x * p.blocks;
    u32 running = 0;
    for (int base = 0; base < p.blocks; base += MAP_THREADS) {
        const int block = base + threadIdx.x, mine = block < p.blocks ? (int)row[block] : 0;
        const int before = prefix_of_threads(mine, sums);
        if (block < p.blocks) row[block] = running + before;
        __shared__ int last;
        if (threadIdx.x == MAP_THREADS - 1) last = before + mine;
        __syncthreads();
        running += last;
        __syncthreads();
    }
    if (threadIdx.x == 0) p.total[blockIdx.x] = running;
#elif STEP == 2
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 first = blockIdx.x * WINDOW;
    __shared__ u16 tally[MAP_WARPS][BINS];
    __shared__ u32 base[BINS];
    __shared__ int sums[MAP_WARPS];
    for (int i = lane; i < BINS; i += 32) tally[warp][i] = 0;
    __syncwarp();
    u64 key[EACH];
    int rank[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 i = first + (warp * EACH + k) * 32 + lane;
        key[k] = i < p.count ? p.keys[i] : 0;
        rank[k] = rank_in_run(i < p.count ? digit(key[k], p.shift) : BINS, tally[warp]);
    }
    base[threadIdx.x] = prefix_of_threads((int)p.total[threadIdx.x], sums) + p.tally[threadIdx.x * p.blocks + blockIdx.x];
    int running = 0;
#pragma unroll
    for (int w = 0; w < MAP_WARPS; ++w) {  // thread = digit
        const int mine = tally[w][threadIdx.x];
        tally[w][threadIdx.x] = (u16)running;
        running += mine;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const u32 i = first + (warp * EACH + k) * 32 + lane;
        if (i >= p.count) continue;
        const u32 d = digit(key[k], p.shift), at = base[d] + tally[warp][d] + rank[k];
        p.keys_out[at] = key[k];
        p.values_out[at] = p.values[i];
    }
#else
    const u32 group = blockIdx.x * MAP_THREADS + threadIdx.x;
    if (group > p.groups) return;
    u32 low = 0, high = p.count;
    while (low < high) {
        const u32 middle = (low + high) >> 1;
        if (p.keys[middle] < group) low = middle + 1;
        else high = middle;
    }
    p.begin[group] = low;
#endif
}
