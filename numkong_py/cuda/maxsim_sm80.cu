// MaxSim for every tensor-core GPU, dtype, metric, depth and layout: mma.sync m16n8k16 (f32 accumulators, k ascending: the row's one chain C).
//
// One CTA takes one (query, document): 64 query rows x 64 tokens x 64 columns a step, two cp.async stages: 72 KiB, three CTAs an H200
// multiprocessor (f32 1x1000,1024x1024), one on cards with 100 KiB. Rows of queries shorter than 33 tokens share a tile. Rows are reached through a list, which is how the
// refinement of a screen (MODE_SCREEN, refine_f32) looks only at rows whose winner is still open.
//
//   DIRECT  bf16, f16, dot: the accumulator is C, maxima stay in registers
//   LISTED  f32 (C is the f64 dot), cosine, angular, overflowing bf16: v is the accumulator (normalised for cosine), B its bound; a token
//           with v + B < floor = max(v - B) cannot win (nor tie), every other one is evaluated in f64 by half a warp
//
//   stage   [64 rows x 128 bytes | 64 tokens x 128 bytes], 16-byte segments swizzled by row & 7
// Compiled once per (DTYPE, LISTED), both macros: see launch_table.py.
#include "ptx.cuh"

#define DTYPE_BF16 0
#define DTYPE_F16 1
#define DTYPE_F32 2
#define METRIC_DOT 0
#define METRIC_COSINE 1
#define METRIC_ANGULAR 2

constexpr int THREADS = 128, STAGES = 2, OPERAND_BYTES = 64 * 128, STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int SPAN = 1024;        // query rows whose results wait in shared memory
constexpr int TILE_STRIDE = 65;   // words a row of the accumulator tile, odd: no bank conflicts down a column
constexpr double LOUD = 0x1p112;  // squared norm from which a product could overflow f32: C is the f64 dot there

#if DTYPE == DTYPE_F32
typedef double Score;
#else
typedef float Score;
#endif

struct Side {                // queries or documents
    const u16* tokens;       // [tokens, stride], bf16 or f16; for f32 its f16 plane
    const float* originals;  // [tokens, depth], f32 only
    const double* squares;   // squared norm a token (LISTED)
    const float4* sets;      // {largest norm, largest |x - plane|, 1 where a token is loud, 0} a set (LISTED)
    const i64* offsets;      // null: `length` tokens a set
    i64 count;
    int length, stride;
};
struct Params {
    Side queries, documents;
    const i64* candidates;        // [query count, slots], or null; null with `pairs`: slot 0 of query q is document q
    Score* scores;                // [query count, slots]
    Score* token_scores;          // [query count, slots, length], or null; `refined`: holds what refine_f32 found
    int* argmax;                  // same shape
    const u64* loud;              // a query is loud where this is `call` (maxsim_forward_sm90), or null
    u64 call;
    double empty;
    i64 slots, items;
    int metric, mean, depth, refined, pairs, only_loud, queries_an_item;
};

struct Shared {
    double best[SPAN];
    double group_sum[SPAN / 16];
    float floor[SPAN];
    int index[SPAN];
    u16 list[SPAN];
    int listed;
    float tile[64 * TILE_STRIDE];  // LISTED
    float inverse_norm[64];        // of the tile's tokens: cosine, angular; NaN where it must be evaluated
};

static_assert(sizeof(Shared) <= 40 * 1024, "scoring.py reserves 40 KiB");

DEVICE float as_float(u16 bits) {
#if DTYPE == DTYPE_F16
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}

// A work item: one document slot against one query, or several short ones.
struct Item {
    i64 query, document, slot, document_start;
    int queries, query_rows, rows, count;  // query_rows: rows a query takes, a multiple of 16; count: the document's tokens, 0 for none
};
struct Row { i64 token; i64 query; int position; bool valid; };

DEVICE int set_count(const Side& side, i64 set) { return side.offsets ? (int)(side.offsets[set + 1] - side.offsets[set]) : side.length; }
DEVICE i64 set_start(const Side& side, i64 set) { return side.offsets ? side.offsets[set] : set * side.length; }

