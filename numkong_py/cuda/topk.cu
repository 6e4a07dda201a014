// The k best of each row of scores, in the contract's order: score descending, then index; -inf, then NaN last.
//
// One CTA a row: radix selection on order-preserving bits (8 a pass) finds the k-th key, one more pass collects what lies above it and the
// lowest positions that equal it, a bitonic sort in shared memory puts them in order. Only k results leave the CTA.
// Also merges: with `indices`, entries bring their own index and -1 stands for none. Compiled once per F64, a macro.
#include "ptx.cuh"

constexpr int THREADS = 1024, MAX_K = 4096;

#if F64
typedef double Score;
#else
typedef float Score;
#endif

struct Params {
    const Score* scores;  // [rows, stride]
    const i64* indices;   // same shape, ascending where scores are equal; null: base + position
    Score* best;          // [rows, best_stride]
    i64* best_indices;    // same shape
    i64 count, stride, base, best_stride;
    int rows, k;
};

// 0 stands for none, 1 for NaN, then ascending with the score; -0 and +0 are one key.
DEVICE u64 key_of(Score score, i64 index) {
    if (index < 0) return 0;
    if (score != score) return 1;
    if (score == 0) score = 0;
#if F64
    const u64 bits = __double_as_longlong(score);
    return bits >> 63 ? ~bits : bits | 0x8000000000000000ull;
#else
    const u32 bits = __float_as_uint(score);
    return (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32;
#endif
}

struct Shared {
    u64 key[MAX_K];
    int position[MAX_K];
    int histogram[256];
    int warp_count[32];
    u64 prefix;
    int wanted, taken, ties;
};

// Exclusive rank of set flags in thread order, and their number.
DEVICE int rank_of(Shared& s, bool flag, int& total) {
    const u32 votes = __ballot_sync(FULL_WARP, flag);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    __syncthreads();
    if (lane == 0) s.warp_count[warp] = __popc(votes);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < THREADS / 32; ++w) {
        before += w < warp ? s.warp_count[w] : 0;
        total += s.warp_count[w];
    }
    return before + __popc(votes & ((1u << lane) - 1));
}

extern "C" __global__ void __launch_bounds__(THREADS) topk(const __grid_constant__ Params p) {
    extern __shared__ unsigned char dynamic_shared[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const Score* scores = p.scores + row * p.stride;
        const i64* indices = p.indices ? p.indices + row * p.stride : nullptr;
        auto key_at = [&](i64 i) { return key_of(scores[i], indices ? indices[i] : i); };
        const int k = (int)min((i64)p.k, p.count);
        __syncthreads();
        if (threadIdx.x == 0) s.prefix = 0, s.wanted = k, s.taken = 0, s.ties = 0;

        u64 decided = 0;  // bits of the k-th key that are known
        for (int shift = 56; shift >= (F64 ? 0 : 32); shift -= 8) {
            for (int b = threadIdx.x; b < 256; b += THREADS) s.histogram[b] = 0;
            __syncthreads();
            const u64 prefix = s.prefix;
            for (i64 i = threadIdx.x; i < p.count; i += THREADS) {
                const u64 key = key_at(i);
                if ((key & decided) == prefix) atomicAdd(&s.histogram[(key >> shift) & 255], 1);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                int bucket = 255, wanted = s.wanted;
                while (bucket > 0 && s.histogram[bucket] < wanted) wanted -= s.histogram[bucket--];
                s.wanted = wanted;
                s.prefix = prefix | (u64)bucket << shift;
            }
            __syncthreads();
            decided |= 255ull << shift;
        }
#if !F64
        decided = ~0ull;  // the low half of an f32 key is 0, or 1 for NaN: decide it as well
        {
            const u64 prefix = s.prefix;
            if (prefix == 0) {
                int numbers = 0;
                for (i64 i = threadIdx.x; i < p.count; i += THREADS) numbers += key_at(i) == 1;
                if (threadIdx.x < 256) s.histogram[threadIdx.x] = 0;
                __syncthreads();
                atomicAdd(&s.histogram[1], numbers);
                __syncthreads();
                if (threadIdx.x == 0) {
                    if (s.histogram[1] >= s.wanted) s.prefix = 1;
                    else s.wanted -= s.histogram[1];
                }
                __syncthreads();
            }
        }
#endif
        const u64 last = s.prefix;
        const int ties_wanted = s.wanted, above = k - ties_wanted;
        for (i64 first = 0; first < p.count; first += THREADS) {
            const i64 i = first + threadIdx.x;
            const u64 key = i < p.count ? key_at(i) : 0;
            if (i < p.count && key > last) {
                const int at = atomicAdd(&s.taken, 1);
                s.key[at] = key, s.position[at] = (int)i;
            }
            int total;
            const bool tie = i < p.count && key == last;
            const int rank = rank_of(s, tie, total) + s.ties;
            if (tie && rank < ties_wanted) s.key[above + rank] = key, s.position[above + rank] = (int)i;
            __syncthreads();
            if (threadIdx.x == 0) s.ties += total;
        }
        int size = 1;
        while (size < k) size <<= 1;
        __syncthreads();
        for (int i = k + threadIdx.x; i < size; i += THREADS) s.key[i] = 0, s.position[i] = 0x7fffffff;
        for (int width = 2; width <= size; width <<= 1)
            for (int step = width >> 1; step > 0; step >>= 1) {
                __syncthreads();
                for (int i = threadIdx.x; i < size; i += THREADS) {
                    const int j = i ^ step;
                    if (j < i) continue;
                    const bool later = s.key[i] < s.key[j] || (s.key[i] == s.key[j] && s.position[i] > s.position[j]);
                    if (later == ((i & width) == 0)) {
                        const u64 key = s.key[i];
                        const int position = s.position[i];
                        s.key[i] = s.key[j], s.position[i] = s.position[j];
                        s.key[j] = key, s.position[j] = position;
                    }
                }
            }
        __syncthreads();
        for (int i = threadIdx.x; i < p.k; i += THREADS) {
            const bool some = i < k && s.key[i] != 0;
            const int position = some ? s.position[i] : 0;
            p.best[row * p.best_stride + i] = some ? scores[position] : (Score)__uint_as_float(NAN_BITS);
            p.best_indices[row * p.best_stride + i] = !some ? -1 : indices ? indices[position] : p.base + position;
        }
    }
}
