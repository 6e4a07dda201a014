// What the two Hopper forward kernels share: the schedule, the maxima of a tile, the end of a document and the sums of queries.
//
//   rows   groups of 16 query tokens; a query starts a group, its last group is filled with rows that count nothing
//   CTA    [consumer warpgroups | producer warpgroup: warp 0 issues TMA, warp 1 sums queries]
//   stage  operands, and a header {valid tokens, flags, slot, first token}: consumers know nothing of ragged lengths
// The includer defines ROWS (query rows a CTA), MODE and TILE_TOKENS.
#pragma once
#include "ptx.cuh"

#define MODE_SCORE 0   // maxima only
#define MODE_ARGMAX 1  // and the lowest winning token
#define MODE_SCREEN 2  // the two best with their tokens and the third best value

constexpr int GROUPS = ROWS / 16;
constexpr int M_TILES = ROWS == 256 ? 2 : 1;      // 64-row tiles a consumer warpgroup
constexpr int CONSUMERS = ROWS / (64 * M_TILES);  // warpgroups
constexpr int SUM_SLOTS = 4;
constexpr bool MANY_REGISTERS = ROWS == 256;
constexpr int LAST_OF_DOCUMENT = 1, LAST_OF_ITEM = 2;

struct Piece { i64 start; int count; int slot; };  // a document, or a part of one
struct alignas(64) Params {
    TensorMap map;                 // documents, boxes of 64 tokens x 64 columns
    TensorMap query_map;           // queries, boxes of query_box tokens x 64 columns (maxsim_deep_sm90)
    const u16* queries;
    const i64* query_offsets;      // null: all queries have query_length tokens
    const int4* pieces;            // Piece, in schedule order; null for candidates
    const int* chunk_begin;        // chunks + 1, into pieces
    const i64* candidates;         // [query_count, slots] document indices, or null
    const i64* document_offsets;   // for candidates
    float* scores;                 // [query_count, slots], or null: token_scores only
    float* token_scores;           // [query_count, slots, query_length], or null
    int* argmax;                   // same shape, or null
    float* second;                 // same shape, MODE_SCREEN; second_index and third as well
    int* second_index;
    float* third;
    int* error;
    i64 document_count;
    float empty;
    int mean, query_count, query_length, query_groups, stride, slots, blocks, chunks, block_groups;
    int stages, query_box;         // of the ring; rows of one box of query_map (maxsim_deep_sm90)
};

