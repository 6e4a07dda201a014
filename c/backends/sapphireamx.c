/* sapphireamx.c: AMX. TDPBSUD multiplies 16 query tokens by 16 document tokens over 64 dimensions: signed query codes
 * on the rows of one tile, and on the other a slice of the screening plane as it lies in memory, 16 depth steps by 16
 * tokens of 4 unsigned codes. The int32 sums are exact and the bias leaves with the preset, as in icelake.
 *
 *   tiles 0..3  sums of  query rows 0..15 | 16..31  x  document tile | next document tile
 *   tiles 4, 5  query rows     6, 7  document tiles
 *
 * All slices have the same number of depth steps, so one shape of the tiles does: where the steps do not divide evenly
 * the last slice begins early, and its query codes are zero for the steps that it repeats. The second screen of bf16
 * tokens is TDPBF16PS over the same shapes, a step being two elements; other types have f32 FMAs. Linux keeps the tiles
 * closed to a process until it asks, which detection does (capabilities.c): every entry point detects before it selects
 * this row, and threads and forks inherit the answer. */
#include <numkong/backend.h>

#if NK_COMPILE_sapphireamx
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#ifndef NK_SAPPHIREAMX_TARGET
#define NK_SAPPHIREAMX_TARGET                                                                                          \
    "avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8,amx-bf16"
#endif

NK_TARGET_BEGIN(NK_SAPPHIREAMX_TARGET)

#define NK_TILE_TOKENS_ 16
#define NK_QUERY_GROUP_ 1 /* codes of one query token lie together: a row of a tile */
#define NK_CODE_LIMIT_ 127
#define NK_CODE_BIAS_ 128

#include "../kernels/x86_v4.inc"
#include "../kernels/transpose.inc"
#include "../kernels/x86_direct_rows.inc"
#define NK_DIRECT_HALVES_(dtype) ((dtype) == nk_bf16_k)

enum { nk_tile_rows_k = 16, nk_tile_row_bytes_k = 64, nk_screen_rows_k = 2 * nk_tile_rows_k, nk_fetch_rows_k = 8 };

/* The intrinsics' assembly (gcc 12) does not name the memory that it reads: stores before it are completed here. */
NK_INLINE void nk_settle_stores_(void) { __asm__ volatile("" ::: "memory"); }

typedef struct nk_tile_config_t {
    nk_u8_t palette, start_row, reserved[14];
    nk_u16_t row_bytes[16];
    nk_u8_t rows[16];
} nk_tile_config_t;

static void nk_shape_tile_(nk_tile_config_t *config, int tile, nk_size_t rows, nk_size_t row_bytes) {
    config->rows[tile] = (nk_u8_t)rows;
    config->row_bytes[tile] = (nk_u16_t)(rows ? row_bytes : 0);
}

/* Shapes for `count` query tokens, at most 32, and slices of `steps` depth steps. */
static void nk_configure_tiles_(nk_size_t count, nk_size_t steps) {
    nk_size_t const upper = count < nk_tile_rows_k ? count : nk_tile_rows_k, lower = count - upper;
    nk_tile_config_t config;
    memset(&config, 0, sizeof(config));
    config.palette = 1;
    nk_shape_tile_(&config, 0, upper, nk_tile_row_bytes_k);
    nk_shape_tile_(&config, 1, lower, nk_tile_row_bytes_k);
    nk_shape_tile_(&config, 2, upper, nk_tile_row_bytes_k);
    nk_shape_tile_(&config, 3, lower, nk_tile_row_bytes_k);
    nk_shape_tile_(&config, 4, upper, steps * 4);
    nk_shape_tile_(&config, 5, lower, steps * 4);
    nk_shape_tile_(&config, 6, steps, nk_tile_row_bytes_k);
    nk_shape_tile_(&config, 7, steps, nk_tile_row_bytes_k);
    nk_settle_stores_();
    _tile_loadconfig(&config);
}

/* Up to 32 query tokens, cut into slices of equal depth. */
typedef struct nk_sliced_queries_t {
    nk_size_t count, steps, slices, slice_steps;
    nk_i8_t const *codes;
    nk_i8_t last[nk_screen_rows_k * nk_tile_row_bytes_k]; /* rows of the last slice */
} nk_sliced_queries_t;

static void nk_slice_queries_(nk_i8_t const *codes, nk_size_t count, nk_size_t steps, nk_sliced_queries_t *queries) {
    queries->count = count;
    queries->steps = steps;
    queries->slices = (steps + nk_tile_rows_k - 1) / nk_tile_rows_k;
    queries->slice_steps = (steps + queries->slices - 1) / queries->slices;
    queries->codes = codes;
    nk_size_t const repeated = queries->slices * queries->slice_steps - steps;
    for (nk_size_t row = 0; row != count; ++row) {
        nk_i8_t *const to = queries->last + row * nk_tile_row_bytes_k;
        memcpy(to, codes + ((row + 1) * steps - queries->slice_steps) * 4, queries->slice_steps * 4);
        memset(to, 0, repeated * 4);
    }
}