DEVICE Row row_of(const Params& p, const Item& item, int row) {
    const int which = row / item.query_rows, position = row - which * item.query_rows;
    const i64 query = item.query + which;
    const bool valid = which < item.queries && position < set_count(p.queries, query);
    return {valid ? set_start(p.queries, query) + position : 0, query, position, valid};
}

DEVICE Item item_at(const Params& p, i64 at) {
    const i64 blocks = (p.queries.count + p.queries_an_item - 1) / p.queries_an_item, block = at % blocks;
    Item item;
    item.slot = at / blocks;
    item.query = block * p.queries_an_item;
    item.queries = (int)min((i64)p.queries_an_item, p.queries.count - item.query);
    item.query_rows = (p.queries.length + 15) / 16 * 16;
    item.rows = item.queries * item.query_rows;
    item.document = p.pairs ? item.query : p.candidates ? p.candidates[item.query * p.slots + item.slot] : item.slot;
    const bool some = item.document >= 0 && item.document < p.documents.count;
    item.count = some ? set_count(p.documents, item.document) : 0;
    item.document_start = some ? set_start(p.documents, item.document) : 0;
    return item;
}

DEVICE void load_stage(const Params& p, const Item& item, const Shared& s, u32 stage, int first_row, int rows, int token, int column, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = threadIdx.x + i * THREADS, r = at >> 3, segment = at & 7, c = column + 8 * segment;
        const u32 offset = r * 128 + ((segment ^ (r & 7)) << 4);
        const Row row = r < rows ? row_of(p, item, first + s.list[first_row + r]) : Row{0, 0, 0, false};
        const bool query = row.valid && c < p.queries.stride, document = token + r < item.count && c < p.documents.stride;
        copy_16_bytes(stage + offset, query ? p.queries.tokens + row.token * p.queries.stride + c : p.queries.tokens, query ? 16 : 0);
        const u16* source = p.documents.tokens + (item.document_start + token + r) * p.documents.stride + c;
        copy_16_bytes(stage + OPERAND_BYTES + offset, document ? source : p.documents.tokens, document ? 16 : 0);
    }
    copy_commit();
}

// 16 rows of this warp x 64 tokens x 64 columns
DEVICE void multiply(float (&acc)[8][4], u32 stage, int warp, int lane) {
    const int a_row = warp * 16 + (lane & 15), b_row = (lane & 7) + ((lane >> 4) << 3);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32 a[4];
        load_matrices(a, stage + a_row * 128 + (((2 * k + (lane >> 4)) ^ (a_row & 7)) << 4));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            u32 b[4];
            const int row = 16 * n + b_row;
            load_matrices(b, stage + OPERAND_BYTES + row * 128 + (((2 * k + ((lane >> 3) & 1)) ^ (row & 7)) << 4));
            mma_16x8x16<DTYPE == DTYPE_BF16>(acc[2 * n], a, b[0], b[1]);
            mma_16x8x16<DTYPE == DTYPE_BF16>(acc[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// ---------------------------------------------------------------- DIRECT
struct Best { float value[2]; int index[2]; };  // rows lane/4 and lane/4 + 8 of the warp

DEVICE void reduce_direct(const float (&acc)[8][4], Best& best, int token, int count, int lane) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = token + 8 * j + 2 * (lane & 3) + (e & 1), h = e >> 1;
            const float v = acc[j][e];
            if (at < count && !(v <= best.value[h]) && best.value[h] == best.value[h]) best.value[h] = v, best.index[h] = at;
        }
}
DEVICE void store_direct(Shared& s, Best best, int first_row, int rows, int warp, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int x = 1; x <= 2; x <<= 1) {
            const float value = __shfl_xor_sync(FULL_WARP, best.value[h], x);
            const int index = __shfl_xor_sync(FULL_WARP, best.index[h], x);
            if (wins(value, index, best.value[h], best.index[h])) best.value[h] = value, best.index[h] = index;
        }
        const int r = warp * 16 + (lane >> 2) + 8 * h;
        if ((lane & 3) == 0 && r < rows) s.best[s.list[first_row + r]] = best.value[h], s.index[s.list[first_row + r]] = best.index[h];
    }
}

// ---------------------------------------------------------------- LISTED: half a warp a row
struct Half { u32 mask; int lane, index; };  // mask of its 16 lanes, lane within, which of the CTA's 8