DEVICE int max3(int a, int b, int c) {  // opaque to NVVM, so that ptxas makes one VIMNMX3 of it
    int r;
    asm("{\n\t.reg .s32 x;\n\tmax.s32 x, %2, %3;\n\tmax.s32 %0, %1, x;\n\t}" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
// best = running max of float bits, pair = its column pair, first = the value of that pair's first column
DEVICE void max_of_pair(int& best, int& pair, int& first, int v0, int v1, int j) {
    asm("{\n\t.reg .pred p;\n\t.reg .s32 x, n;\n\tmax.s32 x, %3, %4;\n\tmax.s32 n, %0, x;\n\tsetp.ne.s32 p, n, %0;\n\tmov.s32 %0, n;\n\t"
        "selp.s32 %1, %5, %1, p;\n\tselp.s32 %2, %3, %2, p;\n\t}"
        : "+r"(best), "+r"(pair), "+r"(first) : "r"(v0), "r"(v1), "r"(j));
}

struct Best { float value[2], second[2], third[2]; int index[2], second_index[2]; };  // rows lane/4 and lane/4 + 8
DEVICE void reset(Best& b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        b.value[h] = b.second[h] = b.third[h] = negative_infinity();
        b.index[h] = b.second_index[h] = 0;
    }
}
DEVICE void insert(Best& b, int h, float value, int index) {
    const bool first = value > b.value[h], second = value > b.second[h];
    b.third[h] = fmaxf(b.third[h], second ? b.second[h] : value);
    b.second_index[h] = first ? b.index[h] : second ? index : b.second_index[h];
    b.second[h] = first ? b.value[h] : second ? value : b.second[h];
    b.index[h] = first ? index : b.index[h];
    b.value[h] = first ? value : b.value[h];
}

// Accumulator element 4 j + 2 h + e is row lane/4 + 8 h, column 8 j + 2 (lane % 4) + e. `left` = valid columns - 2 (lane % 4).
constexpr int PAIRS = TILE_TOKENS / 8;  // column pairs a thread holds of each of its two rows
template <bool MASKED> DEVICE void reduce_tile(const float (&acc)[TILE_TOKENS / 2], Best& best, int left, int first_column) {
#define VALUE(j, h, e) (!MASKED || (8 * (j) + (e) < left) ? acc[4 * (j) + 2 * (h) + (e)] : negative_infinity())
#define BITS(j, h, e) __float_as_int(VALUE(j, h, e))
    if constexpr (MODE == MODE_SCORE) {
        // Floats with a clear sign order like their bits as signed integers and beat every negative one, so a signed max >= 0 is the float
        // max (a NaN wins too). Otherwise all values are negative and the max is the unsigned minimum of the bits: a rare second pass.
        int c[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int c0 = __float_as_int(best.value[h]), c1 = (int)NEGATIVE_INFINITY_BITS;
#pragma unroll
            for (int j = 0; j < PAIRS; j += 2) {
                c0 = max3(c0, BITS(j, h, 0), BITS(j, h, 1));
                c1 = max3(c1, BITS(j + 1, h, 0), BITS(j + 1, h, 1));
            }
            c[h] = max(c0, c1);
        }
        if (__any_sync(FULL_WARP, (c[0] | c[1]) < 0)) {  // a vote keeps this a branch
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 u = __float_as_uint(best.value[h]);
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) u = min(u, min((u32)BITS(j, h, 0), (u32)BITS(j, h, 1)));
                if (c[h] < 0) c[h] = (int)u;
            }
        }
        best.value[0] = __int_as_float(c[0]);
        best.value[1] = __int_as_float(c[1]);
    } else if constexpr (MODE == MODE_ARGMAX) {
        int t[2], pair[2], first[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            t[h] = (int)0x80000000, pair[h] = 0, first[h] = 0;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) max_of_pair(t[h], pair[h], first[h], BITS(j, h, 0), BITS(j, h, 1), j);
        }
        const bool negative = __any_sync(FULL_WARP, (t[0] | t[1]) < 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float value = __int_as_float(t[h]);
            int column = 8 * pair[h] + (first[h] != t[h] ? 1 : 0);
            if (negative && t[h] < 0) {
                value = negative_infinity(), column = 0;
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) {
                    const float v0 = VALUE(j, h, 0), v1 = VALUE(j, h, 1);
                    if (v0 > value) value = v0, column = 8 * j;
                    if (v1 > value) value = v1, column = 8 * j + 1;
                }
            }
            if (!(value <= best.value[h]) && best.value[h] == best.value[h]) best.value[h] = value, best.index[h] = first_column + column;
        }
    } else {  // the screen's values are finite
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float value = negative_infinity(), second = value, first = 0.0f;
            int pair = 0;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const float v0 = VALUE(j, h, 0), v1 = VALUE(j, h, 1), high = fmaxf(v0, v1);
                second = fmaxf(fmaxf(second, fminf(v0, v1)), fminf(value, high));
                if (high > value) pair = j, first = v0;
                value = fmaxf(value, high);
            }
            insert(best, h, value, first_column + 8 * pair + (first != value ? 1 : 0));
            best.third[h] = fmaxf(best.third[h], second);  // its token is not kept: it counts as a third
        }
    }
#undef VALUE
#undef BITS
}

// Which queries a warp's 16-row groups belong to, one entry per m-tile.
struct Rows { int query[M_TILES], token[M_TILES], count[M_TILES]; };

// Maxima of a document over the four lanes of a row, then optional per-token outputs and the fixed sums of 16 rows; resets the best.
DEVICE void write_tokens(const Params& p, const Best& best, const Rows& rows, int t, int slot, int count, int lane) {
    const int h = lane & 3, token = rows.token[t] + (lane >> 2) + 8 * h;  // lanes 0 and 1 of a quad write rows r and r + 8
    if (h > 1 || rows.query[t] >= p.query_count || token >= p.query_length) return;
    const i64 at = ((i64)rows.query[t] * p.slots + slot) * p.query_length + token;
    const bool valid = token < rows.count[t], some = valid && count > 0;
    p.token_scores[at] = some ? (h ? best.value[1] : best.value[0]) : valid ? p.empty : 0.0f;
    if constexpr (MODE != MODE_SCORE) p.argmax[at] = some ? (h ? best.index[1] : best.index[0]) : -1;
    if constexpr (MODE == MODE_SCREEN) {
        p.second[at] = h ? best.second[1] : best.second[0];
        p.second_index[at] = h ? best.second_index[1] : best.second_index[0];
        p.third[at] = h ? best.third[1] : best.third[0];
    }
}