/* A product of tiles; their numbers are literals. */
#define NK_MULTIPLY_TILE_(operation, sums, queries, documents)                                                         \
    if ((operation) == nk_multiply_codes_k)                                                                            \
        _tile_dpbsud(sums, queries, documents);                                                                        \
    else                                                                                                               \
        _tile_dpbf16ps(sums, queries, documents)

/* Tiles want their numbers as literals, so what depends on the shape of the work is a constant of each inlined copy.
 *
 * Slices of the next two document tiles are prefetched: a corpus streams from memory, where that takes a sixth of the
 * time off at depth 128 (Emerald Rapids, one core: 0.90 to 1.04 TOP/s) and costs nothing from the second-level cache
 * (1.53, 1.56). Sums of four or more document tiles converted row by row, or between the products of the next, were
 * slower. */
NK_INLINE void nk_multiply_tiles_(nk_operation_t const operation, int const lower, int const pair,
                                  nk_sliced_queries_t const *queries, nk_u8_t const *plane, nk_i32_t *sums) {
    nk_size_t const tile_bytes = queries->steps * nk_tile_row_bytes_k;
    _tile_zero(0);
    if (lower) _tile_zero(1);
    if (pair) _tile_zero(2);
    if (lower && pair) _tile_zero(3);
    for (nk_size_t slice = 0; slice != queries->slices; ++slice) {
        int const last = slice + 1 == queries->slices;
        nk_size_t const step = last ? queries->steps - queries->slice_steps : slice * queries->slice_steps;
        nk_size_t const stride = last ? nk_tile_row_bytes_k : queries->steps * 4;
        nk_i8_t const *const rows = last ? queries->last : queries->codes + step * 4;
        nk_u8_t const *const documents = plane + step * nk_tile_row_bytes_k;
        _tile_loadd(4, rows, stride);
        _tile_loadd(6, documents, nk_tile_row_bytes_k);
        NK_MULTIPLY_TILE_(operation, 0, 4, 6);
        if (lower) {
            _tile_loadd(5, rows + nk_tile_rows_k * stride, stride);
            NK_MULTIPLY_TILE_(operation, 1, 5, 6);
        }
        if (pair) {
            _tile_loadd(7, documents + tile_bytes, nk_tile_row_bytes_k);
            NK_MULTIPLY_TILE_(operation, 2, 4, 7);
        }
        if (lower && pair) {
            NK_MULTIPLY_TILE_(operation, 3, 5, 7);
        }
        nk_u8_t const *const following = documents + 2 * tile_bytes;
        for (nk_size_t row = 0; row != queries->slice_steps; ++row) {
            NK_PREFETCH(following + row * nk_tile_row_bytes_k);
            NK_PREFETCH(following + tile_bytes + row * nk_tile_row_bytes_k);
        }
    }
    _tile_stored(0, sums, nk_tile_row_bytes_k);
    if (lower) _tile_stored(1, sums + 256, nk_tile_row_bytes_k);
    if (pair) _tile_stored(2, sums + 512, nk_tile_row_bytes_k);
    if (lower && pair) _tile_stored(3, sums + 768, nk_tile_row_bytes_k);
}

NK_INLINE __m512 nk_value_of_sums_(nk_operation_t const operation, nk_i32_t const *sums, __m512i preset, __m512 scale) {
    __m512i const sum = _mm512_loadu_si512(sums);
    if (operation != nk_multiply_codes_k) return _mm512_mul_ps(_mm512_castsi512_ps(sum), scale);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sum, preset)), scale);
}

/* values = sums * scale, the presets added to integer sums, for up to 32 query tokens and one or two document tiles. */
NK_INLINE void nk_store_values_(nk_operation_t const operation, int const pair, nk_i32_t const *sums,
                                nk_i32_t const *preset, nk_size_t rows, nk_f32_t const *scale, nk_f32_t *values,
                                nk_size_t value_stride, nk_ahead_t *ahead, nk_size_t ahead_share) {
    __m512 const scale0 = _mm512_loadu_ps(scale), scale16 = pair ? _mm512_loadu_ps(scale + 16) : scale0;
    for (nk_size_t begin = 0; begin < rows; begin += nk_fetch_rows_k) {
        nk_size_t const end = rows - begin < nk_fetch_rows_k ? rows : begin + nk_fetch_rows_k;
        nk_fetch_lines_(ahead, ahead_share);
        for (nk_size_t row = begin; row != end; ++row) {
            __m512i const start = _mm512_set1_epi32(preset[row]);
            nk_f32_t *const to = values + row * value_stride;
            _mm512_storeu_ps(to, nk_value_of_sums_(operation, sums + row * 16, start, scale0));
            if (pair) _mm512_storeu_ps(to + 16, nk_value_of_sums_(operation, sums + 512 + row * 16, start, scale16));
        }
    }
}

