// The inverse of a map of winners, by a CTA that owns up to OWNED destinations: which sources won each, in ascending order of the source.
// Built in shared memory by count, prefix sum and stable order: no atomics, nothing in device memory, no question to the host.
// Sources come in windows of WINDOW; those that belong here are appended to a list, and every BATCH of them is sorted by destination.
#pragma once
#include "ptx.cuh"

#ifndef DIFFERENCE
#define DIFFERENCE 0
#endif

constexpr int MAP_THREADS = 256, MAP_WARPS = MAP_THREADS / 32;
constexpr int WINDOW = 2048, BATCH = 2048, OWNED = 256, EACH = WINDOW / MAP_THREADS;
constexpr int TURNS = EACH / 4;  // of a window: four neighbouring sources a thread and turn

// Stable rank of every key among the equal keys of its warp's run; `tally` (one a warp, zeros) ends as the run's histogram.
// Keys of a warp are in order by k, then lane. An absent key is OWNED or more.
DEVICE int rank_in_run(u32 key, u16* tally) {
    const u32 below = (1u << (threadIdx.x & 31)) - 1u, peers = __match_any_sync(FULL_WARP, key);
    const bool present = key < OWNED;
    const int before = present ? tally[key] : 0;
    __syncwarp();
    if (present && (peers & below) == 0) tally[key] = (u16)(before + __popc(peers));
    __syncwarp();
    return before + __popc(peers & below);
}
// Exclusive prefix sum over the CTA's threads; `sums` holds MAP_WARPS numbers, and everybody has passed a barrier when it returns.
DEVICE int prefix_of_threads(int value, int* sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int running = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(FULL_WARP, running, step);
        if (lane >= step) running += other;
    }
    if (lane == 31) sums[warp] = running;
    __syncthreads();
    int before = 0;
#pragma unroll
    for (int w = 0; w < MAP_WARPS; ++w) before += w < warp ? sums[w] : 0;
    return before + running - value;
}

struct Inverse {
    alignas(16) u32 list[2 * BATCH];  // sources not yet sorted; between batches free for partial sums
    u8 key[2 * BATCH];                // their destinations, counted from the first owned
    u32 source[BATCH];                // sorted: whose row to add,
    float weight[BATCH];              // how much of it
#if DIFFERENCE
    u8 owner[BATCH];                  // and to which destination
#endif
    alignas(4) u16 tally[MAP_WARPS][OWNED];
    int start[OWNED + 1];             // where a destination's sources begin in the sorted batch
    int counts[2][TURNS * MAP_WARPS];
    int sums[MAP_WARPS];

    // Appends the sources of a window whose winner is one of `owned` from `first` on; winner[4 k + j] is that of source
    // base + 4 (256 k + thread) + j. `parity` alternates from window to window; sources end at `sources`.
    // Returns the list's new length, which was below BATCH before.
    DEVICE int append(const int (&winner)[EACH], int base, int sources, int first, int owned, int length, int parity) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const u32 below = (1u << lane) - 1u;
        int rank[TURNS];
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
            int total = 0;
            rank[k] = 0;
            if (4 * MAP_THREADS * k < sources - base)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 mine = __ballot_sync(FULL_WARP, (u32)(winner[4 * k + j] - first) < (u32)owned);
                    rank[k] += __popc(mine & below), total += __popc(mine);
                }
            if (lane == 0) counts[parity][k * MAP_WARPS + warp] = total;
        }
        __syncthreads();
        const int mine = lane < TURNS * MAP_WARPS ? counts[parity][lane] : 0;  // every warp sums all of them
        int running = mine;
