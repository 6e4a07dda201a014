/* sme.c: Arm SME outer products. SMOPA adds, to a tile of ZA, all dot products of four s8 x s8 between the words of two
 * vectors: with W words in a vector, W query tokens by W document tokens per instruction. FMOPA does the same with f32
 * words and BFMOPA with pairs of bfloat16, for the second screen.
 *
 *   2 x 2 tiles   query vectors 0, 1 (rows)  x  document vectors 0, 1 (columns)       four loads per four products
 *   1 x 4 tiles   query vector 0 where there is no second one  x  document vectors 0..3          five per four
 *
 * So all four tiles of 32-bit sums are busy, and no product waits for the one before it. The planes are those of the
 * 16-token rows whatever W is: a vector of 4 or 8 words takes a part of a tile's step, one of 32 or 64 words joins the
 * steps of several tiles, with zeros where there are no more tiles. A row of ZA is one query token's sums: horizontal
 * slices leave as its values. Streaming mode is entered once per call, and never holds NEON code: exact dots and
 * selection are arm_neon.inc's. */
#include <numkong/backend.h>

#if NK_COMPILE_sme
#include <arm_neon.h>
#include <arm_sme.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NK_TILE_TOKENS_ 16
#define NK_QUERY_GROUP_ 16
#define NK_CODE_LIMIT_ 127
#define NK_CODE_BIAS_ 0
#define NK_DIRECT_HALVES_(dtype) ((dtype) == nk_bf16_k)

#include "../kernels/arm_neon.inc"
#include "../kernels/arm_sme_abi.inc"

/* Tiles of documents by groups of queries, as screening.inc hands them over. */
typedef struct nk_outer_t {
    nk_u8_t const *plane, *queries;
    nk_size_t tiles, groups, words;
    nk_f32_t const *scale;
    nk_f32_t *values;
    nk_size_t value_stride;
    nk_ahead_t *ahead;
} nk_outer_t;

NK_TARGET_BEGIN("+sme")

enum { nk_step_bytes_k = NK_TILE_TOKENS_ * 4 }; /* a word of a tile or group */

/* Where a vector's words begin in tiles of `words` words. */
NK_INLINE nk_u8_t const *nk_vector_at_(nk_u8_t const *tiles, nk_size_t words, nk_size_t vector) __arm_streaming {
    nk_size_t const token = vector * svcntw();
    return tiles + token / NK_TILE_TOKENS_ * words * nk_step_bytes_k + token % NK_TILE_TOKENS_ * 4;
}

/* A word of the tokens of a vector that is longer than a tile's: the tiles' steps one behind the other, zeros past the
 * last of `count` tiles. */
NK_INLINE svint8_t nk_join_tiles_(nk_u8_t const *step, nk_size_t words, nk_size_t vector,
                                  nk_size_t count) __arm_streaming {
    nk_size_t const parts = svcntb() / nk_step_bytes_k;
    svint8_t joined = svdup_s8(0);
    for (nk_size_t part = 0; part != parts && vector * parts + part < count; ++part) {
        nk_u64_t const begin = part * nk_step_bytes_k;
        svbool_t const lanes =
            svbic_z(svptrue_b8(), svwhilelt_b8_u64(0, begin + nk_step_bytes_k), svwhilelt_b8_u64(0, begin));
        nk_i8_t const *const from = (nk_i8_t const *)step + part * words * nk_step_bytes_k - begin;
        joined = svorr_x(svptrue_b8(), joined, svld1_s8(lanes, from));
    }
    return joined;
}

/* One word of a vector of tokens; `joined` says that vectors are longer than tiles. */
NK_INLINE svint8_t nk_load_words_(int const joined, nk_u8_t const *step, nk_size_t words, nk_size_t vector,
                                  nk_size_t count) __arm_streaming {
    if (joined) return nk_join_tiles_(step, words, vector, count);
    return svld1_s8(svptrue_b8(), (nk_i8_t const *)step);
}

/* Tile of ZA += the outer product of two vectors; `operation` and `tile` are constants. */
#define NK_ADD_PRODUCT_(operation, tile, queries, documents)                                                           \
    do {                                                                                                               \
        if ((operation) == nk_multiply_codes_k)                                                                        \
            svmopa_za32_s8_m(tile, svptrue_b8(), svptrue_b8(), queries, documents);                                    \
        else if ((operation) == nk_multiply_bf16_k)                                                                    \
            svmopa_za32_bf16_m(tile, svptrue_b16(), svptrue_b16(), svreinterpret_bf16_s8(queries),                     \
                               svreinterpret_bf16_s8(documents));                                                      \
        else                                                                                                           \
            svmopa_za32_f32_m(tile, svptrue_b32(), svptrue_b32(), svreinterpret_f32_s8(queries),                       \
                              svreinterpret_f32_s8(documents));                                                        \
    } while (0)