/* Document tiles against `count` query tokens, 32 at a time. */
NK_INLINE void nk_multiply_all_tiles_(nk_operation_t const operation, nk_u8_t const *plane, nk_size_t tiles,
                                      nk_f32_t const *scale, nk_u8_t const *words, nk_i32_t const *preset,
                                      nk_size_t count, nk_size_t steps, nk_f32_t *values, nk_size_t value_stride,
                                      nk_ahead_t *ahead) {
    nk_sliced_queries_t queries;
    nk_i32_t room[1024 + 16]; /* each row of sums is a cache line */
    nk_i32_t *const sums = room + (64 - (uintptr_t)room % 64) / sizeof(nk_i32_t);
    if (!steps) return; /* tokens without elements: nothing is screened */
    nk_size_t const fetches = (count + nk_fetch_rows_k - 1) / nk_fetch_rows_k;
    nk_size_t const ahead_share = nk_fetch_share_(ahead, (tiles + 1) / 2 * fetches);
    for (nk_size_t first = 0; first < count; first += nk_screen_rows_k) {
        nk_size_t const rows = count - first < nk_screen_rows_k ? count - first : nk_screen_rows_k;
        nk_slice_queries_((nk_i8_t const *)words + first * steps * 4, rows, steps, &queries);
        nk_configure_tiles_(rows, queries.slice_steps);
        for (nk_size_t tile = 0; tile < tiles; tile += 2) {
            int const pair = tiles - tile > 1;
            nk_u8_t const *const at = plane + tile * steps * nk_tile_row_bytes_k;
            if (rows > nk_tile_rows_k && pair)
                nk_multiply_tiles_(operation, 1, 1, &queries, at, sums);
            else if (rows > nk_tile_rows_k)
                nk_multiply_tiles_(operation, 1, 0, &queries, at, sums);
            else if (pair)
                nk_multiply_tiles_(operation, 0, 1, &queries, at, sums);
            else
                nk_multiply_tiles_(operation, 0, 0, &queries, at, sums);
            nk_f32_t *const to = values + first * value_stride + tile * nk_tile_rows_k;
            nk_f32_t const *const worth = scale + tile * nk_tile_rows_k;
            if (pair)
                nk_store_values_(operation, 1, sums, preset + first, rows, worth, to, value_stride, ahead, ahead_share);
            else
                nk_store_values_(operation, 0, sums, preset + first, rows, worth, to, value_stride, ahead, ahead_share);
        }
    }
    _tile_release();
}

NK_NOINLINE void nk_screen_(nk_u8_t const *plane, nk_size_t tiles, nk_f32_t const *scale, nk_u8_t const *codes,
                            nk_i32_t const *preset, nk_size_t count, nk_size_t steps, nk_f32_t *values,
                            nk_size_t value_stride, nk_ahead_t *ahead) {
    nk_multiply_all_tiles_(nk_multiply_codes_k, plane, tiles, scale, codes, preset, count, steps, values, value_stride,
                           ahead);
}

NK_NOINLINE void nk_direct_(nk_dtype_t dtype, nk_u8_t const *plane, nk_size_t tiles, nk_f32_t const *scale,
                            nk_u8_t const *words, nk_i32_t const *preset, nk_size_t count, nk_size_t steps,
                            nk_f32_t *values, nk_size_t value_stride) {
    nk_ahead_t nothing = nk_fetch_nothing_();
    if (NK_DIRECT_HALVES_(dtype))
        nk_multiply_all_tiles_(nk_multiply_bf16_k, plane, tiles, scale, words, preset, count, steps, values,
                               value_stride, &nothing);
    else
        nk_direct_rows_(plane, tiles, scale, words, count, steps, values, value_stride);
}

#include "../packing.inc"
#include "../scoring.inc"
#include "../coded.inc"
#include "../gradient.inc"
#include "../kernels/x86_vector512.inc"
#include "../nearest.inc"

NK_TARGET_END

nk_backend_kernels_t const nk_backend_sapphireamx_kernels = {
    NK_TILE_TOKENS_, nk_pack_rows_,  nk_score_corpus_, nk_gradient_rows_, nk_nearest_rows_,
    nk_square_rows_, NK_CODED_TILE_, NK_CODED_BIAS_,   nk_score_coded_,   nk_decode_rows_,
};

#endif