// All four lanes get the maximum (and what goes with it) of the quad.
DEVICE void reduce_quad(Best& best) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int x = 1; x <= 2; x <<= 1) {
            const float other = __shfl_xor_sync(FULL_WARP, best.value[h], x);
            if constexpr (MODE == MODE_SCORE) {
                best.value[h] = max_nan(best.value[h], other);
            } else if constexpr (MODE == MODE_ARGMAX) {
                const int index = __shfl_xor_sync(FULL_WARP, best.index[h], x);
                if (wins(other, index, best.value[h], best.index[h])) best.value[h] = other, best.index[h] = index;
            } else {
                const int index = __shfl_xor_sync(FULL_WARP, best.index[h], x), second_index = __shfl_xor_sync(FULL_WARP, best.second_index[h], x);
                const float second = __shfl_xor_sync(FULL_WARP, best.second[h], x), third = __shfl_xor_sync(FULL_WARP, best.third[h], x);
                insert(best, h, other, index);
                insert(best, h, second, second_index);
                best.third[h] = fmaxf(best.third[h], third);
            }
        }
}

// Row maxima of every m-tile, spread over the quad: lane bit 0 is h, lane bit 1 the m-tile (with two of them). Half the shuffles of a plain
// reduction of each value.
DEVICE float spread_maxima(const Best (&best)[M_TILES], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    float kept[M_TILES];
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
        const float away = odd ? best[t].value[0] : best[t].value[1];
        kept[t] = max_nan(odd ? best[t].value[1] : best[t].value[0], __shfl_xor_sync(FULL_WARP, away, 1));
    }
    if constexpr (M_TILES == 1) return max_nan(kept[0], __shfl_xor_sync(FULL_WARP, kept[0], 2));
    const float away = upper ? kept[0] : kept[M_TILES - 1];
    return max_nan(upper ? kept[M_TILES - 1] : kept[0], __shfl_xor_sync(FULL_WARP, away, 2));
}

DEVICE void finish_document(const Params& p, Best (&best)[M_TILES], const Rows& rows, double* sums, int group, int slot, int count, int lane) {
    const bool per_token = MODE != MODE_SCORE || p.token_scores;
    if (per_token) {
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
            reduce_quad(best[t]);
            write_tokens(p, best[t], rows, t, slot, count, lane);
        }
    }
    if (p.scores) {
        const int t = M_TILES == 2 ? lane >> 1 & 1 : 0, row = (lane >> 2) + 8 * (lane & 1);
        const int token = t ? rows.token[M_TILES - 1] : rows.token[0], valid = t ? rows.count[M_TILES - 1] : rows.count[0];
        float value = spread_maxima(best, lane);
        if (token + row >= valid) value = 0.0f;
        const float other = __shfl_xor_sync(FULL_WARP, value, 1);
        const double s = sum_of_16_rows<4>((double)value, (double)other);
        if (lane == 0 || (M_TILES == 2 && lane == 2)) sums[group + 4 * t] = s;
    }
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) reset(best[t]);
}

// A warp's 16-row groups are `group` and, with two m-tiles, `group + 4` of the block.
DEVICE void assign_rows(const Params& p, Rows& rows, i64 (&start)[M_TILES], int block, int group) {
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) {
        const int in_block = group + 4 * t, global = block * p.block_groups + in_block;
        const int query = global / p.query_groups;
        const bool inside = in_block < p.block_groups && query < p.query_count;
        rows.query[t] = inside ? query : p.query_count;
        rows.token[t] = (global - query * p.query_groups) * 16;
        rows.count[t] = inside ? p.query_length : 0;
        start[t] = inside ? (i64)query * p.query_length : 0;
        if (p.query_offsets && inside) {
            start[t] = p.query_offsets[query];
            rows.count[t] = (int)(p.query_offsets[query + 1] - start[t]);
        }
    }
}

struct Ring { u32 tiles, full, empty; int4* tile; };
struct Sums { u32 full, empty; double (*value)[GROUPS]; int4* document; };

DEVICE Piece fetch_piece(const Params& p, int block, int i) {
    if (!p.candidates) {
        const int4 raw = __ldg(p.pieces + i);
        return {(i64)(u32)raw.x | ((i64)raw.y << 32), raw.z, raw.w};
    }
    const i64 document = p.candidates[(i64)(block * p.block_groups / p.query_groups) * p.slots + i];
    if (document < 0 || document >= p.document_count) return {0, 0, i};
    const i64 start = p.document_offsets[document];
    return {start, (int)(p.document_offsets[document + 1] - start), i};
}