/* values = sums * scale, for the rows and columns of a tile of ZA that tokens stand for; `tile` is a constant. */
#define NK_STORE_TILE_(operation, tile, outer, row, column)                                                            \
    do {                                                                                                               \
        nk_size_t const tokens = (outer)->tiles * NK_TILE_TOKENS_, queries = (outer)->groups * NK_QUERY_GROUP_;        \
        nk_size_t const first = (row) * svcntw(), at = (column) * svcntw();                                            \
        svbool_t const lanes = svwhilelt_b32_u64(at, tokens);                                                          \
        svfloat32_t const scale = svld1_f32(lanes, (outer)->scale + at);                                               \
        nk_f32_t *to = (outer)->values + first * (outer)->value_stride + at;                                           \
        nk_u32_t const slices = (nk_u32_t)(queries - first < svcntw() ? queries - first : svcntw());                   \
        for (nk_u32_t slice = 0; slice != slices; ++slice, to += (outer)->value_stride) {                              \
            svint32_t const sums = svread_hor_za32_s32_m(svdup_s32(0), lanes, tile, slice);                            \
            svfloat32_t const sum =                                                                                    \
                (operation) == nk_multiply_codes_k ? svcvt_f32_s32_x(lanes, sums) : svreinterpret_f32_s32(sums);       \
            svst1_f32(lanes, to, svmul_f32_x(lanes, sum, scale));                                                      \
        }                                                                                                              \
    } while (0)

/* Query vectors row .. row + rows (1 or 2) against document vectors column .. column + columns (at most 2, or 4 with
 * one row). */
NK_INLINE void nk_outer_block_(nk_operation_t const operation, int const joined, int const rows, int const columns,
                               nk_outer_t const *outer, nk_size_t row,
                               nk_size_t column) __arm_streaming __arm_inout("za") {
    nk_size_t const words = outer->words;
    nk_u8_t const *queries0 = nk_vector_at_(outer->queries, words, row);
    nk_u8_t const *queries1 = nk_vector_at_(outer->queries, words, row + 1);
    nk_u8_t const *documents0 = nk_vector_at_(outer->plane, words, column);
    nk_u8_t const *documents1 = nk_vector_at_(outer->plane, words, column + 1);
    nk_u8_t const *documents2 = nk_vector_at_(outer->plane, words, column + 2);
    nk_u8_t const *documents3 = nk_vector_at_(outer->plane, words, column + 3);
    svzero_za();
    for (nk_size_t offset = 0; offset != words * nk_step_bytes_k; offset += nk_step_bytes_k) {
        svint8_t const query = nk_load_words_(joined, queries0 + offset, words, row, outer->groups);
        svint8_t document = nk_load_words_(joined, documents0 + offset, words, column, outer->tiles);
        NK_ADD_PRODUCT_(operation, 0, query, document);
        if (rows > 1) {
            svint8_t const second = nk_load_words_(joined, queries1 + offset, words, row + 1, outer->groups);
            NK_ADD_PRODUCT_(operation, 2, second, document);
            if (columns < 2) continue;
            document = nk_load_words_(joined, documents1 + offset, words, column + 1, outer->tiles);
            NK_ADD_PRODUCT_(operation, 1, query, document);
            NK_ADD_PRODUCT_(operation, 3, second, document);
            continue;
        }
        if (columns < 2) continue;
        document = nk_load_words_(joined, documents1 + offset, words, column + 1, outer->tiles);
        NK_ADD_PRODUCT_(operation, 1, query, document);
        if (columns < 3) continue;
        document = nk_load_words_(joined, documents2 + offset, words, column + 2, outer->tiles);
        NK_ADD_PRODUCT_(operation, 2, query, document);
        if (columns < 4) continue;
        document = nk_load_words_(joined, documents3 + offset, words, column + 3, outer->tiles);
        NK_ADD_PRODUCT_(operation, 3, query, document);
    }
    nk_size_t const third_row = rows > 1 ? row + 1 : row, third_column = rows > 1 ? column : column + 2;
    NK_STORE_TILE_(operation, 0, outer, row, column);
    if (columns > 1) NK_STORE_TILE_(operation, 1, outer, row, column + 1);
    if (rows > 1 || columns > 2) NK_STORE_TILE_(operation, 2, outer, third_row, third_column);
    if (rows > 1 ? columns > 1 : columns > 3) NK_STORE_TILE_(operation, 3, outer, third_row, third_column + 1);
}