#pragma unroll
        for (int step = 1; step < TURNS * MAP_WARPS; step <<= 1) {
            const int other = __shfl_up_sync(FULL_WARP, running, step);
            if (lane >= step) running += other;
        }
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
            int at = length + rank[k] + __shfl_sync(FULL_WARP, running - mine, k * MAP_WARPS + warp);
            if (4 * MAP_THREADS * k >= sources - base) break;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int local = winner[4 * k + j] - first;
                if ((u32)local >= (u32)owned) continue;
                list[at] = base + 4 * (k * MAP_THREADS + threadIdx.x) + j;
                key[at++] = (u8)local;
            }
        }
        return length + __shfl_sync(FULL_WARP, running, TURNS * MAP_WARPS - 1);
    }

    // Sorts the first `count` (at most BATCH) of the list by destination. look(source) only loads what weigh(found, row, weight) makes the
    // source's row and weight of, so that the loads of all keys of a thread are in flight together.
    // Returns whether some destination has more than `heavy` sources.
    template <typename Found, typename Look, typename Weigh> DEVICE bool sort(int count, int heavy, const Look& look, const Weigh& weigh) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int each = (count + MAP_THREADS - 1) / MAP_THREADS;  // keys a thread
        __syncthreads();
        for (int i = lane; i < OWNED / 2; i += 32) reinterpret_cast<u32*>(tally[warp])[i] = 0;
        __syncwarp();
        u32 entry[EACH];
        u32 place[EACH];  // destination << 16 | rank in the warp's run
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            place[k] = FULL_WARP;
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            if (k >= each) break;
            const int i = (warp * each + k) * 32 + lane;
            const u32 destination = i < count ? key[i] : OWNED;
            const int rank = rank_in_run(destination, tally[warp]);
            if (i >= count) continue;
            entry[k] = list[i];
            place[k] = destination << 16 | rank;
        }
        __syncthreads();
        int total = 0;
#pragma unroll
        for (int w = 0; w < MAP_WARPS; ++w) {  // thread = destination
            const int mine = tally[w][threadIdx.x];
            tally[w][threadIdx.x] = (u16)total;
            total += mine;
        }
        const int before = prefix_of_threads(total, sums);
        start[threadIdx.x] = before;
        if (threadIdx.x == OWNED - 1) start[OWNED] = before + total;
        const bool any_heavy = __syncthreads_or(total > heavy);
#pragma unroll
        for (int half = 0; half < EACH; half += EACH / 2) {
            if (half >= each) break;
            Found found[EACH / 2];
#pragma unroll
            for (int k = 0; k < EACH / 2; ++k)
                if (place[half + k] != FULL_WARP) found[k] = look(entry[half + k]);
#pragma unroll
            for (int k = 0; k < EACH / 2; ++k) {
                if (place[half + k] == FULL_WARP) continue;
                const u32 destination = place[half + k] >> 16;
                const int at = start[destination] + tally[warp][destination] + (place[half + k] & 0xffffu);
                weigh(found[k], source[at], weight[at]);
#if DIFFERENCE
                owner[at] = (u8)destination;
#endif
            }
        }
        __syncthreads();
        return any_heavy;
    }

    // Moves what lies behind the first BATCH to the front; returns how much that is.
    DEVICE int drop_batch(int length) {
        const int left = max(length - BATCH, 0);
        u32 moved[EACH];
        u8 moved_key[EACH];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int i = k * MAP_THREADS + threadIdx.x;
            moved[k] = list[BATCH + min(i, BATCH - 1)], moved_key[k] = key[BATCH + min(i, BATCH - 1)];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int i = k * MAP_THREADS + threadIdx.x;
            if (i < left) list[i] = moved[k], key[i] = moved_key[k];
        }
        __syncthreads();
        return left;
    }
};
static_assert(OWNED == MAP_THREADS && TURNS * MAP_WARPS <= 32, "one thread a destination, one lane a run");

// Division by an invariant: n / d for all 32-bit n in a multiply, an add and two shifts (Granlund and Montgomery, figure 4.1).
struct Divisor {
    u32 by, magic, shift;
    DEVICE u32 quotient(u32 n) const {
        const u32 high = __umulhi(magic, n);
        return shift ? (((n - high) >> 1) + high) >> (shift - 1) : n;
    }
};