// One lane walks the schedule: `begin_item(block)`, then for every tile and each of its `steps` stages `load(stage, step, token)`, which
// issues `bytes` bytes of copies for the tile that starts at a token of the collection.
template <typename Begin, typename Load>
DEVICE void produce(const Params& p, const Ring& ring, int stages, int steps, u32 bytes, Begin begin_item, Load load) {
    int stage = 0;
    u32 phase = 0;
    for (int item = blockIdx.x; item < p.blocks * p.chunks; item += gridDim.x) {
        const int chunk = item / p.blocks, block = item - chunk * p.blocks;
        const int step = p.candidates ? p.chunks : 1, end = p.candidates ? p.slots : p.chunk_begin[chunk + 1];
        int i = p.candidates ? chunk : p.chunk_begin[chunk];
        Piece piece = fetch_piece(p, block, i);
        begin_item(block);
        while (i < end) {
            i += step;
            Piece next = piece;
            if (i < end) next = fetch_piece(p, block, i);  // in flight while this document is loaded
            int token = 0;
            do {
                // The last tile of a document that fills one starts early, so that no column is masked; what is seen twice changes no
                // maximum and no lowest index (but would be its own second best).
                if (MODE != MODE_SCREEN && piece.count > TILE_TOKENS) token = min(token, piece.count - TILE_TOKENS);
                const int left = piece.count - token;
                const int flags = left > TILE_TOKENS ? 0 : i < end ? LAST_OF_DOCUMENT : LAST_OF_DOCUMENT | LAST_OF_ITEM;
                for (int step = 0; step < steps; ++step) {
                    if (!barrier_wait(ring.empty + 8 * stage, phase ^ 1u)) { *p.error = 1; return; }
                    ring.tile[stage] = make_int4(min(left, TILE_TOKENS), flags, piece.slot, token);
                    if (left > 0) {
                        barrier_arrive_expect(ring.full + 8 * stage, bytes);
                        load(stage, step, (int)piece.start + token);
                    } else {
                        barrier_arrive(ring.full + 8 * stage);  // an empty document: no column is valid
                    }
                    if (++stage == stages) { stage = 0; phase ^= 1u; }
                }
                token += TILE_TOKENS;
            } while (token < piece.count);
            piece = next;
        }
    }
}

// One warp adds the groups of each query of the block in ascending order and writes the scores.
DEVICE void sum_queries(const Params& p, const Sums& sums, int lane) {
    int slot = 0;
    u32 phase = 0;
    for (int item = blockIdx.x; item < p.blocks * p.chunks; item += gridDim.x) {
        const int query = (item % p.blocks) * (p.block_groups / p.query_groups) + lane;
        const bool mine = lane < p.block_groups / p.query_groups && query < p.query_count;
        int query_count = p.query_length;
        if (mine && p.query_offsets) query_count = (int)(p.query_offsets[query + 1] - p.query_offsets[query]);
        int flags = 0;
        while (!(flags & LAST_OF_ITEM)) {
            if (!barrier_wait(sums.full + 8 * slot, phase)) { *p.error = 3; return; }
            const int4 document = sums.document[slot];
            flags = document.y;
            double s = 0.0;
            if (mine)
                for (int g = 0; g < p.query_groups; ++g) s += sums.value[slot][lane * p.query_groups + g];
            __syncwarp();
            if (lane == 0) barrier_arrive(sums.empty + 8 * slot);
            if (mine) p.scores[(i64)query * p.slots + document.x] = (float)score_of(s, query_count, document.z, p.mean, p.empty);
            if (++slot == SUM_SLOTS) { slot = 0; phase ^= 1u; }
        }
    }
}

// What a consumer warp does with the last tile of a document.
struct SumPlace { int slot; u32 phase; };
DEVICE void end_document(const Params& p, const Sums& sums, SumPlace& place, Best (&best)[M_TILES], const Rows& rows, const int4& tile, int group,
                         int warp, int lane) {
    const int count = tile.w + tile.x;
    if (p.scores && !barrier_wait(sums.empty + 8 * place.slot, place.phase ^ 1u)) *p.error = 4;
    finish_document(p, best, rows, sums.value[place.slot], group, tile.z, count, lane);
    if (!p.scores) return;
    if (warp == 0 && lane == 0) sums.document[place.slot] = make_int4(tile.z, tile.y, count, 0);
    __syncwarp();
    if (lane == 0) barrier_arrive(sums.full + 8 * place.slot);
    if (++place.slot == SUM_SLOTS) { place.slot = 0; place.phase ^= 1u; }
}

DEVICE void init_barriers(const Ring& ring, const Sums& sums, int stages) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, CONSUMERS * 4);
        }
        for (int i = 0; i < SUM_SLOTS; ++i) {
            barrier_init(sums.full + 8 * i, CONSUMERS * 4);
            barrier_init(sums.empty + 8 * i, 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
}
