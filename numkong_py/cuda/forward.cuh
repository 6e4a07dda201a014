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
// 128 threads of the producer's warpgroup and 256 of the consumers' share 64512. A screen sums nothing; deep queries are loaded as well.
constexpr int PRODUCER_REGISTERS = TILE_TOKENS == 128 ? 56 : MODE == MODE_SCREEN ? 24 : 40;
constexpr int CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
constexpr u32 LOUD_CARRY = 0x27802780u, LOUD_BITS = 0x80008000u;  // carries into bit 15 of a bf16 that is 2^50 or more, or not finite
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
    u64* loud;                     // bf16, depth <= 128: `call` where a query holds a loud token (maxsim_sm80.cu), or null
    u64 call;
    i64 document_count;
    float empty;
    int mean, query_count, query_length, query_groups, stride, slots, blocks, chunks, block_groups;
    int stages, query_box, one;    // of the ring; rows of one box of query_map (maxsim_deep_sm90); 1
};

DEVICE int max3(int a, int b, int c) {  // opaque to NVVM, so that ptxas makes one VIMNMX3 of it
    int r;
    asm("{\n\t.reg .s32 x;\n\tmax.s32 x, %2, %3;\n\tmax.s32 %0, %1, x;\n\t}" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
// Selections of the searches below: a predicated multiplication by 1. It runs beside the maxima and comparisons, on a pipe that they leave
// free; plain moves would become SEL, on theirs. `one` is a parameter, so that the compiler cannot know it.
//
// bits = running max of float bits, column = the first column of its pair, first = the bits of that column's value
DEVICE void max_of_pair(int& bits, int& column, int& first, int v0, int v1, int tile, int j, int one) {
    asm("{\n\t.reg .pred p;\n\t.reg .s32 x, n;\n\tmax.s32 x, %3, %4;\n\tmax.s32 n, %0, x;\n\tsetp.ne.s32 p, n, %0;\n\tmov.s32 %0, n;\n\t"
        "@p mad.lo.s32 %1, %5, %7, %6;\n\t@p mad.lo.s32 %2, %3, %7, 0;\n\t}"
        : "+r"(bits), "+r"(column), "+r"(first) : "r"(v0), "r"(v1), "r"(tile), "r"(j), "r"(one));
}
// The same with four columns, of which the first three are kept; `other` is the largest maximum of the fours that do not hold the best.
DEVICE void max_of_four(int& best, int& other, int& four, int (&kept)[4], int v0, int v1, int v2, int v3, int j, int one, int zero) {
    asm("{\n\t.reg .pred p;\n\t.reg .s32 g, m, n;\n\tmax.s32 g, %7, %8;\n\tmax.s32 g, g, %9;\n\tmax.s32 g, g, %10;\n\t"
        "min.s32 m, %0, g;\n\tmax.s32 n, %0, g;\n\tsetp.ne.s32 p, n, %0;\n\tmov.s32 %0, n;\n\tmax.s32 %1, %1, m;\n\t"
        "@p mad.lo.s32 %2, %7, %13, %11;\n\t@p mad.lo.s32 %3, %7, %12, 0;\n\t@p mad.lo.s32 %4, %8, %12, 0;\n\t@p mad.lo.s32 %5, %9, %12, 0;\n\t"
        "@p mad.lo.s32 %6, %10, %12, 0;\n\t}"
        : "+r"(best), "+r"(other), "+r"(four), "+r"(kept[0]), "+r"(kept[1]), "+r"(kept[2]), "+r"(kept[3])
        : "r"(v0), "r"(v1), "r"(v2), "r"(v3), "r"(j), "r"(one), "r"(zero));
}

struct Best {  // rows lane/4 and lane/4 + 8
    float value[2], second[2], third[2];
    int index[2], second_index[2];
    int bits[2], first[2];  // MODE_ARGMAX until the end of a document: -1, and the best in `first`, where no value was above -0
};
DEVICE void reset(Best& b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        b.value[h] = b.second[h] = b.third[h] = negative_infinity();
        b.index[h] = b.second_index[h] = 0;
        b.bits[h] = -1, b.first[h] = (int)NEGATIVE_INFINITY_BITS;
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

// Accumulator element 4 j + 2 h + e is row lane/4 + 8 h, column 8 j + 2 (lane % 4) + e.
constexpr int PAIRS = TILE_TOKENS / 8;  // column pairs a thread holds of each of its two rows

// Columns that a tile does not have: `left` = valid columns - 2 (lane % 4).
DEVICE void mask_tile(float (&acc)[TILE_TOKENS / 2], int left) {
#pragma unroll
    for (int i = 0; i < TILE_TOKENS / 2; ++i)
        if (8 * (i / 4) + (i & 1) >= left) acc[i] = negative_infinity();
}

DEVICE void reduce_tile(const float (&acc)[TILE_TOKENS / 2], Best& best, int first_column, int one) {
#define VALUE(j, h, e) acc[4 * (j) + 2 * (h) + (e)]
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
        // Bits below 0 stand for no value yet: no negative float's bits exceed -1, so negative ones are looked at apart, and rarely.
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                max_of_pair(best.bits[h], best.index[h], best.first[h], BITS(j, h, 0), BITS(j, h, 1), first_column, 8 * j, one);
    } else {  // the screen's values are finite; a second best below zero counts as zero, which bounds it
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int t = -1, other = -1, four = 0, kept[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < PAIRS; j += 2) max_of_four(t, other, four, kept, BITS(j, h, 0), BITS(j, h, 1), BITS(j + 1, h, 0), BITS(j + 1, h, 1), j, one, one - 1);
            int place = kept[2] == t ? 2 : 3;  // the lowest of the four that holds the maximum
            if (kept[1] == t) place = 1;
            if (kept[0] == t) place = 0;
            const int rest = max3(other, place == 0 ? kept[1] : kept[0], place <= 1 ? kept[2] : kept[1]);
            float value = __int_as_float(t), second = __int_as_float(max3(rest, place == 3 ? kept[2] : kept[3], 0));
            int column = 8 * four + 8 * (place >> 1) + (place & 1);
            if (__any_sync(FULL_WARP, t < 0) && t < 0) {
                value = second = negative_infinity(), column = 0;
#pragma unroll
                for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float v = VALUE(j, h, e);
                        second = fmaxf(second, fminf(value, v));
                        if (v > value) value = v, column = 8 * j + e;
                    }
            }
            insert(best, h, value, first_column + column);
            best.third[h] = fmaxf(best.third[h], second);  // its token is not kept: it counts as a third
        }
    }
#undef BITS
}

