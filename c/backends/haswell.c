/* haswell.c: AVX2. Screening by VPMADDUBSW, whose 16-bit pair sums saturate: documents are quantised to 7 bits and stored
 * as 1..127, queries to 8 bits, so a pair sum is at most 2 * 127 * 127 = 32258 < 32768 and never does.
 *
 * Tile: 2 x 8 document tokens x 4 query tokens, 8 accumulators; with two document vectors, a broadcast, a product and the
 * ones of VPMADDWD that is 13 of the 16 registers. Three vector operations per 32 products against four FMAs, two of
 * them on the multiplier ports: twice the rate of f32 FMA. */
#include <numkong/backend.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <immintrin.h>

#ifndef NK_HASWELL_TARGET
#define NK_HASWELL_TARGET "avx2,fma,f16c"
#endif
NK_TARGET_BEGIN(NK_HASWELL_TARGET)

#define NK_TILE_TOKENS_ 8
#define NK_QUERY_GROUP_ 4
#define NK_CODE_LIMIT_ 63
#define NK_CODE_BIAS_ 64

#include "../kernels/x86_v3.inc"

/* One step of four codes: sums[token] += the four products. */
NK_INLINE __m256i nk_multiply_codes_(__m256i sums, __m256i documents, __m256i query, __m256i ones) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(documents, query), ones));
}

/* Tiles x one group of queries. `tiles` is a constant, 1 or 2. */
NK_INLINE void nk_screen_tiles_(int const tiles, nk_u8_t const *plane, nk_size_t tile_bytes, nk_f32_t const *scale,
                                nk_i8_t const *codes, nk_i32_t const *preset, nk_size_t steps, nk_f32_t *values,
                                nk_size_t value_stride) {
    __m256i const ones = _mm256_set1_epi16(1);
    __m256i sums[NK_QUERY_GROUP_][2];
    for (int query = 0; query != NK_QUERY_GROUP_; ++query)
        for (int tile = 0; tile != tiles; ++tile) sums[query][tile] = _mm256_set1_epi32(preset[query]);
    for (nk_size_t step = 0; step != steps; ++step, plane += 32, codes += NK_QUERY_GROUP_ * 4) {
        __m256i const tile0 = _mm256_loadu_si256((__m256i const *)plane);
        __m256i const tile1 = tiles > 1 ? _mm256_loadu_si256((__m256i const *)(plane + tile_bytes)) : tile0;
#pragma GCC unroll 4
        for (int query = 0; query != NK_QUERY_GROUP_; ++query) {
            nk_i32_t word;
            memcpy(&word, codes + query * 4, 4);
            __m256i const query_i8x32 = _mm256_set1_epi32(word);
            sums[query][0] = nk_multiply_codes_(sums[query][0], tile0, query_i8x32, ones);
            if (tiles > 1) sums[query][1] = nk_multiply_codes_(sums[query][1], tile1, query_i8x32, ones);
        }
    }
    for (int query = 0; query != NK_QUERY_GROUP_; ++query)
        for (int tile = 0; tile != tiles; ++tile)
            _mm256_storeu_ps(values + (nk_size_t)query * value_stride + tile * 8,
                             _mm256_mul_ps(_mm256_cvtepi32_ps(sums[query][tile]), _mm256_loadu_ps(scale + tile * 8)));
}

#define NK_PANEL_TILES_ 2

#include "../kernels/panels.inc"
#include "../packing.inc"
#include "../scoring.inc"

NK_TARGET_END

nk_backend_kernels_t const nk_backend_haswell_kernels = {NK_TILE_TOKENS_, NULL, nk_pack_rows_, nk_score_corpus_};