DEVICE double fold_16(double x, const Half& half) {
#pragma unroll
    for (int step = 8; step >= 1; step >>= 1) x += __shfl_xor_sync(half.mask, x, step);
    return x;
}
// The contract's f64 dot: element k goes, in order, to lane k mod 16; the lanes fold by 8, 4, 2, 1.
DEVICE double dot_f64(const Params& p, i64 query, i64 document, const Half& half) {
    double sum = 0.0;
    for (int k = half.lane; k < p.depth; k += 16) {
#if DTYPE == DTYPE_F32
        const float q = p.queries.originals[query * p.depth + k], d = p.documents.originals[document * p.depth + k];
#else
        const float q = as_float(p.queries.tokens[query * p.queries.stride + k]), d = as_float(p.documents.tokens[document * p.documents.stride + k]);
#endif
        sum = fma((double)q, (double)d, sum);
    }
    return fold_16(sum, half);
}
// The squared norm of a query token, where no pass over the queries has stored it.
DEVICE double square_of(const Params& p, i64 query, const Half& half) {
    double sum = 0.0;
#if DTYPE != DTYPE_F32
    for (int k = half.lane; k < p.depth; k += 16) {
        const double x = as_float(p.queries.tokens[query * p.queries.stride + k]);
        sum = fma(x, x, sum);
    }
#endif
    return fold_16(sum, half);
}
DEVICE double pair_value(const Params& p, i64 query, i64 document, float accumulator, const Half& half) {
    double qq = 0.0, dd = 0.0, dot;
    if (DTYPE != DTYPE_F32 || p.metric != METRIC_DOT) qq = p.queries.squares ? p.queries.squares[query] : square_of(p, query, half), dd = p.documents.squares[document];
    if (DTYPE == DTYPE_F32 || !(qq < LOUD) || !(dd < LOUD)) dot = dot_f64(p, query, document, half);
    else dot = accumulator;
    if (p.metric == METRIC_DOT) return dot;
    double cosine = qq == 0.0 || dd == 0.0 ? 0.0 : dot / sqrt(qq * dd);
    if (cosine > 1.0) cosine = 1.0;
    if (cosine < -1.0) cosine = -1.0;
    if (p.metric == METRIC_COSINE) return cosine;
    if (qq == 0.0 && dd == 0.0) return 0.0;
    const double angle = 1.0 - cosine;
    return angle < 0.0 ? 0.0 : angle;  // NaN kept
}
DEVICE bool better(const Params& p, double value, double best, int best_index) {
    if (best_index < 0) return true;
    if (best != best) return false;
    return value != value || (p.metric == METRIC_ANGULAR ? value < best : value > best);
}

DEVICE float dot_bound(const Params& p, i64 query, i64 document) {
    return DTYPE == DTYPE_F32 ? screen_bound(p.queries.sets[query], p.documents.sets[document], p.depth) : 0.0f;
}

DEVICE void reduce_listed(const Params& p, const Item& item, Shared& s, int first, int first_row, int rows, int token, const Half& half) {
    for (int r = half.index; r < rows; r += 8) {
        const int at = s.list[first_row + r];
        const Row row = row_of(p, item, first + at);
        if (!row.valid) continue;
        const float bound = dot_bound(p, row.query, item.document);
        const double qq = p.queries.squares ? p.queries.squares[row.token] : square_of(p, row.token, half);
        const bool open = p.metric != METRIC_DOT ? !(qq < 0x1p120 && (qq > 0x1p-120 || qq == 0.0)) : DTYPE != DTYPE_F32 && !(qq < LOUD);
        float high[4], floor = s.floor[at];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int c = half.lane + 16 * i;
            const float inverse = s.inverse_norm[c];
            float v = s.tile[r * TILE_STRIDE + c] * inverse, b = bound;
            if (p.metric != METRIC_DOT) b = bound * inverse * (1.0f + 0x1p-20f) + fabsf(v) * 0x1p-20f + 0x1p-100f;
            if (open) v = __uint_as_float(NAN_BITS);
            high[i] = v + b;
            if (token + c < item.count) floor = fmaxf(floor, v - b);  // a NaN gives no floor
        }
#pragma unroll
        for (int step = 8; step >= 1; step >>= 1) floor = fmaxf(floor, __shfl_xor_sync(half.mask, floor, step));
        double best = s.best[at];
        int index = s.index[at];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool keep = token + half.lane + 16 * i < item.count && !(high[i] < floor);
            u32 open_columns = (__ballot_sync(half.mask, keep) >> (half.mask == 0xffffu ? 0 : 16)) & 0xffffu;
            while (open_columns) {
                const int c = 16 * i + __ffs(open_columns) - 1;
                open_columns &= open_columns - 1;
                const double value = pair_value(p, row.token, item.document_start + token + c, s.tile[r * TILE_STRIDE + c], half);
                if (better(p, value, best, index)) best = value, index = token + c;
            }
        }
        __syncwarp(half.mask);
        if (half.lane == 0) s.best[at] = best, s.index[at] = index, s.floor[at] = floor;
    }
}