// MODE_ARGMAX: rows that have seen no value above -0 keep their best as a float in `first`.
DEVICE void look_at_negatives(const float (&acc)[TILE_TOKENS / 2], Best& best, int first_column) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (best.bits[h] < 0 && VALUE(j, h, e) > __int_as_float(best.first[h]))
                    best.first[h] = __float_as_int(VALUE(j, h, e)), best.index[h] = first_column + 8 * j + e;
#undef VALUE
}

// All m-tiles of a tile of documents: what lies beyond it masked, then the search.
DEVICE void reduce_tiles(float (&acc)[M_TILES][TILE_TOKENS / 2], Best (&best)[M_TILES], const int4& tile, int quad, int one) {
    if (tile.x < TILE_TOKENS) {
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) mask_tile(acc[t], tile.x - quad);
    }
#pragma unroll
    for (int t = 0; t < M_TILES; ++t) reduce_tile(acc[t], best[t], tile.w + quad, one);
    if constexpr (MODE == MODE_ARGMAX) {
        int bits = 0;
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) bits |= best[t].bits[0] | best[t].bits[1];
        if (__any_sync(FULL_WARP, bits < 0)) {
#pragma unroll
            for (int t = 0; t < M_TILES; ++t) look_at_negatives(acc[t], best[t], tile.w + quad);
        }
    }
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
    if constexpr (MODE == MODE_ARGMAX) {
#pragma unroll
        for (int t = 0; t < M_TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool some = best[t].bits[h] >= 0;
                best[t].value[h] = __int_as_float(some ? best[t].bits[h] : best[t].first[h]);
                if (some && best[t].first[h] != best[t].bits[h]) ++best[t].index[h];
            }
    }
    const bool per_token = MODE != MODE_SCORE || p.token_scores;
    if (per_token) {
#pragma unroll
        for (int t = 0; t < M_TILES; ++t) {
            reduce_quad(best[t]);
            write_tokens(p, best[t], rows, t, slot, count, lane);
        }
    }
    if (MODE != MODE_SCREEN && p.scores) {
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
    const bool summed = MODE != MODE_SCREEN && p.scores;
    if (summed && !barrier_wait(sums.empty + 8 * place.slot, place.phase ^ 1u)) *p.error = 4;
    finish_document(p, best, rows, sums.value[place.slot], group, tile.z, count, lane);
    if (!summed) return;
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