/* All vectors of queries and documents, in blocks that use four tiles where there is work for them. */
NK_INLINE void nk_outer_blocks_(nk_operation_t const operation, int const joined,
                                nk_outer_t const *outer) __arm_streaming __arm_inout("za") {
    nk_size_t const rows = (outer->groups * NK_QUERY_GROUP_ + svcntw() - 1) / svcntw();
    nk_size_t const columns = (outer->tiles * NK_TILE_TOKENS_ + svcntw() - 1) / svcntw();
    nk_ahead_t *const ahead = outer->ahead;
    nk_size_t const share = (ahead->count * ahead->token_lines + columns - 1) / columns;
    for (nk_size_t row = 0; row < rows; row += 2) {
        int const pair = rows - row > 1;
        nk_size_t const step = pair ? 2 : 4;
        for (nk_size_t column = 0; column < columns; column += step) {
            /* nk_fetch_lines_, which streaming code may not have inlined */
            for (nk_size_t line = 0; line != share * step && ahead->next != ahead->count; ++line) {
                NK_PREFETCH_FAR(ahead->tokens[ahead->next] + ahead->line * 64);
                int const last = ++ahead->line == ahead->token_lines;
                ahead->next += (nk_size_t)last;
                ahead->line = last ? 0 : ahead->line;
            }
            nk_size_t const left = columns - column < step ? columns - column : step;
            if (joined) /* no processor has such vectors yet: one copy of the code does for every shape */
                nk_outer_block_(operation, 1, pair ? 2 : 1, (int)left, outer, row, column);
            else if (pair && left == 2)
                nk_outer_block_(operation, 0, 2, 2, outer, row, column);
            else if (pair)
                nk_outer_block_(operation, 0, 2, 1, outer, row, column);
            else if (left == 4)
                nk_outer_block_(operation, 0, 1, 4, outer, row, column);
            else
                nk_outer_block_(operation, 0, 1, (int)left, outer, row, column);
        }
    }
}

__arm_locally_streaming __arm_new("za") NK_NOINLINE
    void nk_outer_products_(nk_operation_t operation, nk_outer_t const *outer) {
    int const joined = svcntb() > nk_step_bytes_k;
    if (operation == nk_multiply_codes_k && !joined)
        nk_outer_blocks_(nk_multiply_codes_k, 0, outer);
    else if (operation == nk_multiply_codes_k)
        nk_outer_blocks_(nk_multiply_codes_k, 1, outer);
    else if (operation == nk_multiply_bf16_k && !joined)
        nk_outer_blocks_(nk_multiply_bf16_k, 0, outer);
    else if (operation == nk_multiply_bf16_k)
        nk_outer_blocks_(nk_multiply_bf16_k, 1, outer);
    else if (!joined)
        nk_outer_blocks_(nk_multiply_f32_k, 0, outer);
    else
        nk_outer_blocks_(nk_multiply_f32_k, 1, outer);
}

NK_TARGET_END

static void nk_screen_(nk_u8_t const *plane, nk_size_t tiles, nk_f32_t const *scale, nk_u8_t const *queries,
                       nk_i32_t const *preset, nk_size_t groups, nk_size_t words, nk_f32_t *values,
                       nk_size_t value_stride, nk_ahead_t *ahead) {
    nk_outer_t const outer = {plane, queries, tiles, groups, words, scale, values, value_stride, ahead};
    (void)preset; /* zeros: the codes have no bias */
    nk_outer_products_(nk_multiply_codes_k, &outer);
}

static void nk_direct_(nk_dtype_t dtype, nk_u8_t const *plane, nk_size_t tiles, nk_f32_t const *scale,
                       nk_u8_t const *queries, nk_i32_t const *preset, nk_size_t groups, nk_size_t words,
                       nk_f32_t *values, nk_size_t value_stride) {
    nk_ahead_t nothing = nk_fetch_nothing_();
    nk_outer_t const outer = {plane, queries, tiles, groups, words, scale, values, value_stride, &nothing};
    (void)preset;
    nk_outer_products_(NK_DIRECT_HALVES_(dtype) ? nk_multiply_bf16_k : nk_multiply_f32_k, &outer);
}

#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../kernels/arm_vector128.inc"
#include "../nearest.inc"

nk_backend_kernels_t const nk_backend_sme_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