// Takes over the rows that refine_f32 decided; the others go on the list, with the floor that the screen found.
DEVICE void take_refined(const Params& p, const Item& item, Shared& s, int first, int rows) {
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        const Row row = row_of(p, item, first + r);
        if (!row.valid) continue;
        const i64 at = (row.query * p.slots + item.slot) * p.queries.length + row.position;
        const int index = p.argmax[at];
        if (index >= 0) {
            s.best[r] = p.token_scores[at], s.index[r] = index;
        } else {
            s.floor[r] = (float)p.token_scores[at];
            s.list[atomicAdd(&s.listed, 1)] = (u16)r;
        }
    }
}

// Whether a query of the item could hold a loud token: an element of 2^50 or more, or one that is not finite.
DEVICE bool may_be_loud(const Params& p, const Item& item) {
    bool loud = false;
    if (p.loud) {
        for (int q = 0; q < item.queries; ++q) loud |= p.loud[item.query + q] == p.call;
        return loud;
    }
    if (p.queries.sets) {
        for (int q = 0; q < item.queries; ++q) loud |= p.queries.sets[item.query + q].z != 0.0f;
        return loud;
    }
    const i64 start = set_start(p.queries, item.query), end = set_start(p.queries, item.query + item.queries - 1) + set_count(p.queries, item.query + item.queries - 1);
    const uint4* words = reinterpret_cast<const uint4*>(p.queries.tokens + start * p.queries.stride);
    u32 carry = 0;  // into bit 15 of a half where its exponent is large
    for (i64 i = threadIdx.x; i < (end - start) * p.queries.stride / 8; i += THREADS) {
        const uint4 w = words[i];
        carry |= ((w.x & 0x7fff7fffu) + 0x27802780u) | ((w.y & 0x7fff7fffu) + 0x27802780u) | ((w.z & 0x7fff7fffu) + 0x27802780u) | ((w.w & 0x7fff7fffu) + 0x27802780u);
    }
    return __syncthreads_or(carry & 0x80008000u);
}

// One pass of the document for up to 64 listed rows.
DEVICE void score_rows(const Params& p, const Item& item, Shared& s, u32 stages, int first, int first_row, int rows, const Half& half) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int columns = (p.queries.stride + 63) / 64, steps = (item.count + 63) / 64 * columns;
    float acc[8][4];
    Best best = {{negative_infinity(), negative_infinity()}, {0, 0}};
    auto load = [&](int step) {
        if (step < steps) load_stage(p, item, s, stages + step % STAGES * STAGE_BYTES, first_row, rows, step / columns * 64, step % columns * 64, first);
        else copy_commit();  // keeps the count of groups
    };
    for (int step = 0; step < STAGES - 1; ++step) load(step);
    for (int step = 0; step < steps; ++step) {
        const int token = step / columns * 64;
        copy_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        if (step % columns == 0)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[j][e] = 0.0f;
        multiply(acc, stages + step % STAGES * STAGE_BYTES, warp, lane);
        if (step % columns != columns - 1) continue;
#if LISTED
        for (int c = threadIdx.x; c < 64; c += THREADS) {
            float inverse = 1.0f;
            const i64 at = item.document_start + token + c;
            if (token + c < item.count && (p.metric != METRIC_DOT || DTYPE != DTYPE_F32)) {
                const double dd = p.documents.squares[at];
                if (p.metric == METRIC_DOT) inverse = dd < LOUD ? 1.0f : __uint_as_float(NAN_BITS);
                else inverse = dd == 0.0 ? 0.0f : dd < 0x1p120 && dd > 0x1p-120 ? (float)(1.0 / sqrt(dd)) : __uint_as_float(NAN_BITS);
            }
            s.inverse_norm[c] = inverse;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s.tile[(warp * 16 + (lane >> 2) + 8 * (e >> 1)) * TILE_STRIDE + 8 * j + 2 * (lane & 3) + (e & 1)] = acc[j][e];
        __syncthreads();
        reduce_listed(p, item, s, first, first_row, rows, token, half);
        __syncthreads();
#else
        reduce_direct(acc, best, token, item.count, lane);
#endif
    }
    copy_wait<0>();
#if !LISTED
    store_direct(s, best, first_row, rows, warp, lane);
#endif
    __syncthreads();
}

DEVICE void write_rows(const Params& p, const Item& item, const Shared& s, int first, int rows) {
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        const Row row = row_of(p, item, first + r);
        if (row.query >= p.queries.count || row.position >= p.queries.length) continue;
        const i64 at = (row.query * p.slots + item.slot) * p.queries.length + row.position;
        const bool some = row.valid && item.count > 0;
        p.token_scores[at] = (Score)(some ? s.best[r] : row.valid ? p.empty : 0.0);
        p.argmax[at] = some ? s.index[r] : -1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) maxsim_sm80(const __grid_constant__ Params p) {
    extern __shared__ unsigned char dynamic_shared[];
    __shared__ double totals[4];  // one a query of the item
    Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
    const u32 stages = (shared_address(dynamic_shared + sizeof(Shared)) + 1023u) & ~1023u;
    const int lane = threadIdx.x & 31;
    const Half half = {lane < 16 ? 0xffffu : 0xffff0000u, lane & 15, (int)(threadIdx.x >> 4)};

    for (i64 at = blockIdx.x; at < p.items; at += gridDim.x) {
        const Item item = item_at(p, at);
        if (p.only_loud) {
            if (item.count == 0 || !(may_be_loud(p, item) || p.documents.sets[item.document].z != 0.0f)) continue;
        }
        if (threadIdx.x < 4) totals[threadIdx.x] = 0.0;
        for (int first = 0; first < item.rows; first += SPAN) {
            const int rows = min(SPAN, item.rows - first);
            __syncthreads();
            if (threadIdx.x == 0) s.listed = p.refined && item.count > 0 ? 0 : rows;
            for (int r = threadIdx.x; r < rows; r += THREADS) s.list[r] = (u16)r, s.index[r] = -1, s.best[r] = 0.0, s.floor[r] = negative_infinity();
            __syncthreads();
            if (p.refined && item.count > 0) take_refined(p, item, s, first, rows);
            __syncthreads();
            const int listed = item.count > 0 ? s.listed : 0;
            for (int row = 0; row < listed; row += 64) score_rows(p, item, s, stages, first, row, min(64, listed - row), half);

            for (int group = half.index; group < rows / 16; group += 8) {
                const int r = group * 16 + half.lane;
                double value = row_of(p, item, first + r).valid ? s.best[r] : 0.0;
                value += __shfl_xor_sync(half.mask, value, 8);
#pragma unroll
                for (int step = 1; step <= 4; step <<= 1) value += __shfl_xor_sync(half.mask, value, step);
                if (half.lane == 0) s.group_sum[group] = value;
            }
            __syncthreads();
            if (threadIdx.x < item.queries) {
                const int groups = min(rows, item.query_rows) / 16, begin = threadIdx.x * groups;
                double total = totals[threadIdx.x];
                for (int group = 0; group < groups; ++group) total += s.group_sum[begin + group];
                totals[threadIdx.x] = total;
            }
            if (p.token_scores) write_rows(p, item, s, first, rows);
        }
        if (threadIdx.x < item.queries) {
            const i64 query = item.query + threadIdx.x;
            p.scores[query * p.slots + item.slot] = (Score)score_of(totals[threadIdx.x], set_count(p.queries, query), item.count, p.mean, p.empty);
        }
    }
}
